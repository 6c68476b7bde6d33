"""One number per window, or per picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine import Tensor
from zoo.onnx import values as v
from zoo.onnx.layout import as_it_lies, channels_first, channels_last, lies_last
from zoo.onnx.operators.convolution import Sides, sides
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value


def _windows(
    x: Tensor,
    how: dict,
    value: float,
    axes_shape: Sequence[int],
) -> tuple[Tensor, Sides, Sides]:
    """(windows (B, C, *out, *kernel), the padding asked for, and that with ceil_mode's)."""
    kernel = tuple(axes_shape)
    rank = len(kernel)
    strides = how["strides"] or (1,) * rank
    dilations = how["dilations"] or (1,) * rank
    space = x.shape[2:]
    around = sides(how["auto_pad"], how["pads"], space, kernel, strides, dilations)
    wide = list(around)
    if how["ceil_mode"]:
        for i, (n, k, s, d) in enumerate(zip(space, kernel, strides, dilations)):
            before, after = around[i]
            count = -(-(n + before + after - d * (k - 1) - 1) // s) + 1
            count -= (count - 1) * s >= n + before  # a window begins within the data
            wide[i] = before, max(after, (count - 1) * s + d * (k - 1) + 1 - n - before)
    padded = x.pad([(0, 0), (0, 0), *wide], value)
    return padded.windows(range(2, x.ndim), kernel, strides, dilations), around, wide


def _inner(x: Tensor) -> tuple[int, ...]:
    """The axes of the windows, the last half of those after batch and channel."""
    return tuple(range(2 + (x.ndim - 2) // 2, x.ndim))


def _of_each(kind: str, windows: Tensor, last: bool) -> Tensor:
    """The sum or max of each window (B, C, *out), with channels last in memory if asked for."""
    axes = _inner(windows)
    if not last:
        return getattr(windows, kind)(axes)
    turned = windows.permute(0, *range(2, axes[0]), 1, *axes)
    return channels_first(getattr(turned, kind)(axes))


@operator("MaxPool", heavy=True)
def max_pool(x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0,
             dilations: tuple | None = None, kernel_shape: tuple, pads: tuple | None = None,
             storage_order: int = 0, strides: tuple | None = None, call):  # fmt: skip
    """The largest value of each window and, if wanted, its place in the flat tensor."""
    how = {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "dilations": dilations, "pads": pads,
           "strides": strides}  # fmt: skip
    windows, _, _ = _windows(x, how, x.dtype.min, kernel_shape)
    axes = _inner(windows)
    best = _of_each("max", windows, lies_last(x))
    if len(call.outputs) < 2:
        return best
    order = range(x.ndim) if not storage_order else (0, 1, *reversed(range(2, x.ndim)))
    sizes = [x.shape[a] for a in order]
    flat = np.arange(int(np.prod(sizes)), dtype=np.int32).reshape(sizes)
    numbers = Tensor(np.transpose(flat, np.argsort(list(order))).copy(), device=x.device)
    places, _, _ = _windows(numbers + 1, how, 0, kernel_shape)
    first = Tensor.where(windows == windows.max(axes, True), -places, -(1 << 30)).max(axes)
    return best, v.cast(-first - 1, "int64")


@operator("AveragePool", heavy=True)
def average_pool(x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0,
                 count_include_pad: int = 0, dilations: tuple | None = None, kernel_shape: tuple,
                 pads: tuple | None = None, strides: tuple | None = None):  # fmt: skip
    """The mean of each window; zeros of the padding count if asked for, ceil_mode's never."""
    how = {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "dilations": dilations, "pads": pads,
           "strides": strides}  # fmt: skip
    windows, around, wide = _windows(x.float(), how, 0, kernel_shape)
    total = _of_each("sum", windows, lies_last(x))
    if wide == around and (count_include_pad or not any(map(any, around))):
        return as_it_lies(lambda t: (t * (1 / int(np.prod(kernel_shape)))).cast(x.dtype), [total])
    ones = np.ones(x.shape[2:], np.float32)
    rest = [(w[0] - a[0], w[1] - a[1]) for w, a in zip(wide, around)]
    ones = np.pad(np.pad(ones, around, constant_values=count_include_pad), rest)
    how = {**how, "auto_pad": "VALID", "ceil_mode": 0}
    counts, _, _ = _windows(Tensor(ones[None, None], device=x.device), how, 0, kernel_shape)
    return as_it_lies(lambda t, n: (t / n).cast(x.dtype), [total, counts.sum(_inner(counts))])


@operator("LpPool", heavy=True)
def lp_pool(x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0,
            dilations: tuple | None = None, kernel_shape: tuple, p: int = 2,
            pads: tuple | None = None, strides: tuple | None = None):  # fmt: skip
    """The p-norm of each window."""
    how = {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "dilations": dilations, "pads": pads,
           "strides": strides}  # fmt: skip
    windows, _, _ = _windows(x.float().abs() ** p, how, 0, kernel_shape)
    total = windows.sum(_inner(windows))
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
