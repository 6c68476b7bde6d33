"""Tensor names: each layout's keys mapped to one canonical set per model, by one anchored table.

LLaMA's canonical names are those of Meta's reference implementation. A layout is a tuple of rows
(pattern, target, …): the first row whose pattern matches a whole key gives the canonical
name; a target of None drops the tensor; a key that no row matches is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weights.checkpoint import Checkpoint, Entry, WeightError

if TYPE_CHECKING:
    from engine import Tensor


@dataclass(frozen=True)
class Row:
    """One row of a layout; `target` may use the pattern's groups, None drops the tensor.

    `heads` names the count ("n_heads", "n_kv_heads") by whose heads `pair_rows` reorders the rows.
    """

    pattern: str
    target: str | None
    heads: str | None = None


def pair_rows(w: Tensor, n_heads: int) -> Tensor:
    """Reorder rows from rotated halves to interleaved pairs: (H * D, ...) -> the same shape.

    Hugging Face rotates element j of a head with element j + D/2; Meta and GGUF rotate 2j with
    2j + 1. Source: `permute` in transformers' LLaMA conversion, inverted.
    """
    rows, *rest = w.shape
    halves = w.reshape(n_heads, 2, rows // n_heads // 2, *rest)  # (H, 2, D/2, ...)
    return halves.transpose(1, 2).reshape(rows, *rest)


LLAMA_META = (
    Row(r"(layers\.[0-9]+\.(?:attention\.w[qkvo]|feed_forward\.w[123])\.(?:weight|bias))", r"\1"),
    Row(r"(layers\.[0-9]+\.(?:attention_norm|ffn_norm)\.weight)", r"\1"),
    Row(r"((?:tok_embeddings|norm|output)\.weight)", r"\1"),
    Row(r"rope\.freqs", None),
)

LLAMA_GGUF = (
    Row(r"token_embd\.weight", r"tok_embeddings.weight"),
    Row(r"output_norm\.weight", r"norm.weight"),
    Row(r"output\.weight", r"output.weight"),
    Row(r"blk\.([0-9]+)\.attn_norm\.weight", r"layers.\1.attention_norm.weight"),
    Row(r"blk\.([0-9]+)\.ffn_norm\.weight", r"layers.\1.ffn_norm.weight"),
    Row(r"blk\.([0-9]+)\.attn_([qkv])\.(weight|bias)", r"layers.\1.attention.w\2.\3"),
    Row(r"blk\.([0-9]+)\.attn_output\.(weight|bias)", r"layers.\1.attention.wo.\2"),
    Row(r"blk\.([0-9]+)\.ffn_gate\.(weight|bias)", r"layers.\1.feed_forward.w1.\2"),
    Row(r"blk\.([0-9]+)\.ffn_down\.(weight|bias)", r"layers.\1.feed_forward.w2.\2"),
    Row(r"blk\.([0-9]+)\.ffn_up\.(weight|bias)", r"layers.\1.feed_forward.w3.\2"),
    Row(r"rope_freqs\.weight|blk\.[0-9]+\.attn_rot_embd\.weight", None),
)

LLAMA_HF = (
    Row(r"model\.embed_tokens\.weight", r"tok_embeddings.weight"),
    Row(r"model\.norm\.weight", r"norm.weight"),
    Row(r"lm_head\.weight", r"output.weight"),
    Row(r"model\.layers\.([0-9]+)\.input_layernorm\.weight", r"layers.\1.attention_norm.weight"),
    Row(r"model\.layers\.([0-9]+)\.post_attention_layernorm\.weight", r"layers.\1.ffn_norm.weight"),
    Row(
        r"model\.layers\.([0-9]+)\.self_attn\.q_proj\.(weight|bias)",
        r"layers.\1.attention.wq.\2",
        "n_heads",
    ),
    Row(
        r"model\.layers\.([0-9]+)\.self_attn\.k_proj\.(weight|bias)",
        r"layers.\1.attention.wk.\2",
        "n_kv_heads",
    ),
    Row(
        r"model\.layers\.([0-9]+)\.self_attn\.([vo])_proj\.(weight|bias)",
        r"layers.\1.attention.w\2.\3",
    ),
    Row(r"model\.layers\.([0-9]+)\.mlp\.gate_proj\.(weight|bias)", r"layers.\1.feed_forward.w1.\2"),
    Row(r"model\.layers\.([0-9]+)\.mlp\.down_proj\.(weight|bias)", r"layers.\1.feed_forward.w2.\2"),
    Row(r"model\.layers\.([0-9]+)\.mlp\.up_proj\.(weight|bias)", r"layers.\1.feed_forward.w3.\2"),
    Row(r"(?:model\.layers\.[0-9]+\.self_attn|model)\.rotary_emb\.inv_freq", None),
)

# A key that only this layout has, and its table. Every LLaMA checkpoint has an embedding.
LLAMA_LAYOUTS = {
    "token_embd.weight": LLAMA_GGUF,
    "model.embed_tokens.weight": LLAMA_HF,
    "tok_embeddings.weight": LLAMA_META,
}


def llama(checkpoint: Checkpoint, n_heads: int, n_kv_heads: int) -> Checkpoint:
    """The same LLaMA checkpoint under Meta's names and row order, still lazy.

    A file without `output.weight` ties it to the embedding: the key stays absent.
    WeightError for a layout or key that no table knows.
    """
    for key, rows in LLAMA_LAYOUTS.items():
        if key in checkpoint:
            counts = {"n_heads": n_heads, "n_kv_heads": n_kv_heads}
            return rename(checkpoint, rows, counts)
    expected = "one of " + ", ".join(LLAMA_LAYOUTS)
    raise WeightError("not a LLaMA checkpoint", file=checkpoint.path, expected=expected)


def rename(checkpoint: Checkpoint, rows: tuple[Row, ...], counts: dict[str, int]) -> Checkpoint:
    """Map every key of `checkpoint` by `rows`; WeightError for a key that none matches.

    `counts` gives the head counts that rows may name.
    """
    compiled = [(re.compile(row.pattern), row) for row in rows]
    entries: dict[str, Entry] = {}
    origin: dict[str, str] = {}
    for key, entry in checkpoint.entries.items():
        found = ((pattern.fullmatch(key), row) for pattern, row in compiled)
        match, row = next((pair for pair in found if pair[0]), (None, None))
        if row is None:
            problem = "no row of the name table matches it"
            raise WeightError(problem, file=checkpoint.path, tensor=key)
        if row.target is None:
            continue
        name = match.expand(row.target)
        if name in entries:
            problem = f"it and '{origin[name]}' are both {name}"
            raise WeightError(problem, file=checkpoint.path, tensor=key)
        if row.heads is not None:
            entry = _paired(checkpoint, key, entry, counts[row.heads])
        entries[name], origin[name] = entry, key
    path, form = checkpoint.path, checkpoint.format
    return Checkpoint(path, form, checkpoint.metadata, entries, checkpoint.device)


def _paired(checkpoint: Checkpoint, key: str, entry: Entry, n_heads: int) -> Entry:
    shape = entry.info.shape
    if n_heads < 1 or not shape or shape[0] % (2 * n_heads):
        problem, file = "its rows do not divide into heads", checkpoint.path
        expected = f"{n_heads} heads of an even number of rows"
        raise WeightError(problem, file=file, tensor=key, expected=expected, got=shape)

    def raw() -> np.ndarray:
        halves = entry.raw().reshape(n_heads, 2, shape[0] // n_heads // 2, -1)
        return halves.swapaxes(1, 2).reshape(-1)

    return Entry(entry.info, raw, lambda device: pair_rows(entry.read(device), n_heads))
