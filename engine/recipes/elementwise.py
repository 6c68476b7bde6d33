"""Elementwise chains and copies: lanes along whichever axis lies in a row in memory."""

from __future__ import annotations

from engine.graph import ELEMENTWISE, Op, make, reshape, toposort
from engine.ir import Target
from engine.lower import Plan
from engine.recipes.analysis import Facts, analyse, contiguous_score
from engine.schedule import Kernel
from engine.symbolic import Expr, Int, linear_in, product, upper

GROUP = 8192  # elements per work-group
MANY = 1 << 16  # outputs that don't stay in the caches next to a core
SQUARE = 32  # elements along either side
COPIES = 64  # of a loop's body, at most
AHEAD = 2048  # bytes: a few lines, so that memory is at work all the time


def flattened(kernel: Kernel) -> tuple[Kernel, Facts | None]:
    """The kernel with its output as one axis, when every read then still lies in a row."""
    root = kernel.root
    if kernel.box is not None or sum(n != 1 for n in root.shape) < 2:
        return kernel, None
    if any(n.op in (Op.REDUCE, Op.GATHER, Op.INTRINSIC) for n in toposort([root])):
        return kernel, None
    shape = (product(root.shape),)
    old = kernel.target
    flat = Kernel(reshape(root, shape), make(Op.BUFFER, (), old.arg, old.dtype, shape))
    facts = analyse(flat)
    (var,) = facts.axes
    if all(load.stride(var) in (0, 1) for load in facts.loads):
        return flat, facts
    return kernel, None


def match(kernel: Kernel, facts: Facts, target: Target) -> Plan | None:
    """Anything: the last recipe."""
    shape = kernel.root.shape
    rank = len(shape)
    wide = [a for a in range(rank) if facts.axes[a] is not None]
    # lanes that are read one by one still calculate together
    arithmetic = sum(n.op in ELEMENTWISE for n in toposort([kernel.root]))
    best, vector = -1 - arithmetic, None
    for a in reversed(wide):
        var = facts.axes[a]
        score = contiguous_score(facts, facts.loads, var)
        if score is None or facts.extent(a) < target.lanes:
            continue
        score += _store_score(facts.store, var)
        if score > best:
            best, vector = score, a
    if target.lanes == 1:
        vector = None
    order = _order(facts, vector)
    unroll = _unroll(facts, vector, target)
    block: list = list(unroll)
    room = max(1, GROUP // product(unroll)) if target.is_cpu else 1
    crossed = _crossed(facts) if target.is_cpu and vector is None else ()
    for a in crossed:
        block[a] = min(SQUARE, upper(shape[a]))
        room = max(1, SQUARE * SQUARE // product(block))
    for a in reversed(order):
        if block[a] > 1:
            continue
        size = upper(shape[a])
        if size <= room:
            block[a] = shape[a]
            room //= max(size, 1)
        else:
            lanes = target.lanes if a == vector else 1
            block[a] = max(1, room // lanes * lanes)
            room = 1
        if room <= 1:
            break
    return Plan(
        "elementwise",
        tuple(block),
        unroll,
        tuple(order),
        vector,
        target.lanes if vector is not None else 1,
        ahead=ahead(kernel, target),
    )


def _unroll(facts: Facts, vector: int | None, target: Target) -> tuple[int, ...]:
    """Copies along each axis: of all places of a short one by whose number values are chosen.

    Each copy then has no choice left, and what several of them need is computed once.
    """
    unroll = [1] * len(facts.axes)
    if target.is_cpu and vector is not None:
        room = COPIES
        for a, var in enumerate(facts.axes):
            if var in facts.counted and a != vector and facts.sizes[var] in range(2, room + 1):
                unroll[a] = facts.sizes[var]
                room //= unroll[a]
    return tuple(unroll)


def _crossed(facts: Facts) -> tuple[int, ...]:
    """The axis along which the largest thing lies that is read, and that along which the output
    does, if they are others: a square of both uses all of each line of memory while it is near."""
    largest = max(facts.loads, key=lambda load: upper(load.buffer.numel), default=None)
    if largest is None:
        return ()
    axes = [a for a, var in enumerate(facts.axes) if var is not None]
    read = [a for a in axes if largest.stride(facts.axes[a]) == 1]
    return (read[0], axes[-1]) if read and axes[-1] not in read else ()


def _order(facts: Facts, vector: int | None) -> list[int]:
    """The loops' axes, the vector last.

    If lanes are read from a row, the others are in the order in which the largest thing that is
    read lies: reads wait for memory, writes don't. Otherwise they are in the order of the output.
    """
    last = [] if vector is None else [vector]
    axes = [a for a in range(len(facts.axes)) if a != vector]
    largest = max(facts.loads, key=lambda load: upper(load.buffer.numel), default=None)
    if largest is None or vector is None or largest.stride(facts.axes[vector]) != 1:
        return axes + last
    steps = {a: 1 if (var := facts.axes[a]) is None else largest.stride(var) for a in axes}
    if not all(steps.values()):  # read again and again, or by steps that vary
        return axes + last
    return sorted(axes, key=lambda a: -abs(steps[a])) + last


def ahead(kernel: Kernel, target: Target) -> int:
    """How far ahead of its writes a kernel fetches memory: not at all where caches hold it."""
    many = upper(product(kernel.root.shape)) >= MANY
    return AHEAD // kernel.target.dtype.itemsize if many and target.is_cpu else 0


def _store_score(store: Int, var: Expr) -> int:
    """Lanes that are written side by side count for more than ones that are read so."""
    found = linear_in(store, var)
    return 2 if found and found[0] == 1 else -4


def scattered(kernel: Kernel, target: Target) -> Plan:
    """Rows that go where ints say: one after the other, each with lanes along it."""
    rows, size = kernel.root.shape
    lanes = target.lanes if target.lanes > 1 and upper(size) >= target.lanes else 1
    together = size if target.is_cpu else 1
    return Plan("scatter", (1, together), (1, 1), (0, 1), 1 if lanes > 1 else None, lanes)
