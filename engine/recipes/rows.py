"""Norms and softmax: rows that are reduced and then rewritten, one work-group for some rows.

The reductions sit outside the loop that writes the row, so each pass runs over memory that is
still in the first-level cache. Where neighbours in memory belong to different rows, as in a softmax
over the first axis, lanes lie across rows, and so do sums over columns.
"""

from __future__ import annotations

from math import prod

from engine.ir import Target
from engine.lower import CHAINS, Plan
from engine.recipes.analysis import Facts, Load, contiguous_score
from engine.recipes.elementwise import ahead
from engine.schedule import Kernel
from engine.symbolic import upper, variables

WORK = 4096  # elements that make a work-group worth its launch
MOST_AHEAD = 4096  # elements; rows are fetched two ahead, since each goes through several passes
BESIDE = 4  # vectors of rows side by side: with more, more memory is open at once than is near


def match(kernel: Kernel, facts: Facts, target: Target) -> Plan | None:
    """Kernels in which every reduction varies with some of the output's axes only."""
    if not facts.reductions:
        return None
    free = frozenset().union(*(variables(i) for _, index, _ in facts.reductions for i in index), ())
    wide = [a for a, var in enumerate(facts.axes) if var is not None]
    rows = [a for a in wide if facts.axes[a] in free]
    inner = [a for a in range(len(facts.axes)) if a not in rows]
    if not any(facts.axes[a] is not None for a in inner) and rows:
        return _columns(kernel, facts, target)
    outside = [load for load in facts.loads if not load.reduced]
    vector = _contiguous(facts, [a for a in inner if a in wide][-1:], outside, target)
    if vector is None:
        across = _contiguous(facts, rows, facts.loads, target)
        if across is not None:
            return _across(kernel, facts, target, across, rows, inner)
    reduce_lanes = _reduce_lanes(facts, target.lanes)
    block = [n if a in inner else 1 for a, n in enumerate(kernel.root.shape)]
    length = 1
    for a in inner:
        length *= facts.extent(a)
    if _work(facts, rows, length) <= WORK:  # sharing it would cost more than it saves
        block = list(kernel.root.shape)
    elif rows and length < WORK:
        block[rows[-1]] = max(1, min(WORK // max(length, 1), _share(facts, rows[-1], target)))
    return Plan(
        "rows",
        tuple(block),
        (1,) * len(block),
        (*rows, *inner),
        vector,
        target.lanes if vector is not None else 1,
        reduce_lanes,
        4 if reduce_lanes > 1 else 1,
        min(2 * length, MOST_AHEAD) if ahead(kernel, target) else 0,
    )


def _contiguous(facts: Facts, axes: list[int], loads: list[Load], target: Target) -> int | None:
    """The last of the axes along which the loads lie in a row and lanes find enough elements."""
    for a in reversed(axes):
        score = contiguous_score(facts, loads, facts.axes[a])
        if score is not None and score >= 0 and facts.extent(a) >= target.lanes > 1:
            moves = any(load.stride(facts.axes[a]) == 1 for load in loads)
            if moves or not loads:
                return a
    return None


def _across(
    kernel: Kernel, facts: Facts, target: Target, vector: int, rows: list[int], inner: list[int]
) -> Plan:
    """Lanes lie across the rows: every lane reduces its own."""
    block = [n if a in inner else 1 for a, n in enumerate(kernel.root.shape)]
    unroll = [1] * len(block)
    unroll[vector] = _beside(facts, vector, BESIDE, target)
    block[vector] = unroll[vector] * target.lanes
    order = (*(a for a in rows if a != vector), vector, *inner)
    return Plan("rows", tuple(block), tuple(unroll), order, vector, target.lanes)


def _columns(kernel: Kernel, facts: Facts, target: Target) -> Plan | None:
    """Sums over columns, where no operand serves two outputs: a contraction has more to gain.

    But sums of several functions of the same numbers are made together.
    """
    wide = [a for a, var in enumerate(facts.axes) if var is not None]
    kinds = [a for a in wide[:-1] if facts.axes[a] in facts.counted and facts.extent(a) <= BESIDE]
    loops = {var for _, _, inner in facts.reductions for var in inner}
    for load in facts.loads:
        moves = variables(load.index)
        needed = [facts.axes[a] for a in wide if a not in kinds]
        if not moves.isdisjoint(loops) and not moves.issuperset(needed):
            return None
    vector = _contiguous(facts, wide[-1:], facts.loads, target)
    if vector is None:
        return None
    block, unroll = [1] * len(facts.axes), [1] * len(facts.axes)
    for a in kinds:
        block[a] = unroll[a] = facts.extent(a)
    most = max(1, CHAINS // len(facts.reductions))  # of each kind: what is read together counts
    unroll[vector] = _beside(facts, vector, most, target)
    block[vector] = unroll[vector] * target.lanes
    order = (*(a for a in range(len(block)) if a != vector), vector)
    return Plan("columns", tuple(block), tuple(unroll), order, vector, target.lanes)


def _beside(facts: Facts, axis: int, most: int, target: Target) -> int:
    """How many vectors along an axis are under way at once, if possible with none left over."""
    count = facts.extent(axis) // target.lanes
    return max((n for n in range(1, most + 1) if count % n == 0), default=1)


def _work(facts: Facts, rows: list[int], length: int) -> int:
    """Elements that all rows together read or write."""
    depth = max(prod(upper(facts.sizes[v]) for v in loops) for _, _, loops in facts.reductions)
    return prod(facts.extent(a) for a in rows) * max(length, depth)


def _share(facts: Facts, axis: int, target: Target) -> int:
    """Elements of an axis per work-group when every core gets some."""
    return max(1, facts.extent(axis) // (2 * target.cores))


def _reduce_lanes(facts: Facts, lanes: int) -> int:
    """Lanes along the last axis of the reductions, if their reads lie in a row there."""
    reduced = [load for load in facts.loads if load.reduced]
    for _, _, loops in facts.reductions:
        last = loops[-1]
        mine = [load for load in reduced if last in variables(load.index)]
        score = contiguous_score(facts, mine, last)
        if score is None or score < 0 or upper(facts.sizes[last]) < lanes:
            return 1
    return lanes
