"""CTranslate2's models: folders, bare files, and what must be refused."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.weights import build_binary as b
from tests.weights import models, whisper
from tests.weights.test_gguf import mutations
from weights import WeightError, load, names


def opened(tmp_path, raw: bytes):
    path = tmp_path / "any.name"
    path.write_bytes(raw)
    return load(path, device="reference")


def test_each_type_settings_and_aliases_are_read(tmp_path):
    checkpoint = opened(tmp_path, b.small_ctranslate2())
    assert checkpoint.format == "ctranslate2" and checkpoint.architecture == "whisper"
    assert checkpoint.metadata == {
        "spec": "WhisperSpec", "revision": 3, "model_type": "whisper", "encoder/num_heads": 2,
        "decoder/alignment_layer": -1, "decoder/pre_norm": 1,
    }  # fmt: skip
    types = {key: checkpoint.info(key).type for key in checkpoint}
    assert types == {
        "x/f4": "F32", "x/f2": "F16", "x/i2": "I16", "x/i4": "I32", "x/bf16": "BF16",
        "a/weight": "I8", "a/weight_scale": "F32", "b/weight_scale": "F32",
        "c/weight": "I8", "c/weight_scale": "F32", "d": "F32",
    }  # fmt: skip
    for key in ("x/f4", "x/f2", "x/i2", "x/i4", "d"):
        assert checkpoint[key].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint["x/bf16"].tolist() == [1, -2]
    assert checkpoint["c/weight"].tolist() == [[-2, 4]]


def write_folder(path, arrays: dict[str, np.ndarray], config: dict | None = None) -> None:
    path.mkdir()
    variables = [b.of_array(key, w) for key, w in sorted(arrays.items())]
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    (path / "model.bin").write_bytes(b.ctranslate2(variables + b.SETTINGS, aliases))
    (path / "config.json").write_text(json.dumps(config or {"suppress_ids": [1]}))


@pytest.mark.parametrize(
    ("file", "text"),
    [("vocabulary.txt", "!\nĠa\n\n"), ("vocabulary.json", '["!", "\\u0120a", ""]')],
)
def test_folder_adds_its_configuration_and_vocabulary(file, text, tmp_path):
    layouts = whisper.layouts()
    write_folder(tmp_path / "m", layouts["ctranslate2"])
    (tmp_path / "m" / file).write_text(text, "utf-8")
    checkpoint = load(tmp_path / "m", "reference")
    assert checkpoint.path == tmp_path / "m"
    assert checkpoint.metadata["suppress_ids"] == [1]
    assert checkpoint.metadata["encoder/num_heads"] == 2
    assert checkpoint.metadata["vocabulary"] == ["!", "Ġa", ""]
    assert names.recognise(checkpoint) == ("whisper", "ctranslate2")
    ours = names.canonical(checkpoint)
    models.assert_equal(ours, layouts["openai"])
    key = "decoder.blocks.0.cross_attn.value.bias"
    np.testing.assert_array_equal(ours[key].numpy(), layouts["openai"][key])


def test_another_specification_is_opened_but_not_taken_for_whisper(tmp_path):
    checkpoint = opened(tmp_path, b.ctranslate2([b.of_array("x", np.ones(1, "<f4"))], spec="TSpec"))
    assert checkpoint.metadata["spec"] == "TSpec" and checkpoint.architecture is None


X = b.of_array("x", np.ones((2, 3), "<f4"))
HEAD = struct.pack("<I", 6) + b.name("WhisperSpec")
HOSTILE = {
    "another version": (b.ctranslate2([X], version=5), "unsupported binary version .expected 6"),
    "cut in the header": (HEAD + b"\3\0", "the revision runs past the end of the file"),
    "cut in the values": (b.ctranslate2([X])[:-9], "tensor 'x' runs past the end of the file"),
    "cut before the aliases": (b.ctranslate2([X])[:-1], "the number of aliases runs past"),
    "bytes left over": (b.ctranslate2([X]) + b"x", "bytes after the last alias"),
    "4 billion variables": (b.ctranslate2([X], counts=(2**32 - 1, 0)), "the number of variables"),
    "4 billion aliases": (b.ctranslate2([X], counts=(1, 2**32 - 1)), "the number of aliases can't"),
    "more variables than there are": (b.ctranslate2([X], counts=(2, 0)), "runs past|is empty|not"),
    "a name twice": (b.ctranslate2([X, X]), "tensor 'x': the name appears twice"),
    "an alias of nothing": (b.ctranslate2([X], {"y": "z"}), "an alias of a variable that isn't"),
    "an alias that is a variable": (b.ctranslate2([X], {"x": "x"}), "the name appears twice"),
    "an empty name": (b.ctranslate2([b.variable("", (1,), 1, b"x")]), "not a name ended by a zero"),
    "a zero within a name": (
        b.ctranslate2([b.variable("a\0b", (1,), 1, b"x")]),
        "not a name ended",
    ),
    "not UTF-8": (b.ctranslate2([b.variable(b"\xff", (1,), 1, b"x")]), "is not valid UTF-8"),
    "255 axes": (b.ctranslate2([b.variable("x", (1,) * 255, 1, b"x")]), "too many axes"),
    "a zero axis": (b.ctranslate2([b.variable("x", (0, 3), 1, b"")]), "its size is wrong"),
    "a type that is none": (
        b.ctranslate2([b.variable("x", (1,), 6, b"x")]),
        "unknown type .expect",
    ),
    "size and shape that differ": (
        b.ctranslate2([b.variable("x", (2**32 - 1,) * 8, 0, b"1234")]),
        "its size is wrong .expected that of F32",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_file_is_one_clear_line(name, tmp_path):
    raw, message = HOSTILE[name]
    with pytest.raises(WeightError, match=message) as caught:
        opened(tmp_path, raw)
    line = str(caught.value)
    assert line.startswith(str(tmp_path / "any.name")) and "\n" not in line


@pytest.mark.parametrize(
    ("file", "raw", "message"),
    [
        ("config.json", b"[]", "its JSON is not an object"),
        ("config.json", b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested too deep"),
        ("vocabulary.txt", b"\xff", "can't be read"),
        ("vocabulary.json", b'{"a": 1}', "not a list of tokens"),
        ("vocabulary.json", b'["a", 1]', "not a list of tokens"),
    ],
)
def test_damaged_file_beside_the_model_is_named(file, raw, message, tmp_path):
    write_folder(tmp_path / "m", {"x": np.ones(1, "<f4"), "decoder/embeddings/weight": np.ones(
        1, "<f4")})  # fmt: skip
    (tmp_path / "m" / file).write_bytes(raw)
    with pytest.raises(WeightError, match=message) as caught:
        load(tmp_path / "m")
    assert file in str(caught.value)


@given(raw=mutations(b.small_ctranslate2()))
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
