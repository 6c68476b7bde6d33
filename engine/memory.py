"""Where temporaries lie: buffers whose lives don't overlap share bytes of one arena."""

from __future__ import annotations

from collections.abc import Sequence

from engine.graph import Storage
from engine.schedule import Kernel

ALIGNMENT = 256  # bytes, of each buffer in an arena
SLACK = 2048  # bytes that may be read, never used, behind an allocation: whole tiles at its end


def plan_memory(kernels: Sequence[Kernel], sharable: set[Storage]) -> tuple[dict, int]:
    """Offsets (bytes) of `sharable` storages in one arena, and the arena's size.

    Storages whose lives don't overlap share bytes: each takes the lowest gap that is free from its
    first kernel to its last.
    """
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for i, k in enumerate(kernels):
        for node in (*k.reads, k.target):
            storage = node.arg[0]
            if storage in sharable:
                first.setdefault(storage, i)
                last[storage] = i
    placed: dict[Storage, int] = {}
    ends: list[Storage] = []  # placed storages whose life goes on
    size = 0
    for storage in sorted(first, key=lambda s: first[s]):
        ends = [s for s in ends if last[s] >= first[storage]]
        offset = 0
        for other in sorted(ends, key=lambda s: placed[s]):
            if offset + storage.nbytes <= placed[other]:
                break
            offset = max(offset, _align(placed[other] + other.nbytes))
        placed[storage] = offset
        ends.append(storage)
        size = max(size, offset + storage.nbytes)
    return placed, _align(size)


def _align(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
