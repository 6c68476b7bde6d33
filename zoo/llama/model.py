"""LLaMA: a decoder-only transformer with RMSNorm, rotary positions, grouped queries and SwiGLU.

Papers: Touvron et al. 2023 (LLaMA, Llama 2), Ainslie et al. 2023 (grouped queries), Shazeer 2020
(SwiGLU), Su et al. 2021 (RoPE). Names are Meta's checkpoint keys. What its family changed since is
in Config: Jiang et al. 2023 and 2024 (Mistral's window, Mixtral's experts), Yang et al. 2024 and
2025 (Qwen), Gemma Team 2024 and 2025.
Axes: T new tokens, H query heads, K key heads, D head size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import Tensor, dtype
from engine.functional import (
    embedding,
    gelu,
    linear,
    rms_norm,
    rope,
    silu,
    soft_cap,
    softmax,
)
from zoo.llama import rope as rotary

Params = Any  # a tree over the checkpoint: weights.Params
Span = Any  # where the new tokens are, and what they see: see zoo.llama.cache


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
    rope_scaling: rotary.Scaling | None = None
    qkv_bias: bool = False  # Qwen 2
    qk_norm: bool = False  # Qwen 3, Gemma 3: each head of queries and keys is normed
    n_experts: int = 0  # Mixtral: feed-forward networks beside each other; 0: the usual one
    n_chosen: int = 0  # and how many of them a token goes through
    windows: tuple[int | None, ...] = ()  # by layer: how many tokens are seen; (): all everywhere
    local_theta: float | None = None  # Gemma 3: rope_theta of layers with a window, never scaled
    tanh_gelu: bool = False  # Gemma: GeGLU instead of SwiGLU
    embedding_scale: float = 1.0  # Gemma: sqrt(dim)
    post_norms: bool = False  # Gemma 2, 3: what a block's two parts give is normed too
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_cap: float | None = None  # Gemma 2: soft limits of scores and logits
    logit_cap: float | None = None


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
    }
    if c.qkv_bias:
        rows = {"wq": q, "wk": kv, "wv": kv}
        block |= {f"attention.{name}.bias": (count,) for name, count in rows.items()}
    if c.qk_norm:
        block |= {f"attention.{name}_norm.weight": (c.head_dim,) for name in ("q", "k")}
    if c.post_norms:
        block |= {f"{name}_post_norm.weight": (c.dim,) for name in ("attention", "ffn")}
    if c.n_experts:
        block["feed_forward.gate.weight"] = (c.n_experts, c.dim)
    experts, path = ((c.n_experts,), "experts.") if c.n_experts else ((), "")
    block |= {
        f"feed_forward.{path}w1.weight": (*experts, c.hidden_dim, c.dim),
        f"feed_forward.{path}w2.weight": (*experts, c.dim, c.hidden_dim),
        f"feed_forward.{path}w3.weight": (*experts, c.hidden_dim, c.dim),
    }
    shapes = {"tok_embeddings.weight": (c.vocab_size, c.dim), "norm.weight": (c.dim,)}
    for n in range(c.n_layers):
        shapes |= {f"layers.{n}.{key}": shape for key, shape in block.items()}
    return shapes


def attend(p: Params, x: Tensor, config: Config, span: Span, layer: int) -> Tensor:
    """Self-attention of the T new tokens to all those that they see."""
    t, d = x.shape[0], config.head_dim
    q = linear(p.wq, x).reshape(t, config.n_heads, d).permute(1, 0, 2)  # (H, T, D)
    k = linear(p.wk, x).reshape(t, config.n_kv_heads, d).permute(1, 0, 2)  # (K, T, D)
    v = linear(p.wv, x).reshape(t, config.n_kv_heads, d).permute(1, 0, 2)  # (K, T, D)
    if config.qk_norm:
        q, k = rms_norm(p.q_norm, q, config.norm_eps), rms_norm(p.k_norm, k, config.norm_eps)
    cos, sin = span.angles(layer, t)  # (T, D/2)
    span.write(layer, rope(k, cos, sin), v)
    window = config.windows[layer] if config.windows else None
    scale, cap = config.attention_scale, config.attention_cap
    out = span.attend(layer, rope(q, cos, sin), window, scale, cap)
    return linear(p.wo, out.permute(1, 0, 2).reshape(t, config.n_heads * d))


def gated(gate: Tensor, up: Tensor, config: Config) -> Tensor:
    """What SwiGLU, or Gemma's GeGLU, makes of its two linear parts."""
    return (gelu(gate, approximate=True) if config.tanh_gelu else silu(gate)) * up


def feed_forward(p: Params, x: Tensor, config: Config) -> Tensor:
    """(T, dim): every token through the one network, or through those that it chooses."""
    if config.n_experts:
        return mixture(p, x, config)
    return linear(p.w2, gated(linear(p.w1, x), linear(p.w3, x), config))


def mixture(p: Params, x: Tensor, config: Config) -> Tensor:
    """Sum of the networks that have the highest gates, by the softmax of these (Mixtral)."""
    gates = linear(p.gate, x)  # (T, E)
    left, chosen = gates, []
    for _ in range(config.n_chosen):
        chosen.append(left.argmax(-1, keepdim=True))  # (T, 1)
        left = Tensor.where(Tensor.arange(config.n_experts) == chosen[-1], -float("inf"), left)
    share = softmax(Tensor.where(left == -float("inf"), gates, -float("inf")))  # 0 of all others
    w1, w2, w3 = p.experts.w1.weight, p.experts.w2.weight, p.experts.w3.weight
    if x.shape[0] == 1:  # no other network's weights are read
        only = Tensor.cat(*chosen, axis=1).reshape(config.n_chosen)
        w1, w2, w3, share = w1[only], w2[only], w3[only], share[0][only].unsqueeze(0)
    out = gated(x @ w1.transpose(), x @ w3.transpose(), config) @ w2.transpose()  # (E, T, dim)
    return (out * share.transpose().unsqueeze(-1)).sum(0)


def extend(p: Params, config: Config, ids: Tensor, span: Span) -> Tensor:
    """(T, dim): T new tokens after all blocks; writes their keys and values."""
    eps = config.norm_eps
    x = embedding(p.tok_embeddings, ids)  # (T, dim)
    if config.embedding_scale != 1:
        x = x * config.embedding_scale
    for n, block in enumerate(p.layers):
        h = rms_norm(block.attention_norm, x, eps)
        h = attend(block.attention, h, config, span, n)
        x = x + (rms_norm(block.attention_post_norm, h, eps) if config.post_norms else h)
        h = feed_forward(block.feed_forward, rms_norm(block.ffn_norm, x, eps), config)
        x = x + (rms_norm(block.ffn_post_norm, h, eps) if config.post_norms else h)
    return x


def forward(p: Params, config: Config, ids: Tensor, span: Span) -> Tensor:
    """Logits (T, vocab) of T new tokens; writes their keys and values."""
    x = rms_norm(p.norm, extend(p, config, ids, span), config.norm_eps)
    logits = linear(p.output if "output" in p else p.tok_embeddings, x).cast(dtype.float32)
    return logits if config.logit_cap is None else soft_cap(logits, config.logit_cap)
