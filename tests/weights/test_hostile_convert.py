"""Conversions of files whose names, configuration or vocabulary make no sense."""

from __future__ import annotations

import json

import pytest

from tests.weights import build as b
from tests.weights import build_binary as binary
from tests.weights import build_torch as t
from tests.zoo.llama import tiny
from weights import WeightError, convert, load

ONE = ("F32", (1,), bytes(4))
TYPES = "tokenizer.ggml.token_type"
SCALING = {"rope_type": "llama3", "factor": 1, "low_freq_factor": 1, "high_freq_factor": 4,
           "original_max_position_embeddings": 8}  # fmt: skip


def refused(source, target, match: str) -> None:
    with pytest.raises(WeightError, match=match) as caught:
        convert(source, target)
    assert ".partial" not in str(caught.value)
    assert not target.exists() and not list(target.parent.glob(".*"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".gguf"])
def test_tokens_that_are_parts_of_letters_are_kept(suffix, tmp_path):
    source, target = tmp_path / "a.bin", tmp_path / f"b{suffix}"
    source.write_bytes(binary.small_ggml())
    convert(source, target)
    assert set(load(target)) == set(load(source))
    if suffix != ".gguf":
        assert load(target).metadata["vocabulary"] == load(source).metadata["vocabulary"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".gguf"])
def test_name_that_is_no_text_is_refused(suffix, tmp_path):
    header = b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (tmp_path / "a").write_bytes(b.framed(header, bytes(4)))
    refused(tmp_path / "a", tmp_path / f"b{suffix}", "its name is no text")


@pytest.mark.parametrize(
    ("name", "suffix"), [("", ".gguf"), ("x" * 70_000, ".gguf"), ("x" * 1001, ".pt")]
)
def test_name_that_could_not_be_read_again_is_refused(name, suffix, tmp_path):
    (tmp_path / "a").write_bytes(b.safetensors({name: ONE}))
    refused(tmp_path / "a", tmp_path / f"b{suffix}", "its name doesn't fit into")


def test_letters_of_four_bytes_fit_into_the_targets_name(tmp_path):
    (tmp_path / "a").write_bytes(b.safetensors({"a": ONE}))
    target = tmp_path / ("字" * 83 + ".gguf")
    convert(tmp_path / "a", target)
    assert set(load(target)) == {"a"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (TYPES, "x"),
        (TYPES, ["x"]),
        (TYPES, [2**40]),
        (TYPES, None),
        (TYPES, [[1], [1, 2]]),
        ("k", [1, [2]]),
        ("k", [[1], [2, [3]]]),
        ("", 1),
        ("k" * 70_000, 1),
    ],
)
def test_configuration_that_gguf_cannot_hold_is_refused(key, value, tmp_path):
    config = json.dumps({"general.architecture": "llama", key: value})
    raw = b.safetensors({"a": ONE}, {"format": "menagerie", "config": config})
    (tmp_path / "a").write_bytes(raw)
    refused(tmp_path / "a", tmp_path / "b.gguf", "bad 'tok|fit into GGUF|mixes types")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_number_beyond_64_bits_beside_the_model_can_be_read_again(suffix, tmp_path):
    pairs = t.text("model_state_dict") + t.mapping(x=t.tensor()) + t.text("n") + t.integer(2**2000)
    (tmp_path / "a").write_bytes(t.archive(t.EMPTY_DICT + t.MARK + pairs + t.SET_ITEMS))
    convert(tmp_path / "a", tmp_path / f"b{suffix}")
    assert load(tmp_path / f"b{suffix}").metadata["n"] == str(2**2000)


def test_head_longer_than_the_embedding_is_refused_before_an_array_is_made(tmp_path):
    folder = tiny.write_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": SCALING, "head_dim": 2**30}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, tmp_path / "b.gguf", "heads longer than the embedding")


def _renamed(data: dict, special: int) -> None:
    data["added_tokens"] += [{"content": "q", "id": special, "special": True},
                             {"content": "q", "id": 1}]  # fmt: skip


SPLIT = [{"type": "Split", "pattern": "x"}, {"type": "ByteLevel", "use_regex": False}]
CHANGES = {
    "an id that another replaces": lambda data: _renamed(data, 999_999),
    "a pattern that is a text": lambda data: data.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": SPLIT}
    ),
    "an unknown token that is a list": lambda data: (
        data["model"].update(byte_fallback=True, unk_token=[]),
        data.update(pre_tokenizer=None),
    ),
} | {
    f"a template that is {single}": lambda data, single=single: data.update(
        post_processor={"type": "TemplateProcessing", "single": single}
    )
    for single in ({"a": 1}, [5], 5)
}


@pytest.mark.parametrize("case", CHANGES)
def test_tokenizer_that_makes_no_sense_is_a_weight_error_at_most(case, tmp_path):
    folder = tiny.write_folder(tmp_path / "hf")
    data = json.loads((folder / "tokenizer.json").read_text())
    data.setdefault("added_tokens", [])
    CHANGES[case](data)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    try:
        convert(folder, tmp_path / "b.gguf")
    except WeightError as error:
        assert str(error).isprintable()
