"""What a case takes at least, by the machine's limits."""

from __future__ import annotations

from typing import Any

from bench.measure import usable_cores
from engine.runtime.limits import l2_bytes


def roofline(limits: dict[str, float], case: Any) -> tuple[float, str] | None:
    """(microseconds that a case takes at the limit, which limit that is); None without limits.

    Bytes count at the rate of the smallest memory that they fit into.
    """
    if not limits:
        return None
    halves = "bfloat16 GFLOP/s"
    number = halves if case.dtype != "f32" and halves in limits else "float32 GFLOP/s"
    touched = case.nbytes + (case.copies - 1) * case.moved
    places = (("L2", l2_bytes() * usable_cores()), ("64 MB", 128 << 20), ("1 GB", 1 << 62))
    place = next(name for name, size in places if touched <= size)
    times = {
        number.partition(" ")[0]: case.flops / limits[number] / 1e3,
        f"reading from {place}": case.nbytes / limits[f"{place} GB/s"] / 1e3,
    }
    slowest = max(times, key=times.get)
    return times[slowest], slowest
