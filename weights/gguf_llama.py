"""The key/value pairs by which a GGUF file says what kind of LLaMA it holds.

Source: the GGUF specification; llama.cpp's `convert_hf_to_gguf.py` for what each family needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weights import config
from weights.checkpoint import Checkpoint, Entry, TensorInfo, WeightError
from weights.mapped import decoded

# GGUF's key behind the architecture, Hugging Face's in config.json, Meta's in params.json.
_SIZES = (
    ("context_length", "max_position_embeddings", None),
    ("embedding_length", "hidden_size", "dim"),
    ("block_count", "num_hidden_layers", "n_layers"),
    ("feed_forward_length", "intermediate_size", None),
    ("attention.head_count", "num_attention_heads", "n_heads"),
    ("attention.head_count_kv", "num_key_value_heads", "n_kv_heads"),
    ("attention.key_length", "head_dim", None),
)
_NUMBERS = (
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", "norm_eps", 1e-6),
    ("rope.freq_base", "rope_theta", "rope_theta", 10000.0),
)

_LARGE = 1e38  # float32 ends at 3.4e38
_LONGEST = 1 << 24  # tokens of context
_YARN_UNSAID = ("attention_factor", "mscale", "mscale_all_dim", "truncate")


def keys(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Pairs whose keys lack the architecture's name, and for Llama 3 a tensor beside the others.

    The checkpoint has GGUF's names. WeightError for a configuration without sizes, and for what
    GGUF has no words for.
    """
    metadata = config.complete(checkpoint.metadata)
    sizes = _sizes(checkpoint, metadata)
    scaling, factors = _rope(checkpoint, metadata, sizes)
    try:
        return sizes | scaling | _further(metadata, sizes["block_count"]), factors
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        problem = f"bad configuration: {type(error).__name__} {error}"
        raise WeightError(problem, file=checkpoint.path) from None


