"""LLaMA's names: Meta's reference implementation is canonical; Hugging Face and GGUF beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from weights import entries
from weights.checkpoint import Checkpoint, Entry, WeightError
from weights.names.table import Change, Counts, Layout, Row, identity, translate

# What files name as their architecture, and the family that it is; None for a file that says none.
_FAMILIES = {
    None: "llama", "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2",
    "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}  # fmt: skip
MOST_EXPERTS = 1024
_ONE = "one head"  # the name, among the counts, of what is one


def _heads(name: str) -> Change:
    """Rows of a projection whose heads are rotated, `counts[name]` of them.

    Hugging Face rotates element j of a head with element j + D/2, as does GGUF but for the family
    llama; Meta rotates 2j with 2j + 1. Source: `permute` in transformers' LLaMA conversion.
    """

    def half(entry: Entry, counts: Counts) -> tuple[int, int]:
        shape, heads = entry.info.shape, 1 if name == _ONE else counts[name]
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


_ROTATED = {
    "layers.{n}.attention.wq.{p}": _heads("n_heads"),
    "layers.{n}.attention.wk.{p}": _heads("n_kv_heads"),
    "layers.{n}.attention.q_norm.weight": _heads(_ONE),
    "layers.{n}.attention.k_norm.weight": _heads(_ONE),
}
# Hugging Face's Gemma multiplies by 1 + weight; here, as in GGUF, the 1 is in the weight.
_PLUS_ONE = Change(
    lambda entry, counts: entries.plus(entry, 1.0), lambda entry, counts: entries.plus(entry, -1.0)
)


def _one_by_one(count: int) -> Change:
    """`count` matrices, one of each expert, as the layers of one tensor (E, out, in)."""

    def stacked(entry: Entry, counts: Counts) -> Entry:
        rows, *rest = entry.info.shape
        return entries.reshaped(entries.copied(entry), (count, rows // count, *rest))

    return Change(stacked, lambda entry, counts: entries.reshaped(entry, entry.info.shape[1:]))


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
    Row("layers.{n}.attention.q_norm.weight", "blk.{n}.attn_q_norm.weight"),
    Row("layers.{n}.attention.k_norm.weight", "blk.{n}.attn_k_norm.weight"),
    Row("layers.{n}.attention_post_norm.weight", "blk.{n}.post_attention_norm.weight"),
    Row("layers.{n}.ffn_norm.weight", "blk.{n}.ffn_norm.weight"),
    Row("layers.{n}.ffn_post_norm.weight", "blk.{n}.post_ffw_norm.weight"),
    Row("layers.{n}.feed_forward.w1.{p}", "blk.{n}.ffn_gate.{p}"),
    Row("layers.{n}.feed_forward.w2.{p}", "blk.{n}.ffn_down.{p}"),
    Row("layers.{n}.feed_forward.w3.{p}", "blk.{n}.ffn_up.{p}"),
    Row("layers.{n}.feed_forward.gate.weight", "blk.{n}.ffn_gate_inp.weight"),
    Row("layers.{n}.feed_forward.experts.w1.weight", "blk.{n}.ffn_gate_exps.weight"),
    Row("layers.{n}.feed_forward.experts.w2.weight", "blk.{n}.ffn_down_exps.weight"),
    Row("layers.{n}.feed_forward.experts.w3.weight", "blk.{n}.ffn_up_exps.weight"),
    _FACTORS,
)

_HF = (
    Row("tok_embeddings.weight", "model.embed_tokens.weight"),
    Row("norm.weight", "model.norm.weight"),
    Row("output.weight", "lm_head.weight"),
    Row("layers.{n}.attention_norm.weight", "model.layers.{n}.input_layernorm.weight"),
    Row("layers.{n}.attention.wq.{p}", "model.layers.{n}.self_attn.q_proj.{p}"),
    Row("layers.{n}.attention.wk.{p}", "model.layers.{n}.self_attn.k_proj.{p}"),
    Row("layers.{n}.attention.wv.{p}", "model.layers.{n}.self_attn.v_proj.{p}"),
    Row("layers.{n}.attention.wo.{p}", "model.layers.{n}.self_attn.o_proj.{p}"),
    Row("layers.{n}.attention.q_norm.weight", "model.layers.{n}.self_attn.q_norm.weight"),
    Row("layers.{n}.attention.k_norm.weight", "model.layers.{n}.self_attn.k_norm.weight"),
    Row("layers.{n}.feed_forward.w1.{p}", "model.layers.{n}.mlp.gate_proj.{p}"),
    Row("layers.{n}.feed_forward.w2.{p}", "model.layers.{n}.mlp.down_proj.{p}"),
    Row("layers.{n}.feed_forward.w3.{p}", "model.layers.{n}.mlp.up_proj.{p}"),
    Row("layers.{n}.feed_forward.gate.weight", "model.layers.{n}.block_sparse_moe.gate.weight"),
    _FACTORS,
)
_HF_NORMS = (Row("layers.{n}.ffn_norm.weight", "model.layers.{n}.post_attention_layernorm.weight"),)
_HF_POST_NORMS = (  # Gemma 2 and 3, where the same name means another norm
    Row(
        "layers.{n}.attention_post_norm.weight",
        "model.layers.{n}.post_attention_layernorm.weight",
    ),
    Row("layers.{n}.ffn_norm.weight", "model.layers.{n}.pre_feedforward_layernorm.weight"),
    Row("layers.{n}.ffn_post_norm.weight", "model.layers.{n}.post_feedforward_layernorm.weight"),
)
_HF_EXPERT = "model.layers.{{n}}.block_sparse_moe.experts.{e}.{w}.weight"
_OLD_GGUF_EXPERT = "blk.{{n}}.{w}.{e}.weight"  # as llama.cpp wrote it until April 2024


def _changed(rows: tuple[Row, ...], changes: Mapping[str, Change]) -> tuple[Row, ...]:
    """The same rows with a further change of the keys that are named."""
    return tuple(
        Row(row.ours, row.theirs, _both(row.change, changes.get(row.ours))) for row in rows
    )


def _both(first: Change | None, then: Change | None) -> Change | None:
    if first is None or then is None:
        return first or then
    return Change(
        lambda entry, counts: then.to_ours(first.to_ours(entry, counts), counts),
        lambda entry, counts: first.to_theirs(then.to_theirs(entry, counts), counts),
    )


@cache
def _hf_rows(family: str, experts: int) -> tuple[Row, ...]:
    rows = _HF + (_HF_POST_NORMS if family in ("gemma2", "gemma3") else _HF_NORMS)
    rows = _changed(rows, _ROTATED)
    if family.startswith("gemma"):
        norms = [row.ours for row in rows if row.ours.endswith("norm.weight")]
        rows = _changed(rows, dict.fromkeys(norms, _PLUS_ONE))
    return rows + _expert_rows(_HF_EXPERT, {w: w for w in ("w1", "w2", "w3")}, experts)


@cache
def _gguf_rows(family: str, experts: int) -> tuple[Row, ...]:
    """`experts` is how many of them have a tensor of their own."""
    old = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
    rows = _expert_rows(_OLD_GGUF_EXPERT, old, experts) + _GGUF
    return rows if family == "llama" else _changed(rows, _ROTATED)


def _expert_rows(theirs: str, words: Mapping[str, str], count: int) -> tuple[Row, ...]:
    """One row for each of the experts' matrices, which lie side by side in our layout."""
    return tuple(
        Row(
            f"layers.{{n}}.feed_forward.experts.{ours}.weight",
            tuple(theirs.format(e=e, w=word) for e in range(count)),
            _one_by_one(count),
        )
        for ours, word in words.items()
        if count
    )


