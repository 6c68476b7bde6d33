"""Norms and softmax: rows that are reduced and then rewritten, one work-group for some rows.

The reductions sit outside the loop that writes the row, so each pass runs over memory that is
still in the first-level cache.
"""

from __future__ import annotations

from engine.ir import Target
from engine.lower import Plan
from engine.recipes.analysis import Facts, contiguous_score
from engine.schedule import Kernel
from engine.symbolic import upper, variables

WORK = 4096  # elements that make a work-group worth its launch


def match(kernel: Kernel, facts: Facts, target: Target) -> Plan | None:
    """Kernels in which every reduction varies with some of the output's axes only."""
    if not facts.reductions:
        return None
    free = frozenset().union(*(variables(i) for _, index, _ in facts.reductions for i in index), ())
    rows = [a for a, var in enumerate(facts.axes) if var is not None and var in free]
    inner = [a for a, var in enumerate(facts.axes) if a not in rows]
    if not any(facts.axes[a] is not None for a in inner) and rows:
        return None
    rank = len(facts.axes)
    lanes = target.lanes
    vector = None
    for a in reversed(inner):
        var = facts.axes[a]
        if var is not None:
            outside = [load for load in facts.loads if not load.reduced]
            score = contiguous_score(facts, outside, var)
            if score is not None and score >= 0 and facts.extent(a) >= lanes:
                vector = a
            break
    reduce_lanes = _reduce_lanes(facts, lanes)
    length = 1
    for a in inner:
        length *= facts.extent(a)
    block = [upper(n) if a in inner else 1 for a, n in enumerate(kernel.root.shape)]
    for a in inner:
        block[a] = kernel.root.shape[a]
    if rows and length < WORK:
        block[rows[-1]] = max(1, min(WORK // max(length, 1), _share(facts, rows[-1], target)))
    return Plan(
        "rows",
        tuple(block),
        (1,) * rank,
        (*rows, *inner),
        vector,
        lanes if vector is not None else 1,
        reduce_lanes,
        2 if reduce_lanes > 1 else 1,
    )


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
