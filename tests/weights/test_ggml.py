"""whisper.cpp's models: what is read of them, and what must be refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import HealthCheck, given, settings

from tests.weights import build_binary as b
from tests.weights import models, whisper
from tests.weights.test_gguf import mutations
from weights import WeightError, load, names
from weights.names.whisper import dims


def opened(tmp_path, raw: bytes):
    path = tmp_path / "ggml-tiny.bin"
    path.write_bytes(raw)
    return load(path, device="reference")


def test_sizes_tokens_and_tensors_are_read(tmp_path):
    checkpoint = opened(tmp_path, b.small_ggml())
    assert checkpoint.format == "ggml" and checkpoint.architecture == "whisper"
    metadata = dict(checkpoint.metadata)
    tokens = metadata.pop("vocabulary")
    assert [token.encode("utf-8", "surrogateescape") for token in tokens] == [
        b"a",
        b"\xf0\x9f",
        b"",
    ]
    wanted = b.GGML_DIMS | {"ftype": 2007, "mel_filters": [4, 3], "model_type": "whisper"}
    assert metadata == wanted
    assert {key: (i.type, i.shape) for key in checkpoint if (i := checkpoint.info(key))} == {
        "x": ("F32", (2, 3)), "h": ("F16", (3,)), "q": ("Q8_0", (2, 32)),
    }  # fmt: skip
    assert checkpoint["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint["h"].tolist() == [0, 1, 2]
    assert checkpoint["q"].tolist() == [[2 * k for k in range(1, 33)]] * 2


def test_a_whole_model_becomes_openais(tmp_path):
    layouts = whisper.layouts()
    tensors = [b.ggml_tensor(k, w.shape, b.F32, w.tobytes()) for k, w in layouts["ggml"].items()]
    sizes = {key: value for key, value in whisper.DIMS.items() if key in b.GGML_DIMS}
    checkpoint = opened(tmp_path, b.ggml(tensors, **sizes))
    assert names.recognise(checkpoint) == ("whisper", "ggml")
    ours = names.canonical(checkpoint)
    models.assert_equal(ours, layouts["openai"], tensors=True)
    assert dims(ours) == whisper.DIMS


HOSTILE = {
    "cut in the sizes": (b.small_ggml()[:20], "'n_audio_layer' runs past the end of the file"),
    "another model of ggml": (
        b.ggml([b.FLOATS], bands=5),
        "not Whisper's filter bank .expected a Whisper",
    ),
    "4 billion tokens": (
        b.ggml([b.FLOATS], n_tokens=2**32 - 1),
        "too many tokens",
    ),
    "a token past the end": (b.ggml([], [b"abc"])[:-1], "a token runs past the end"),
    "more tokens than there are": (b.ggml([], n_tokens=4), "a token runs past the end"),
    "cut in a tensor header": (b.ggml([b.FLOATS[:9]]), "a tensor header runs past the end"),
    "cut in the values": (b.small_ggml()[:-1], "tensor 'q' runs past the end of the file"),
    "bytes left over": (b.small_ggml() + b"x", "a tensor header runs past the end"),
    "a name twice": (b.ggml([b.FLOATS, b.FLOATS]), "tensor 'x': the name appears twice"),
    "an empty name": (b.ggml([b.ggml_tensor("", (1,), 0, bytes(4))]), "a tensor's name is empty"),
    "a name past the end": (b.ggml([struct.pack("<4I", 1, 2**32 - 1, 0, 1)]), "name runs past"),
    "not UTF-8": (b.ggml([b.ggml_tensor(b"\xff", (1,), 0, bytes(4))]), "is not valid UTF-8"),
    "no axes": (b.ggml([b.ggml_tensor("x", (), 0, bytes(4))]), "number of axes is wrong"),
    "five axes": (b.ggml([b.ggml_tensor("x", (1,) * 5, 0, bytes(4))]), "number of axes is wrong"),
    "a zero axis": (b.ggml([b.ggml_tensor("x", (0, 3), 0, b"")]), "its shape is wrong"),
    "an enormous shape": (b.ggml([b.ggml_tensor("x", (2**32 - 1,) * 4, 0, b"")]), "runs past"),
    "rows that are not whole blocks": (
        b.ggml([b.ggml_tensor("q", (2, 33), b.Q8_0, bytes(68))], ftype=2007),
        "its shape is wrong .expected rows of Q8_0 in multiples of 32",
    ),
    "a type that is none": (b.ggml([b.ggml_tensor("x", (1,), 99, b"")]), "unknown tensor type"),
    "blocks of 2022": (b.ggml([b.BLOCKS], ftype=7), "'q': its blocks are of an old form .got Q8_0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_file_is_one_clear_line(name, tmp_path):
    raw, message = HOSTILE[name]
    with pytest.raises(WeightError, match=message) as caught:
        opened(tmp_path, raw)
    line = str(caught.value)
    assert line.startswith(str(tmp_path / "ggml-tiny.bin")) and "\n" not in line


@given(raw=mutations(b.small_ggml()))
@settings(
    max_examples=200,
    deadline=1000,  # milliseconds: the limit for a hostile file
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_mutated_file_opens_or_raises_weight_error(raw, tmp_path):
    try:
        checkpoint = opened(tmp_path, raw)
        for entry in checkpoint.entries.values():
            assert entry.raw().nbytes == entry.info.nbytes
    except WeightError as error:
        assert "\n" not in str(error)
