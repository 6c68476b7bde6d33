"""The OpenCL C with which workers walk through a program's table of steps.

Memory order: a worker's results are written before it moves its lane's `at`, and read after `at`
was seen to have moved, with a fence between the two on each side. x86 keeps loads in order, and
stores, so there the fence only binds the compiler. arm64 doesn't: `dmb ish` orders all before it
with all behind it. Volatile ints make each access one whole load or store. A claim is an atomic
exchange with a fence behind it: OpenCL 1.2 promises no order around atomics, and a lane's next run
may need what another worker wrote in that lane's last.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from engine.render import Rendered

# a row of the table, in 64-bit words
FUNCTION, GROUPS, SHARERS, PARTS, FIRST, BUFFERS = range(6)

LINE = 32  # ints that a lane's counter has for itself: processors fetch cache lines in pairs
SHARES = 4  # how many times a lane comes back for more of a part of a long step
PATIENCE = 64  # pauses, some 3 us, after which a lane that stands still may be abandoned
STUCK = 1 << 24  # turns of 64 pauses and a yield, some minutes: something has gone wrong


@dataclass(frozen=True)
class Spelling:
    """What OpenCL C has no words for, on one kind of machine."""

    fence: str
    pause: str = ""
    give_way: str = ""  # let another thread have the core
    clock: str = ""  # cycles since some time ago, into `low` and `high`


SPELLINGS = {
    "x86": Spelling(
        '__asm__ volatile("" ::: "memory");',
        '__asm__ volatile("pause" ::: "memory");',
        '{ long r; __asm__ volatile("syscall" : "=a"(r) : "0"(24L) : "rcx", "r11", "memory"); }',
        '__asm__ volatile("rdtsc" : "=a"(low), "=d"(high) :: "memory");',
    ),
    "arm64": Spelling(
        '__asm__ volatile("dmb ish" ::: "memory");', '__asm__ volatile("yield" ::: "memory");'
    ),
    "other": Spelling("mem_fence(CLK_GLOBAL_MEM_FENCE);"),
}

DRIVER = """
typedef volatile __global int* counters;
// at[lane]: runs behind it. claimed[lane]: the same while it stands still, more while it runs.
typedef struct {{
  __global const ulong* table;
  __global const int* runs;  // of each: first step, end, lanes, needs of every lane
  __global const int* ints;
  counters at, claimed, taken, failed;
  __global ulong* times;
  int count, workers;
}} zoo_state;

