"""LLaMA: a decoder-only transformer with RMSNorm, rotary positions, grouped queries and SwiGLU.

Papers: Touvron et al. 2023 (LLaMA, Llama 2), Ainslie et al. 2023 (grouped queries), Shazeer 2020
(SwiGLU), Su et al. 2021 (RoPE). Names are Meta's checkpoint keys.
Axes: T new tokens, S tokens so far with the new ones, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import Tensor, dtype
from engine.functional import (
    attention,
    causal_mask,
    embedding,
    linear,
    rms_norm,
    rope,
    rope_table,
    silu,
)
from engine.symbolic import Int

Params = Any  # a tree over the checkpoint: weights.Params


@dataclass(frozen=True)
class Config:
    """What a checkpoint says of its network; sizes in elements, max_context in tokens."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_context: int


@dataclass
class Cache:
    """Keys and values of the tokens so far, and the rotary table: one entry per layer in k, v."""

    k: list[Tensor]  # (K, context, D)
    v: list[Tensor]  # (K, context, D)
    rope: Tensor  # (2, context, D / 2): cosines, sines


def init_cache(
    config: Config, context: int, device: str | None = None, kind: dtype.DType = dtype.float32
) -> Cache:
    """Room for `context` tokens, all zero; keys and values are kept in the type `kind`."""
    heads, d = config.n_kv_heads, config.head_dim

    def empty(*shape: int) -> list[Tensor]:
        zeros = Tensor.zeros(*shape, dtype=kind, device=device)
        return [zeros.contiguous() for _ in range(config.n_layers)]

    k, v = empty(heads, context, d), empty(heads, context, d)
    k[0].realize(*k[1:], *v)
    table = rope_table(context, d, config.rope_theta)
    return Cache(k, v, rope=Tensor.from_numpy(table, device=device))


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every key that a checkpoint has, without the output matrix that tied embeddings save."""
    c = config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    block = {
        "attention_norm.weight": (c.dim,),
        "attention.wq.weight": (q, c.dim),
        "attention.wk.weight": (kv, c.dim),
        "attention.wv.weight": (kv, c.dim),
        "attention.wo.weight": (c.dim, q),
        "ffn_norm.weight": (c.dim,),
        "feed_forward.w1.weight": (c.hidden_dim, c.dim),
        "feed_forward.w2.weight": (c.dim, c.hidden_dim),
        "feed_forward.w3.weight": (c.hidden_dim, c.dim),
    }
    shapes = {"tok_embeddings.weight": (c.vocab_size, c.dim), "norm.weight": (c.dim,)}
    for n in range(c.n_layers):
        shapes |= {f"layers.{n}.{key}": shape for key, shape in block.items()}
    return shapes


def attend(p: Params, x: Tensor, config: Config, start: Int, cache: Cache, layer: int) -> Tensor:
    """Self-attention of the T new tokens, at positions start …, to all S = start + T."""
    t, d = x.shape[0], config.head_dim
    q = linear(p.wq, x).reshape(t, config.n_heads, d).permute(1, 0, 2)  # (H, T, D)
    k = linear(p.wk, x).reshape(t, config.n_kv_heads, d).permute(1, 0, 2)  # (K, T, D)
    v = linear(p.wv, x).reshape(t, config.n_kv_heads, d).permute(1, 0, 2)  # (K, T, D)
    cos, sin = cache.rope[0, start : start + t], cache.rope[1, start : start + t]  # (T, D/2)
    keys, values = cache.k[layer], cache.v[layer]
    keys[:, start : start + t] = rope(k, cos, sin)
    values[:, start : start + t] = v
    out = attention(
        rope(q, cos, sin),
        keys[:, : start + t],
        values[:, : start + t],
        causal_mask(t, start + t, start),
    )
    return linear(p.wo, out.permute(1, 0, 2).reshape(t, config.n_heads * d))


def feed_forward(p: Params, x: Tensor) -> Tensor:
    """SwiGLU."""
    return linear(p.w2, silu(linear(p.w1, x)) * linear(p.w3, x))


def extend(p: Params, config: Config, ids: Tensor, start: Int, cache: Cache) -> Tensor:
    """(T, dim): T new tokens, at positions start …, after all blocks; writes keys and values."""
    x = embedding(p.tok_embeddings, ids)  # (T, dim)
    for n, block in enumerate(p.layers):
        x = x + attend(
            block.attention,
            rms_norm(block.attention_norm, x, config.norm_eps),
            config,
            start,
            cache,
            n,
        )
        x = x + feed_forward(block.feed_forward, rms_norm(block.ffn_norm, x, config.norm_eps))
    return x


def forward(p: Params, config: Config, ids: Tensor, start: Int, cache: Cache) -> Tensor:
    """Logits (T, vocab) of T new tokens at positions start …; writes their keys and values."""
    x = rms_norm(p.norm, extend(p, config, ids, start, cache), config.norm_eps)
    return linear(p.output if "output" in p else p.tok_embeddings, x).cast(dtype.float32)
