"""Other ways to cut a kernel's loops, and which of some timed runs is the fastest.

A recipe's plan is a good guess for all machines; the cuts around it are as right, and one of them
may be faster on this one. What won is kept as text beside the name of the code it replaces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engine.graph import Op, toposort
from engine.lower import Plan
from engine.schedule import Kernel
from engine.symbolic import Int, upper
from engine.tiles import TilePlan, rows_in_all

COPIES = (1, 2, 3, 4, 6, 8)  # of a loop's body
MOST_COPIES = 24  # in all: more values than that don't stay in registers
CLIMBS = 2  # steps from a recipe's plan, each to a neighbour of the last
MARGIN = 0.97  # of the time, at most: less of a gain is noise


def candidates(kernel: Kernel, plan: Plan) -> list[Plan]:
    """The plans that differ from this one in one respect: how much a work-group makes along an
    axis, how many copies of a loop's body there are, which groups follow each other, how far ahead
    memory is fetched."""
    found = [*_other_blocks(kernel, plan), *_other_copies(kernel, plan)]
    if isinstance(plan, TilePlan) and plan.rows:
        counting = tuple(a for a, _ in plan.rows)
        rest = tuple(a for a in plan.grid if a not in counting)
        found += [replace(plan, grid=grid) for grid in (rest + counting, counting + rest)]
    if plan.ahead:
        found += [replace(plan, ahead=n) for n in (0, plan.ahead // 2, plan.ahead * 2)]
    return [p for p in dict.fromkeys(found) if p != plan]


def restored(kernel: Kernel, plan: Plan, text: str) -> Plan | None:
    """The plan within CLIMBS steps of this one whose `cut` is the text; None if there is none."""
    reached = {cut(plan): plan}
    for _ in range(CLIMBS):
        if text in reached:
            break
        for known in list(reached.values()):
            for other in candidates(kernel, known):
                reached.setdefault(cut(other), other)
    return reached.get(text)


def cut(plan: Plan) -> str:
    """What tells a plan from its neighbours."""
    sizes = ", ".join(map(str, plan.block))
    copies = ", ".join(map(str, plan.unroll))
    text = f"block {sizes} unroll {copies} reduce {plan.reduce_unroll} ahead {plan.ahead}"
    return f"{text} grid {plan.grid}" if isinstance(plan, TilePlan) else text


def table(data: bytes | None) -> dict[str, str]:
    """What `json.dumps` made of a table of winners; empty for anything else."""
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {name: text for name, text in entries if isinstance(text, str)}


def fastest(runs: Sequence[Callable[[], float]], seconds: float) -> int:
    """Which of some runs, each giving how long it took, is the fastest: the first, unless another
    takes at most MARGIN of its time.

    They take turns, so that a busy moment of the machine hits them all. The slower half of the
    first one's rivals leaves from time to time, until there is one left for a last comparison. It
    all takes `seconds`, or two turns and a half of each run if that is longer.
    """
    rivals = list(range(1, len(runs)))
    phases = max(1, len(rivals).bit_length())
    while rivals:
        best: dict[int, float] = {}
        left = seconds / phases
        while left > 0:
            for i in (0, *rivals):
                taken = runs[i]()
                best[i] = min(taken, best.get(i, taken))
                left -= taken
        rivals.sort(key=lambda i: best[i])
        if len(rivals) == 1:
            return rivals[0] if best[rivals[0]] <= MARGIN * best[0] else 0
        rivals = rivals[: len(rivals) // 2]
    return 0


def _other_blocks(kernel: Kernel, plan: Plan) -> Iterator[Plan]:
    """Half and double of what a work-group makes along an axis."""
    for axis, size in enumerate(kernel.root.shape):
        unit = plan.unroll[axis] * (plan.lanes if axis == plan.vector else 1)
        if isinstance(plan, TilePlan):
            if not plan.rows or axis != plan.rows[0][0]:
                continue  # a group makes what reads one column of tiles
            size = rows_in_all(kernel.root.shape, plan.rows)
            unit = min(node.arg.strip for node, _ in plan.where)
        now = upper(plan.block[axis])
        if upper(size) == 1 or (plan.recipe == "rows" and now >= upper(size)):
            continue  # every part of a row would reduce it again
        for wanted in (now // 2, now * 2):
            yield _with_block(plan, axis, size, _whole_units(wanted, unit))


def _other_copies(kernel: Kernel, plan: Plan) -> Iterator[Plan]:
    """More or fewer copies of the innermost loops' bodies, and of the sums' steps."""
    shape = kernel.root.shape
    inner = [a for a in plan.order if upper(shape[a]) > 1][-2:]
    for axis in inner:
        lanes = plan.lanes if axis == plan.vector else 1
        for copies in _beside(plan.unroll[axis]):
            unroll = (*plan.unroll[:axis], copies, *plan.unroll[axis + 1 :])
            in_all = 1
            for n in unroll:
                in_all *= n
            if copies * lanes > upper(shape[axis]) or in_all > MOST_COPIES:
                continue
            wider = replace(plan, unroll=unroll)
            if not isinstance(plan, TilePlan):
                block = _whole_units(upper(plan.block[axis]), copies * lanes)
                wider = _with_block(wider, axis, shape[axis], block)
            yield wider
    if not isinstance(plan, TilePlan) and any(n.op is Op.REDUCE for n in toposort([kernel.root])):
        for copies in _beside(plan.reduce_unroll):
            yield replace(plan, reduce_unroll=copies)


def _beside(copies: int) -> list[int]:
    """The numbers of copies next to one."""
    fewer = [n for n in COPIES if n < copies]
    more = [n for n in COPIES if n > copies]
    return fewer[-1:] + more[:1]


def _whole_units(size: int, unit: int) -> int:
    return max(1, -(-size // unit)) * unit


def _with_block(plan: Plan, axis: int, size: Int, block: int) -> Plan:
    """The plan with this block along an axis, the whole axis if it is that long."""
    if block >= upper(size):
        return replace(plan, block=(*plan.block[:axis], size, *plan.block[axis + 1 :]))
    return replace(plan, block=(*plan.block[:axis], block, *plan.block[axis + 1 :]))
