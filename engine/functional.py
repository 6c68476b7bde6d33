"""Neural-network functions without state. `p` is any tree with tensors as attributes.

Sums are in float32, whatever the type of the inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import dtype as dt
from engine.graph import ShapeError
from engine.symbolic import Int
from engine.tensor import Tensor


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


def group_norm(p: Any, x: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
    """layer_norm over each group of channels, all places together (Wu & He 2018).

    x (B, C, …); p.weight and p.bias, where they are there, (C,). Returns float32. Raises ShapeError
    if the groups don't divide the channels.
    """
    batch, channels, *space = x.shape
    if channels % groups:
        raise ShapeError(f"group_norm: {groups} groups don't divide the channels of {[*x.shape]}")
    parts = x.float().reshape(batch, groups, channels // groups, -1)
    centred = parts - parts.mean((2, 3), keepdim=True)
    scaled = centred * (centred.square().mean((2, 3), keepdim=True) + eps).rsqrt()
    out = scaled.reshape(*x.shape)
    each = (channels, *(1,) * len(space))
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
    """x * Φ(x), by erf to 1.5e-7 (Abramowitz & Stegun 7.1.26), or by the usual tanh formula."""
    if approximate:
        return x * 0.5 * ((x * (x.square() * 0.044715 + 1) * float(np.sqrt(2 / np.pi))).tanh() + 1)
    return x * 0.5 * (erf(x * float(np.sqrt(0.5))) + 1)


def erf(x: Tensor) -> Tensor:
    """The error function, absolute error below 3e-7 (Abramowitz & Stegun 7.1.26)."""
    t = (x.abs() * 0.3275911 + 1).reciprocal()
    poly = 0.0
    for c in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly = (poly + c) * t if isinstance(poly, Tensor) else t * c
    tail = 1 - poly * (-x.square()).exp()
    return Tensor.where(x < 0, -tail, tail)


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

    scale, if given, maps the (head_dim / 2,) frequencies to the ones used. Computed in float64,
    since float32 is off by 5e-4 at position 8000.
    """
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scale is not None:
        frequency = scale(frequency)
    angle = np.arange(length, dtype=np.float64)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)


def causal_mask(queries: Int, keys: Int, start: Int) -> Tensor:
    """(queries, keys) bool: query i, at position start + i, sees keys 0 … start + i."""
    q = Tensor.arange(queries).reshape(queries, 1) + Tensor(start)
    return Tensor.arange(keys).reshape(1, keys) <= q


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v with grouped heads.

    q (H, T, D), k and v (K, S, D), H a multiple of K: each key head serves H / K query heads.
    mask, bool, broadcasts to (H / K, T, S): where it is False, nothing is seen. Returns (H, T, D).
    """
    heads, t, d = q.shape
    groups = k.shape[0]
    q = q.reshape(groups, heads // groups, t, d)
    scores = (q @ k.unsqueeze(1).transpose()) * (1.0 / float(np.sqrt(d)))  # (K, H/K, T, S)
    if mask is not None:
        scores = Tensor.where(mask, scores, -float("inf"))
    return (softmax(scores) @ v.unsqueeze(1)).reshape(heads, t, d)


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
