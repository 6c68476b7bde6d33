"""Resizing along any axes: nearest, linear and cubic, as one gather or product per axis."""

from __future__ import annotations

import numpy as np

from engine import Tensor
from zoo.onnx import values as v
from zoo.onnx.layout import channels_first, channels_last, lies_last
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value


@operator("Resize", since=11)
def resize(x: Value, roi: Known = None, scales: Known = None, sizes: Known = None, *,
           antialias: int = 0, axes: tuple | None = None,
           coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75,
           exclude_outside: int = 0, extrapolation_value: float = 0.0,
           keep_aspect_ratio_policy: str = "stretch", mode: str = "nearest",
           nearest_mode: str = "round_prefer_floor"):  # fmt: skip
    """To sizes, or by scales, along the axes named (all by default)."""
    named = list(range(x.ndim)) if axes is None else [v.axis_in(a, x.ndim) for a in axes]
    before = [x.shape[a] for a in named]
    if sizes is not None and sizes.size:
        after = list(v.ints(sizes))
        factors = [m / n for m, n in zip(after, before)]
        if keep_aspect_ratio_policy != "stretch":
            one = (min if keep_aspect_ratio_policy == "not_larger" else max)(factors)
            factors = [one] * len(factors)
            after = [int(np.floor(n * one + 0.5)) for n in before]
    else:
        factors = [float(f) for f in np.asarray(scales).reshape(-1)]
        after = [int(np.floor(n * f)) for n, f in zip(before, factors)]
    count = len(named)
    box = [(0.0, 1.0)] * count
    if roi is not None and roi.size == 2 * count:
        box = list(zip(roi[:count].tolist(), roi[count:].tolist()))
    outside, last = None, lies_last(x)
    if last:  # channels stay so
        x, lies = channels_last(x), (0, x.ndim - 1, *range(1, x.ndim - 1))
        named = [lies[axis] for axis in named]
    for i, axis in enumerate(named):
        n, m = before[i], after[i]
        if n == m and factors[i] == 1 and coordinate_transformation_mode != "tf_crop_and_resize":
            continue
        places = _places(n, m, factors[i], coordinate_transformation_mode, box[i])
        if mode == "nearest":
            x = _picked(x, np.clip(_nearest(places, nearest_mode), 0, n - 1), axis)
        else:
            weights = _weights(places, n, mode, cubic_coeff_a, bool(exclude_outside),
                               min(factors[i], 1.0) if antialias else 1.0)  # fmt: skip
            x = _mixed(x, weights, axis)
        if coordinate_transformation_mode == "tf_crop_and_resize":
            shape = [1] * x.ndim
            shape[axis] = m
            beyond = ((places < 0) | (places > n - 1)).reshape(shape)
            outside = beyond if outside is None else outside | beyond
    if outside is not None and outside.any():
        x = v.where(outside, v.full((1,) * x.ndim, extrapolation_value, x), x)
    return channels_first(x) if last else x


@operator("Resize", since=10)
@operator("Upsample")
def upsample(x: Value, scales: Known, *, mode: str = "nearest"):
    """By scales, from the corner."""
    kinds = {"bilinear": "linear"}
    return resize(x, None, scales, mode=kinds.get(mode, mode), nearest_mode="floor",
                  coordinate_transformation_mode="asymmetric")  # fmt: skip


def _picked(x: Value, places: np.ndarray, axis: int) -> Value:
    """Elements of an axis; whole numbers of repetitions of each are a view."""
    n, times = x.shape[axis], len(places) // x.shape[axis]
    if not np.array_equal(places, np.arange(n * times) // max(times, 1)):
        return v.take(x, places, axis)
    wide = v.reshape(x, [*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]])
    wide = v.expand(wide, [*x.shape[: axis + 1], times, *x.shape[axis + 1 :]])
    return v.reshape(wide, [*x.shape[:axis], n * times, *x.shape[axis + 1 :]])


def _places(n: int, m: int, factor: float, how: str, box: tuple[float, float]) -> np.ndarray:
    """Where each of m new elements lies among the n old ones."""
    i = np.arange(m, dtype=np.float64)
    match how:
        case "half_pixel":
            return (i + 0.5) / factor - 0.5
        case "half_pixel_symmetric":
            wide = n * factor
            return n / 2 * (1 - m / wide) + (i + 0.5) / factor - 0.5
        case "pytorch_half_pixel":
            return (i + 0.5) / factor - 0.5 if m > 1 else np.zeros(m)
        case "align_corners":
            return i * ((n - 1) / (n * factor - 1)) if n * factor > 1 else np.zeros(m)
        case "tf_half_pixel_for_nn":
            return (i + 0.5) / factor
        case "asymmetric":
            return i / factor
        case "tf_crop_and_resize":
            start, end = box
            if m > 1:
                return start * (n - 1) + i * ((end - start) * (n - 1) / (m - 1))
            return np.full(m, 0.5 * (start + end) * (n - 1))
    raise ValueError(f"coordinate_transformation_mode {how} is unknown")


def _nearest(places: np.ndarray, how: str) -> np.ndarray:
    match how:
        case "floor":
            return np.floor(places).astype(int)
        case "ceil":
            return np.ceil(places).astype(int)
        case "round_prefer_ceil":
            return np.floor(places + 0.5).astype(int)
    return np.ceil(places - 0.5).astype(int)


def _weights(
    places: np.ndarray, n: int, mode: str, a: float, exclude: bool, shrink: float
) -> np.ndarray:
    """(new, old): the share of each old element in each new one."""
    reach = 1 if mode == "linear" else 2
    kernel = _tent if mode == "linear" else (lambda t: _cubic(t, a))
    first = np.floor(places).astype(int) - int(np.ceil(reach / shrink))
    out = np.zeros((len(places), n))
    for k in range(2 * int(np.ceil(reach / shrink)) + 2):
        at = first + k
        share = kernel(np.abs(places - at) * shrink)
        if exclude:
            share = np.where((at < 0) | (at >= n), 0, share)
        np.add.at(out, (np.arange(len(places)), np.clip(at, 0, n - 1)), share)
    return out / out.sum(1, keepdims=True)


def _tent(t: np.ndarray) -> np.ndarray:
    return np.maximum(0, 1 - t)


def _cubic(t: np.ndarray, a: float) -> np.ndarray:
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0))


def _mixed(x: Value, weights: np.ndarray, axis: int) -> Value:
    """The product of the weights with one axis."""
    last = [a for a in range(x.ndim) if a != axis] + [axis]
    turned = v.permute(x, last)
    matrix = weights.T.astype(np.float32)
    if isinstance(x, Tensor):
        out = (turned.float() @ Tensor.from_numpy(np.ascontiguousarray(matrix), x.device)).cast(
            x.dtype
        )
    else:
        out = (turned.astype(np.float64) @ weights.T).astype(x.dtype)
    return v.permute(out, [last.index(a) for a in range(x.ndim)])
