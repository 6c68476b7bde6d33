"""Loading: formats that must agree, and files that must be refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import zoo.llama
from tests.weights.serving import publish, serve
from tests.zoo.llama import reference, tiny, vocab
from weights import WeightError
from zoo.errors import UsageError
from zoo.llama.benchmark import measure

ROOT = Path(__file__).resolve().parents[3]
IDS = [5, 300, 17, 5, 80, 254, 9, 100, 44, 2]
# float32 sums of at most 40 products on logits of size 10: 1e-4 leaves a factor of ten.
TOLERANCE = 1e-4


def expected() -> np.ndarray:
    count = len(vocab.tiny()["tokenizer.ggml.tokens"])
    return reference.logits(tiny.tensors(count), tiny.config(count), IDS)


def test_gguf_logits_equal_plain_numpy(tmp_path, device):
    model = zoo.llama.load(tiny.write_gguf(tmp_path / "tiny.gguf"), device=device, dtype="f32")
    logits = model.logits(IDS)
    assert (logits.shape, logits.dtype) == (expected().shape, np.float32)
    np.testing.assert_allclose(logits, expected(), atol=TOLERANCE)


def test_hugging_face_folder_gives_the_same_model(tmp_path, device):
    folder = zoo.llama.load(tiny.write_folder(tmp_path / "model"), device=device, dtype="f32")
    np.testing.assert_allclose(folder.logits(IDS), expected(), atol=TOLERANCE)
    file = zoo.llama.load(tiny.write_gguf(tmp_path / "tiny.gguf"), device=device, dtype="f32")
    text = vocab.CORPUS + "<|im_end|>"
    for special in (False, True):
        ids = folder.tokenizer.encode(text, special)
        assert ids == file.tokenizer.encode(text, special)
    assert folder.tokenizer.stop_ids == file.tokenizer.stop_ids
    assert "".join(folder.chat("12 foxes", max_tokens=8)) == "".join(
        file.chat("12 foxes", max_tokens=8)
    )


def test_context_defaults_to_the_models_and_can_be_less(tmp_path):
    path = tiny.write_gguf(tmp_path / "tiny.gguf")
    assert zoo.llama.load(path, device="reference").ctx == 300
    assert zoo.llama.load(path, device="reference", ctx=20).ctx == 20


@pytest.mark.parametrize("options", [{"ctx": 301}, {"ctx": 0}, {"dtype": "f8"}])
def test_wrong_option_is_a_usage_error(tmp_path, options):
    path = tiny.write_gguf(tmp_path / "tiny.gguf")
    (name,) = options
    with pytest.raises(UsageError, match=name):
        zoo.llama.load(path, device="reference", **options)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"block_count": 10**9}, "block_count"),
        ({"block_count": 1000}, "layers"),
        ({"block_count": 0}, "block_count"),
        ({"block_count": None}, "block_count"),
        ({"attention.head_count": 0}, "head_count"),
        ({"attention.head_count": 7}, "heads"),
        ({"attention.head_count_kv": 4}, "heads"),
        ({"attention.head_count": 2**31}, "head_count"),
        ({"attention.key_length": 3, "rope.dimension_count": 3}, "head size"),
        ({"rope.dimension_count": 2}, "rope.dimension_count"),
        ({"embedding_length": 48}, "head size"),
        ({"feed_forward_length": 41}, "feed_forward"),
        ({"feed_forward_length": None}, "feed_forward_length"),
        ({"context_length": None}, "context_length"),
        ({"context_length": 0}, "context_length"),
        ({"expert_count": 8}, "expert_used_count"),
        ({"expert_count": 8, "expert_used_count": 9}, "experts"),
        ({"expert_count": 8, "expert_used_count": 2}, "experts.w1.weight"),
        ({"attention.sliding_window": 2**31}, "sliding_window"),
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": 0}, "pattern"),
    ],
)
def test_impossible_sizes_are_one_line_naming_file_and_key(tmp_path, sizes, named):
    path = tiny.write_gguf(tmp_path / "tiny.gguf", sizes)
    begun = time.perf_counter()
    with pytest.raises(WeightError) as caught:
        zoo.llama.load(path, device="reference")
    assert time.perf_counter() - begun < 1  # refused before anything is allocated
    message = str(caught.value)
    assert str(path) in message and named in message and "\n" not in message


@pytest.mark.parametrize(
    ("drop", "extra", "named"),
    [
        ("blk.1.attn_v.weight", {}, "layers.1.attention.wv.weight"),
        ("token_embd.weight", {}, "token_embd"),
        ("output_norm.weight", {}, "norm.weight"),
        ("", {"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ("", {"tokenizer.ggml.merges": None}, "merges"),
        ("", {"llama.rope.scaling.type": "yarn"}, "rope.scaling.original_context_length"),
        ("", {"llama.rope.scaling.type": "longrope"}, "longrope"),
        ("", {"llama.attention.kv_lora_rank": 16}, "MLA"),
    ],
)
def test_missing_or_unsupported_parts_are_named(tmp_path, drop, extra, named):
    path = tiny.write_gguf(tmp_path / "tiny.gguf", drop=drop, extra=extra)
    with pytest.raises(WeightError) as caught:
        zoo.llama.load(path, device="reference")
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_unsupported_architecture_is_named(tmp_path):
    path = tmp_path / "tiny.gguf"
    raw = tiny.write_gguf(path).read_bytes()
    path.write_bytes(raw.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(WeightError, match="mamba"):
        zoo.llama.load(path, device="reference")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "linear"),
        ({"model_type": "gemma3", "vision_config": {}}, "multimodal"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "qwen3"}, "q_norm"),
        ({"model_type": "qwen2"}, "wq.bias"),
        ({"model_type": "gemma2"}, "post_norm"),
        ({"model_type": "mixtral"}, "experts"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "experts"),
        ({"model_type": "mistral", "sliding_window": "wide"}, "sliding_window"),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["sliding_attention"]},
            "windows",
        ),
        ({"partial_rotary_factor": 0.5}, "rotated in part"),
        ({"vocab_size": 7}, "shape"),
        ({"rope_parameters": {"rope_theta": "much"}}, "rope_theta"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
    ],
)
def test_wrong_config_of_a_folder_is_named(tmp_path, change, named):
    folder = tiny.write_folder(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(WeightError) as caught:
        zoo.llama.load(folder, device="reference")
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_broken_tokenizer_json_is_named(tmp_path):
    folder = tiny.write_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    for broken in ("{", "[]", '{"model": {"type": "WordPiece", "vocab": {}}}'):
        path.write_text(broken)
        with pytest.raises(WeightError, match="tokenizer.json"):
            zoo.llama.load(folder, device="reference")
    path.unlink()
    with pytest.raises(WeightError, match="no tokenizer"):
        zoo.llama.load(folder, device="reference")


def test_only_what_can_be_no_path_is_taken_for_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/absent", "org/absent.gguf", "./org/name", "/org/name", "a/b/c"):
        with pytest.raises(WeightError) as caught:
            zoo.llama.load(path, device="reference")
        assert "fetched" not in str(caught.value), path


def test_model_of_the_hub_is_fetched_and_loaded(tmp_path, monkeypatch):
    from huggingface_hub import constants

    folder = tiny.write_folder(tmp_path / "source")
    with serve() as hub:
        publish(hub, "org/tiny", {path.name: path.read_bytes() for path in folder.iterdir()})
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
        monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
        model = zoo.llama.load("org/tiny", device="reference")
    expected = zoo.llama.load(folder, device="reference")
    np.testing.assert_array_equal(model.logits([1, 2, 3]), expected.logits([1, 2, 3]))


@pytest.mark.parametrize(
    ("tokens", "told"), [(250, "--ctx 260"), (300, "310 tokens are too many for the model")]
)
def test_benchmark_longer_than_the_context_or_the_model(tmp_path, tokens, told):
    path = str(tiny.write_gguf(tmp_path / "tiny.gguf"))
    with pytest.raises(UsageError, match=told):
        measure(path, tokens, 10, device="reference", ctx=100)


def test_benchmark_speaks_of_llama_benchs_tests(tmp_path):
    path = str(tiny.write_gguf(tmp_path / "tiny.gguf"))
    found = measure(path, 20, 3, device="reference", ctx=100, repetitions=3)
    assert [each.test for each in found.tests] == ["pp20", "tg3 @ d20"]
    data = json.loads(found.json())
    for each, key in zip(data["tests"], ("prefill_tokens_per_s", "decode_tokens_per_s")):
        samples = each["samples_ts"]
        assert len(samples) == 3 and data[key] == each["avg_ts"]
        assert each["avg_ts"] == pytest.approx(np.mean(samples), rel=1e-3)  # rounded to 4 places
        assert each["stddev_ts"] == pytest.approx(np.std(samples, ddof=1), rel=1e-2, abs=1e-3)
        assert f"{each['test']} " in found.text() and " ± " in found.text()


def test_complete_continues_piped_text(tmp_path):
    path = str(tiny.write_gguf(tmp_path / "tiny.gguf"))
    command = [sys.executable, "-m", "zoo.llama", "complete", "--model", path, "--max-tokens", "4"]
    options = {"cwd": ROOT, "capture_output": True, "timeout": 120}
    piped = subprocess.run([*command, "--device", "reference"], input=b"12 foxes\n", **options)
    given = subprocess.run([*command, "--device", "reference", "12 foxes"], **options)
    assert (piped.returncode, piped.stderr) == (0, b"")  # and no note of the limit
    assert piped.stdout == given.stdout != b""
