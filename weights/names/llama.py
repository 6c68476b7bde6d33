"""LLaMA's names: Meta's reference implementation is canonical; Hugging Face and GGUF beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weights import entries
from weights.checkpoint import Checkpoint, Entry, WeightError
from weights.names.table import Change, Counts, Layout, Row, identity, translate

_ARCHITECTURES = ("llama", "mistral")


def _heads(name: str) -> Change:
    """Rows of a projection whose heads are rotated, `counts[name]` of them.

    Hugging Face rotates element j of a head with element j + D/2; Meta and GGUF rotate 2j with
    2j + 1. Source: `permute` in transformers' LLaMA conversion.
    """

    def half(entry: Entry, counts: Counts) -> tuple[int, int]:
        shape, heads = entry.info.shape, counts[name]
        if heads < 1 or not shape or shape[0] % (2 * heads):
            problem = "its rows do not divide into heads"
            expected = f"{heads} heads of an even number of rows"
            raise WeightError(problem, expected=expected, got=shape)
        return heads, shape[0] // heads // 2

    def pairs(entry: Entry, counts: Counts) -> Entry:
        heads, size = half(entry, counts)
        return entries.reordered(entry, (heads, 2, size), (0, 2, 1))

    def halves(entry: Entry, counts: Counts) -> Entry:
        heads, size = half(entry, counts)
        return entries.reordered(entry, (heads, size, 2), (0, 2, 1))

    return Change(pairs, halves)


# The factors of RoPE scaling, which GGUF alone keeps as a tensor: there is nothing to compute
# them from in such a file, so they travel under their own name.
_FACTORS = Row("rope_freqs.weight", "rope_freqs.weight")

_GGUF = (
    Row("tok_embeddings.weight", "token_embd.weight"),
    Row("norm.weight", "output_norm.weight"),
    Row("output.weight", "output.weight"),
    Row("layers.{n}.attention_norm.weight", "blk.{n}.attn_norm.weight"),
    Row("layers.{n}.attention.wq.{p}", "blk.{n}.attn_q.{p}"),
    Row("layers.{n}.attention.wk.{p}", "blk.{n}.attn_k.{p}"),
    Row("layers.{n}.attention.wv.{p}", "blk.{n}.attn_v.{p}"),
    Row("layers.{n}.attention.wo.{p}", "blk.{n}.attn_output.{p}"),
    Row("layers.{n}.ffn_norm.weight", "blk.{n}.ffn_norm.weight"),
    Row("layers.{n}.feed_forward.w1.{p}", "blk.{n}.ffn_gate.{p}"),
    Row("layers.{n}.feed_forward.w2.{p}", "blk.{n}.ffn_down.{p}"),
    Row("layers.{n}.feed_forward.w3.{p}", "blk.{n}.ffn_up.{p}"),
    _FACTORS,
)

_HF = (
    Row("tok_embeddings.weight", "model.embed_tokens.weight"),
    Row("norm.weight", "model.norm.weight"),
    Row("output.weight", "lm_head.weight"),
    Row("layers.{n}.attention_norm.weight", "model.layers.{n}.input_layernorm.weight"),
    Row("layers.{n}.attention.wq.{p}", "model.layers.{n}.self_attn.q_proj.{p}", _heads("n_heads")),
    Row(
        "layers.{n}.attention.wk.{p}",
        "model.layers.{n}.self_attn.k_proj.{p}",
        _heads("n_kv_heads"),
    ),
    Row("layers.{n}.attention.wv.{p}", "model.layers.{n}.self_attn.v_proj.{p}"),
    Row("layers.{n}.attention.wo.{p}", "model.layers.{n}.self_attn.o_proj.{p}"),
    Row("layers.{n}.ffn_norm.weight", "model.layers.{n}.post_attention_layernorm.weight"),
    Row("layers.{n}.feed_forward.w1.{p}", "model.layers.{n}.mlp.gate_proj.{p}"),
    Row("layers.{n}.feed_forward.w2.{p}", "model.layers.{n}.mlp.down_proj.{p}"),
    Row("layers.{n}.feed_forward.w3.{p}", "model.layers.{n}.mlp.up_proj.{p}"),
    _FACTORS,
)

# Tables of angles that some converters kept; a model computes them.
_ANGLES = (
    r"rope\.freqs",
    r"blk\.[0-9]+\.attn_rot_embd\.weight",
    r"(?:model\.layers\.[0-9]+\.self_attn|model)\.rotary_emb\.inv_freq",
)

LAYOUTS = {
    "meta": Layout("meta", identity(_GGUF), _ANGLES),
    "hf": Layout("hf", _HF, _ANGLES),
    "gguf": Layout("gguf", _GGUF, _ANGLES),
}
# A key that only this layout has: every LLaMA checkpoint has an embedding.
MARKERS = {
    "token_embd.weight": "gguf",
    "model.embed_tokens.weight": "hf",
    "tok_embeddings.weight": "meta",
}


def canonical(checkpoint: Checkpoint, layout: str) -> Checkpoint:
    """The checkpoint in Meta's layout; only Hugging Face's needs the metadata's head counts."""
    return translate(checkpoint, LAYOUTS[layout], True, _counts_for(checkpoint, layout))


def in_layout(ours: Checkpoint, layout: str) -> Checkpoint:
    """The inverse of `canonical`."""
    return translate(ours, LAYOUTS[layout], False, _counts_for(ours, layout))


def _counts_for(checkpoint: Checkpoint, layout: str) -> dict[str, int]:
    return counts(checkpoint) if layout == "hf" else {}


def recognise(checkpoint: Checkpoint) -> str | None:
    """The layout of a LLaMA checkpoint, or None; another architecture may use the same names."""
    if checkpoint.architecture not in (None, *_ARCHITECTURES):
        return None
    return layout_of(checkpoint)


def layout_of(checkpoint: Checkpoint) -> str | None:
    """The layout by the name of the embedding, whatever the file says of its architecture."""
    return next((name for key, name in MARKERS.items() if key in checkpoint), None)


def counts(checkpoint: Checkpoint) -> dict[str, int]:
    """How many heads the metadata names, in whichever layout's words; WeightError when none."""
    metadata = checkpoint.metadata
    heads = _count(metadata, "n_heads", "num_attention_heads", "attention.head_count")
    kv_heads = _count(metadata, "n_kv_heads", "num_key_value_heads", "attention.head_count_kv")
    if heads is None:
        keys = "n_heads, num_attention_heads or attention.head_count"
        problem = "the number of attention heads is not named"
        raise WeightError(problem, file=checkpoint.path, expected=f"{keys} in the metadata")
    return {"n_heads": heads, "n_kv_heads": kv_heads or heads}


def _count(metadata: Mapping[str, Any], meta: str, hf: str, gguf: str) -> int | None:
    architecture = metadata.get("general.architecture")
    values = (metadata.get(key) for key in (meta, hf, f"{architecture}.{gguf}"))
    return next((value for value in values if type(value) is int and value > 0), None)
