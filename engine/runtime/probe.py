"""Which processor features the OpenCL compiler accepts: each tried once, in its own process.

The processor's flags say what it can do, not what the driver's compiler was told; and a compiler
that doesn't know an instruction may end the whole process. Results are kept on disk per device.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.clib import helpers
from engine.dtype import bfloat16_to_float32, float32_to_bfloat16
from engine.ir import Target
from engine.runtime.host import allow_tiles, cache_folder, save, saved

PLACE = 4096  # bytes for the input, and for the output, of a trial
SECONDS = 60  # a compiler that takes longer than this is not to be relied on

DOTS = """static void dots(__global int* out, __global const int* given) {
  int16 sum = *(__global const int16*)(given + 32);
  int16 a = *(__global const int16*)given, b = *(__global const int16*)(given + 16);
  __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  *(__global int16*)out = sum;
}"""
PAIRS = """static void pairs(__global ushort* out, __global const float* given) {
  float16 low = *(__global const float16*)given, high = *(__global const float16*)(given + 16);
  __asm__ volatile("vcvtne2ps2bf16 %1, %2, %%zmm0\\n vmovdqu16 %%zmm0, (%0)"
                   :: "r"(out), "v"(low), "v"(high) : "xmm0", "memory");
}"""
TILES = """static void NAME(__global KIND* out, __global const uchar* given) {
  __asm__ volatile("ldtilecfg (%0)\\n tilezero %%tmm0\\n tileloadd (%1, %3, 1), %%tmm1\\n"
                   "tileloadd (%1, %3, 1), %%tmm2\\n INSTRUCTION %%tmm2, %%tmm1, %%tmm0\\n"
                   "tilestored %%tmm0, (%2, %3, 1)\\n tilerelease"
                   :: "r"(given), "r"(given + 64), "r"(out), "r"(64L) : "memory");
}"""


def _halves(lanes: int) -> Trial:
    number, half = ("float", "ushort") if lanes == 1 else (f"float{lanes}", f"ushort{lanes}")
    features = frozenset({"f16c", "avx512f"} if lanes == 16 else {"f16c"})
    name = f"unpack_float16_{number}"
    source = f"""{helpers(Target("opencl-cpu", True, lanes, 1, features))[name]}
