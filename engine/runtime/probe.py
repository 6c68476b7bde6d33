"""Which processor features the OpenCL compiler accepts: each tried once, in its own process.

The processor's flags say what it can do, not what the driver's compiler was told; and a compiler
that doesn't know an instruction may end the whole process. Results are kept on disk per device.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable

import numpy as np

from engine.clib import helpers
from engine.ir import Target
from engine.runtime.host import cache_folder, save, saved

# feature -> (lanes, the other features its code needs)
TRIALS = {"f16c": (1, ()), "avx512f": (16, ("f16c",))}
SECONDS = 60  # a compiler that takes longer than this is not to be relied on


def accepted(which: str, identity: str, flags: Iterable[str]) -> frozenset[str]:
    """`flags` without those features whose code doesn't compile and run on device `which`."""
    flags = frozenset(flags)
    wanted = sorted(flags & TRIALS.keys())
    if not wanted:
        return flags
    key = hashlib.sha256("\0".join([identity, *wanted]).encode()).hexdigest()[:16]
    path = cache_folder() / f"features-{key}.json"
    try:
        works = json.loads(saved(path) or b"{}")
        known = all(isinstance(works[f], bool) for f in wanted)
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        works = {f: _try(which, f) for f in wanted}
        save(path, json.dumps(works).encode())
    return flags - {f for f in wanted if not works[f]}


def _try(which: str, feature: str) -> bool:
    command = [sys.executable, "-m", "engine.runtime.probe", which, feature]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _trial(which: str, feature: str) -> bool:
    """Convert some halves with the feature's code; whether the numbers are right."""
    from engine.runtime.opencl import import_pyopencl, pick

    cl = import_pyopencl()
    device = pick(cl, which)
    context = cl.Context([device])
    queue = cl.CommandQueue(context)
    lanes, needs = TRIALS[feature]
    target = Target("opencl-cpu", True, lanes, 1, frozenset({feature, *needs}))
    number, half = ("float", "ushort") if lanes == 1 else (f"float{lanes}", f"ushort{lanes}")
    name = f"unpack_float16_{number}"
    source = f"""{helpers(target)[name]}
__kernel void trial(__global {number}* out, __global const {half}* halves) {{
  out[get_global_id(0)] = {name}(halves[get_global_id(0)]);
}}"""
    values = np.arange(64, dtype=np.float16) * np.float16(0.37)
    out = np.zeros(64, np.float32)
    flags = cl.mem_flags
    given = cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=values)
    made = cl.Buffer(context, flags.WRITE_ONLY, out.nbytes)
    program = cl.Program(context, source).build(cache_dir=False)
    cl.Kernel(program, "trial")(queue, (64 // lanes,), None, made, given)
    cl.enqueue_copy(queue, out, made)
    return bool((out == values.astype(np.float32)).all())


if __name__ == "__main__":
    sys.exit(0 if _trial(*sys.argv[1:3]) else 1)
