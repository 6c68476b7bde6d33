"""Files of pictures, and the parameters in them."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from weights import WeightError
from zoo.errors import UsageError, UserError
from zoo.stable_diffusion.parameters import Parameters
from zoo.stable_diffusion.pictures import check_output, numbered, read_picture, save_image

KINDS = (".png", ".jpg", ".jpeg", ".webp", ".PNG")
PARAMETERS = Parameters(
    'a "cat", café 🐱\nsitting', "ugly: dog", {"Steps": "20", "Model": "a, b\nc", "Seed": "42"}
)


def picture(size: int = 16) -> Image.Image:
    pixels = np.random.RandomState(0).randint(0, 256, (size, size, 3))
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_picture_carries_its_parameters(tmp_path, kind) -> None:
    path = tmp_path / f"x{kind}"
    save_image(picture(), path, PARAMETERS)
    assert read_picture(path) == PARAMETERS
    with Image.open(path) as saved:
        assert saved.size == (16, 16)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_png_holds_the_very_pixels_and_the_same_bytes_every_time(tmp_path) -> None:
    for name in ("a.png", "b.png"):
        save_image(picture(), tmp_path / name, PARAMETERS)
    with Image.open(tmp_path / "a.png") as saved:
        np.testing.assert_array_equal(np.asarray(saved), np.asarray(picture()))
        assert saved.info["parameters"].startswith('a "cat", café 🐱\nsitting\nNegative prompt: ')
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=50, deadline=None)
@given(text, text, st.sampled_from([".png", ".jpg", ".webp"]))
def test_any_prompt_comes_back_from_a_file(tmp_path_factory, prompt, negative, kind) -> None:
    path = tmp_path_factory.mktemp("pictures") / f"x{kind}"
    parameters = Parameters(prompt, negative, {"Steps": "1"})
    save_image(picture(1), path, parameters)
    assert read_picture(path) == parameters


def test_parameters_too_long_for_a_jpeg_are_left_out_and_said_so(tmp_path, capsys) -> None:
    path = tmp_path / "x.jpg"
    save_image(picture(), path, Parameters("a" * 40_000))
    assert "too long for a JPEG" in capsys.readouterr().err
    with pytest.raises(UserError, match="carries no parameters"):
        read_picture(path)


def test_a_file_that_is_there_is_kept(tmp_path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"mine")
    with pytest.raises(WeightError, match="exists already.*--force"):
        check_output(path)
    with pytest.raises(WeightError, match="exists already"):
        save_image(picture(), path)
    assert path.read_bytes() == b"mine"
    check_output(path, force=True)
    save_image(picture(), path, force=True)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch) -> None:
    def broken(self, file, kind, **options):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", broken)
    with pytest.raises(KeyboardInterrupt):
        save_image(picture(), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x", "x.bmp", "x.png.txt", ".png"])
def test_an_extension_that_names_no_format_is_a_usage_error(tmp_path, name) -> None:
    for call in (check_output, lambda path: save_image(picture(), path)):
        with pytest.raises(UsageError, match="ends in .png, .jpg"):
            call(tmp_path / name)


def test_a_place_that_cannot_be_written_is_told_before_any_work(tmp_path, monkeypatch) -> None:
    with pytest.raises(WeightError, match="folder does not exist"):
        check_output(tmp_path / "none" / "x.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(WeightError, match="it is a folder"):
        check_output(tmp_path / "folder.png", force=True)

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(UserError, match="can't be written to: Permission denied"):
        check_output(tmp_path / "x.png")


def test_numbered_names_are_free_ones(tmp_path) -> None:
    path = tmp_path / "x.png"
    assert numbered(path) == path
    for name in ("x.png", "x-2.png"):
        (tmp_path / name).touch()
    assert numbered(path) == tmp_path / "x-3.png"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


HEADER = b"\x89PNG\r\n\x1a\n"
SIZE = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a picture",
        HEADER,
        HEADER + SIZE[:10],
        HEADER + chunk(b"IHDR", b"short"),
        HEADER + chunk(b"IHDR", struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", b""),
        HEADER + SIZE + chunk(b"zTXt", b"parameters\0\0" + zlib.compress(b"a" * 10**8)),
        HEADER + SIZE + chunk(b"iTXt", b"parameters\0\1\0\0\0" + b"broken"),
        HEADER + SIZE + b"\xff\xff\xff\xfftEXtparameters\0a",
        b"\xff\xd8\xff\xe1\xff\xffExif\0\0II*\0\xff\xff\xff\xff",
        b"RIFF\xff\xff\xff\xffWEBPVP8 ",
    ],
)  # fmt: skip
def test_a_damaged_picture_is_one_line(tmp_path, data) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(data)
    with pytest.raises(UserError) as error:
        read_picture(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_says_so(tmp_path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_picture(tmp_path / "none.png")


@pytest.mark.parametrize("kind", [".png", ".jpg", ".webp"])
def test_pictures_with_flipped_bytes_never_give_more_than_one_line(tmp_path, kind) -> None:
    path = tmp_path / f"x{kind}"
    save_image(picture(8), path, PARAMETERS)
    whole, source = path.read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(
            whole[: source.randrange(len(whole)) if source.random() < 0.3 else None]
        )
        for _ in range(source.randrange(1, 6)):
            if damaged:
                damaged[source.randrange(len(damaged))] = source.randrange(256)
        path.write_bytes(damaged)
        try:
            assert isinstance(read_picture(path), Parameters)
        except UserError as error:
            assert "\n" not in str(error)
