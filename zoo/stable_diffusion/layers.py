"""Layers that the UNet and the autoencoder share; pictures are (B, H, W, C), channels last."""

from __future__ import annotations

from typing import Any

from engine import Tensor
from engine import convolution as nn
from engine.functional import attention, group_norm, join_heads, split_heads

Params = Any  # a tree over the checkpoint: weights.Params
GROUPS = 32  # of channels, in every group norm


def conv(p: Params, x: Tensor, stride: int = 1, padding: Any = None) -> Tensor:
    """A convolution that keeps the size, or divides it by the stride."""
    padding = p.weight.shape[-1] // 2 if padding is None else padding
    x = nn.conv2d(x.permute(0, 3, 1, 2), p.weight, None, stride, padding).permute(0, 2, 3, 1)
    return x + p.bias if "bias" in p else x


def norm(p: Params, x: Tensor, eps: float) -> Tensor:
    """Group norm of pictures."""
    return group_norm(p, x, GROUPS, eps, axis=-1)


def upsample(p: Params, x: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """Each pixel four times, then a convolution: twice the size, or `size`, which is one less."""
    h, w = size or (2 * x.shape[1], 2 * x.shape[2])
    return conv(p.conv, doubled(x)[:, :h, :w])


def doubled(x: Tensor) -> Tensor:
    """Each pixel four times."""
    b, h, w, c = x.shape
    return x.reshape(b, h, 1, w, 1, c).expand(b, h, 2, w, 2, c).reshape(b, 2 * h, 2 * w, c)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention of q (B, T, C) to k and v (B, S, C), each in `heads` heads; (B, T, C)."""
    q, k, v = (split_heads(x, heads) for x in (q, k, v))
    return join_heads(attention(q, k, v), heads)


def pointwise(p: Params, x: Tensor) -> Tensor:
    """A linear layer on the last axis, which some checkpoints store as a 1x1 convolution."""
    out, ins = p.weight.shape[:2]
    return x @ p.weight.reshape(out, ins).transpose() + p.bias
