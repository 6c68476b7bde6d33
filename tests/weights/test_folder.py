"""Folders of PyTorch shards; those of safetensors are in test_safetensors.py."""

from __future__ import annotations

import json

import pytest

from tests.weights import build as b
from tests.weights import build_torch as t
from tests.weights.test_safetensors import part
from weights import WeightError, load

INDEX = "pytorch_model.bin.index.json"


def shard(*names: str) -> bytes:
    return t.archive(t.mapping(**dict.fromkeys(names, t.tensor())))


def folder(tmp_path, files: dict[str, bytes]):
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    return tmp_path


def index(**weight_map: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


def test_one_file_is_read_with_its_config(tmp_path):
    files = {"pytorch_model.bin": shard("a"), "config.json": b'{"model_type": "llama"}'}
    checkpoint = load(folder(tmp_path, files), device="reference")
    assert checkpoint.format == "huggingface" and checkpoint.architecture == "llama"
    assert checkpoint["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_index_says_which_shard_has_a_tensor(tmp_path):
    files = {"s-1.bin": shard("a", "b"), "s-2.bin": shard("b", "c")}
    files[INDEX] = index(a="s-1.bin", b="s-2.bin", c="s-2.bin")
    assert list(load(folder(tmp_path, files))) == ["a", "b", "c"]


def test_files_without_an_index_are_taken_together(tmp_path):
    files = {"s-1.bin": shard("a"), "s-2.bin": shard("b"), "training_args.bin": b"\x80broken"}
    assert set(load(folder(tmp_path, files))) == {"a", "b"}
    folder(tmp_path, {"s-3.bin": shard("b")})
    with pytest.raises(WeightError, match="tensor 'b': another file of the folder has it too"):
        load(tmp_path)


def test_safetensors_are_preferred(tmp_path):
    files = {"pytorch_model.bin": shard("a"), "model.safetensors": part("a.bias")}
    assert set(load(folder(tmp_path, files))) == {"a.bias"}


@pytest.mark.parametrize("name", ["../s-1.bin", "/s-1.bin", "c:x", "a\\b", "..", "", "a\0b"])
def test_index_that_leaves_its_folder_is_refused(name, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    folder(tmp_path, {"s-1.bin": shard("a")})
    with pytest.raises(WeightError, match="the index points outside its folder"):
        load(folder(inside, {INDEX: index(a=name)}))


def test_missing_shard_and_missing_tensor_are_named(tmp_path):
    folder(tmp_path, {INDEX: index(a="s-1.bin")})
    with pytest.raises(WeightError, match="s-1.bin: tensor 'a': a shard is missing"):
        load(tmp_path)
    folder(tmp_path, {"s-1.bin": shard("b")})
    with pytest.raises(WeightError, match="it is in s-1.bin, which has no such tensor"):
        load(tmp_path)


def test_shard_that_would_run_code_is_refused(tmp_path):
    folder(tmp_path, {"pytorch_model.bin": t.archive(t.call("os", "system", t.text("false")))})
    with pytest.raises(WeightError, match="pytorch_model.bin: its pickle names os.system"):
        load(tmp_path)


def test_shard_of_another_format_is_named(tmp_path):
    folder(tmp_path, {"pytorch_model.bin": b.small_gguf()})
    with pytest.raises(WeightError, match="pytorch_model.bin: .*not one of torch.save|malformed"):
        load(tmp_path)


def test_whisper_s_heads_come_from_the_generation_config(tmp_path):
    heads = b'{"alignment_heads": [[1, 0]], "max_length": 448}'
    files = {"pytorch_model.bin": shard("a"), "generation_config.json": heads}
    config = {"config.json": b'{"model_type": "whisper"}'}
    assert load(folder(tmp_path, files | config)).metadata["alignment_heads"] == [[1, 0]]
    config = {"config.json": b'{"model_type": "llama"}'}
    assert "alignment_heads" not in load(folder(tmp_path, config)).metadata
