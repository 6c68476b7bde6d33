"""Neural-network functions without state. `p` is any tree with tensors as attributes.

Sums are in float32, whatever the type of the inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import dtype as dt
from engine.graph import ShapeError
from engine.symbolic import Int
from engine.tensor import Tensor, polynomial

# erf(x) / x in x²; the square of where it is as good as 1
ERF_P = (2.1082624e-6, 2.8567604e-4, 3.6740028e-3, 0.05247993, 0.18789944, 1.1283791)
ERF_Q = (3.87318e-5, 1.1455177e-3, 0.014785038, 0.113129675, 0.49985442, 1.0)
ERF_END = 14.82
# Φ(-z) exp(z² / 2) in 1 / (1 + 0.285 z), but for one factor of that
TAIL = (-0.095796265, 0.32867226, -0.14860071, 0.20984678, 0.090194136, 0.115683794)


def linear(p: Any, x: Tensor) -> Tensor:
    """x (…, in) -> (…, out): x @ p.weight.T, plus p.bias if there is one."""
    out = x @ p.weight.transpose()
    return out + p.bias if "bias" in p else out


def embedding(p: Any, ids: Tensor) -> Tensor:
    """Rows of p.weight (vocab, dim) at integer ids, any shape: (…,) -> (…, dim), float32."""
    return p.weight[ids].float()


def rms_norm(p: Any, x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * p.weight over the last axis (Zhang & Sennrich 2019)."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * p.weight


def layer_norm(p: Any, x: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * p.weight + p.bias over the last axis."""
    x = x.float()
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = scaled * p.weight if "weight" in p else scaled
    return out + p.bias if "bias" in p else out


