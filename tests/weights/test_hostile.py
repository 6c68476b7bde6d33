"""Files that are small but want much: memory, time, or a place that is no file."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest

from tests.weights import build as b
from tests.weights import build_binary as binary
from tests.weights import build_torch as t
from tests.weights.fuzz import CONSTANT, PER_BYTE
from weights import WeightError, convert, load
from weights.__main__ import main

MANY = 12_000
ONE = ("F32", (1,), bytes(4))


def with_json(body: str) -> bytes:
    return b.framed(b'{"__metadata__": {"a": ' + body.encode() + b"}}")


GROWING = {
    "gguf": b.gguf(
        [b.u32("general.alignment", 1)],
        [b.header(f"{n:x}", (), 24, n) for n in range(MANY)],
        bytes(MANY),
        align=1,
    ),
    "gguf's split.count": b.gguf([b.pair("split.count", 9, b.array(0, MANY, b"\xff" * MANY))]),
    "safetensors": b.safetensors({f"{n:x}": ("U8", (0,), b"") for n in range(MANY)}),
    "ggml": binary.ggml([binary.ggml_tensor(f"{n:x}", (1,), 24, b"\0") for n in range(MANY)]),
    "ctranslate2": binary.ctranslate2(
        [binary.variable(f"{n:x}", (), 1, b"\0") for n in range(MANY)]
    ),
    "JSON of lists": with_json("[" + "[]," * 200_000 + "0]"),
    "JSON of objects": with_json("[" + "{}," * 200_000 + "0]"),
    "JSON of keys": with_json("{" + ",".join(f'"{n:x}":0' for n in range(10**5)) + "}"),
}


@pytest.mark.parametrize("case", GROWING)
def test_many_small_things_are_refused_before_they_fill_the_memory(case, tmp_path):
    raw, path = GROWING[case], tmp_path / "model"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(WeightError) as caught:
        load(path)
    assert str(caught.value).isprintable()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < PER_BYTE * len(raw) + CONSTANT


def test_text_in_json_costs_no_more_than_its_letters(tmp_path):
    """A tokenizer within a header: quotes and brackets in a string are no values."""
    vocabulary = json.dumps({"vocab": {f"token {n}": n for n in range(10**5)}, "x": '\\"'})
    path = tmp_path / "a.safetensors"
    path.write_bytes(b.safetensors({"a": ONE}, {"tokenizer": vocabulary}))
    assert load(path).metadata["tokenizer"] == vocabulary


def test_vocabulary_in_a_carried_configuration_is_read(tmp_path):
    """As what was a GGUF file has it, in a model whose weights are few for its tokens."""
    words = [f"tok{n:x}" for n in range(50_000)]
    config = {"tokens": words, "merges": words, "token_type": [1] * 50_000}
    path, weight = tmp_path / "a.safetensors", ("F16", (50_000, 24), bytes(2 * 50_000 * 24))
    metadata = {"format": "menagerie", "config": json.dumps(config)}
    path.write_bytes(b.safetensors({"a": weight}, metadata))
    assert load(path).metadata == config


@pytest.mark.parametrize("depth", [100, 600, 900])
def test_deep_configuration_is_one_line(depth, tmp_path, capsys):
    config = '{"a":' + "[" * depth + "]" * depth + "}"
    path = tmp_path / "a.safetensors"
    path.write_bytes(b.safetensors({"a": ONE}, {"format": "menagerie", "config": config}))
    assert main(["inspect", str(path)]) == 1
    assert "nested" in capsys.readouterr().err


def test_nothing_of_a_huge_shape_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b.safetensors({"a": ("F32", (0, 2**62), b"")}))
    with pytest.raises(WeightError, match="larger than any array"):
        load(path)


def test_lone_surrogate_in_a_configuration_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b.safetensors({"a": ONE}, {"format": "menagerie", "config": "\ud800"}))
    with pytest.raises(WeightError, match="JSON can't be read"):
        load(path)


@pytest.mark.parametrize("where", ["model", "model.bin", "a.safetensors", "params.json"])
def test_pipe_is_refused_and_not_waited_for(where, tmp_path):
    (tmp_path / "consolidated.00.pth").write_bytes(t.archive(t.mapping(x=t.tensor())))
    if where != "params.json":
        (tmp_path / "consolidated.00.pth").unlink()
    os.mkfifo(tmp_path / where)
    with pytest.raises(WeightError, match="neither a file nor a folder"):
        load(tmp_path / where if where == "model" else tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_name_that_no_file_has_is_refused(name, tmp_path):
    with pytest.raises(WeightError, match="can't be read"):
        load(tmp_path / name)
    source = tmp_path / "a.safetensors"
    source.write_bytes(b.safetensors({"a": ONE}))
    with pytest.raises(WeightError):
        convert(source, tmp_path / f"{name}.gguf")


def test_part_of_nothing_joins(tmp_path):
    (tmp_path / "params.json").write_text('{"dim": 4}')
    key = t.text("layers.0.attention.wo.weight")
    raw = t.archive(t.EMPTY_DICT + key + t.tensor((0, 5), (5, 1)) + t.SET_ITEM)
    for number in range(2):
        (tmp_path / f"consolidated.{number:02}.pth").write_bytes(raw)
    (entry,) = load(tmp_path).entries.values()
    assert entry.info.shape == (0, 10) and entry.raw().nbytes == 0
