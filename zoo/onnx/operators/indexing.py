"""Operators that pick elements by index, or put them there."""

from __future__ import annotations

import numpy as np

from zoo.onnx import values as v
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value


@operator("Gather")
def gather(x: Value, indices: Value, *, axis: int = 0):
    """Slices along an axis, in place of which come the axes of the indices."""
    return v.take(x, indices, v.axis_in(axis, x.ndim))


@operator("GatherElements")
def gather_elements(x: Known, indices: Known, *, axis: int = 0):
    """x[…, indices[…], …] along an axis."""
    return np.take_along_axis(x, indices, axis)


@operator("GatherND")
def gather_nd(x: Known, indices: Known, *, batch_dims: int = 0):
    """x at the tuples of the last axis of the indices."""
    lead = np.ix_(*map(np.arange, x.shape[:batch_dims]))
    rest = indices.ndim - 1 - batch_dims
    lead = [a.reshape(*a.shape, *(1,) * rest) for a in lead]
    return x[(*lead, *np.moveaxis(indices, -1, 0))]


def _put(out: np.ndarray, where: tuple, updates: np.ndarray, reduction: str) -> np.ndarray:
    how = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    if reduction == "none":
        out[where] = updates
    else:
        how[reduction].at(out, where, updates)
    return out


@operator("ScatterElements", "Scatter")
def scatter_elements(x: Known, indices: Known, updates: Known, *, axis: int = 0,
                     reduction: str = "none"):  # fmt: skip
    """x with the updates put, added, … where the indices along an axis say."""
    axis = v.axis_in(axis, x.ndim)
    where = list(np.indices(indices.shape))
    where[axis] = np.where(indices < 0, indices + x.shape[axis], indices)
    return _put(x.copy(), tuple(where), updates, reduction)


@operator("ScatterND")
def scatter_nd(x: Known, indices: Known, updates: Known, *, reduction: str = "none"):
    """x with slices put, added, … at the tuples of the last axis of the indices."""
    return _put(x.copy(), tuple(np.moveaxis(indices, -1, 0)), updates, reduction)


@operator("TensorScatter")
def tensor_scatter(x: Known, updates: Known, indices: Known = None, *, axis: int = -2,
                   mode: str = "linear"):  # fmt: skip
    """x with the updates along an axis from each batch's own index on (a cache of keys)."""
    axis = v.axis_in(axis, x.ndim)
    out, updates = np.moveaxis(x.copy(), axis, 1), np.moveaxis(updates, axis, 1)
    starts = np.zeros(x.shape[0], int) if indices is None else indices
    for b, start in enumerate(starts):
        places = int(start) + np.arange(updates.shape[1])
        out[b, places % out.shape[1] if mode == "circular" else places] = updates[b]
    return np.moveaxis(out, 1, axis)


@operator("NonZero")
def non_zero(x: Known):
    """The indices of what isn't 0, (rank, count)."""
    return np.array(np.nonzero(x), np.int64).reshape(x.ndim, -1)


@operator("Compress")
def compress(x: Known, condition: Known, *, axis: int | None = None):
    """The slices where the condition holds."""
    return np.compress(condition, x, axis)


@operator("Unique")
def unique(x: Known, *, axis: int | None = None, sorted: int = 1):
    """Each value once: (values, where first, inverse, counts), in order or as they come."""
    flat = x.reshape(-1) if axis is None else x
    at = 0 if axis is None else axis
    values, first, inverse, counts = np.unique(
        flat, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        values, first, counts = np.take(values, order, at), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return values, first, inverse, counts


@operator("ReverseSequence")
def reverse_sequence(x: Known, lengths: Known, *, batch_axis: int = 1, time_axis: int = 0):
    """The first steps of each row backwards, as many as its length."""
    out = np.moveaxis(x, (batch_axis, time_axis), (0, 1)).copy()
    for row, n in zip(out, v.ints(lengths)):
        row[:n] = row[:n][::-1]
    return np.moveaxis(out, (0, 1), (batch_axis, time_axis))


@operator("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(x: Known, indices: Known):
    """Columns of the last axis."""
    return np.take(x, indices.reshape(-1), -1)
