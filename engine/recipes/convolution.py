"""A sum of products seen as a convolution, however its windows and its weight were spelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.indexing import Index, flat_index, move_index
from engine.symbolic import Int, Var, linear_in, product, upper

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Convolution:
    """node (B, groups, O / groups, *out, 1, …) = sum over c and k of
    x[b, c, out * stride + k * dilation] * weight[o, c, k].

    x (B, C, *space), padded already and no larger than what is read; weight (O, C / groups,
    *kernel). Both are float32 in value.
    """

    node: Node
    x: Node
    weight: Node
    stride: Sizes
    dilation: Sizes
    groups: int

    @property
    def out(self) -> tuple[Int, ...]:
        """Places along each axis of space."""
        return self.node.shape[3 : 3 + len(self.stride)]

    def unpadded(self) -> tuple[Node, tuple[tuple[int, int], ...]]:
        """x without the zeros around its space, and their number (before, after) on each axis.

        All sizes of x have to be known.
        """
        x, before, kept = self.x, [0] * len(self.x.shape), list(self.x.shape)
        while x.op is Op.PAD or (x.op is Op.SHRINK and not any(start for start, _ in x.arg)):
            offsets = [b for b, _ in x.arg] if x.op is Op.PAD else [0] * len(before)
            inner = [min(n - b, m) for n, b, m in zip(kept, offsets, x.src[0].shape)]
            if min(inner) < 1 or inner[:2] != kept[:2]:
                break
            x, before, kept = x.src[0], [b + o for b, o in zip(before, offsets)], inner
        x = g.shrink(x, tuple((0, n) for n in kept))
        sides = zip(before, kept, self.x.shape)
        return x, tuple((b, whole - b - n) for b, n, whole in sides)


def find(node: Node) -> Convolution | None:
    """The Convolution that a node is, or None."""
    if node.op is not Op.REDUCE or node.arg[0] != "add" or node.dtype is not dt.float32:
        return None
    times = node.src[0]
    rank = len(times.shape) // 2 - 2
    first = 3 + rank  # of the summed axes
    summed = tuple(a for a, n in enumerate(times.shape[first:], first) if n != 1)
    if times.op is not Op.MUL or len(times.shape) % 2 or rank < 1 or node.arg[1] != summed:
        return None
    axes = tuple(0 if n == 1 else Var(f"c{a}", 0, upper(n) - 1) for a, n in enumerate(times.shape))
    for x, weight in (times.src, times.src[::-1]):
        kernel = _weight(weight, axes)
        found = kernel and _picture(x, axes)
        if found:
            return Convolution(node, found[0], kernel, *found[1:], times.shape[1])
    return None


def _views(x: Node, index: Index) -> Iterator[tuple[Node, Index]]:
    """Every node that x is a view of, and where in it x's element at `index` lies."""
    yield x, index
    while x.op in g.MOVEMENT:
        index, guard = move_index(x, index)
        if guard:
            return
        x = x.src[0]
        yield x, index


def _weight(x: Node, axes: Index) -> Node | None:
    """x as (O, C / groups, *kernel)."""
    _, groups, each, *rest = x.shape
    inner = rest[len(rest) // 2 :]
    shape = (groups * each, *inner)
    plain = flat_index((axes[1] * each + axes[2], *axes[-len(inner) :]), shape)
    for base, index in reversed([*_views(x, axes)]):
        if base.numel == product(shape) and flat_index(index, base.shape) is plain:
            return g.reshape(base, shape)
    return None


def _picture(x: Node, axes: Index) -> tuple[Node, Sizes, Sizes] | None:
    """x as (B, C, *space), and the stride and dilation of its windows."""
    rank = len(axes) // 2 - 2
    batch, groups = x.shape[:2]
    each = x.shape[3 + rank]
    channel = axes[1] * each + axes[3 + rank]
    places, taps = x.shape[3 : 3 + rank], x.shape[4 + rank :]
    moving = [i for i in range(rank) if (places[i], taps[i]) != (1, 1)]  # the others have size 1
    for base, index in reversed([*_views(x, axes)]):
        wide = [(n, i) for n, i in zip(base.shape, index) if n != 1]
        lead = [(n, i) for n, i in ((batch, axes[0]), (groups * each, channel)) if n != 1]
        space = wide[len(lead) :]
        if wide[: len(lead)] != lead or len(space) != len(moving):
            continue
        sizes, steps = [1] * rank, [(1, 1)] * rank
        for i, (n, at) in zip(moving, space):
            sizes[i], steps[i] = n, _step(at, axes[3 + i], axes[4 + rank + i])
        if None not in steps:
            stride, dilation = zip(*steps)
            whole = g.reshape(base, (batch, groups * each, *sizes))
            read = [
                (n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(places, stride, taps, dilation)
            ]
            ends = (batch, groups * each, *read)
            return g.shrink(whole, tuple((0, end) for end in ends)), stride, dilation
    return None


def _step(index: Int, place: Int, tap: Int) -> tuple[int, int] | None:
    """(stride, dilation) with index = place * stride + tap * dilation."""
    out = []
    for var in (place, tap):
        found = (1, index) if isinstance(var, int) else linear_in(index, var)
        if found is None or found[0] < 1:
            return None
        out.append(found[0])
        index = found[1]
    return tuple(out) if isinstance(index, int) and index == 0 else None
