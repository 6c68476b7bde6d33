"""Every family of LLaMA gives the logits of transformers from the same random checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.peers

torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
transformers = pytest.importorskip("transformers", reason="needs the peers extra: transformers")

import weights  # noqa: E402 - after the peers, which this file can't do without
import zoo.llama  # noqa: E402
from tests.peers.test_llama_parity import make_tokenizer, their_logits  # noqa: E402

LENGTH = 50  # longer than any window and any original context below
# Both in float32 over sums of at most 80 terms, on logits near 10: some hundred roundings, and
# those of exp and tanh. What a mistake in any of the families changes is off by 0.1 and more.
TOLERANCE = 1e-3

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# name: (model_type, what its configuration says)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "code llama": ("llama", {"rope_theta": 1e6, "max_position_embeddings": 16384}),
    "llama 3": ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3, "head_dim": 32}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic, short": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "yarn": ("llama", {"rope_scaling": YARN, "head_dim": 32}),
    "yarn, odd": (
        "llama",
        {"rope_scaling": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7,
                                 "mscale_all_dim": 0.3, "truncate": False},
         "head_dim": 32},
    ),
    "yarn, attention": ("llama", {"rope_scaling": YARN | {"attention_factor": 0.8}}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral without a window": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral of one": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "mixtral of all": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    ),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3 with biases": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "gemma": ("gemma", {"head_dim": 12}),
    "gemma2": (
        "gemma2",
        {"head_dim": 12, "sliding_window": 9, "query_pre_attn_scalar": 20,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 12, "sliding_window": 9, "query_pre_attn_scalar": 20,
         "layer_types": MIXED, "rope_parameters": GEMMA3_ROPE},
    ),
}  # fmt: skip
# Scalings for which GGUF has no words.
NO_GGUF = {"dynamic, short", "yarn, attention", "yarn, odd"}


def make(folder: Path, case: str) -> torch.nn.Module:
    """A random checkpoint: large weights, no norm or bias that is all ones or zeros."""
    kind, options = CASES[case]
    torch.manual_seed(len(case))
    config = transformers.AutoConfig.for_model(
        kind,
        **{
            "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
            "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "initializer_range": 0.2, "rms_norm_eps": 1e-5, "bos_token_id": 318,
            "eos_token_id": 319, "pad_token_id": None, "dtype": "float32",
        } | options,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.eval().named_parameters():
        if parameter.ndim == 1:
            low = -0.5 if "bias" in name or kind.startswith("gemma") else 0.5
            torch.nn.init.uniform_(parameter, low, low + 1)
    model.save_pretrained(folder, safe_serialization=True)
    make_tokenizer(folder, config.vocab_size)
    return model


def step_by_step(model: zoo.llama.Llama, ids: list[int], first: int) -> np.ndarray:
    """Logits after first, first + 1, … tokens: one prompt, then one token at a time."""
    rows = [model.context.next_logits(ids[:n]) for n in range(first, len(ids) + 1)]
    return np.stack(rows)


def assert_same(ours: zoo.llama.Llama, theirs: np.ndarray, ids: list[int]) -> None:
    assert np.abs(theirs).max() > 1, "logits too close to 0 to compare"
    np.testing.assert_allclose(ours.logits(ids), theirs, atol=TOLERANCE)
    ours.context.reset()
    np.testing.assert_allclose(step_by_step(ours, ids, 40), theirs[39:], atol=TOLERANCE)


def some_ids(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 318, LENGTH).tolist()


@pytest.mark.parametrize("case", CASES)
def test_family_equals_transformers_at_once_and_step_by_step(tmp_path: Path, case: str) -> None:
    theirs, ids = make(tmp_path, case), some_ids(len(case))
    assert_same(zoo.llama.load(tmp_path, dtype="f32"), their_logits(theirs, ids), ids)


@pytest.mark.parametrize("case", [case for case in CASES if case not in NO_GGUF])
def test_family_as_gguf_equals_transformers(tmp_path: Path, case: str) -> None:
    theirs, ids = make(tmp_path, case), some_ids(len(case))
    weights.convert(tmp_path, tmp_path / "model.gguf")
    assert_same(
        zoo.llama.load(tmp_path / "model.gguf", dtype="f32"), their_logits(theirs, ids), ids
    )


def test_dynamic_scaling_equals_theirs_token_by_token(tmp_path: Path) -> None:
    """Beyond the original context each token is rotated by what the text up to it asks for."""
    CASES["dynamic"] = (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 24},
    )
    theirs, ids = make(tmp_path, "dynamic"), some_ids(0)
    cache, rows = None, []
    with torch.inference_mode():
        for token in ids:
            out = theirs(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1].numpy())
    ours = zoo.llama.load(tmp_path, dtype="f32")
    assert ours.ctx >= LENGTH
    assert_same(ours, np.stack(rows), ids)
