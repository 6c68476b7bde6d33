"""One way to compute with NumPy's arrays and the engine's tensors, so that operators are said once.

A value is an array where it is known while a model is prepared (a constant, a shape), and a
Tensor where it is computed on the device. Each function here does the same with either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine import Tensor, functional
from engine import dtype as dt
from weights.onnx_tensor import dtype_of

Known = np.ndarray  # in an operator's signature: an input whose numbers it must see
Value = np.ndarray | Tensor  # all of these are arrays, or all are tensors
Weight = np.ndarray | Tensor  # each as it comes: an array if it is a constant

_LARGE = 1 << 16  # elements of a tensor
SOFT = np.vectorize(math.erf, otypes=[np.float64])


def _either(name: str, array: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The Tensor method and the NumPy function of one name."""
    method, function = getattr(Tensor, name), array or getattr(np, name)
    return lambda x, *rest: (method if isinstance(x, Tensor) else function)(x, *rest)


exp, log, sqrt, sin, cos, tanh = map(_either, ("exp", "log", "sqrt", "sin", "cos", "tanh"))
floor, ceil, trunc, round_ = map(_either, ("floor", "ceil", "trunc", "round"))
absolute, log2, exp2 = map(_either, ("abs", "log2", "exp2"))
sigmoid = _either("sigmoid", lambda x: (1 / (1 + np.exp(-x))).astype(x.dtype))
reciprocal = _either("reciprocal", np.reciprocal)


def erf(x: Value) -> Value:
    """The error function."""
    return functional.erf(x) if isinstance(x, Tensor) else SOFT(x).astype(x.dtype)


def maximum(a: Value, b: Any) -> Value:
    """The larger, NaN if either is."""
    return a.maximum(b) if isinstance(a, Tensor) else np.maximum(a, np.asarray(b, a.dtype))


def minimum(a: Value, b: Any) -> Value:
    """The smaller, NaN if either is."""
    return a.minimum(b) if isinstance(a, Tensor) else np.minimum(a, np.asarray(b, a.dtype))


def where(condition: Value, a: Any, b: Any) -> Value:
    """a where the condition holds, else b."""
    if any(isinstance(x, Tensor) for x in (condition, a, b)):
        if not isinstance(condition, Tensor):
            condition = Tensor(condition, device=(a if isinstance(a, Tensor) else b).device)
        return Tensor.where(condition, a, b)
    return np.where(condition, a, b)


def type_of(x: Value) -> str:
    """The name of the element type, as NumPy, ml_dtypes and the engine have it; "str" for texts."""
    if isinstance(x, Tensor):
        return x.dtype.name
    return "str" if x.dtype.kind in "OUS" else x.dtype.name


def is_float(x: Value) -> bool:
    """Whether the elements are floating-point numbers."""
    return x.dtype.is_float if isinstance(x, Tensor) else "float" in x.dtype.name


def cast(x: Value, name: str) -> Value:
    """Another element type; on the device float64 is float32."""
    if isinstance(x, Tensor):
        return x.cast(dt.BY_NAME["float32" if name == "float64" else name])
    if type_of(x) == name:
        return x
    with np.errstate(invalid="ignore", over="ignore"):
        return x.astype(dtype_of(name))


def number(x: Value, value: float) -> Any:
    """A Python number that keeps the type of x beside it."""
    return value if isinstance(x, Tensor) else np.asarray(value, x.dtype)


# --- movement --------------------------------------------------------------------------------


def ints(values: Any) -> tuple[int, ...]:
    """Python's ints of an array of them."""
    return tuple(int(n) for n in np.asarray(values).reshape(-1))


def axis_in(axis: int, rank: int) -> int:
    """The axis from 0. ValueError if there is none."""
    if not -rank <= axis < max(rank, 1):
        raise ValueError(f"axis {axis} of a tensor with {rank}")
    return axis % max(rank, 1)


def reshape(x: Value, shape: Sequence[int]) -> Value:
    """The same elements in another shape."""
    return x.reshape(*shape) if isinstance(x, Tensor) else x.reshape(tuple(shape))


def permute(x: Value, axes: Sequence[int]) -> Value:
    """The axes in another order."""
    return x.permute(*axes) if isinstance(x, Tensor) else x.transpose(axes)


def expand(x: Value, shape: Sequence[int]) -> Value:
    """Broadcast to a shape."""
    return x.expand(*shape) if isinstance(x, Tensor) else np.broadcast_to(x, tuple(shape))


