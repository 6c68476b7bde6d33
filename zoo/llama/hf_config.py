"""The Config of Hugging Face's config.json.

Source: the configurations and `modeling_rope_utils.py` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weights import Checkpoint
from weights import config as weights_config
from zoo.llama import model
from zoo.llama.fields import LARGEST, Fields, made, windows
from zoo.llama.rope import Scaling

# model_type -> family
_TYPES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip
_GELU = ("gelu_pytorch_tanh", "gelu")  # Gemma's first files say gelu and mean the other


def read(checkpoint: Checkpoint) -> model.Config:
    """The model's sizes and what its family changed; WeightError names file and key."""
    config = weights_config.complete(checkpoint.metadata)
    fields, kind = Fields(checkpoint, config), checkpoint.architecture
    _check_supported(fields, config, kind)
    family, rope = _TYPES[kind], weights_config.rope(config)
    dim, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers")
    if layers > len(checkpoint):  # before anything is made for each
        fields.fail("bad 'num_hidden_layers'", f"at most {len(checkpoint)} tensors", layers)
    limit = fields.integer("max_position_embeddings", 2048)
    scaling = _scaling(fields, rope, limit)
    theta = fields.number("rope_theta", 1e4, rope if "rope_theta" in rope else None)
    values: dict[str, Any] = {
        "dim": dim,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.head_dim("head_dim", dim, heads),
        "hidden_dim": fields.integer("intermediate_size"),
        "vocab_size": fields.integer("vocab_size"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "max_context": int(min(weights_config.stretched(config, limit), LARGEST)),
        "rope_scaling": scaling,
        "windows": windows(
            fields.window("sliding_window"), weights_config.local_layers(config, layers)
        ),
    }
    if kind == "mixtral":
        values["n_experts"] = fields.integer("num_local_experts")
        values["n_chosen"] = fields.integer("num_experts_per_tok")
    if kind in ("gemma2", "gemma3_text"):
        values["attention_scale"] = 1 / math.sqrt(fields.number("query_pre_attn_scalar"))
        values["attention_cap"] = fields.optional("attn_logit_softcapping")
        values["logit_cap"] = fields.optional("final_logit_softcapping")
    if kind == "gemma3_text":
        local = weights_config.rope(config, "sliding_attention")
        old = fields.number("rope_local_base_freq")
        values["local_theta"] = old if local is rope else fields.number("rope_theta", old, local)
    return made(fields, family, values)


def _check_supported(fields: Fields, config: Mapping[str, Any], kind: object) -> None:
    """WeightError for what this model file does not compute."""
    if any(key in config for key in ("vision_config", "audio_config")):
        fields.fail("a multimodal model; only models of text are supported", got=kind)
    if config.get("kv_lora_rank"):
        fields.fail("multi-head latent attention (MLA), which is not supported", got=kind)
    if kind not in _TYPES:
        fields.fail("unsupported model_type", " or ".join(_TYPES), kind or "none")
    gemma = _TYPES[kind].startswith("gemma")
    wanted, key = (_GELU, "hidden_activation") if gemma else (("silu",), "hidden_act")
    got = config.get(key) or config.get("hidden_act") or wanted[0]
    if got not in wanted:
        fields.fail(f"unsupported {key}", wanted[0], got)
    if config.get("use_bidirectional_attention"):
        fields.fail("attention in both directions, which is not supported")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        fields.fail("heads that are rotated in part, which are not supported")


def _scaling(fields: Fields, rope: Mapping[str, Any], limit: int) -> Scaling | None:
    """How positions are stretched beyond the `limit` that the configuration names."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default"):
        return None
    key = "original_max_position_embeddings"
    original = rope.get(key) or fields.get(key) or limit
    if type(original) is not int or not 1 <= original <= LARGEST:
        fields.fail(f"bad '{key}'", f"1 to {LARGEST}", original)

    def number(key: str, default: float | None = None) -> float:
        return fields.number(key, default, rope)

    match kind:
        case "linear":
            return Scaling(kind, number("factor"))
        case "dynamic":
            return Scaling(kind, number("factor"), limit)
        case "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if low >= high:
                fields.fail("bad 'low_freq_factor'", f"less than {high}", low)
            return Scaling(kind, number("factor"), original, low, high)
        case "yarn":
            factor = number("factor", limit / original)
            return Scaling(
                kind,
                factor,
                original,
                slow=number("beta_slow", 1),
                fast=number("beta_fast", 32),
                truncate=rope.get("truncate", True) is not False,
                attention=_yarn_attention(fields, rope, factor),
            )
    expected = "default, linear, dynamic, yarn or llama3"
    fields.fail("this scaling of rotary positions is not supported", expected, kind)


def _yarn_attention(fields: Fields, rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return fields.number("attention_factor", None, rope)
    of, by = rope.get("mscale"), rope.get("mscale_all_dim")
    if not of or not by:
        return yarn_attention(factor)
    of, by = (fields.number(key, None, rope) for key in ("mscale", "mscale_all_dim"))
    return yarn_attention(factor, of) / yarn_attention(factor, by)


def yarn_attention(factor: float, weight: float = 1.0) -> float:
    """By what YaRN multiplies cosines and sines, Peng et al. 2023, equation 22."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
