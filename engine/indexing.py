"""Which element of a source makes an element of a node: movement ops as arithmetic on indices."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from engine.graph import MOVEMENT, Node, Op
from engine.symbolic import Expr, Int, less, upper

Index = tuple[Int, ...]
Guard = tuple[Expr, ...]  # conditions (0 or 1) that must all hold


def move_index(node: Node, index: Index) -> tuple[Index, Guard]:
    """Where a movement op's element at `index` comes from in its source.

    The guard is non-empty only for PAD: where it fails, the element is 0 and there is no source.
    """
    return _moved(node.op, node.arg, node.src[0].shape, node.shape, index)


@lru_cache(maxsize=1 << 16)  # the layers of a network ask the same
def _moved(
    op: Op, arg: Any, source: tuple[Int, ...], shape: tuple[Int, ...], index: Index
) -> tuple[Index, Guard]:
    match op:
        case Op.RESHAPE:
            return reshape_index(index, shape, source), ()
        case Op.PERMUTE:
            moved: list[Int] = [0] * len(index)
            for position, axis in enumerate(arg):
                moved[axis] = index[position]
            return tuple(moved), ()
        case Op.EXPAND:
            return tuple(0 if n == 1 else i for i, n in zip(index, source)), ()
        case Op.SHRINK:
            return tuple(i + start for i, (start, _) in zip(index, arg)), ()
        case Op.FLIP:
            flipped = enumerate(zip(index, shape))
            return tuple(n - 1 - i if a in arg else i for a, (i, n) in flipped), ()
        case Op.PAD:
            moved, guard = [], []
            for i, n, (before, after) in zip(index, source, arg):
                moved.append(i - before)
                # where nothing was added the index is inside, though its bounds may not show it
                guard += [less(-1, i - before)] if before != 0 else []
                guard += [less(i - before, n)] if after != 0 else []
            return tuple(moved), tuple(g for g in guard if not (isinstance(g, int) and g == 1))
    raise AssertionError(f"{op.name} doesn't move elements")


def source_indices(
    node: Node, index: Index, fresh: Callable[[str, Int], Int]
) -> list[tuple[Node, Index]]:
    """Which element of each source makes node's element at `index`.

    fresh(name, size) gives the variable of a loop (or of a gathered index) over `size` values; the
    names are "r" and the axis for REDUCE, "g" for GATHER. Guards of PAD are left out.
    """
    if node.op in MOVEMENT:
        return [(node.src[0], move_index(node, index)[0])]
    if node.op is Op.REDUCE:
        inner = list(index)
        for a in node.arg[1]:
            inner[a] = fresh(f"r{a}", node.src[0].shape[a])
        return [(node.src[0], tuple(inner))]
    if node.op is Op.GATHER:
        source, chosen = node.src
        at, end = node.arg, node.arg + len(chosen.shape)
        row = fresh("g", source.shape[at])
        return [(source, (*index[:at], row, *index[end:])), (chosen, index[at:end])]
    if node.op is Op.INTRINSIC:  # it reads its operands in an order of its own
        return [
            (s, tuple(fresh(f"t{i}{a}", n) for a, n in enumerate(s.shape)))
            for i, s in enumerate(node.src)
        ]
    if node.op is Op.BITCAST and node.dtype.itemsize != node.src[0].dtype.itemsize:
        wide, narrow = node.dtype.itemsize, node.src[0].dtype.itemsize
        last = index[-1] * (wide // narrow) if wide > narrow else index[-1] // (narrow // wide)
        return [(node.src[0], (*index[:-1], last))]
    return [(s, index) for s in node.src]


def reshape_index(index: Index, shape: tuple[Int, ...], to: tuple[Int, ...]) -> Index:
    """The index into shape `to` of the element at `index` of `shape` (same count, row-major).

    Axes are matched in groups of equal size, so that an untouched axis (a symbolic one above all)
    passes through without a division.
    """
    out: list[Int] = []
    i = j = 0
    while i < len(shape) or j < len(to):
        group_i, group_j = i, j
        left: Int = 1
        right: Int = 1
        if i < len(shape):
            left, i = shape[i], i + 1
        if j < len(to):
            right, j = to[j], j + 1
        while left != right:
            if (upper(left) < upper(right) and i < len(shape)) or j >= len(to):
                left, i = left * shape[i], i + 1
            else:
                right, j = right * to[j], j + 1
        out += _regroup(index[group_i:i], shape[group_i:i], to[group_j:j])
    return tuple(out)


def _regroup(index: Index, shape: tuple[Int, ...], to: tuple[Int, ...]) -> list[Int]:
    wide = [(i, n) for i, n in zip(index, shape) if n != 1]
    targets = [a for a, n in enumerate(to) if n != 1]
    out: list[Int] = [0] * len(to)
    if len(wide) == len(targets) == 1:  # only axes of size 1 came or went
        out[targets[0]] = wide[0][0]
        return out
    flat = flat_index(tuple(i for i, _ in wide), tuple(n for _, n in wide))
    for a in reversed(targets):
        out[a] = flat if a == targets[0] else flat % to[a]
        flat = flat // to[a]
    return out


def flat_index(index: Index, shape: tuple[Int, ...]) -> Int:
    """The row-major position of `index` in `shape`."""
    flat: Int = 0
    for i, n in zip(index, shape):
        flat = flat * n + i
    return flat
