"""Convolution, pooling and resizing of pictures (B, C, H, W) and of sound (B, C, T).

Each is one sum, or one maximum, over windows that are a view of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine import dtype as dt
from engine.graph import ShapeError
from engine.symbolic import Int, bounds, product
from engine.tensor import Tensor

Pair = int | tuple[int, int]
Padding = int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]
Sides = list[tuple[int, int]]  # (before, after) on each axis


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """x (B, C, H, W) and weight (O, C / groups, kh, kw) -> (B, O, OH, OW), not flipped.

    padding: zeros all around, or (above and below, left and right), or ((above, below), (left,
    right)). Halves multiply and sum in float32. Raises ShapeError for shapes that don't fit.
    """
    return conv(x, weight, bias, _pair(stride), _sides(padding), _pair(dilation), groups)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Tensor:
    """x (B, C, T) and weight (O, C / groups, k) -> (B, O, OT); padding may be (before, after)."""
    return conv(x, weight, bias, (stride,), [_pair(padding)], (dilation,), groups)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    sides: Sides,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The same over any number of axes: x (B, C, *space), weight (O, C / groups, *kernel).

    sides: zeros (before, after) on each axis. One sum over (C / groups, *kernel) of a product
    (B, groups, O / groups, *out, …).
    """
    rank = len(sides)
    shown = _check(f"conv{rank}d", x, weight, bias, rank, groups)
    for n, k, (before, after), d in zip(x.shape[2:], weight.shape[2:], sides, dilation):
        if bounds(before + n + after - d * (k - 1))[0] < 1:
            raise ShapeError(f"{shown}: the kernel is larger than the padded x")
    dtype = dt.promote(x.dtype, weight.dtype)
    if dtype in (dt.float16, dt.bfloat16):
        x, weight = x.float(), weight.float()
    batch, o = x.shape[0], weight.shape[0]
    axes = range(2, x.ndim)
    windows = slide(x, axes, weight.shape[2:], stride, sides, dilation)  # (B, C, *out, *kernel)
    out, kernel = windows.shape[2 : 2 + rank], weight.shape[2:]
    inner = (weight.shape[1], *kernel)
    split = windows.reshape(batch, groups, 1, weight.shape[1], *out, *kernel)
    places = range(4, 4 + rank)
    split = split.permute(0, 1, 2, *places, 3, *range(4 + rank, 4 + 2 * rank))
    terms = split * weight.reshape(1, groups, o // groups, *(1,) * rank, *inner)
    total = terms.sum(range(terms.ndim - 1 - rank, terms.ndim)).reshape(batch, o, *out)
    if bias is not None:
        total = total + bias.reshape(o, *(1,) * rank).cast(total.dtype)
    return total.cast(dtype)


def _check(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, groups: int
) -> str:
    """The shapes, for more errors. Raises ShapeError if they don't fit together."""
    shown = f"{name}: x {list(x.shape)} and weight {list(weight.shape)}"
    if x.ndim != rank + 2 or weight.ndim != rank + 2:
        raise ShapeError(f"{shown}: both need {rank + 2} axes")
    if weight.shape[0] % groups or x.shape[1] != weight.shape[1] * groups:
        raise ShapeError(
            f"{shown} with {groups} groups: x's channels must be the weight's second axis times "
            "the groups, and its first axis a multiple of them"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"{shown}: bias {list(bias.shape)} must be {list(weight.shape[:1])}")
    return shown


def max_pool2d(
    x: Tensor,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Padding = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The largest value of each window: (B, C, H, W) -> (B, C, OH, OW); padding never wins.

    stride defaults to the kernel. ceil_mode adds the windows that reach beyond the end, if they
    begin inside.
    """
    size, step, apart = _pair(kernel), _pair(kernel if stride is None else stride), _pair(dilation)
    return max_pool(x, (2, 3), size, step, _sides(padding), apart, ceil_mode)


def avg_pool2d(
    x: Tensor,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window: (B, C, H, W) -> (B, C, OH, OW).

    Zeros from the padding count as elements, unless count_include_pad is False; what ceil_mode adds
    beyond them never does.
    """
    size, step = _pair(kernel), _pair(kernel if stride is None else stride)
    how = (_sides(padding), (1, 1), ceil_mode, count_include_pad)
    return avg_pool(x, (2, 3), size, step, *how)


def max_pool(
    x: Tensor,
    axes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    sides: Sides,
    dilation: Sequence[int],
    ceil_mode: bool = False,
) -> Tensor:
    """The same along any axes, which become those of the windows' places."""
    wide = widened(x, axes, kernel, stride, sides, dilation) if ceil_mode else sides
    windows = slide(x, axes, kernel, stride, wide, dilation, x.dtype.min)
    return windows.max(range(x.ndim, windows.ndim))


def avg_pool(
    x: Tensor,
    axes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    sides: Sides,
    dilation: Sequence[int],
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The same along any axes."""
    wide = widened(x, axes, kernel, stride, sides, dilation) if ceil_mode else sides
    summed = range(x.ndim, x.ndim + len(axes))
    total = slide(x.float(), axes, kernel, stride, wide, dilation).sum(summed)
    counted = sides if count_include_pad else [(0, 0)] * len(axes)
    ones = [1] * x.ndim
    for axis, (before, after) in zip(axes, counted):
        ones[axis] = x.shape[axis] + before + after
    around = [(w[0] - c[0], w[1] - c[1]) for w, c in zip(wide, counted)]
    if any(map(any, around)):
        count = slide(Tensor.ones(*ones, device=x.device), axes, kernel, stride, around, dilation)
        total = total / count.sum(summed)
    else:
        total = total * (1 / product(kernel))
    return total.cast(x.dtype) if x.dtype.is_float else total


def slide(
    x: Tensor,
    axes: Sequence[int],
    kernel: Sequence[Int],
    stride: Sequence[int],
    sides: Sides,
    dilation: Sequence[int],
    value: float = 0,
) -> Tensor:
    """x, padded along some axes -> its windows, whose axes come last."""
    amounts = [(0, 0)] * x.ndim
    for axis, pair in zip(axes, sides):
        amounts[axis] = pair
    return x.pad(amounts, value).windows(axes, kernel, stride, dilation)


def upsample_nearest(x: Tensor, factor: Pair) -> Tensor:
    """Each element of (B, C, H, W) repeated, factor times along H and W."""
    b, c, h, w = x.shape
    fh, fw = _pair(factor)
    spread = x.reshape(b, c, h, 1, w, 1).expand(b, c, h, fh, w, fw)
    return spread.reshape(b, c, h * fh, w * fw)


def widened(
    x: Tensor,
    axes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    sides: Sides,
    dilation: Sequence[int],
) -> Sides:
    """The padding with room behind each axis for the last window that begins inside."""
    out = []
    for axis, k, s, (before, after), d in zip(axes, kernel, stride, sides, dilation):
        n = x.shape[axis]
        last = n + before + after - d * (k - 1) - 1  # where a window that still fits may begin
        left = last % s
        out.append((before, after + s - left if left and last - left + s < n + before else after))
    return out


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _sides(padding: Padding) -> Sides:
    return [_pair(p) for p in _pair(padding)]