def pad(x: Value, amounts: Sequence[tuple[int, int]], value: Any = 0) -> Value:
    """(before, after) new elements on each axis."""
    if isinstance(x, Tensor):
        return x.pad(amounts, value)
    return np.pad(x, amounts, constant_values=value) if x.ndim else x


def shrink(x: Value, ranges: Sequence[tuple[int, int]]) -> Value:
    """(start, end) on each axis."""
    if isinstance(x, Tensor):
        return x.shrink(ranges)
    return x[tuple(slice(start, end) for start, end in ranges)]


def part(x: Value, axis: int, start: int, end: int) -> Value:
    """start … end - 1 along one axis."""
    ranges = [(0, n) for n in x.shape]
    ranges[axis] = (start, end)
    return shrink(x, ranges)


def flip(x: Value, axis: int) -> Value:
    """Backwards along an axis."""
    return x.flip(axis) if isinstance(x, Tensor) else np.flip(x, axis)


def concat(parts: Sequence[Value], axis: int) -> Value:
    """One after the other along an axis."""
    if not isinstance(parts[0], Tensor):
        return np.concatenate(parts, axis)
    if len(parts) < 3 or sum(x.numel for x in parts) < _LARGE:
        return Tensor.cat(*parts, axis=axis)
    # Many large parts: each is written where it belongs, rather than looked for by each element.
    total, start = [*parts[0].shape], 0
    total[axis] = sum(x.shape[axis] for x in parts)
    out = Tensor.full(total, 0, parts[0].dtype, parts[0].device).contiguous()
    for x in parts:
        end = start + x.shape[axis]
        out[(*[slice(None)] * axis, slice(start, end))] = x
        start = end
    return out


def stack(parts: Sequence[Value], axis: int = 0) -> Value:
    """Side by side along a new axis."""
    if isinstance(parts[0], Tensor):
        return Tensor.stack(*parts, axis=axis)
    return np.stack(parts, axis)


def take(x: Value, indices: Any, axis: int) -> Value:
    """Slices of x along an axis; negative indices count from the end."""
    if isinstance(x, Tensor):
        index = indices if isinstance(indices, Tensor) else np.asarray(indices, np.int32)
        return x[(*[slice(None)] * axis, index)]
    return np.take(x, np.asarray(indices), axis)


def every(x: Value, axis: int, step: int) -> Value:
    """Every step-th element along an axis, from the first."""
    if step == 1:
        return x
    if not isinstance(x, Tensor):
        return x[(*[slice(None)] * axis, slice(None, None, step))]
    n = x.shape[axis]
    amounts = [(0, 0)] * x.ndim
    amounts[axis] = (0, -n % step)
    x = x.pad(amounts)
    split = x.reshape(*x.shape[:axis], -(-n // step), step, *x.shape[axis + 1 :])
    return part(split, axis + 1, 0, 1).squeeze(axis + 1)


def iota(n: int, like: Value) -> Value:
    """0 … n-1, int32."""
    if isinstance(like, Tensor):
        return Tensor.arange(n, device=like.device)
    return np.arange(n, dtype=np.int32)


def full(shape: Sequence[int], value: Any, like: Value) -> Value:
    """One number everywhere, of the type of `like`."""
    if isinstance(like, Tensor):
        return Tensor.full(tuple(shape), value, like.dtype, like.device)
    return np.full(tuple(shape), value, like.dtype)


# --- reductions ------------------------------------------------------------------------------


def reduce(kind: str, x: Value, axes: Sequence[int], keep: bool = True) -> Value:
    """sum, mean, max or min over axes; the type stays."""
    axes = tuple(axes)
    if not axes:
        return x
    if isinstance(x, Tensor):
        return getattr(x, kind)(axes, keep).cast(x.dtype)
    wide = x.astype(np.float32) if x.dtype.name in ("float16", "bfloat16") else x
    return getattr(np, kind)(wide, axis=axes, keepdims=keep).astype(x.dtype)


def matmul(a: Value, b: Value) -> Value:
    """NumPy's product of stacks of matrices."""
    return a @ b


def softmax(x: Value, axis: int) -> Value:
    """exp(x) / sum(exp(x)) along an axis."""
    if isinstance(x, Tensor):
        return functional.softmax(x, axis).cast(x.dtype)
    e = exp(x - reduce("max", x, (axis,)))
    return e / reduce("sum", e, (axis,))
