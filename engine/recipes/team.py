"""Reductions on a GPU: the work-items of a group sum side by side, then add up what they have.

Neighbouring items read neighbouring numbers, which is how a GPU's memory is fast. Norms and softmax
are a group for each row, whose items then write it too; products of a matrix and a few rows a group
for each of the matrix's rows. Where the numbers that are summed lie apart in memory, or many sums
share what is read, work-items do better alone: `contraction` plans that.
"""

from __future__ import annotations

from engine.ir import Target
from engine.lower import Plan
from engine.recipes.analysis import Facts, Load, contiguous_score
from engine.schedule import Kernel
from engine.symbolic import upper, variables

FEW = 8  # sums that share what is read, at most: each has a register of every item
WORTH = 16  # numbers to a sum, at least


def match(kernel: Kernel, facts: Facts, target: Target) -> Plan | None:
    """Kernels that reduce, on a target whose work-items work in teams."""
    if target.team == 1 or not facts.reductions:
        return None
    free = frozenset().union(*(variables(i) for _, index, _ in facts.reductions for i in index), ())
    wide = [a for a, var in enumerate(facts.axes) if var is not None]
    inner = [a for a in wide if facts.axes[a] not in free]
    depth = max(upper(facts.sizes[loops[-1]]) for _, _, loops in facts.reductions)
    if inner:
        vector = inner[-1]
        if max(depth, facts.extent(vector)) < WORTH:
            return None
        block = tuple(n if a in inner else 1 for a, n in enumerate(kernel.root.shape))
        order = (*(a for a in range(len(block)) if a not in inner), *inner)
        return Plan("team rows", block, (1,) * len(block), order, vector, team=target.team)
    together = _together(kernel, facts)
    if depth < WORTH or together is None:
        return None
    return Plan("team", together, together, tuple(range(len(together))), team=target.team)


def _together(kernel: Kernel, facts: Facts) -> tuple[int, ...] | None:
    """The sums of a group along each axis: all that share the reads of the largest operand.

    None if they are too many, or its numbers lie apart along the summed axis.
    """
    reads = [load for load in facts.loads if load.reduced and _summed(load, facts)]
    if not reads:
        return None
    largest = max(reads, key=lambda load: upper(load.buffer.numel))
    along = [loops[-1] for _, _, loops in facts.reductions if loops[-1] in variables(largest.index)]
    if not along or any((contiguous_score(facts, [largest], var) or -1) < 1 for var in along):
        return None
    moves = variables(largest.index)
    together, count = [], 1
    for axis, var in enumerate(facts.axes):
        shared = var is not None and var not in moves
        if shared and not isinstance(kernel.root.shape[axis], int):
            return None
        together.append(facts.extent(axis) if shared else 1)
        count *= together[-1]
    return tuple(together) if count * len(facts.reductions) <= FEW else None


def _summed(load: Load, facts: Facts) -> bool:
    """Whether it moves with the last axis of a reduction."""
    return any(loops[-1] in variables(load.index) for _, _, loops in facts.reductions)