static inline void zoo_fence(void) {{ {fence} }}
static inline void zoo_pause(void) {{ {pause} }}
static inline void zoo_rest(void) {{
  for (int i = 0; i < 64; i++) zoo_pause();
  {give_way}
}}
static inline ulong zoo_clock(void) {{
  uint low = 0, high = 0;
  {clock}
  return ((ulong)high << 32) | low;
}}
static inline __global const int* zoo_run(const zoo_state* z, int run) {{
  return z->runs + run * (3 + z->workers);
}}
static void zoo_groups(__global const ulong* t, __global const int* ints, int g, const int end) {{
  const int first = (int)t[{FIRST}];
  switch ((int)t[{FUNCTION}]) {{
{cases}
  }}
}}
static inline int zoo_begin(int groups, int sharers, int lane) {{
  return lane * (groups / sharers) + max(0, lane - sharers + groups % sharers);  // lane 0 has least
}}
// The parts of a long step: a lane's own, which lies in one stretch, then what is left of others'.
static void zoo_parts(const zoo_state* z, __global const ulong* t, int lane) {{
  const int groups = (int)t[{GROUPS}], sharers = (int)t[{SHARERS}];
  for (int k = 0; k < sharers; k++) {{
    const int part = (lane + k) % sharers, begin = zoo_begin(groups, sharers, part);
    const int size = zoo_begin(groups, sharers, part + 1) - begin, share = max(1, size / {shares});
    counters taken = z->taken + t[{PARTS}] + part;
    for (int g; *taken < size && (g = atomic_add(taken, share)) < size;)
      zoo_groups(t, z->ints, begin + g, begin + min(g + share, size));
  }}
}}
static void zoo_steps(const zoo_state* z, int run, int lane) {{
  const int end = zoo_run(z, run)[1];
  for (int s = zoo_run(z, run)[0]; s < end; s++) {{
    __global const ulong* t = z->table + s * {width};
    const int groups = (int)t[{GROUPS}], sharers = (int)t[{SHARERS}];
    if (lane >= sharers) continue;
    {before}
    if (sharers == 1) zoo_groups(t, z->ints, 0, groups);
    else if (t[{PARTS}]) zoo_parts(z, t, lane);
    else {{
      const int begin = zoo_begin(groups, sharers, lane);
      zoo_groups(t, z->ints, begin, zoo_begin(groups, sharers, lane + 1));
    }}
    {after}
  }}
}}
static bool zoo_ready(const zoo_state* z, int run) {{
  __global const int* needs = zoo_run(z, run) + 3;
  for (int lane = 0; lane < z->workers; lane++)
    if (needs[lane] && z->at[lane * {line}] < needs[lane]) return false;
  zoo_fence();
  return true;
}}
// Do a lane's next run, if nobody else has begun it.
static bool zoo_advance(const zoo_state* z, int lane, int run) {{
  int next = run + 1;
  while (next < z->count && lane >= zoo_run(z, next)[2]) next++;
  if (atomic_cmpxchg(z->claimed + lane * {line}, run, next) != run) return false;
  zoo_fence();
  zoo_steps(z, run, lane);
  zoo_fence();
  z->at[lane * {line}] = next;
  return true;
}}
// Do what is ready in lanes that stand still before a run: their workers may not have turned up.
static bool zoo_help(const zoo_state* z, int me, int before) {{
  bool helped = false;
  for (int k = 1; k < z->workers; k++) {{
    const int lane = (me + k) % z->workers, run = z->at[lane * {line}];
    if (run < before && z->claimed[lane * {line}] == run && zoo_ready(z, run))
      helped |= zoo_advance(z, lane, run);
  }}
  return helped;
}}
static bool zoo_wait(const zoo_state* z, int me, int run) {{
  for (int spin = 0; z->at[me * {line}] == run; spin++) {{
    if (z->claimed[me * {line}] == run && zoo_ready(z, run)) return true;
    if (spin < {patience}) zoo_pause();
    else if (zoo_help(z, me, run)) spin = {patience};
    else if (spin < 512) zoo_pause();
    else zoo_rest();
    if (*z->failed || spin > {stuck}) {{ *z->failed = 1; return false; }}
  }}
  return true;
}}
__kernel __attribute__((reqd_work_group_size(1,1,1)))
void zoo_program(__global const ulong* table, __global const int* runs, __global const int* ints,
                 counters at, counters claimed, counters taken, counters failed,
                 __global ulong* times, int count) {{
  const int workers = get_num_groups(0), me = get_group_id(0);
  const zoo_state z = {{table, runs, ints, at, claimed, taken, failed, times, count, workers}};
  if (workers == 1) {{
    for (int run = 0; run < count; run++) zoo_steps(&z, run, 0);
    return;
  }}
  for (int run; (run = at[me * {line}]) < count;)
    if (!zoo_wait(&z, me, run)) return;
    else if (at[me * {line}] == run) zoo_advance(&z, me, run);
  while (zoo_help(&z, me, count)) {{}}
}}
"""


def driver(functions: Sequence[Rendered], width: int, timed: bool, stuck: int) -> str:
    """The kernel `zoo_program` over rows of `width` words that call these functions.

    timed: it also writes the cycles that each lane takes for each step, where there is a clock.
    """
    words = SPELLINGS[_machine()]
    timed = timed and bool(words.clock)
    columns = ("FUNCTION", "GROUPS", "SHARERS", "PARTS", "FIRST")
    return DRIVER.format(
        **{name: globals()[name] for name in columns},
        fence=words.fence,
        pause=words.pause,
        give_way=words.give_way,
        clock=words.clock,
        cases="\n".join(_case(i, f) for i, f in enumerate(functions)),
        before="const ulong begun = zoo_clock();" if timed else "",
        after="z->times[s * z->workers + lane] = zoo_clock() - begun;" if timed else "",
        width=width,
        line=LINE,
        shares=SHARES,
        patience=PATIENCE,
        stuck=stuck,
    )


def _machine() -> str:
    name = platform.machine().lower()
    if name in ("x86_64", "amd64") and sys.platform == "linux":
        return "x86"
    return "arm64" if name in ("aarch64", "arm64") else "other"


def _case(number: int, f: Rendered) -> str:
    buffers = [
        f"(__global {'const ' if i else ''}{kind}*)t[{BUFFERS + i}]"
        for i, kind in enumerate(f.types)
    ]
    passed = [*buffers, *(["ints", "first"] if f.has_ints else []), "g"]
    call = f"{f.name}({', '.join(passed)})"
    return f"    case {number}: for (; g < end; g++) {call}; break;"