def _further(metadata: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """What only some families have."""
    kind, out = metadata.get("model_type"), {}
    if kind == "mixtral":
        out["expert_count"] = int(metadata["num_local_experts"])
        out["expert_used_count"] = int(metadata["num_experts_per_tok"])
    if kind in ("gemma2", "gemma3_text"):
        out["attention.scale"] = 1 / math.sqrt(float(metadata["query_pre_attn_scalar"]))
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if metadata.get(key) is not None:
                out[key] = float(metadata[key])
    local = config.local_layers(metadata, layers)
    if any(local) and metadata.get("sliding_window"):
        out["attention.sliding_window"] = int(metadata["sliding_window"])
        out["attention.sliding_window_pattern"] = local
    if kind == "gemma3_text":
        rope = config.rope(metadata, "sliding_attention")
        old = metadata["rope_local_base_freq"]
        new = old if rope is config.rope(metadata) else rope.get("rope_theta", old)
        out["rope.freq_base_swa"] = float(new)
    return out


def _sizes(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A LLaMA's sizes: as the configuration has them, or failing that as its tensors do."""
    out = _from_shapes(checkpoint)
    columns = out["embedding_length"]
    for key, hf, meta in _SIZES:
        value = _first(metadata, hf, meta)
        if value is not None:
            if type(value) is not int or not 0 < value < 1 << 31:
                problem = f"bad '{hf}'"
                raise WeightError(problem, file=checkpoint.path, expected="a size", got=value)
            out[key] = value
    heads = out.get("attention.head_count")
    if heads is None:
        problem = "the number of attention heads is not named"
        remedy = "give the folder that has config.json, or params.json"
        raise WeightError(problem, file=checkpoint.path, remedy=remedy)
    out.setdefault("attention.head_count_kv", heads)
    context = config.stretched(metadata, out.get("context_length", 2048))
    out["context_length"] = int(min(context, _LONGEST))
    out.setdefault("attention.key_length", out["embedding_length"] // heads)
    if out["attention.key_length"] > columns:  # else a number of the configuration sizes an array
        facts = {"expected": f"at most {columns}", "got": out["attention.key_length"]}
        raise WeightError("heads longer than the embedding", file=checkpoint.path, **facts)
    out["attention.value_length"] = out["rope.dimension_count"] = out["attention.key_length"]
    for key, hf, meta, default in _NUMBERS:
        value = _first(config.rope(metadata), hf) or _first(metadata, hf, meta) or default
        if type(value) not in (int, float) or not 0 < value < _LARGE:
            raise WeightError(f"bad '{hf}'", file=checkpoint.path, expected="a number", got=value)
        out[key] = float(value)
    return out


def _from_shapes(checkpoint: Checkpoint) -> dict[str, int]:
    layers = {key.split(".")[1] for key in checkpoint if key.startswith("layers.")}
    layers |= {key.split(".")[1] for key in checkpoint if key.startswith("blk.")}
    out = {"block_count": len(layers)}
    gate = "blk.0.ffn_gate_exps.weight"
    gate = gate if gate in checkpoint else "blk.0.ffn_gate.weight"
    for key, of in (("token_embd.weight", "vocab_size"), (gate, None)):
        if key not in checkpoint or len(checkpoint.info(key).shape) not in (2, 3):
            raise WeightError("not a LLaMA's tensor", file=checkpoint.path, tensor=key)
        rows, columns = checkpoint.info(key).shape[-2:]
        out |= {of or "feed_forward_length": rows, "embedding_length": columns}
    return out


def _first(metadata: Mapping[str, Any], *keys: str | None) -> Any:
    found = (metadata.get(key) for key in keys if key is not None)
    return next((value for value in found if value is not None), None)


def _rope(
    checkpoint: Checkpoint, metadata: Mapping[str, Any], sizes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Entry]]:
    """How positions are scaled: pairs, and for Llama 3 a tensor that divides the frequencies."""
    scaling = config.rope(metadata)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {}, {}
    if kind == "llama3" and "rope_freqs.weight" in checkpoint:
        return {}, {}
    try:
        if kind == "linear":
            return {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}, {}
        if kind == "yarn" and not any(scaling.get(key) is not None for key in _YARN_UNSAID):
            return _yarn(scaling, metadata["max_position_embeddings"]), {}
        if kind == "llama3":
            size, theta = sizes["rope.dimension_count"], sizes["rope.freq_base"]
            values = llama3_factors(size, theta, scaling)
            info = TensorInfo(values.shape, "F32", values.nbytes)
            name, raw = "rope_freqs.weight", values.view(np.uint8)
            return {}, {name: decoded(checkpoint.path, name, info, lambda: raw)}
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        problem = f"bad rope_scaling of type {kind}: {type(error).__name__} {error}"
        raise WeightError(problem, file=checkpoint.path) from None
    expected = "default, linear, llama3 or plain yarn"
    problem = "this scaling of positions has no conversion"
    raise WeightError(problem, file=checkpoint.path, expected=expected, got=kind)


def _yarn(scaling: Mapping[str, Any], limit: int) -> dict[str, Any]:
    out = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": int(
            scaling.get("original_max_position_embeddings") or limit
        ),
    }
    for name in ("beta_fast", "beta_slow"):
        if scaling.get(name) is not None:
            out[f"rope.scaling.yarn_{name}"] = float(scaling[name])
    return out


def llama3_factors(size: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """(size / 2,) float32: by what each rotation's frequency is divided.

    Fast ones stay as they are, slow ones are divided by `factor`, between them it goes over.
    Source: `_compute_llama3_parameters` in transformers.
    """
    turns = theta ** -(np.arange(0, size, 2) / size) / (2 * math.pi)  # per position
    turns = turns * float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    share = ((turns - low) / (high - low)).clip(0, 1)
    return (1 / ((1 - share) / float(scaling["factor"]) + share)).astype("<f4")
