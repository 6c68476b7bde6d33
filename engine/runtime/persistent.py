"""A captured program on a CPU as ONE kernel that runs through a table of steps.

Launching hundreds of small kernels costs more than running them. Here one worker (work-group) per
core walks the same table and takes groups of each step from a counter until none are left; before a
step that needs what earlier ones made, it waits until all their groups are done.

A worker waits only for groups that another worker is running at that moment, never for a worker to
turn up. So it can't hang for want of a thread: one that starts late, or never, finds the work done.
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

SHARES = 4  # how many times a worker comes back for more of its part
STUCK = 1 << 24  # turns of 64 pauses and a yield, some minutes: something has gone wrong

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

# done[s]: how many groups of step s are. taken[s][part]: how many of a part are, or are under way.
# Each worker begins with a part of its own, so that it reads one stretch of the weights; then it
# helps with the others'. t[WAIT]: how many steps before s to wait for.
DRIVER = """
typedef volatile __global int* counters;
static inline void zoo_rest(void) {{
  for (int i = 0; i < 64; i++) {{ {pause} }}
  {give_way}
}}
static bool zoo_wait(__global const ulong* t, int s, counters done, counters failed) {{
  for (int k = 1; k <= (int)t[{WAIT}]; k++) {{
    const int groups = (int)t[{GROUPS} - k * {width}];
    for (int spin = 0; done[s - k] < groups; spin++) {{
      if (spin < 512) {{ {pause} }} else zoo_rest();
      if (*failed || spin > {stuck}) {{ *failed = 1; return false; }}
    }}
  }}
  mem_fence(CLK_GLOBAL_MEM_FENCE);
  return true;
}}
static void zoo_step(__global const ulong* t, __global const int* ints, int g, const int end) {{
  const int first = (int)t[{FIRST}];
  switch ((int)t[{FUNCTION}]) {{
{cases}
  }}
}}
__kernel __attribute__((reqd_work_group_size(1,1,1)))
void zoo_program(__global ulong* table, int steps, counters taken, counters done, counters failed,
                 __global const int* ints) {{
  const int workers = get_num_groups(0), me = get_group_id(0);
  for (int s = 0; s < steps; s++) {{
    __global ulong* t = table + s * {width};
    const int groups = (int)t[{GROUPS}];
    {before}
    if (workers == 1) {{
      zoo_step(t, ints, 0, groups);
    }} else {{
      if (!zoo_wait(t, s, done, failed)) return;
      int made = 0;
      for (int k = 0; k < workers; k++) {{
        const int part = (me + k) % workers;
        const int begin = groups * part / workers, size = groups * (part + 1) / workers - begin;
        const int share = max(1, size / {shares});
        counters mine = taken + s * workers + part;
        for (int g; *mine < size && (g = atomic_add(mine, share)) < size;) {{
          const int end = min(g + share, size);
          zoo_step(t, ints, begin + g, begin + end);
          made += end - g;
        }}
      }}
      mem_fence(CLK_GLOBAL_MEM_FENCE);
      if (made) atomic_add(done + s, made);
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
        self.taken, self.done, self.failed = (
            _shared(np.zeros(n, np.int32))
            for n in (len(steps) * device.target.cores, len(steps), 1)
        )
        self._fill()
        self.moving = [i for i, s in enumerate(steps) if isinstance(s.groups, Expr)]
        self.built = device.build(self._source(width))
        self.kernel = device.cl.Kernel(self.built.program, "zoo_program")
        arrays = (self.table, self.taken, self.done, self.failed)
        self.kept = [device.wrap_shared(a) for a in arrays]
        table, *counters = (m.buffer for m in self.kept)
        arguments = (table, np.int32(len(steps)), *counters, self.ints.memory.buffer)
        for i, argument in enumerate(arguments):
            self.kernel.set_arg(i, argument)

    def _fill(self) -> None:
        """The table: which function, on which addresses, after whom."""
        since: list[Step] = []  # steps after the last wait
        for row, step in zip(self.table, self.steps):
            wait = len(since) if any(_depends(step, earlier) for earlier in since) else 0
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
        after = f"t[{CYCLES}] = zoo_clock() - begun;" if timed else ""
        fields = {"pause": pause, "give_way": give_way, "cases": cases, "width": width}
        fields |= {"before": before, "after": after, "stuck": STUCK, "shares": SHARES}
        columns = {"GROUPS": GROUPS, "WAIT": WAIT, "FIRST": FIRST, "FUNCTION": FUNCTION}
        driver = (CLOCK if timed else "") + DRIVER.format(**fields, **columns)
        return assemble(self.functions, self.device.target) + driver

    def __call__(self, values: Mapping[Expr, int]) -> None:
        device = self.device
        if device.running:
            device.queue.finish()  # the table and the state are ours only when nothing runs
            device.running.clear()
        for i in self.moving:
            self.table[i, GROUPS] = evaluate(self.steps[i].groups, values)
        self.ints.set(values)
        self.taken[:] = self.done[:] = self.failed[:] = 0
        device.cl.enqueue_nd_range_kernel(device.queue, self.kernel, (device.target.cores,), (1,))
        device.queue.finish()
        if self.failed[0]:
            raise DeviceError("a program's workers wait for each other for minutes; is it paused?")
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
    return f"    case {number}: for (; g < end; g++) {call}; break;"


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
