"""A device that compiles and runs nothing, and keeps the functions that it was asked to run.

With it every kernel of a model is had in any dialect, on any machine, in the time that planning
takes. What is read back from it are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from engine import runtime
from engine.ir import Target
from engine.render import Rendered
from engine.runtime import Step
from engine.symbolic import Expr

CUDA = Target("cuda", False, 1, 132, frozenset({"sm_80"}), 128)
METAL = replace(CUDA, dialect="metal", features=frozenset({"apple7"}))


class Recorder:
    """Handles are empty: memory of any size costs nothing."""

    fresh_is_zero = False

    def __init__(self, name: str, target: Target) -> None:
        self.name, self.target = name, target
        self.identity = f"recorder of {target}"
        self.functions: dict[Rendered, None] = {}  # in the order of their first use

    def allocate(self, nbytes: int, large_pages: bool = False) -> tuple:
        return ()

    def part(self, handle: tuple, offset: int, nbytes: int) -> tuple:
        return ()

    def wrap(self, array: np.ndarray) -> tuple:
        return ()

    def read(self, handle: tuple, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def write(self, handle: tuple, data: np.ndarray) -> None: ...

    def copy(self, source: tuple, target: tuple, nbytes: int) -> None: ...

    def forget(self, handle: tuple) -> None: ...

    def prepare(self, steps: Sequence[Step]) -> None:
        self.functions |= dict.fromkeys(s.function for s in steps)

    def replay(self, steps: Sequence[Step], repeated: bool):
        self.prepare(steps)

        def nothing(values: Mapping[Expr, int]) -> None: ...

        return nothing


@contextmanager
def recording(target: Target, name: str = "recorder") -> Iterator[Recorder]:
    """The recorder as the device called `name`, until the end of the block."""
    device = Recorder(name, target)
    before = dict(runtime._opened)
    runtime._opened[name] = device
    runtime.BACKENDS[name] = lambda which: device
    try:
        yield device
    finally:
        del runtime.BACKENDS[name]
        runtime._opened.clear()
        runtime._opened.update(before)
