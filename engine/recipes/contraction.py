"""Sums of products: matrix times vector, matrix times matrix, batched, on quantised weights too.

Lanes lie along the axis in which the operands lie in a row: the summed axis (each lane a partial
sum, folded at the end) or an output axis (each lane an output). Outputs are unrolled so that an
operand once loaded serves several of them.
"""

from __future__ import annotations

from engine.ir import Target
from engine.lower import Plan
from engine.recipes.analysis import Facts, Load, contiguous_score
from engine.schedule import Kernel
from engine.symbolic import Expr, Int, upper, variables

ACCUMULATORS = 16  # vectors of sums that stay in registers, operands beside them
SMALL = 8192  # multiplications that one core does quicker alone
WORK = 16384  # multiplications that make a work-group worth its launch


def match(kernel: Kernel, facts: Facts, target: Target) -> Plan | None:
    """Kernels whose reductions are wanted once for every output."""
    if not facts.reductions:
        return None
    loops = facts.reductions[0][2]
    loads = [x for x in facts.loads if x.reduced]
    last = loops[-1]
    vector, reduce_lanes = _lanes(facts, loads, last, target)
    unroll = _unroll(kernel, facts, loads, vector, target)
    order = _order(facts, vector)
    depth = 1
    for var in loops:
        depth *= upper(facts.sizes[var])
    block = _blocks(kernel, facts, unroll, vector, order, depth, target)
    return Plan(
        "contraction",
        block,
        unroll,
        order,
        vector,
        target.lanes if vector is not None else 1,
        reduce_lanes,
        2 if reduce_lanes > 1 or vector is None else 1,
    )


def _lanes(facts: Facts, loads: list[Load], last: Expr, target: Target) -> tuple[int | None, int]:
    """(output axis across lanes or None, lanes along the summed axis)."""
    if target.lanes == 1:
        return None, 1
    inner = [x for x in loads if last in variables(x.index)]
    along = contiguous_score(facts, inner, last)
    if along is None or upper(facts.sizes[last]) < target.lanes:
        along = -1
    best, vector = along, None
    for a in reversed(range(len(facts.axes))):
        var = facts.axes[a]
        if var is None or facts.extent(a) < target.lanes:
            continue
        score = contiguous_score(facts, facts.loads, var)
        if score is not None and score > 0 and score + 1 > best:
            best, vector = score + 1, a
    if vector is not None:
        return vector, 1
    return None, target.lanes if along >= 0 else 1


def _unroll(
    kernel: Kernel, facts: Facts, loads: list[Load], vector: int | None, target: Target
) -> tuple[int, ...]:
    """Copies per axis, within the registers: along axes that some load doesn't move with."""
    unroll = [1] * len(facts.axes)
    room = ACCUMULATORS if target.lanes == 16 else ACCUMULATORS // 2
    room = max(1, room // len(facts.reductions))
    for a, var in enumerate(facts.axes):
        if var is None or not any(var not in variables(x.index) for x in loads):
            continue
        lanes = target.lanes if a == vector else 1
        unroll[a] = _copies(kernel.root.shape[a], lanes, min(2 if a == vector else 4, room))
        room //= unroll[a]
    return tuple(unroll)


def _copies(size: Int, lanes: int, most: int) -> int:
    """The largest number of copies up to `most` that leaves nothing over, or a power of two."""
    for copies in range(most, 1, -1):
        if isinstance(size, int) and size % (copies * lanes) == 0:
            return copies
    copies = 1
    while copies * 2 <= most and copies * 2 * lanes <= upper(size):
        copies *= 2
    return copies


def _order(facts: Facts, vector: int | None) -> tuple[int, ...]:
    axes = [a for a in range(len(facts.axes)) if a != vector]
    return (*axes, *(() if vector is None else (vector,)))


def _blocks(
    kernel: Kernel,
    facts: Facts,
    unroll: tuple[int, ...],
    vector: int | None,
    order: tuple[int, ...],
    depth: int,
    target: Target,
) -> tuple:
    """Outputs per work-group: enough work each, and some groups for every core."""
    block: list = list(unroll)
    if vector is not None:
        block[vector] *= target.lanes
    total = 1
    for a in range(len(block)):
        total *= facts.extent(a)
    if not target.is_cpu:
        return tuple(block)
    if total * depth <= SMALL:  # sharing it would cost more than it saves
        return kernel.root.shape
    most = max(1, total // (4 * target.cores))  # outputs in one group
    for a in reversed(order):
        size = kernel.root.shape[a]
        if facts.axes[a] is None:
            block[a] = 1
            continue
        made = 1
        for b in block:
            made *= upper(b)
        while made * 2 <= most and made * depth < WORK and upper(block[a]) < facts.extent(a):
            block[a] *= 2
            made *= 2
        if upper(block[a]) >= facts.extent(a):
            block[a] = size
    return tuple(block)