static void halves{lanes}(__global {number}* out, __global const {half}* given) {{
  for (int i = 0; i < {64 // lanes}; i++) out[i] = {name}(given[i]);
}}"""
    values = np.arange(64, dtype=np.float16) * np.float16(0.37)
    return Trial(f"halves{lanes}", source, values, values.astype(np.float32))


def _functions() -> Trial:
    """exp2, log2 and their like, where they are exact: on whole powers."""
    target = Target("opencl-cpu", True, 16, 1, frozenset({"avx512f", "avx512dq"}))
    names = [f"zoo_{op}_float16" for op in ("exp2", "log2", "sqrt", "trunc", "max")]
    source = "\n".join(helpers(target)[name] for name in names)
    source += """
static void functions(__global float16* out, __global const float16* given) {
  for (int i = 0; i < 4; i++) {
    const float16 power = zoo_exp2_float16(given[i]);
    out[i] = power;
    out[i + 4] = zoo_log2_float16(power);
    out[i + 8] = zoo_max_float16(zoo_trunc_float16(zoo_sqrt_float16(power)), given[i]);
  }
}"""
    given = np.arange(-32, 32, dtype=np.float32)
    power = np.exp2(given)
    expected = np.stack([power, given, np.maximum(np.trunc(np.sqrt(power)), given)])
    return Trial("functions", source, given, expected)


def _dots() -> Trial:
    given = np.arange(48, dtype=np.int32) * 0x01020304
    a, b = given[:16].view(np.uint8).astype(np.int32), given[16:32].view(np.int8)
    return Trial("dots", DOTS, given, (a * b).reshape(16, 4).sum(1, dtype=np.int32) + given[32:])


def _pairs() -> Trial:
    values = np.arange(32, dtype=np.float32) * np.float32(0.37)
    return Trial("pairs", PAIRS, values, float32_to_bfloat16(values))


def _tiles() -> Trial:
    numbers = float32_to_bfloat16(np.arange(512, dtype=np.float32) % 7)
    a = bfloat16_to_float32(numbers).reshape(16, 16, 2)
    return _tile_trial("tiles", "tdpbf16ps", numbers, a, a, "float")


def _byte_tiles() -> Trial:
    numbers = (np.arange(1024) * 37 % 256).astype(np.uint8)
    signed, unsigned = (numbers.view(t).reshape(16, 16, 4) for t in (np.int8, np.uint8))
    return _tile_trial("byte_tiles", "tdpbsud", numbers, signed, unsigned, "int")


def _tile_trial(
    name: str, instruction: str, numbers: np.ndarray, a: np.ndarray, b: np.ndarray, kind: str
) -> Trial:
    """The product of 16 rows of groups of numbers, a, and as many of columns, b."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32:2] = 64
    config[48:56] = 16
    out = {"int": np.int32, "float": np.float32}[kind]
    expected = np.einsum("mkp,knp->mn", a.astype(out), b.astype(out))
    source = TILES.replace("NAME", name).replace("KIND", kind).replace("INSTRUCTION", instruction)
    return Trial(name, source, np.concatenate([config, numbers.view(np.uint8)]), expected)


@dataclass(frozen=True)
class Trial:
    """A function `name(out, given)`, what it is given, and what it must make of it, to the bit."""

    name: str
    source: str
    given: np.ndarray
    expected: np.ndarray


TRIALS = {
    "f16c": lambda: _halves(1),
    "avx512f": lambda: _halves(16),
    "avx512dq": _functions,
    "avx512_vnni": _dots,
    "avx512_bf16": _pairs,
    "amx_bf16": _tiles,
    "amx_int8": _byte_tiles,
}


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
        all_work = _try(which, *wanted)  # as a rule; one process for all is quicker
        works = {f: all_work or _try(which, f) for f in wanted}
        save(path, json.dumps(works).encode())
    return flags - {f for f in wanted if not works[f]}


def _try(which: str, *features: str) -> bool:
    command = [sys.executable, "-m", "engine.runtime.probe", which, *features]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _work(which: str, trials: Sequence[Trial]) -> bool:
    """Run trials on a device, in one kernel; whether the numbers are right."""
    from engine.runtime.opencl import import_pyopencl, pick

    cl = import_pyopencl()
    device = pick(cl, which)
    context = cl.Context([device])
    queue = cl.CommandQueue(context)
    allow_tiles()
    given = np.zeros((len(trials), PLACE), np.uint8)
    calls = []
    for place, (row, trial) in enumerate(zip(given, trials)):
        data = trial.given.reshape(-1).view(np.uint8)
        row[: data.size] = data
        at = f"+ {place * PLACE}"
        calls.append(
            f"{trial.name}((__global void*)(out {at}), (__global const void*)(given {at}));"
        )
    source = (
        "\n".join(trial.source for trial in trials)
        + f"""
__kernel void trial(__global uchar* out, __global const uchar* given) {{ {" ".join(calls)} }}"""
    )
    out = np.zeros_like(given)
    flags = cl.mem_flags
    inputs = cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=given)
    made = cl.Buffer(context, flags.WRITE_ONLY, out.nbytes)
    program = cl.Program(context, source).build(cache_dir=False)
    cl.Kernel(program, "trial")(queue, (1,), None, made, inputs)
    cl.enqueue_copy(queue, out, made)
    wanted = [trial.expected.reshape(-1).view(np.uint8) for trial in trials]
    return all((row[: w.size] == w).all() for row, w in zip(out, wanted))


if __name__ == "__main__":
    sys.exit(0 if _work(sys.argv[1], [TRIALS[name]() for name in sys.argv[2:]]) else 1)
