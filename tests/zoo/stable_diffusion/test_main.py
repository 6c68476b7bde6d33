"""The commands txt2img, img2img and inpaint, with a model that needs no weights."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import zoo.stable_diffusion
from tests.zoo.stable_diffusion.fake import fake
from tests.zoo.stable_diffusion.test_pipeline import gradient, half_mask
from zoo.stable_diffusion import flags
from zoo.stable_diffusion.__main__ import main, txt2img_main
from zoo.stable_diffusion.pictures import read_picture
from zoo.stable_diffusion.samplers import SAMPLERS

pytestmark = pytest.mark.usefixtures("here")


class Loader:
    """Stands for `load`; keeps the models that it made and what they were asked for."""

    def __init__(self) -> None:
        self.models, self.asked = [], []

    def __call__(self, *args, **options):
        self.models.append(fake())
        self.asked.append((args, options))
        return self.models[-1]


@pytest.fixture
def loader(monkeypatch) -> Loader:
    made = Loader()
    # not setattr, which would first look up the real one
    monkeypatch.setitem(vars(zoo.stable_diffusion), "load", made)
    return made


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def pixels(path: str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


# --- files -----------------------------------------------------------------------------------


def test_the_files_name_goes_to_stdout_and_nothing_else(loader, capsys) -> None:
    assert txt2img_main(["a cat", "-o", "cat.png", "--seed", "1", "--model", "sd1.5"]) == 0
    assert capsys.readouterr() == ("cat.png\n", "")
    assert files() == ["cat.png"] and pixels("cat.png").shape == (64, 64, 3)
    with Image.open("cat.png") as image:
        assert image.info["parameters"] == (
            "a cat\nSteps: 20, Sampler: DPM++ 2M, CFG scale: 7, Seed: 1, Size: 64x64, Model: sd1.5"
        )


def test_both_names_of_the_command_do_the_same(loader, capsys) -> None:
    assert txt2img_main(["a cat", "-o", "a.png", "--seed=1"]) == 0
    assert main(["txt2img", "a cat", "-o", "b.png", "--seed=1"]) == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


def test_without_a_name_the_next_free_one_is_taken(loader, capsys) -> None:
    for _ in range(3):
        assert txt2img_main(["a cat", "--steps", "1"]) == 0
    assert capsys.readouterr().out == "txt2img.png\ntxt2img-2.png\ntxt2img-3.png\n"
    assert files() == ["txt2img-2.png", "txt2img-3.png", "txt2img.png"]


def test_a_batch_has_numbered_names_and_a_grid(loader, capsys) -> None:
    args = ["a cat", "--steps", "2", "--seed", "3", "-o", "cat.png"]
    assert txt2img_main([*args, "--batch", "3"]) == 0
    assert capsys.readouterr().out == "cat-1.png\ncat-2.png\ncat-3.png\ncat-grid.png\n"
    grid = pixels("cat-grid.png")
    assert grid.shape == (128, 128, 3) and (grid[64:, 64:] == 0).all()
    for i, part in enumerate((grid[:64, :64], grid[:64, 64:], grid[64:, :64])):
        assert (part == pixels(f"cat-{i + 1}.png")).all()
    assert txt2img_main(["a cat", "--steps", "2", "--seed", "4", "-o", "alone.png"]) == 0
    assert Path("alone.png").read_bytes() == Path("cat-2.png").read_bytes()


@pytest.mark.parametrize(
    ("name", "kind"), [("a.jpg", "JPEG"), ("a.webp", "WEBP"), ("a.PNG", "PNG")]
)
def test_the_extension_is_the_format(loader, name, kind) -> None:
    assert txt2img_main(["a cat", "--steps", "1", "-o", name]) == 0
    with Image.open(name) as image:
        assert image.format == kind
    assert read_picture(name).prompt == "a cat"


def test_a_file_that_is_there_is_replaced_by_force_only(loader, capsys) -> None:
    Path("cat.png").write_bytes(b"mine")
    assert txt2img_main(["a cat", "-o", "cat.png"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == "txt2img: cat.png: it exists already; --force replaces it\n"
    assert Path("cat.png").read_bytes() == b"mine" and not loader.models
    assert txt2img_main(["a cat", "-o", "cat.png", "--force", "--steps", "1"]) == 0
    assert pixels("cat.png").shape == (64, 64, 3)


# --- flags -----------------------------------------------------------------------------------

EVERY = {
    "negative_prompt": "dogs",
    "width": 72,
    "height": 80,
    "batch": 2,
    "clip_skip": 2,
    "steps": 5,
    "sampler": "DDIM",
    "scheduler": "karras",
    "cfg_scale": 3.5,
    "guidance_rescale": 0.7,
    "eta": 0.5,
    "rng": "torch",
    "hires_scale": 1.5,
    "hires_strength": 0.4,
    "hires_steps": 3,
    "seed": 9,
}


def argv(options: dict) -> list[str]:
    names = {"hires_scale": "hires"}
    return [f"--{names.get(name, name)}={value}" for name, value in options.items()]


def test_every_flag_reaches_the_model(loader, monkeypatch) -> None:
    chosen = []
    monkeypatch.setattr(
        "zoo.stable_diffusion.pipeline.StableDiffusion.pictures",
        lambda self, given, *_: chosen.append(given) or iter([]),
    )
    monkeypatch.setattr("zoo.stable_diffusion.pixels.grid", lambda images: gradient())
    rest = ["--tiled", "--model", "m", "--dtype", "f32", "--device", "reference", "--tune"]
    rest += ["--lora", "a.safetensors", "--lora", "b:0.5", "--embedding", "e.pt"]
    rest += ["--taesd", "t.safetensors"]
    assert txt2img_main(["a cat", *argv(EVERY), *rest]) == 0
    for name, value in {**EVERY, "prompt": "a cat", "tiled": True}.items():
        assert getattr(chosen[0], name) == value, name
    args, options = loader.asked[0]
    assert args == ("m",)
    assert [options.pop(n) for n in ("device", "dtype", "tune")] == ["reference", "f32", True]
    assert options == {
        "loras": [("a.safetensors", 1.0), ("b", 0.5)],
        "embeddings": ["e.pt"],
        "taesd_file": "t.safetensors",
        "taesd_preview_only": False,
    }


def test_every_flag_has_help_and_every_sampler_is_named(capsys) -> None:
    for args in (["--help"], ["txt2img", "-h"], ["img2img", "-h"], ["inpaint", "-h"]):
        with pytest.raises(SystemExit) as caught:
            main(args)
        out = capsys.readouterr().out
        assert caught.value.code == 0 and "examples:" in out
        assert max(map(len, out.splitlines())) <= 100
        if args[0] == "--help":
            continue
        assert all(name in " ".join(out.split()) for name in SAMPLERS)
        assert ("--hires" in out) == (args[0] == "txt2img")
        assert ("--strength" in out) == (args[0] != "txt2img")


def test_help_needs_neither_the_engine_nor_numpy() -> None:
    code = (
        "import sys\nfrom zoo.stable_diffusion.__main__ import txt2img_main\n"
        "try: txt2img_main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'engine', 'numpy', 'PIL', 'tqdm'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    where = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=where)
    assert done.returncode == 0, done.stderr


def test_a_prompt_may_come_from_stdin(loader, monkeypatch, capsys) -> None:
    raw = io.BytesIO("café\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(raw))
    assert txt2img_main(["-", "--steps", "1", "-o", "a.png"]) == 0
    assert read_picture("a.png").prompt == "café"


def test_img2img_and_inpaint_read_their_pictures(loader, capsys) -> None:
    gradient(96, 64).save("photo.jpg")
    half_mask(96, 64).save("mask.png")
    given = ["a cat", "--image", "photo.jpg", "--steps", "4", "--seed", "1"]
    assert main(["img2img", *given, "--strength", "0.5"]) == 0
    assert len(loader.models[-1].networks.asked) == 2
    assert main(["inpaint", *given, "--mask", "mask.png"]) == 0
    assert capsys.readouterr() == ("img2img.png\ninpaint.png\n", "")
    with Image.open("photo.jpg") as image:
        photo = np.asarray(image)
    made = pixels("inpaint.png")
    assert made.shape == (64, 96, 3) and (made[:, :48] == photo[:, :48]).all()
    assert read_picture("img2img.png").settings["Denoising strength"] == "0.5"


# --- a picture says how it was made ----------------------------------------------------------


@pytest.mark.parametrize("end", [".png", ".jpg", ".webp"])
def test_from_png_repeats_a_picture(loader, end) -> None:
    prompt = 'a (cat:1.2),\nsitting: "there" <b>'
    given = [prompt, *argv({**EVERY, "batch": 1}), "--model", "m", "--lora", "a:b.pt:0.25"]
    given += ["--embedding", "e.pt", "--taesd", "t.pt"]
    assert txt2img_main([*given, "-o", f"a{end}"]) == 0
    assert txt2img_main(["--from-png", f"a{end}", "-o", f"b{end}"]) == 0
    assert Path(f"a{end}").read_bytes() == Path(f"b{end}").read_bytes()
    assert loader.asked[0] == loader.asked[1]


def test_flags_that_are_given_count_more_than_the_picture(loader) -> None:
    assert txt2img_main(["a cat", "--seed=1", "--steps=3", "--lora=a:0.5", "-o", "a.png"]) == 0
    again = ["--from-png", "a.png", "--seed=2", "--lora", "a:0.7", "-o", "b.png"]
    assert txt2img_main(again) == 0
    assert txt2img_main(["a dog", "--from-png", "a.png", "-o", "c.png"]) == 0
    b, c = read_picture("b.png"), read_picture("c.png")
    assert (b.settings["Seed"], b.settings["Steps"], b.prompt) == ("2", "3", "a cat")
    assert (c.settings["Seed"], c.prompt) == ("1", "a dog")
    assert loader.asked[1][1]["loras"] == [("a", 0.7)]


def test_any_picture_of_a_batch_can_be_repeated(loader) -> None:
    assert txt2img_main(["a cat", "--seed=1", "--steps=3", "--batch=2", "-o", "a.png"]) == 0
    assert txt2img_main(["--from-png", "a-2.png", "-o", "b.png"]) == 0
    assert Path("a-2.png").read_bytes() == Path("b.png").read_bytes()


@pytest.mark.parametrize("command", ["img2img", "inpaint"])
def test_commands_take_over_from_each_others_pictures(loader, command) -> None:
    gradient().save("photo.png")
    half_mask().save("mask.png")
    given = ["--image", "photo.png"] + (["--mask", "mask.png"] if command == "inpaint" else [])
    first = [command, "a cat", *given, "--strength=0.6", "--steps=5", "--seed=1", "-o", "a.png"]
    assert main(first) == 0
    assert main([command, *given, "--from-png", "a.png", "-o", "b.png"]) == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert txt2img_main(["--from-png", "a.png", "-o", "c.png"]) == 0
    assert txt2img_main(["a", "--hires=1.5", "--steps=2", "-o", "d.png"]) == 0
    assert main([command, *given, "--from-png", "d.png", "-o", "e.png"]) == 0
    assert "Hires upscale" not in read_picture("e.png").settings
    default = {"img2img": "0.75", "inpaint": "1"}
    assert read_picture("e.png").settings["Denoising strength"] == default[command]


def test_pictures_of_a1111s_webui_are_understood(loader) -> None:
    text = (
        "a cat\nNegative prompt: dogs\nSteps: 5, Sampler: DPM++ 2M, Schedule type: Karras, "
        "CFG scale: 7, Seed: 1, Size: 64x72, Model hash: 6ce0161689, Model: v1-5, RNG: CPU, "
        "Denoising strength: 0.6, Hires upscale: 1.5, Hires upscaler: Latent, Version: v1.9.4"
    )
    from PIL import PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", text)
    gradient().save("theirs.png", pnginfo=info)
    assert txt2img_main(["--from-png", "theirs.png", "--model", "m", "-o", "a.png"]) == 0
    made = read_picture("a.png")
    assert (made.prompt, made.negative_prompt) == ("a cat", "dogs")
    expected = {
        "Schedule type": "karras", "RNG": "torch", "Size": "64x72", "Model": "m", "Seed": "1",
        "Denoising strength": "0.6", "Hires upscale": "1.5",
    }  # fmt: skip
    assert expected.items() <= made.settings.items()
    assert pixels("a.png").shape == (112, 96, 3)


# --- previews and progress -------------------------------------------------------------------


def test_a_preview_is_shown_meanwhile_and_gone_after_it(loader, capsys, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(
        "zoo.stable_diffusion.pipeline.StableDiffusion.preview",
        lambda self, latent: shown.append(files()) or gradient(),
    )
    args = ["a cat", "--steps", "6", "-o", "cat.png"]
    assert txt2img_main([*args, "--preview", "every=2"]) == 0
    assert shown == [[], ["cat-preview.png"], ["cat-preview.png"]] and files() == ["cat.png"]
    shown.clear()
    assert txt2img_main([*args, "--force", "--preview", "now.jpg,every=3"]) == 0
    assert shown == [["cat.png"], ["cat.png", "now.jpg"]] and files() == ["cat.png"]


def test_previews_are_of_the_picture_so_far(loader) -> None:
    assert flags._preview("every=2") == (None, 2) and flags._preview("a,b.png") == ("a,b.png", 5)
    assert flags._preview("a.png,every=1") == ("a.png", 1)
    first = fake()
    seen = []
    first.txt2img("a cat", seen.append, steps=8, seed=1)
    last = np.asarray(first.preview(seen[-1].picture)).astype(int)
    errors = [np.abs(np.asarray(first.preview(s.picture)) - last).mean() for s in seen]
    assert errors[-1] == 0 and errors[0] > errors[4] > errors[-2]


def test_a_terminal_sees_rate_and_time_left(loader, capsys, monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert txt2img_main(["a cat", "--steps", "5", "--batch", "2", "-o", "a.png"]) == 0
    shown = terminal.getvalue()
    assert "0/10" in shown and "10/10" in shown and "it/s" in shown
    assert capsys.readouterr().out.splitlines()[-1] == "a-grid.png"


def test_an_interrupt_leaves_finished_pictures_and_nothing_half(
    loader, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest's own handlers stay
    calls = []

    def unet(latent, *_):
        calls.append(latent)
        if len(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return latent

    loader.models = Patched(unet)
    args = ["a cat", "--steps", "4", "--batch", "3", "-o", "a.png", "--preview", "every=1"]
    assert txt2img_main(args) == 130
    assert files() == ["a-1.png"] and capsys.readouterr().out == "a-1.png\n"


class Patched(list):
    """Models whose UNet is another function."""

    def __init__(self, unet) -> None:
        self.unet = unet

    def append(self, model) -> None:
        model.networks.unet = self.unet
        super().append(model)


def test_an_interrupt_while_saving_leaves_nothing(loader, monkeypatch) -> None:
    def broken(self, file, kind, **options):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", broken)
    assert txt2img_main(["a cat", "--steps", "1", "-o", "a.png"]) == 130
    assert files() == []


# --- what can't be ---------------------------------------------------------------------------

WRONG = {
    "": ("give a PROMPT, or --from-png", 2),
    "a --width 500": ("width must be a multiple of 8, got 500; 496 and 504 are near", 2),
    "a --height 8": ("height must be from 64", 2),
    "a --steps 0": ("must be 1 or more", 2),
    "a --sampler Eular": ("unknown sampler 'Eular'; there are DDIM", 2),
    "a --sampler LCM --steps 60": ("at most 50 steps", 2),
    "a --scheduler sgm": ("unknown scheduler 'sgm'", 2),
    "a --rng gpu": ("unknown rng 'gpu'", 2),
    "a --batch 5000": ("batch must be from 1 to 1000", 2),
    "a --cfg-scale nan": ("'nan' is not a finite number", 2),
    "a --seed 99999999999999999999": ("seed must be from 0", 2),
    "a --preview every=0": ("must be 1 or more", 2),
    "a -o a.png --preview a.png": ("a.png: the preview needs a name of its own", 2),
    "a --lora :1": ("no file in ':1'", 2),
    "a --taesd-preview-only": ("needs --taesd and --preview", 2),
    "a photo of a cat": ("goes in quotes", 2),
    "a --stepps 3": ("did you mean --steps?", 2),
    "a -o cat.bmp": ("a picture's name ends in .png", 2),
    "a -o cat": ("a picture's name ends in .png", 2),
    "a -o none/cat.png": ("its folder does not exist; mkdir -p none", 1),
    "a -o folder.png": ("folder.png: it is a folder", 1),
    "a --from-png none.png": ("none.png: No such file or directory", 1),
    "a --from-png corrupt.png": ("corrupt.png: not a PNG, JPEG or WebP, or damaged", 1),
    "a --from-png plain.png": ("plain.png: the picture carries no parameters", 1),
    "--from-png odd.png": ("odd.png: its parameters have no usable LoRA: must be from -100", 1),
    "--from-png steps.png": ("steps must be from 1 to 1000, got 9999", 2),
}


@pytest.mark.parametrize(("line", "expected"), WRONG.items(), ids=lambda x: str(x)[:30])
def test_what_is_wrong_is_one_line_before_a_model_is_loaded(line, expected, loader, capsys) -> None:
    from zoo.stable_diffusion.parameters import Parameters
    from zoo.stable_diffusion.pictures import save_image

    Path("folder.png").mkdir()
    Path("corrupt.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    gradient().save("plain.png")
    save_image(gradient(), "odd.png", Parameters("a", "", {"Steps": "1", "LoRA 1": "x:1000"}))
    save_image(gradient(), "steps.png", Parameters("a", "", {"Steps": "9999"}))
    before = files()
    one_line(line.split(), *expected, capsys)
    assert not loader.models and files() == before


def one_line(args: list[str], message: str, code: int, capsys) -> None:
    command = main if args[:1] in (["img2img"], ["inpaint"]) else txt2img_main
    try:
        ended = command(args)
    except SystemExit as error:
        ended = error.code
    out, err = capsys.readouterr()
    assert (ended, out) == (code, "") and message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message", "code"),
    [
        ("img2img a", "required: --image", 2),
        ("img2img a --image none.png", "none.png: No such file", 1),
        ("img2img a --image corrupt.png", "corrupt.png: not a picture, or damaged", 1),
        ("img2img a --image cut.png", "cut.png: not a picture, or damaged", 1),
        ("img2img a --image good.png --strength 2", "must be from 0 to 1", 2),
        ("img2img a --image good.png --hires 2", "unrecognized arguments: --hires", 2),
        ("inpaint a --image good.png", "required: --mask", 2),
        ("inpaint a --image good.png --mask corrupt.png", "corrupt.png: not a picture", 1),
    ],
)
def test_a_wrong_picture_is_one_line_too(line, message, code, loader, capsys) -> None:
    Path("corrupt.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    gradient(500, 500).save("good.png")
    Path("cut.png").write_bytes(Path("good.png").read_bytes()[:900])
    one_line(line.split(), message, code, capsys)
    assert not loader.models
