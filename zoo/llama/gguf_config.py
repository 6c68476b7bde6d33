"""The Config of a GGUF file's metadata.

Source: the GGUF specification; llama.cpp's `llama-model.cpp` for what its keys leave unsaid.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weights import Checkpoint
from zoo.llama import model
from zoo.llama.fields import FAMILIES, Fields, made, windows
from zoo.llama.hf_config import yarn_attention
from zoo.llama.rope import Scaling

_EMBEDDINGS = ("token_embd.weight", "tok_embeddings.weight", "model.embed_tokens.weight")
# One layer in so many sees all tokens, the last of each group, where no key says so.
_GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6}
_FACTORS = "rope_freqs.weight"
# The 27B models divide their scores by sqrt(dim / heads), which no key says: by layers.
_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}


def read(checkpoint: Checkpoint) -> model.Config:
    """The model's sizes and what its family changed; WeightError names file and key."""
    family = checkpoint.architecture
    fields = Fields(checkpoint, checkpoint.metadata, f"{family}.")
    if fields.get("attention.kv_lora_rank"):
        fields.fail("multi-head latent attention (MLA), which is not supported", got=family)
    if family not in FAMILIES:
        fields.fail("unsupported architecture", " or ".join(FAMILIES), family or "none")
    dim, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    layers = fields.integer("block_count")
    if layers > len(checkpoint):  # before anything is made for each
        expected = f"at most {len(checkpoint)} tensors"
        fields.fail("bad 'block_count': the number of layers can't be right", expected, layers)
    head_dim = fields.head_dim("attention.key_length", dim, heads)
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        fields.fail("bad 'rope.dimension_count'", f"the head size {head_dim}", rotated)
    values: dict[str, Any] = {
        "dim": dim,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_dim": fields.integer("feed_forward_length"),
        "vocab_size": fields.rows(*_EMBEDDINGS),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "max_context": fields.integer("context_length"),
        "rope_scaling": _scaling(fields, head_dim),
        "windows": _windows(fields, family, layers),
        "attention_cap": fields.optional("attn_logit_softcapping"),
        "logit_cap": fields.optional("final_logit_softcapping"),
        "attention_scale": fields.optional("attention.scale"),
    }
    if fields.get("expert_count"):
        values["n_experts"] = fields.integer("expert_count")
        values["n_chosen"] = fields.integer("expert_used_count")
    if values["attention_scale"] is None and (family, layers) in _BY_WIDTH:
        values["attention_scale"] = 1 / math.sqrt(dim / heads)
    if family == "gemma3":
        values["local_theta"] = fields.number("rope.freq_base_swa", 10000.0)
    return made(fields, family, values)


def _windows(fields: Fields, family: str, layers: int) -> tuple[int | None, ...]:
    """By layer; the pattern is a list of those that have one, or says which in so many has none."""
    size = fields.window("attention.sliding_window")
    pattern = fields.get("attention.sliding_window_pattern")
    pattern = pattern.tolist() if isinstance(pattern, np.ndarray) else pattern
    if isinstance(pattern, list):
        return windows(size, [bool(one) for one in pattern])
    every = _GLOBAL_EVERY.get(family)
    if pattern is not None:
        every = fields.integer("attention.sliding_window_pattern")
    return windows(size, [every is None or (n + 1) % every != 0 for n in range(layers)])


def _scaling(fields: Fields, head_dim: int) -> Scaling | None:
    if _FACTORS in fields.checkpoint:
        info = fields.checkpoint.info(_FACTORS)
        if info.shape != (head_dim // 2,) or info.type != "F32":
            expected = f"{head_dim // 2} numbers of type F32"
            fields.fail(f"bad tensor '{_FACTORS}'", expected, f"{info.type} {info.shape}")
        values = fields.checkpoint.entries[_FACTORS].raw().view("<f4").astype(float)
        if not (np.isfinite(values) & (values > 0)).all():
            fields.fail(f"bad tensor '{_FACTORS}'", "numbers above 0")
        return Scaling("factors", factors=tuple(values.tolist()))
    kind = fields.get("rope.scaling.type")
    if kind in (None, "none"):
        old = fields.optional("rope.scale_linear")
        return None if old in (None, 1) else Scaling("linear", old)
    factor = fields.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return Scaling("linear", factor)
    if kind != "yarn":
        fields.fail("this scaling of rotary positions is not supported", "linear or yarn", kind)
    original = fields.integer("rope.scaling.original_context_length")
    attention = fields.number("rope.scaling.attn_factor", 1.0) * yarn_attention(factor)
    slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
    return Scaling("yarn", factor, original, slow=slow, fast=fast, attention=attention)
