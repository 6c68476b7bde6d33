"""Which files of a repository are fetched, told by their names alone."""

from __future__ import annotations

import json

import pytest

from weights import FetchError
from weights.hub_files import choose, shards_of
from weights.registry import MODELS, Hub

REPO = Hub("org/repo")
LLAMA = ["README.md", ".gitattributes", "config.json", "tokenizer.json", "tokenizer.model"]
PARTS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
GGUFS = ["repo.Q4_0.gguf", "repo.Q8_0.gguf"]
WANTED = ["config.json", "tokenizer.json", "tokenizer.model"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ([*LLAMA, "model.safetensors", "pytorch_model.bin"], [*WANTED, "model.safetensors"]),
        ([*LLAMA, *PARTS, "consolidated.safetensors"], [*WANTED, *PARTS]),
        ([*LLAMA, "weights.safetensors"], [*WANTED, "weights.safetensors"]),
        ([*LLAMA, "model.safetensors", "onnx/config.json"], [*WANTED, "model.safetensors"]),
        ([*LLAMA, "model.safetensors", *GGUFS], [*WANTED, "model.safetensors"]),
        ([*LLAMA, "pytorch_model.bin", "flax_model.msgpack"], [*WANTED, "pytorch_model.bin"]),
        (["README.md", "config.json", "repo.Q4_0.GGUF"], ["repo.Q4_0.GGUF"]),
        (["q8/a-00001-of-00002.gguf", "q8/a-00002-of-00002.gguf"],) * 2,
    ],
)
def test_weights_are_taken_once_with_configuration_and_tokenizer(names, chosen):
    assert choose(names, REPO) == sorted(chosen)


def test_diffusers_folder_is_taken_in_float16_where_it_has_that():
    names = ["model_index.json", "README.md", "v1-5.safetensors", "scheduler/scheduler_config.json"]
    names += ["tokenizer/vocab.json", "tokenizer/merges.txt", "safety_checker/model.safetensors"]
    for part, weights in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        names += [f"{part}/config.json", f"{part}/{weights}.bin"]
        names += [f"{part}/{weights}.safetensors", f"{part}/{weights}.fp16.safetensors"]
    names += ["vae/config.json", "vae/model.safetensors", "unet/model.non_ema.safetensors"]
    assert choose(names, REPO) == [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.fp16.safetensors",
        "tokenizer/merges.txt",
        "tokenizer/vocab.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/config.json",
        "vae/model.safetensors",
    ]


def test_sharded_float16_part_comes_with_its_own_index():
    stem = "unet/diffusion_pytorch_model"
    full = [f"{stem}.safetensors.index.json", f"{stem}-00001-of-00001.safetensors"]
    half = [f"{stem}.safetensors.index.fp16.json", f"{stem}.fp16-00001-of-00001.safetensors"]
    assert choose(["model_index.json", *full, *half], REPO) == sorted(["model_index.json", *half])
    assert choose(["model_index.json", *full], REPO) == sorted(["model_index.json", *full])


def test_several_gguf_files_are_listed_and_none_is_guessed():
    with pytest.raises(FetchError) as caught:
        choose(GGUFS, REPO)
    line = str(caught.value)
    assert "2 GGUF files: repo.Q4_0.gguf, repo.Q8_0.gguf" in line
    assert line.endswith("name the one you want, such as org/repo/repo.Q4_0.gguf")


def test_named_part_of_a_split_gguf_brings_the_others():
    names = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"]
    assert choose(names, Hub("org/repo", (names[0],))) == names[:2]
    assert choose(names, Hub("org/repo", ("b.gguf",))) == ["b.gguf"]


@pytest.mark.parametrize("pattern", ["absent.gguf", "*.bin", "sub/*.json"])
def test_pattern_that_nothing_matches_is_an_error(pattern):
    with pytest.raises(FetchError, match="the repository has no file "):
        choose(["config.json", "model.gguf"], Hub("org/repo", ("config.json", pattern)))


@pytest.mark.parametrize(
    "name", ["../x.gguf", "/x.gguf", "a/../../x.gguf", "C:x.gguf", "a\\x.gguf", "a//x.gguf"]
)
def test_name_that_leaves_its_folder_is_refused(name):
    with pytest.raises(FetchError, match="outside its folder|no file|no safetensors"):
        choose([name], REPO)
    with pytest.raises(FetchError, match="outside its folder|no file"):
        choose([name], Hub("org/repo", (name,)))


def test_repository_without_weights_is_an_error():
    with pytest.raises(FetchError, match="no safetensors, GGUF or PyTorch file"):
        choose(["README.md", "config.json"], REPO)


def test_shards_are_those_of_the_index(tmp_path):
    assert shards_of(tmp_path) == []
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "2", "b": "1", "c": "2"}}))
    assert shards_of(tmp_path) == ["1", "2"]
    for damaged in ("[" * 10_000, "{}", '{"weight_map": [1]}', "\0"):
        index.write_text(damaged)
        assert shards_of(tmp_path) == []


def test_diffusion_patterns_of_the_registry_leave_the_large_duplicates_out():
    files = next(m for m in MODELS if m.name == "stable-diffusion-1.5").sources[0].files
    needed = [name for name in files if "*" not in name]
    needed += ["scheduler/scheduler_config.json", "tokenizer/vocab.json", "tokenizer/merges.txt"]
    others = ["v1-5-pruned.safetensors", "unet/diffusion_pytorch_model.safetensors"]
    assert choose([*needed, *others], Hub("org/repo", files)) == sorted(needed)
