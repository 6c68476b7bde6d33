"""A network run on overlapping tiles of a picture, for pictures whose whole doesn't fit in memory.

What a tile has near its edges lacks the surroundings; over the width of the overlap each fades
into the next, so that the middle of a tile counts and no seam is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

TILE, OVERLAP = 64, 16  # in latent pixels: tiles of 512 pixels


def starts(length: int) -> list[int]:
    """Where equal tiles begin that cover `length`, each at least OVERLAP over the next."""
    if length <= TILE:
        return [0]
    count = -(-(length - OVERLAP) // (TILE - OVERLAP))
    return [round(i * (length - TILE) / (count - 1)) for i in range(count)]


def tiled(
    run: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    ins: int,
    outs: int,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """`run` on tiles of x (B, C, ins H, ins W), put together to (B, …, outs H, outs W).

    ins and outs are pixels per latent pixel. All tiles have one size, so that `run` is compiled
    once. `progress` is told the tiles done and those in all.
    """
    height, width = (n // ins for n in x.shape[2:])
    fades = [_fade(min(n, TILE) * outs, OVERLAP * outs) for n in (height, width)]
    weight = fades[0][:, None] * fades[1]
    total: np.ndarray | None = None
    summed = np.zeros((height * outs, width * outs), np.float32)
    places = list(_places(height, width))
    for done, (top, left) in enumerate(places, 1):
        cut = [slice(s * ins, min(s + TILE, n) * ins) for s, n in ((top, height), (left, width))]
        here = run(np.ascontiguousarray(x[:, :, cut[0], cut[1]]))
        if total is None:
            total = np.zeros((*here.shape[:2], *summed.shape), np.float32)
        rows, columns = (slice(s.start // ins * outs, s.stop // ins * outs) for s in cut)
        total[:, :, rows, columns] += here * weight
        summed[rows, columns] += weight
        if progress:
            progress(done, len(places))
    return total / summed


def _places(height: int, width: int) -> Iterator[tuple[int, int]]:
    for top in starts(height):
        for left in starts(width):
            yield top, left


def _fade(length: int, overlap: int) -> np.ndarray:
    """Weights that rise over the overlap, are 1, and fall again; all above 0."""
    near = np.arange(length, dtype=np.float32) + 0.5
    return np.minimum(np.minimum(near, near[::-1]) / overlap, 1)


def available_memory() -> int | None:
    """Bytes that this process may still take, its container's limit counted; None if unknown."""
    found = []
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(free.split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no cgroup v2, or "max"
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()) + _cache(group))
    return min(found) if found else None


def _cache(group: Path) -> int:
    """Bytes of files that the container's memory holds and could let go."""
    lines = (group / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split()[0].endswith("active_file"))
