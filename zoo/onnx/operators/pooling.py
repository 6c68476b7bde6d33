"""One number per window, or per picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from engine import Tensor, convolution
from zoo.onnx import values as v
from zoo.onnx.layout import channels_first, channels_last, lies_last
from zoo.onnx.operators.convolution import Sides, sides
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value


class Sliding(NamedTuple):
    """How windows lie, as `engine.convolution` wants it."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    around: Sides
    dilations: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, kernel: tuple, strides: tuple | None, dilations: tuple | None,
           auto_pad: str, pads: tuple | None) -> Sliding:  # fmt: skip
        """What a node's attributes say of the windows of x (B, C, *space)."""
        strides, dilations = strides or (1,) * len(kernel), dilations or (1,) * len(kernel)
        around = sides(auto_pad, pads, x.shape[2:], kernel, strides, dilations)
        return cls(tuple(kernel), strides, around, dilations)


def _pooled(function: Callable, x: Tensor, how: Sliding, *options: Any) -> Tensor:
    """function(x, axes of space, …): channels stay last in memory."""
    if not lies_last(x):
        return function(x, _space(x), *how, *options)
    axes = range(1, x.ndim - 1)
    return channels_first(function(channels_last(x), axes, *how, *options))


@operator("MaxPool", heavy=True)
def max_pool(x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0,
             dilations: tuple | None = None, kernel_shape: tuple, pads: tuple | None = None,
             storage_order: int = 0, strides: tuple | None = None, call):  # fmt: skip
    """The largest value of each window and, if wanted, its place in the flat tensor."""
    how = Sliding.of(x, kernel_shape, strides, dilations, auto_pad, pads)
    best = _pooled(convolution.max_pool, x, how, bool(ceil_mode))
    if len(call.outputs) < 2:
        return best
    if ceil_mode:
        how = how._replace(around=convolution.widened(x, _space(x), *how))
    order = range(x.ndim) if not storage_order else (0, 1, *reversed(range(2, x.ndim)))
    sizes = [x.shape[a] for a in order]
    flat = np.arange(int(np.prod(sizes)), dtype=np.int32).reshape(sizes)
    numbers = Tensor(np.transpose(flat, np.argsort(list(order))).copy(), device=x.device)
    places = convolution.slide(numbers + 1, _space(x), *how)
    windows = convolution.slide(x, _space(x), *how, x.dtype.min)
    axes = range(x.ndim, windows.ndim)
    first = Tensor.where(windows == windows.max(axes, True), -places, -(1 << 30)).max(axes)
    return best, v.cast(-first - 1, "int64")


@operator("AveragePool", heavy=True)
def average_pool(x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0,
                 count_include_pad: int = 0, dilations: tuple | None = None, kernel_shape: tuple,
                 pads: tuple | None = None, strides: tuple | None = None):  # fmt: skip
    """The mean of each window; zeros of the padding count if asked for, ceil_mode's never."""
    how = Sliding.of(x, kernel_shape, strides, dilations, auto_pad, pads)
    return _pooled(convolution.avg_pool, x, how, bool(ceil_mode), bool(count_include_pad))


@operator("LpPool", heavy=True)
def lp_pool(x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0,
            dilations: tuple | None = None, kernel_shape: tuple, p: int = 2,
            pads: tuple | None = None, strides: tuple | None = None):  # fmt: skip
    """The p-norm of each window."""
    how = Sliding.of(x, kernel_shape, strides, dilations, auto_pad, pads)
    if ceil_mode:
        how = how._replace(around=convolution.widened(x, _space(x), *how))
    windows = convolution.slide(x.float().abs() ** p, _space(x), *how)
    total = windows.sum(range(x.ndim, windows.ndim))
    return (total.sqrt() if p == 2 else total ** (1 / p)).cast(x.dtype)


def _space(x: Value) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@operator("GlobalAveragePool")
def global_average_pool(x: Value):
    """The mean over all places."""
    if not lies_last(x):
        return v.reduce("mean", x, _space(x))
    total = channels_last(x).float()
    for axis in _space(x)[::-1]:  # of lines first, so that there is work for every core
        total = v.reduce("sum", total, (axis - 1,))
    return channels_first((total * (1 / int(np.prod(x.shape[2:])))).cast(x.dtype))


@operator("GlobalMaxPool")
def global_max_pool(x: Value):
    """The largest over all places."""
    return v.reduce("max", x, _space(x))


@operator("GlobalLpPool")
def global_lp_pool(x: Value, *, p: int = 2):
    """The p-norm over all places."""
    total = v.reduce("sum", v.absolute(x) ** p, _space(x))
    return v.sqrt(total) if p == 2 else total ** (1 / p)


@operator("MaxUnpool")
def max_unpool(x: Known, places: Known, shape: Known = None, *, kernel_shape: tuple,
               pads: tuple | None = None, strides: tuple | None = None):  # fmt: skip
    """The values of MaxPool put back where they were, zeros elsewhere."""
    rank = len(kernel_shape)
    strides, pads = strides or (1,) * rank, pads or (0,) * 2 * rank
    sizes = [(n - 1) * s + k - pads[i] - pads[i + rank]
             for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel_shape))]  # fmt: skip
    natural = (*x.shape[:2], *sizes)
    out = np.zeros(natural if shape is None else v.ints(shape), x.dtype)
    if shape is None or out.shape == natural:
        out.reshape(-1)[places.reshape(-1)] = x.reshape(-1)
        return out
    where = np.unravel_index(places.reshape(-1), natural)
    out[where] = x.reshape(-1)
    return out
