"""Operators that make one number of many: sums, extremes, their places."""

from __future__ import annotations

import numpy as np

from engine import Tensor
from zoo.onnx import values as v
from zoo.onnx.registry import add, operator
from zoo.onnx.values import Known, Value


def _reduction(function, empty=None):
    """A row for a function of (x, axes) that keeps the axes with size 1."""

    def run(x: Value, axes: Known = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0):
        if axes is None or not axes.size:
            named = () if noop_with_empty_axes else tuple(range(x.ndim))
        else:
            named = tuple(v.axis_in(a, x.ndim) for a in v.ints(axes)) if x.ndim else ()
        if empty is not None and any(x.shape[a] == 0 for a in named):
            kept = [1 if a in named else n for a, n in enumerate(x.shape)]
            out = v.full(kept, _identity(x, empty), x)
        else:
            out = function(x, named)
        if keepdims:
            return out
        return v.reshape(out, [n for a, n in enumerate(x.shape) if a not in named])

    return run


def _identity(x, empty):
    """What an empty reduction gives: of whole numbers and bools the end of their range."""
    if not np.isinf(empty) or v.is_float(x):
        return empty
    if v.type_of(x) == "bool":
        return empty > 0
    ends = np.iinfo(v.type_of(x))
    return ends.max if empty > 0 else ends.min


def _sum(x, axes):
    return v.reduce("sum", x, axes)


def _product(x, axes):
    if not isinstance(x, Tensor):
        return np.prod(x, axis=axes, keepdims=True).astype(x.dtype)
    for axis in axes:  # halves times halves, as a tournament
        while x.shape[axis] > 1:
            n = x.shape[axis]
            low = v.part(x, axis, 0, n // 2) * v.part(x, axis, n // 2, n // 2 * 2)
            x = v.concat([low, v.part(x, axis, n - 1, n)], axis) if n % 2 else low
    return x


def _log_sum_exp(x, axes):
    top = v.reduce("max", x, axes)
    top = v.where(v.absolute(top) < float("inf"), top, v.number(top, 0))
    return v.log(_sum(v.exp(x - top), axes)) + top


for _name, _function, _empty in (
    ("ReduceSum", _sum, 0),
    ("ReduceMean", lambda x, axes: v.reduce("mean", x, axes), None),
    ("ReduceMax", lambda x, axes: v.reduce("max", x, axes), -np.inf),
    ("ReduceMin", lambda x, axes: v.reduce("min", x, axes), np.inf),
    ("ReduceProd", _product, 1),
    ("ReduceL1", lambda x, axes: _sum(v.absolute(x), axes), 0),
    ("ReduceL2", lambda x, axes: v.sqrt(_sum(x * x, axes)), 0),
    ("ReduceSumSquare", lambda x, axes: _sum(x * x, axes), 0),
    ("ReduceLogSum", lambda x, axes: v.log(_sum(x, axes)), -np.inf),
    ("ReduceLogSumExp", _log_sum_exp, -np.inf),
):
    add(_name, _reduction(_function, _empty))


def _place(name: str):
    def run(x: Value, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0):
        axis = v.axis_in(axis, x.ndim)
        y = v.flip(x, axis) if select_last_index else x
        if isinstance(y, Tensor):
            places = getattr(y, name)(axis, True)
        else:
            places = np.expand_dims(getattr(np, name)(y, axis), axis)
        places = v.cast(x.shape[axis] - 1 - places if select_last_index else places, "int64")
        return places if keepdims else v.reshape(places, [*x.shape[:axis], *x.shape[axis + 1 :]])

    return run


add("ArgMax", _place("argmax"))
add("ArgMin", _place("argmin"))


@operator("CumSum")
def cum_sum(x: Value, axis: Known, *, exclusive: int = 0, reverse: int = 0):
    """Running sums along an axis."""
    return _running(x, v.axis_in(int(axis), x.ndim), exclusive, reverse, "sum")


@operator("CumProd")
def cum_prod(x: Known, axis: Known, *, exclusive: int = 0, reverse: int = 0):
    """Running products along an axis."""
    return _running(x, v.axis_in(int(axis), x.ndim), exclusive, reverse, "prod")


def _running(x: Value, axis: int, exclusive: int, reverse: int, kind: str) -> Value:
    x = v.flip(x, axis) if reverse else x
    n = x.shape[axis]
    if isinstance(x, Tensor):  # a masked sum over all: n² terms, but no scan
        places = v.iota(n, x)
        earlier = places.reshape(1, n) <= places.reshape(n, 1) - exclusive
        wide = [1] * (x.ndim + 1)
        wide[axis], wide[axis + 1] = n, n
        terms = Tensor.where(earlier.reshape(*wide), x.unsqueeze(axis), 0)
        out = terms.sum(axis + 1).cast(x.dtype)
    else:
        out = getattr(np, f"cum{kind}")(x, axis=axis, dtype=x.dtype)
        if exclusive:
            first = np.full_like(x, kind == "prod")[(*[slice(None)] * axis, slice(0, 1))]
            out = np.concatenate([first, out[(*[slice(None)] * axis, slice(0, n - 1))]], axis)
    return v.flip(out, axis) if reverse else out


@operator("TopK")
def top_k(x: Known, k: Known, *, axis: int = -1, largest: int = 1, sorted: int = 1):
    """The k largest (or smallest) along an axis and their places; the first of equal ones."""
    axis, count = v.axis_in(axis, x.ndim), int(k.reshape(-1)[0])
    n = x.shape[axis]
    if not 0 <= count <= n:
        raise ValueError(f"k is {count}, but the axis has {n}")
    # A stable sort takes the first of equal ones: backwards for the largest.
    order = np.argsort(np.flip(x, axis) if largest else x, axis=axis, kind="stable")
    order = n - 1 - np.flip(order, axis) if largest else order
    places = order[(*[slice(None)] * axis, slice(0, count))]
    return np.take_along_axis(x, places, axis), places.astype(np.int64)


@operator("Softmax", since=13)
def softmax(x: Value, *, axis: int = -1):
    """exp(x) / sum(exp(x)) along an axis."""
    return v.softmax(x, axis)


@operator("LogSoftmax", since=13)
def log_softmax(x: Value, *, axis: int = -1):
    """The logarithm of softmax."""
    return x - _log_sum_exp(x, (v.axis_in(axis, x.ndim),))


@operator("Hardmax", since=13)
def hardmax(x: Value, *, axis: int = -1):
    """1 at the first largest value along an axis, 0 elsewhere."""
    axis = v.axis_in(axis, x.ndim)
    best = _place("argmax")(x, axis=axis)
    places = v.iota(x.shape[axis], x)
    sizes = [1] * x.ndim
    sizes[axis] = x.shape[axis]
    return v.cast(v.reshape(places, sizes) == v.cast(best, "int32"), v.type_of(x))


def _over_the_rest(function):
    """Before opset 13 these took all axes from `axis` on as one."""

    def run(x: Value, *, axis: int = 1):
        axis = v.axis_in(axis, x.ndim)
        rows = int(np.prod(x.shape[:axis]))
        return v.reshape(
            function(
                v.reshape(
                    x, (rows, x.size // rows if isinstance(x, np.ndarray) else x.numel // rows)
                ),
                axis=1,
            ),
            x.shape,
        )

    return run


add("Softmax", _over_the_rest(softmax))
add("LogSoftmax", _over_the_rest(log_softmax))
add("Hardmax", _over_the_rest(hardmax))