_THEIR_EXPERT = re.compile(
    r"(?:model\.layers\.0\.block_sparse_moe\.experts\.([0-9]{1,5})\.w1"
    r"|blk\.0\.ffn_gate\.([0-9]{1,5}))\.weight"
)
_OUR_EXPERTS = "layers.0.feed_forward.experts.w1.weight"


def _experts(checkpoint: Checkpoint) -> int:
    """How many experts the first block has, whose tensors are apart in some layouts."""
    if _OUR_EXPERTS in checkpoint:
        shape = checkpoint.info(_OUR_EXPERTS).shape
        return shape[0] if len(shape) == 3 and shape[0] <= MOST_EXPERTS else 0
    found = map(_THEIR_EXPERT.fullmatch, checkpoint)
    return min(sum(match is not None for match in found), MOST_EXPERTS)


def family(checkpoint: Checkpoint) -> str:
    """What GGUF calls the architecture of a LLaMA."""
    return _FAMILIES.get(checkpoint.architecture, "llama")


# Tables of angles that some converters kept; a model computes them.
_ANGLES = (
    r"rope\.freqs",
    r"blk\.[0-9]+\.attn_rot_embd\.weight",
    r"(?:model\.layers\.[0-9]+\.self_attn|model)\.rotary_emb\.inv_freq",
)

LAYOUTS = {
    "meta": Layout("meta", identity(_GGUF), _ANGLES),
    "hf": Layout("hf", lambda c, to_ours: _hf_rows(family(c), _experts(c)), _ANGLES),
    "gguf": Layout(
        "gguf", lambda c, to_ours: _gguf_rows(family(c), _experts(c) if to_ours else 0), _ANGLES
    ),
}
# A key that only this layout has: every LLaMA checkpoint has an embedding.
MARKERS = {
    "token_embd.weight": "gguf",
    "model.embed_tokens.weight": "hf",
    "tok_embeddings.weight": "meta",
}


def canonical(checkpoint: Checkpoint, layout: str) -> Checkpoint:
    """The checkpoint in Meta's layout; where rows are reordered, head counts are needed."""
    return translate(checkpoint, LAYOUTS[layout], True, _counts_for(checkpoint, layout))


def in_layout(ours: Checkpoint, layout: str) -> Checkpoint:
    """The inverse of `canonical`."""
    return translate(ours, LAYOUTS[layout], False, _counts_for(ours, layout))


def _counts_for(checkpoint: Checkpoint, layout: str) -> dict[str, int]:
    reordered = layout == "hf" or layout == "gguf" and family(checkpoint) != "llama"
    return counts(checkpoint) if reordered else {}


def recognise(checkpoint: Checkpoint) -> str | None:
    """The layout of a LLaMA checkpoint, or None; another architecture may use the same names."""
    if checkpoint.architecture not in _FAMILIES:
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
