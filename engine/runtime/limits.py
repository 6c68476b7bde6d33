"""What this machine can do at most: float operations and bytes read per second, all cores at work.

Small kernels that do nothing else, through our OpenCL device. They are a side of their own, so
that they run beside nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from engine.runtime import get_device

TRIES = 5  # the best of them counts: a limit is what is possible
SIZES = {"64 MB": 64 << 20, "1 GB": 1 << 30}  # of what is read, beside the second cache
SECONDS = 0.05  # that one try takes at least
CHAINS = 12  # sums that don't wait for each other: more than two multipliers of 4 cycles need

FMA = """
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void probe(__global float* out, __global const float* given, const int turns) {{
  const {floats} a = ({floats})(given[0]), b = ({floats})(given[1]);
  {floats} {sums};
  for (int i = 0; i < turns; i++) {{
    {steps}
  }}
  const {floats} sum = {total};
  *(__global {floats}*)(out + get_group_id(0) * {lanes}) = sum;
}}"""

# The registers hold numbers of `given`, after the 64 bytes that say how large the tiles are.
TILES = """
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void probe(__global float* out, __global const uchar* given, const int turns) {
  __asm__ volatile("ldtilecfg (%0)\\n tilezero %%tmm0\\n tilezero %%tmm1\\n tilezero %%tmm2\\n"
                   "tilezero %%tmm3\\n tileloadd (%1, %2, 1), %%tmm4\\n"
                   "tileloadd (%1, %2, 1), %%tmm5"
                   :: "r"(given), "r"(given + 64), "r"(64L) : "memory");
  for (int i = 0; i < turns; i++)
    __asm__ volatile("tdpbf16ps %%tmm5, %%tmm4, %%tmm0\\n tdpbf16ps %%tmm5, %%tmm4, %%tmm1\\n"
                     "tdpbf16ps %%tmm5, %%tmm4, %%tmm2\\n tdpbf16ps %%tmm5, %%tmm4, %%tmm3"
                     ::: "memory");
  __asm__ volatile("tilestored %%tmm0, (%0, %1, 1)\\n tilerelease"
                   :: "r"(out + get_group_id(0) * 256), "r"(64L) : "memory");
}"""

# A work-group reads a part of its own, again and again.
READ = """
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void probe(__global uint* out, __global const uint16* given, const int turns, const int part) {
  uint16 a = 0, b = 0, c = 0, d = 0;
  for (int i = 0; i < turns; i++) {
    __global const uint16* p = given + (long)get_group_id(0) * part;
    for (int j = 0; j < part; j += 4) { a += p[j]; b += p[j + 1]; c += p[j + 2]; d += p[j + 3]; }
  }
  *(__global uint16*)(out + get_group_id(0) * 16) = a + b + c + d;
}"""


class Limits:
    """A side that measures limits: {"float32 GFLOP/s": …, "L2 GB/s": …}."""

    def load(self, threads: int, device: str | None = None) -> None:
        self.device = get_device(device)

    def measure(self) -> dict[str, float]:
        """Everything that this device has; nothing for one that isn't a CPU."""
        target = getattr(self.device, "target", None)
        if target is None or not target.is_cpu:
            return {}
        found = {"float32 GFLOP/s": self.fma()}
        if "amx_bf16" in target.features:
            found["bfloat16 GFLOP/s"] = self.tiles()
        sizes = {"L2": l2_bytes() // 2 * target.cores, **SIZES}
        memory = aligned(max(sizes.values()))
        for name, nbytes in sizes.items():
            found[f"{name} GB/s"] = self.read(memory, nbytes)
        return {name: float(f"{value:.4g}") for name, value in found.items()}

    def fma(self) -> float:
        lanes = self.device.target.lanes
        names = [f"s{i}" for i in range(CHAINS)]
        source = FMA.format(
            floats=f"float{lanes}",
            lanes=lanes,
            sums=", ".join(f"{s} = a" for s in names),
            steps=" ".join(f"{s} = {s} * a + b;" for s in names),
            total=" + ".join(names),
        )
        given = np.array([0.5, 1.0], np.float32)  # the sums go to 2
        return self._best(source, given, CHAINS * lanes * 2) / 1e9

    def tiles(self) -> float:
        given = np.zeros(64 + 1024, np.uint8)
        given[0] = 1
        given[16:32:2] = 64
        given[48:56] = 16
        given[64:].view(np.uint16)[:] = 0x3F80  # 1.0
        return self._best(TILES, given, 4 * 16 * 16 * 32 * 2) / 1e9

    def read(self, memory: np.ndarray, nbytes: int) -> float:
        part = nbytes // self.device.target.cores // 256 * 4  # in vectors of 64 bytes
        return self._best(READ, memory, part * 64, part) / 1e9

    def _best(self, source: str, given: np.ndarray, work: int, *more: int) -> float:
        """The highest rate at which all cores do `work` per turn of a kernel."""
        device, cl = self.device, self.device.cl
        built = device.build(source)
        kernel = cl.Kernel(built.program, "probe")
        out, read = device.allocate(4096 * device.target.cores), device.wrap(given)
        kernel.set_args(out.buffer, read.buffer, np.int32(1), *map(np.int32, more))

        def seconds(turns: int) -> float:
            """The shortest of some tries: the longer ones met other work on the machine."""
            return min(once(turns) for _ in range(TRIES))

        def once(turns: int) -> float:
            kernel.set_arg(2, np.int32(turns))
            device.queue.finish()
            begun = time.perf_counter()
            cl.enqueue_nd_range_kernel(device.queue, kernel, (device.target.cores,), (1,))
            device.queue.finish()
            return time.perf_counter() - begun

        once(1)  # compiles
        built.save()
        turns = 1
        while (taken := seconds(turns)) < SECONDS and turns < 1 << 26:
            turns *= max(2, int(1.2 * SECONDS / taken)) if taken > SECONDS / 100 else 16
        return work * turns * device.target.cores / taken


def aligned(nbytes: int) -> np.ndarray:
    """Bytes in pages of their own, starting on a cache line: a load across two takes twice."""
    room = np.ones(nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + nbytes]


def l2_bytes() -> int:
    """Bytes of one core's second cache; 1 MiB where the system doesn't tell."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.rstrip("KM")) << (20 if text.endswith("M") else 10)
    except (OSError, ValueError):
        return 1 << 20
