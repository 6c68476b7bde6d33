"""What sets the families apart: each field of Config against plain NumPy, and where it comes from.

That transformers' logits are the same from the same files is tested beside the peers.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from engine import DeviceError, get_device
from tests.weights import models
from tests.zoo.llama import reference, tiny
from weights import Params, WeightError
from weights.checkpoint import Checkpoint
from zoo.llama import gguf_config, hf_config, model
from zoo.llama.context import Context
from zoo.llama.rope import Scaling

VOCAB = 40
IDS = np.random.default_rng(0).integers(0, VOCAB, 30).tolist()  # longer than any window below
# float32 sums of at most 40 products on logits of size 10: 1e-4 leaves a factor of ten.
TOLERANCE = 1e-4

FIELDS = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mistral": {"windows": (5, 5)},
    "one window": {"windows": (None, 7)},
    "mixtral": {"n_experts": 5, "n_chosen": 2},
    "mixtral of one": {"n_experts": 3, "n_chosen": 1},
    "gemma": {"tanh_gelu": True, "embedding_scale": math.sqrt(24)},
    "gemma2": {"tanh_gelu": True, "embedding_scale": math.sqrt(24), "post_norms": True,
               "windows": (6, None), "attention_scale": 0.3, "attention_cap": 1.5,
               "logit_cap": 4.0},
    "gemma3": {"tanh_gelu": True, "embedding_scale": math.sqrt(24), "post_norms": True,
               "qk_norm": True, "windows": (6, None), "local_theta": 100.0,
               "attention_scale": 0.3},
}  # fmt: skip


def weights_of(config: model.Config) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    return {
        name: (draw.normal(size=shape) * 2 / shape[-1] ** 0.5 + (len(shape) == 1)).astype("<f4")
        for name, shape in model.expected_shapes(config).items()
    }


def context(config: model.Config, tensors: dict[str, np.ndarray], device: str) -> Context:
    given = models.checkpoint(tensors)
    made = Checkpoint(given.path, "test", {}, given.entries, device)
    return Context(Params(made), config, 40, device)


# Compiling takes some ten seconds each, so not all of them: these have everything but biases.
COMPILED = ("mixtral", "gemma2", "gemma3")


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "reference") for name in FIELDS), *((name, "opencl") for name in COMPILED)],
)
def test_fields_change_the_network_as_the_papers_say(name, device):
    try:
        get_device(device)
    except DeviceError as error:
        pytest.skip(f"no {device} here: {error}")
    config = dataclasses.replace(tiny.config(VOCAB), **FIELDS[name])
    tensors = weights_of(config)
    want = reference.logits(tensors, config, IDS)
    ours = context(config, tensors, device)
    np.testing.assert_allclose(ours.all_logits(IDS), want, atol=TOLERANCE)
    ours.reset()
    steps = [ours.next_logits(IDS[:n]) for n in range(20, 31)]
    np.testing.assert_allclose(steps, want[19:], atol=TOLERANCE)


def test_every_field_above_shows_in_the_logits():
    """Else the test above would pass without it."""
    for name, fields in FIELDS.items():
        config = dataclasses.replace(tiny.config(VOCAB), **fields)
        tensors = weights_of(config)
        full = reference.logits(tensors, config, IDS)
        for field in fields.keys() - {"qkv_bias", "n_experts"}:
            plain = {"n_chosen": 3, "attention_scale": None, "windows": (None, None)}
            without = plain.get(field, getattr(tiny.config(VOCAB), field))
            if field == "n_chosen" and fields["n_experts"] == 3:
                without = 2
            other = reference.logits(tensors, dataclasses.replace(config, **{field: without}), IDS)
            assert np.abs(other - full).max() > 100 * TOLERANCE, (name, field)


# --- where the fields come from ----------------------------------------------------------------

HF = {
    "hidden_size": 24, "num_hidden_layers": 7, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 40, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
    "max_position_embeddings": 300,
}  # fmt: skip
EVERY_SIXTH = (8, 8, 8, 8, 8, None, 8)
SCALE = 1 / math.sqrt(256)
FROM_HF = {
    "llama": ({"sliding_window": 8}, {}),  # which this family doesn't have
    "mistral": ({"sliding_window": 8}, {"windows": (8,) * 7}),
    "mistral ": ({"sliding_window": None}, {}),
    "mixtral": ({"num_local_experts": 4}, {"n_experts": 4, "n_chosen": 2, "rope_theta": 1e6}),
    "qwen2": ({"sliding_window": 8}, {"qkv_bias": True}),
    "qwen2 ": (
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 5},
        {"qkv_bias": True, "windows": (None,) * 5 + (8, 8)},
    ),
    "qwen3": ({"head_dim": 16}, {"qk_norm": True, "head_dim": 16}),
    "gemma": (
        {"hidden_act": "gelu"}, {"tanh_gelu": True, "embedding_scale": math.sqrt(24)}
    ),
    "gemma2": (
        {"sliding_window": 8},
        {"tanh_gelu": True, "embedding_scale": math.sqrt(24), "post_norms": True,
         "windows": (8, None, 8, None, 8, None, 8), "attention_scale": SCALE,
         "attention_cap": 50.0, "logit_cap": 30.0},
    ),
    "gemma3_text": (
        {"sliding_window": 8, "rope_theta": 2e6, "rope_local_base_freq": 1e3,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"tanh_gelu": True, "embedding_scale": math.sqrt(24), "post_norms": True, "qk_norm": True,
         "windows": EVERY_SIXTH, "attention_scale": SCALE, "rope_theta": 2e6, "local_theta": 1e3,
         "rope_scaling": Scaling("linear", 8.0)},
    ),
    "gemma3_text ": (
        {"sliding_window": 8, "sliding_window_pattern": 2, "rope_parameters": {
            "full_attention": {"rope_theta": 3e6}, "sliding_attention": {"rope_theta": 2e3}}},
        {"tanh_gelu": True, "embedding_scale": math.sqrt(24), "post_norms": True, "qk_norm": True,
         "windows": (8, None, 8, None, 8, None, 8), "attention_scale": SCALE, "rope_theta": 3e6,
         "local_theta": 2e3},
    ),
}  # fmt: skip


def config_of(**fields) -> model.Config:
    return dataclasses.replace(tiny.config(VOCAB), n_layers=7, **fields)


def some_checkpoint(metadata: dict, extra: dict[str, np.ndarray] | None = None) -> Checkpoint:
    """As many tensors as layers, of which only the embedding is looked at."""
    zeros = np.zeros(1, np.float32)
    tensors = {"token_embd.weight": np.zeros((VOCAB, 24), np.float32)} | (extra or {})
    return models.checkpoint(tensors | {f"blk.{n}.x": zeros for n in range(70)}, metadata)


@pytest.mark.parametrize("kind", FROM_HF)
def test_config_json_of_each_family(kind):
    said, fields = FROM_HF[kind]
    made = hf_config.read(some_checkpoint(HF | {"model_type": kind.strip()} | said))
    assert made == config_of(**fields)


SCALINGS = {
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
         "original_max_position_embeddings": 32},
        Scaling("llama3", 8.0, 32, 1.0, 2.0), 300,
    ),
    "linear": ({"factor": 4.0}, Scaling("linear", 4.0), 1200),
    "dynamic": ({"factor": 2.0}, Scaling("dynamic", 2.0, 300), 600),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 100},
        Scaling("yarn", 4.0, 100, attention=0.1 * math.log(4) + 1), 400,
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_config_json_of_each_scaling(kind, key):
    said, scaling, limit = SCALINGS[kind]
    for name in ("rope_type", "type"):
        made = hf_config.read(
            some_checkpoint(HF | {"model_type": "llama", key: {name: kind} | said})
        )
        assert made == config_of(rope_scaling=scaling, max_context=limit)


GGUF = {
    "embedding_length": 24, "block_count": 7, "attention.head_count": 6,
    "attention.head_count_kv": 2, "feed_forward_length": 40, "context_length": 300,
    "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
GEMMA = {"tanh_gelu": True, "embedding_scale": math.sqrt(24)}
FROM_GGUF = {
    "llama": (
        {"expert_count": 4, "expert_used_count": 3, "attention.sliding_window": 8},
        {"n_experts": 4, "n_chosen": 3, "windows": (8,) * 7},
    ),
    "qwen2": ({}, {"qkv_bias": True}),
    "qwen3": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 75},
        {"qk_norm": True,
         "rope_scaling": Scaling("yarn", 4.0, 75, attention=0.1 * math.log(4) + 1)},
    ),
    "gemma": ({"attention.key_length": 16}, GEMMA | {"head_dim": 16}),
    "gemma2": (
        {"attention.sliding_window": 8, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0},
        GEMMA | {"post_norms": True, "windows": (8, None, 8, None, 8, None, 8),
                 "attention_cap": 50.0, "logit_cap": 30.0},
    ),
    "gemma3": (
        {"attention.sliding_window": 8, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
         "rope.scaling.factor": 8.0},
        GEMMA | {"post_norms": True, "qk_norm": True, "windows": EVERY_SIXTH, "rope_theta": 1e6,
                 "local_theta": 1e4, "rope_scaling": Scaling("linear", 8.0)},
    ),
    "gemma3 ": (
        {"attention.sliding_window": 8, "attention.scale": 0.25, "rope.freq_base_swa": 2e4,
         "attention.sliding_window_pattern": [True] * 6 + [False]},
        GEMMA | {"post_norms": True, "qk_norm": True, "windows": (8,) * 6 + (None,),
                 "local_theta": 2e4, "attention_scale": 0.25},
    ),
}  # fmt: skip


def gguf(kind: str, said: dict) -> dict:
    keys = {f"{kind.strip()}.{key}": value for key, value in (GGUF | said).items()}
    return keys | {"general.architecture": kind.strip()}


@pytest.mark.parametrize("kind", FROM_GGUF)
def test_gguf_metadata_of_each_family(kind):
    said, fields = FROM_GGUF[kind]
    assert gguf_config.read(some_checkpoint(gguf(kind, said))) == config_of(**fields)


@pytest.mark.parametrize(("kind", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_27b_models_are_scaled_by_their_width(kind, layers):
    said = {"block_count": layers, "attention.key_length": 8}
    for count, scale in ((layers, 1 / math.sqrt(24 / 6)), (layers - 1, None)):
        made = gguf_config.read(some_checkpoint(gguf(kind, said | {"block_count": count})))
        assert made.attention_scale == scale


def test_factors_of_llama_3_come_from_a_tensor():
    factors = np.array([1.0, 8.0], np.float32)
    made = gguf_config.read(some_checkpoint(gguf("llama", {}), {"rope_freqs.weight": factors}))
    assert made == config_of(rope_scaling=Scaling("factors", factors=(1.0, 8.0)))


@pytest.mark.parametrize("factors", [[1.0], [1.0, 0.0], [1.0, -2.0], [1.0, float("nan")]])
def test_factors_that_can_t_be_are_refused(factors):
    tensors = {"rope_freqs.weight": np.array(factors, np.float32)}
    with pytest.raises(WeightError, match="model: bad tensor 'rope_freqs.weight'"):
        gguf_config.read(some_checkpoint(gguf("llama", {}), tensors))
