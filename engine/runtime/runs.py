"""Which steps of a program a worker does in one go, and what it waits for before them.

Each worker has a lane: its share of every step, in the program's order. Steps that need nothing
new of other lanes form one Run. A step so small that sharing it would cost more than doing it lies
in lane 0 alone, and a chain of such steps is one Run: nobody waits inside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.runtime import Step
from engine.symbolic import upper

ENOUGH = 1 << 14  # operations and bytes, a microsecond or less, that are worth a lane's while
LONG = 1 << 22  # as many for each lane make a step worth balancing between lanes


@dataclass
class Run:
    """The steps from `first` up to `end`, which a lane does without waiting in between.

    lanes: how many lanes have a share in it. needs: for each lane, how many runs it must have
    behind it before this one begins, (lanes of the program,) int64.
    """

    first: int
    end: int
    lanes: int
    needs: np.ndarray


def sharers(step: Step, workers: int) -> int:
    """How many lanes share a step: each has a group at least, and enough to do."""
    return max(1, min(workers, upper(step.groups), _work(step) // ENOUGH))


def is_long(step: Step, workers: int) -> bool:
    """Whether a step takes so long that lanes which are done should help those that aren't."""
    return sharers(step, workers) == workers and _work(step) > workers * LONG


def plan_runs(steps: Sequence[Step], workers: int) -> list[Run]:
    """The runs of a program, in order.

    Before a step begins, what it reads must have been written, and what it writes must no longer
    be in use, by every lane with a share in that. A lane does its runs in order, so the latest of
    those runs is all that has to be waited for in it.
    """
    edges = sorted({edge for step in steps for piece in _pieces(step) for edge in piece})
    wrote, used = (np.zeros((len(edges), workers), np.int64) for _ in range(2))
    runs: list[Run] = []
    for number, step in enumerate(steps):
        written, *read = [
            slice(bisect_left(edges, start), bisect_left(edges, end))
            for start, end in _pieces(step)
        ]
        before = [wrote[written], used[written], *(wrote[span] for span in read)]
        needs = np.concatenate(before).max(0, initial=0)
        lanes = sharers(step, workers)
        if lanes == 1:
            needs[0] = 0  # lane 0 comes to it after all that it did itself
        if runs and (needs <= runs[-1].needs).all():
            runs[-1].end = number + 1
            runs[-1].lanes = max(runs[-1].lanes, lanes)
        else:
            runs.append(Run(number, number + 1, lanes, needs))
        wrote[written, :lanes] = len(runs)
        for span in read:
            used[span, :lanes] = len(runs)
    return runs


def _work(step: Step) -> int:
    return upper(step.flops) + upper(step.nbytes)


def _pieces(step: Step) -> list[tuple[int, int]]:
    """(start, end) in memory of each buffer, the written one first."""
    return [(b.address, b.address + n) for b, n in zip(step.buffers, step.sizes)]
