"""Sliding windows as a view: they overlap, and nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

from engine import graph as g
from engine.graph import Node, ShapeError
from engine.symbolic import Int, bounds, upper


def windows(
    x: Node,
    axes: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Node:
    """Each axis becomes the places of its window, and the windows are new axes at the end.

    An axis of N has (N - dilation * (size - 1) - 1) // stride + 1 places; element k of the window
    at y is y * stride + k * dilation. Raises ShapeError if a window doesn't fit its axis.
    """
    for axis, *how in zip(axes, sizes, strides, dilations):
        x = _along(x, axis, *how)
    return x


def _along(x: Node, axis: int, size: int, stride: int, dilation: int) -> Node:
    """One axis. It is repeated, and the repetitions are read in rows that are `dilation` too long:
    row k begins k * dilation later than it would in its repetition."""
    n = x.shape[axis]
    if size < 1 or stride < 1 or dilation < 1:
        raise ShapeError(
            f"windows: size {size}, stride {stride}, dilation {dilation}: all are >= 1"
        )
    count = (n - dilation * (size - 1) - 1) // stride + 1
    if bounds(count)[0] < 1:
        raise ShapeError(
            f"windows: {size} elements {dilation} apart don't fit axis {axis} of {list(x.shape)}"
        )
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    # Behind the last window there must be room for the rest of its stride.
    length = max(upper(n), upper(count) * stride - (dilation if size > 1 else 0))
    end = ((0, 0),) * axis + ((0, length - n),) + ((0, 0),) * len(after)
    rows = g.reshape(g.pad(x, end), (*before, 1, length, *after))
    if size > 1:
        row = length + dilation
        copies = -(-size * row // length)
        flat = g.expand(rows, (*before, copies, length, *after))
        flat = _first(g.reshape(flat, (*before, copies * length, *after)), axis, size * row)
        rows = g.reshape(flat, (*before, size, row, *after))
    rows = _first(rows, axis, size, upper(count) * stride)
    steps = g.reshape(rows, (*before, size, upper(count), stride, *after))
    picked = g.reshape(_first(steps, axis, size, count, 1), (*before, size, count, *after))
    rest = range(axis + 1, len(picked.shape))
    return g.permute(picked, (*range(axis), *rest, axis))


def _first(x: Node, axis: int, *ends: Int) -> Node:
    """The beginning of the axes from `axis` on."""
    kept = (*x.shape[:axis], *ends, *x.shape[axis + len(ends) :])
    return g.shrink(x, tuple((0, end) for end in kept))