def group_norm(p: Any, x: Tensor, groups: int, eps: float = 1e-5, axis: int = 1) -> Tensor:
    """layer_norm over each group of channels, all places together (Wu & He 2018).

    x (B, …) with its channels on `axis`; p.weight and p.bias, where they are there, (C,). Returns
    float32. Raises ShapeError if the groups don't divide the channels.
    """
    axis = axis % x.ndim
    channels = x.shape[axis]
    if channels % groups:
        raise ShapeError(f"group_norm: {groups} groups don't divide the channels of {[*x.shape]}")
    parts = x.float().reshape(*x.shape[:axis], groups, channels // groups, *x.shape[axis + 1 :])
    inner = tuple(a for a in range(1, parts.ndim) if a != axis)
    centred = parts - parts.mean(inner, keepdim=True)
    scaled = centred * (centred.square().mean(inner, keepdim=True) + eps).rsqrt()
    out = scaled.reshape(*x.shape)
    each = (channels, *(1,) * (x.ndim - axis - 1))
    out = out * p.weight.reshape(*each) if "weight" in p else out
    return out + p.bias.reshape(*each) if "bias" in p else out


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis, shifted by the maximum so that it can't overflow."""
    e = (x.float() - x.float().max(axis, keepdim=True)).exp()
    return e / e.sum(axis, keepdim=True)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.relu()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * x.sigmoid()


def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """x * Φ(x), exactly or by the usual formula with tanh (Hendrycks & Gimpel 2016)."""
    if approximate:  # (1 + tanh(y)) / 2 is the sigmoid of 2y
        return x * (x * (x.square() * 0.044715 + 1) * float(np.sqrt(8 / np.pi))).sigmoid()
    return x * normal_cdf(x)


def normal_cdf(x: Tensor) -> Tensor:
    """Φ(x), the share of a normal distribution below x: absolute error below 3e-7.

    The tail beyond |x| is exp(-x² / 2) times a polynomial in 1 / (1 + p |x|): the form of
    Abramowitz & Stegun 26.2.17, fitted with one term more.
    """
    y = x.float()
    negative = y < 0
    t = (Tensor.where(negative, -y, y) * 0.285 + 1).reciprocal()
    tail = polynomial(t, TAIL) * t * (y.square() * float(-0.5 / np.log(2))).exp2()
    below = Tensor.where(negative, tail, 1 - tail)
    return below.cast(x.dtype) if x.dtype.is_float else below


def erf(x: Tensor) -> Tensor:
    """The error function: x P(x²) / Q(x²), a minimax fit. Relative error below 4e-7."""
    y = x.float()
    square = y.square()
    square = Tensor.where(square < ERF_END, square, ERF_END)  # from there on it is 1
    out = (y * polynomial(square, ERF_P) * polynomial(square, ERF_Q).reciprocal()).clip(-1, 1)
    return out.cast(x.dtype) if x.dtype.is_float else out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last axis (Su et al. 2021).

    x (…, T, head_dim); cos and sin (T, head_dim / 2), broadcast over the rest. Meta's order: pair i
    is elements 2i and 2i+1.
    """
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    sign = Tensor.arange(2, device=x.device) * 2 - 1  # (a, b) -> (a cos - b sin, b cos + a sin)
    turned = pairs * cos.unsqueeze(-1) + pairs.flip(-1) * (sin.unsqueeze(-1) * sign)
    return turned.reshape(*x.shape)


def rope_table(length: int, head_dim: int, theta: float, scale: Any = None) -> np.ndarray:
    """(2, length, head_dim / 2) float32: the cosines and sines of position * frequency.

    scale, if given, maps the (head_dim / 2,) frequencies to the ones used, which may differ from
    position to position. Computed in float64, since float32 is off by 5e-4 at position 8000.
    """
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scale is not None:
        frequency = scale(frequency)
    angle = np.arange(length, dtype=np.float64)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)


def causal_mask(queries: Int, keys: Int, start: Int, window: int | None = None) -> Tensor:
    """(queries, keys) bool: query i, at position start + i, sees keys 0 … start + i.

    With a window, only the last `window` of them.
    """
    q = Tensor.arange(queries).reshape(queries, 1) + Tensor(start)
    k = Tensor.arange(keys).reshape(1, keys)
    return k <= q if window is None else (k <= q) & (k > q - window)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v with grouped heads.

    q (H, T, D), k and v (K, S, D), H a multiple of K: each key head serves H / K query heads.
    mask, bool, broadcasts to (H / K, T, S): where it is False, nothing is seen. scale replaces
    1 / sqrt(D); softcap bends the scores to within ±softcap (Gemma 2). Returns (H, T, D).
    """
    heads, t, d = q.shape
    groups = k.shape[0]
    q = q.reshape(groups, heads // groups, t, d)
    scale = 1.0 / float(np.sqrt(d)) if scale is None else scale
    scores = (q @ k.unsqueeze(1).transpose()) * scale  # (K, H/K, T, S)
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    if mask is not None:
        scores = Tensor.where(mask, scores, -float("inf"))
    return (softmax(scores) @ v.unsqueeze(1)).reshape(heads, t, d)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, C) -> (B * H, T, D)."""
    b, t, c = x.shape
    return x.reshape(b, t, heads, c // heads).permute(0, 2, 1, 3).reshape(b * heads, t, c // heads)


def join_heads(x: Tensor, heads: int) -> Tensor:
    """(B * H, T, D) -> (B, T, C)."""
    rows, t, d = x.shape
    x = x.reshape(rows // heads, heads, t, d).permute(0, 2, 1, 3)
    return x.reshape(rows // heads, t, heads * d)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """x, bent so that it stays within ±cap: cap tanh(x / cap)."""
    return (x * (1 / cap)).tanh() * cap


def argmax(x: Tensor, axis: int = -1) -> Tensor:
    """The first place of the largest value along an axis, int32."""
    return x.argmax(axis)


def multinomial(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """One draw per row by inverting the cumulative sum: (…, N) and (…,) in 0 … 1 -> (…,) int32.

    The cumulative sum is a masked matrix product, which is exact enough and needs no scan.
    """
    n = probabilities.shape[-1]
    upto = (Tensor.arange(n).reshape(n, 1) <= Tensor.arange(n).reshape(1, n)).cast(dt.float32)
    cumulative = probabilities @ upto  # (…, N)
    below = (cumulative <= uniform.unsqueeze(-1)).sum(-1)
    return below.minimum(n - 1)
