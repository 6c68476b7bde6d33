"""A captured program on a CPU as ONE kernel that runs through a table of steps.

Launching hundreds of small kernels costs more than running them. Here one worker (work-group) per
core walks the same table. Each has a lane: its share of every step (runs.py); before a share that
needs what other lanes made, it waits for those lanes to have come that far, and for nothing else.

Shares aren't bound to workers. Each is claimed before it is done, and whoever has to wait for a
lane that stands still goes on with that lane himself. So a worker waits only for shares that
another worker is running at that moment, never for a worker to turn up, and can't hang for want of
a thread: the earliest share of all that aren't done needs nothing that isn't, so someone is running
it or whoever waits may.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.render import assemble
from engine.runtime import DEBUG, DeviceError, Step
from engine.runtime.driver import (
    BUFFERS,
    FIRST,
    FUNCTION,
    GROUPS,
    LINE,
    PARTS,
    SHARERS,
    STUCK,
    driver,
)
from engine.runtime.ints import Ints
from engine.runtime.runs import is_long, plan_runs, sharers
from engine.symbolic import Expr, evaluate

if TYPE_CHECKING:
    from engine.runtime.opencl import OpenCLDevice

PROGRAM = "zoo_program"  # the kernel that `driver` writes


class Persistent:
    """The steps of a program, ready to run in one launch."""

    def __init__(self, device: OpenCLDevice, steps: list[Step]) -> None:
        self.device = device
        self.steps = steps
        self.workers = device.target.cores
        self.functions = list(dict.fromkeys(s.function for s in steps))
        self.ints = Ints(device, steps)
        self.runs = plan_runs(steps, self.workers)
        rows = np.array([[r.first, r.end, r.lanes, *r.needs] for r in self.runs], np.int32)
        self.table = self._table()
        self.at, self.claimed = (_shared(np.zeros(self.workers * LINE, np.int32)) for _ in "ab")
        self.taken = _shared(np.zeros(LINE + int(self.table[:, PARTS].max()) + LINE, np.int32))
        self.failed = _shared(np.zeros(1, np.int32))
        self.times = _shared(np.zeros((len(steps), self.workers), np.uint64))
        self.moving = [i for i, s in enumerate(steps) if isinstance(s.groups, Expr)]
        source = driver(self.functions, self.table.shape[1], DEBUG >= 1, STUCK)
        self.built = device.build(assemble(self.functions, device.target) + source, [PROGRAM])
        self.kernel = device.cl.Kernel(self.built.program, PROGRAM)
        counters = (self.at, self.claimed, self.taken, self.failed, self.times)
        self.kept = [device.wrap_shared(a) for a in (self.table, _shared(rows), *counters)]
        table, runs, *state = (m.buffer for m in self.kept)
        arguments = (table, runs, self.ints.memory.buffer, *state, np.int32(len(self.runs)))
        for i, argument in enumerate(arguments):
            self.kernel.set_arg(i, argument)

    def _table(self) -> np.ndarray:
        """Of each step: which function, on which addresses, and how lanes share it."""
        width = BUFFERS + max(len(s.buffers) for s in self.steps)
        table = _shared(np.zeros((len(self.steps), width), np.uint64))
        numbers = {f: i for i, f in enumerate(self.functions)}
        parts = LINE
        for row, step in zip(table, self.steps):
            row[FUNCTION] = numbers[step.function]
            row[GROUPS] = step.groups if isinstance(step.groups, int) else 0
            row[SHARERS] = sharers(step, self.workers)
            if self.workers > 1 and is_long(step, self.workers):
                row[PARTS] = parts
                parts += self.workers
            row[FIRST] = self.ints.places.get(step.variables, 0)
            row[BUFFERS : BUFFERS + len(step.buffers)] = [b.address for b in step.buffers]
        return table

    def __call__(self, values: Mapping[Expr, int]) -> None:
        device = self.device
        if device.running:
            device.queue.finish()  # the table and the state are ours only when nothing runs
            device.running.clear()
        for i in self.moving:
            self.table[i, GROUPS] = evaluate(self.steps[i].groups, values)
        self.ints.set(values)
        for counters in (self.at, self.claimed, self.taken, self.failed):
            counters[:] = 0
        begun = time.perf_counter()
        device.cl.enqueue_nd_range_kernel(device.queue, self.kernel, (self.workers,), (1,))
        device.queue.finish()
        if self.failed[0]:
            raise DeviceError("a program's workers wait for each other for minutes; is it paused?")
        self.built.ran([PROGRAM])
        if DEBUG >= 1:
            self._report(values, (time.perf_counter() - begun) * 1e6)

    def _report(self, values: Mapping[Expr, int], elapsed: float) -> None:
        """Time per step, that of its slowest lane without waiting; their sum; and all there was."""
        times = self.times.max(1) * (1e3 / _clock_khz())
        for step, taken in zip(self.steps, times):
            print(step.report(taken, values), file=sys.stderr)
        line = f"{times.sum():9.1f} us  in {len(times)} steps"
        print(
            f"{line}, {elapsed:.1f} us with {len(self.runs)} waits and the launch", file=sys.stderr
        )


def _clock_khz() -> float:
    """The rate of the cycle counter: the processor's nominal one."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return float(line.partition(":")[2]) * 1e3
    return 1e6


def _shared(array: np.ndarray) -> np.ndarray:
    """A copy that starts on a cache line."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    out = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out
