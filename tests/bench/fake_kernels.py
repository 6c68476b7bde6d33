"""Sides that need no engine and no peer, to test `bench kernels` with."""

from __future__ import annotations

import time

import numpy as np

from bench.kernels_peers import Numpy


class Quick(Numpy):
    """NumPy's results, and made-up times: `us` microseconds."""

    def load(self, threads: int, us: float = 2.0, **options: object) -> None:
        self.us = us

    def start_us(self) -> float:
        return 1.0

    def measure(self, seconds: float) -> float:
        return self.us


class Wrong(Quick):
    def array(self, result: np.ndarray) -> np.ndarray:
        return result * np.float32(1.5)


class NotANumber(Quick):
    def array(self, result: np.ndarray) -> np.ndarray:
        return result * np.float32("nan")


class Incapable(Quick):
    def prepare(self, name: str) -> None:
        raise AttributeError("no such function")


class Slow(Quick):
    def prepare(self, name: str) -> None:
        time.sleep(60)


class Crashing(Quick):
    def measure(self, seconds: float) -> float:
        raise MemoryError("gone")


class Rates:
    """Limits that are easy to divide by, of a machine that is faster at the second look."""

    def load(self, threads: int, device: str | None = None) -> None:
        pass

    def measure(self) -> dict[str, float]:
        return {"float32 GFLOP/s": 1e6, "L2 GB/s": 1e6, "64 MB GB/s": 1e6, "1 GB GB/s": 1e6}
