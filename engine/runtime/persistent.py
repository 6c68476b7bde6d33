"""A captured program on a CPU as ONE kernel that runs through a table of steps.

Launching hundreds of small kernels costs more than running them. Here one work-group per core walks
the same table; in each step it takes every n-th of the step's groups, and where a step needs what
another made, they wait for each other in a spin barrier.

Waiting can't last for ever: before any work all work-groups must meet within a short time, which
proves that each has a thread of its own. If they don't (fewer threads than the system promised),
none of them does anything and one alone runs the whole table.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.render import Rendered, assemble
from engine.runtime import DEBUG, DeviceError, Step
from engine.symbolic import Expr, evaluate

if TYPE_CHECKING:
    from engine.runtime.opencl import OpenCLDevice

# a row of the table, in 64-bit words
FUNCTION, GROUPS, WAIT, FIRST, CYCLES, BUFFERS = range(6)

# words of the state, each 128 bytes from the next so that no two share a cache line
ARRIVED, DECIDED, FAILED, FLAGS = (32 * i for i in range(4))
GO, ABANDONED = 1, 2

MEET = 1 << 15  # turns of 64 pauses and a yield until a work-group gives up on the others
STUCK = 1 << 24  # the same inside the program: minutes

PAUSE = {
    "x86": (
        '__asm__ volatile("pause" ::: "memory");',
        '{ long r; __asm__ volatile("syscall" : "=a"(r) : "0"(24L) : "rcx", "r11", "memory"); }',
    ),
    "other": ("", ""),
}
CLOCK = """
static inline ulong zoo_clock(void) {
  uint low, high;
  __asm__ volatile("rdtsc" : "=a"(low), "=d"(high) :: "memory");
  return ((ulong)high << 32) | low;
}
"""

DRIVER = """
typedef volatile __global uint* words;
static inline void zoo_rest(void) {{
  for (int i = 0; i < 64; i++) {{ {pause} }}
  {give_way}
}}
static bool zoo_meet(words state, uint count) {{
  if (atomic_inc(state + {ARRIVED}) + 1 == count) atomic_cmpxchg(state + {DECIDED}, 0u, {GO}u);
  for (uint turn = 0; state[{DECIDED}] == 0; turn++) {{
    if (turn > {MEET}) atomic_cmpxchg(state + {DECIDED}, 0u, {ABANDONED}u);
    zoo_rest();
  }}
  return state[{DECIDED}] == {GO}u;
}}
static bool zoo_wait(words state, uint me, uint count, uint epoch) {{
  mem_fence(CLK_GLOBAL_MEM_FENCE);
  atomic_xchg(state + {FLAGS} + 32 * me, epoch);
  for (uint other = 0; other < count; other++) {{
    for (uint spin = 0; state[{FLAGS} + 32 * other] < epoch; spin++) {{
      if (spin < 256) {{ {pause} }} else zoo_rest();
      if (state[{FAILED}] || spin > {STUCK}) {{ state[{FAILED}] = 1; return false; }}
    }}
  }}
  mem_fence(CLK_GLOBAL_MEM_FENCE);
  return true;
}}
__kernel __attribute__((reqd_work_group_size(1,1,1)))
void zoo_program(__global ulong* table, int steps, words state, __global const int* ints) {{
  const uint me = get_group_id(0), count = get_num_groups(0);
  if (count > 1 && !zoo_meet(state, count)) return;
  uint epoch = 0;
  for (int s = 0; s < steps; s++) {{
    __global ulong* t = table + s * {width};
    {before}
    if (count > 1 && t[{WAIT}] && !zoo_wait(state, me, count, ++epoch)) return;
    const int groups = (int)t[{GROUPS}], first = (int)t[{FIRST}];
    switch ((int)t[{FUNCTION}]) {{
{cases}
    }}
    {after}
  }}
}}
"""


class Persistent:
    """The steps of a program, ready to run in one launch."""

    def __init__(self, device: OpenCLDevice, steps: list[Step]) -> None:
        from engine.runtime.opencl import Ints

        self.device = device
        self.steps = steps
        self.functions = list(dict.fromkeys(s.function for s in steps))
        self.ints = Ints(device, steps)
        width = BUFFERS + max(len(s.buffers) for s in steps)
        self.table = _shared(np.zeros((len(steps), width), np.uint64))
        self.state = _shared(np.zeros(FLAGS + 32 * device.target.cores, np.uint32))
        self._fill()
        self.moving = [i for i, s in enumerate(steps) if isinstance(s.groups, Expr)]
        self.built = device.build(self._source(width))
        self.kernel = device.cl.Kernel(self.built.program, "zoo_program")
        self.kept = [device.wrap_shared(a) for a in (self.table, self.state)]
        for i, a in enumerate(
            [
                self.kept[0].buffer,
                np.int32(len(steps)),
                self.kept[1].buffer,
                self.ints.memory.buffer,
            ]
        ):
            self.kernel.set_arg(i, a)
        self.groups = device.target.cores

    def _fill(self) -> None:
        """The table: which function, on which addresses, after whom."""
        since: list[Step] = []  # steps after the last wait
        for row, step in zip(self.table, self.steps):
            wait = any(_depends(step, earlier) for earlier in since)
            since = [step] if wait else [*since, step]
            row[FUNCTION] = self.functions.index(step.function)
            row[GROUPS] = step.groups if isinstance(step.groups, int) else 0
            row[WAIT] = wait
            row[FIRST] = self.ints.places.get(step.variables, 0)
            row[BUFFERS : BUFFERS + len(step.buffers)] = [b.address for b in step.buffers]

    def _source(self, width: int) -> str:
        is_x86 = platform.machine() in ("x86_64", "AMD64") and sys.platform == "linux"
        pause, give_way = PAUSE["x86" if is_x86 else "other"]
        cases = "\n".join(_case(i, f) for i, f in enumerate(self.functions))
        timed = is_x86 and DEBUG >= 1
        before = "const ulong begun = zoo_clock();" if timed else ""
        after = f"if (me == 0) t[{CYCLES}] = zoo_clock() - begun;" if timed else ""
        names = {k: v for k, v in globals().items() if k.isupper() and isinstance(v, int)}
        driver = (CLOCK if timed else "") + DRIVER.format(
            pause=pause,
            give_way=give_way,
            cases=cases,
            width=width,
            before=before,
            after=after,
            **names,
        )
        return assemble(self.functions, self.device.target) + driver

    def __call__(self, values: Mapping[Expr, int]) -> None:
        device = self.device
        if device.running:
            device.queue.finish()  # the table and the state are ours only when nothing runs
            device.running.clear()
        for i in self.moving:
            self.table[i, GROUPS] = evaluate(self.steps[i].groups, values)
        self.ints.set(values)
        self._launch(self.groups)
        if self.groups > 1 and self.state[DECIDED] == ABANDONED:
            self.groups = 1  # this process has fewer threads than cores: go on with one
            self._launch(1)
        if self.state[FAILED]:
            raise DeviceError("a program's work-groups lost each other; try again on fewer cores")
        self.built.save()
        if DEBUG >= 1:
            self._report(values)

    def _report(self, values: Mapping[Expr, int]) -> None:
        """Time per step, waiting for it included, and their sum."""
        scale = 1e3 / _clock_khz()
        times = self.table[:, CYCLES] * scale
        for step, taken in zip(self.steps, times):
            print(step.report(taken, values), file=sys.stderr)
        print(f"{times.sum():9.1f} us  in {len(times)} steps", file=sys.stderr)

    def _launch(self, groups: int) -> None:
        self.state[:] = 0
        queue = self.device.queue
        self.device.cl.enqueue_nd_range_kernel(queue, self.kernel, (groups,), (1,))
        queue.finish()


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


def _case(number: int, f: Rendered) -> str:
    buffers = [
        f"(__global {'const ' if i else ''}{kind}*)t[{BUFFERS + i}]"
        for i, kind in enumerate(f.types)
    ]
    passed = [*buffers, *(["ints", "first"] if f.has_ints else []), "g"]
    call = f"{f.name}({', '.join(passed)})"
    return f"      case {number}: for (int g = me; g < groups; g += count) {call}; break;"


def _depends(step: Step, earlier: Step) -> bool:
    """Whether a step must see another's writes, or writes what the other reads or writes."""
    (written, *read), (made, *used) = _ranges(step), _ranges(earlier)
    return any(_overlap(made, r) for r in (written, *read)) or any(
        _overlap(written, u) for u in used
    )


def _ranges(step: Step) -> Sequence[tuple[int, int]]:
    return [(b.address, b.address + n) for b, n in zip(step.buffers, step.sizes)]


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]
