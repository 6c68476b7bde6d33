"""Generated CUDA C and Metal on a CPU: the system's C++ compiler and headers that stand in.

That checks syntax and arithmetic, barriers and shuffles; not address spaces, not time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.ir import Target
from engine.render import assemble, entry_points
from engine.runtime import Step
from engine.symbolic import Expr, evaluate

INCLUDE = Path(__file__).parent / "include"
COMPILER = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
ALONE = 64  # work-items of a group where each makes an output alone

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


class Library:
    """A compiled source, whose kernels are launched by name."""

    def __init__(self, source: str, dialect: str) -> None:
        if dialect == "metal":
            source = re.sub(r"threadgroup (\w+ \w+\[\d+\];)", r"static \1", source)
        else:
            source = f'#include "cuda.h"\n{source}'
        self.source = source
        self.library = ctypes.CDLL(str(_compiled(source)))
        shared = "static" if dialect == "metal" else "__shared__"
        self.together = set(re.findall(rf"void (\w+)_\([^{{]*\{{ {shared}", source))

    def launch(self, name: str, values: Sequence[int], groups: int, team: int) -> None:
        """values: addresses of buffers, and numbers (in Metal, their addresses)."""
        given = (ctypes.c_uint64 * len(values))(*values)
        self.library.shim_launch(
            ctypes.cast(getattr(self.library, name), ctypes.c_void_p),
            given,
            ctypes.c_uint(len(values)),
            ctypes.c_uint(groups),
            ctypes.c_uint(team),
            ctypes.c_bool(name.removesuffix("_") in self.together),
        )


def _compiled(source: str) -> Path:
    """The shared library of a source, compiled once on this machine."""
    headers = "".join(path.read_text() for path in sorted(INCLUDE.iterdir()))
    key = hashlib.sha256((source + headers).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"menagerie-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.so"
    if path.exists():
        return path
    made = folder / f"{key}.{os.getpid()}.so"
    options = ["-std=c++17", "-O1", "-fno-fast-math", "-ffp-contract=on", "-w", "-shared", "-fPIC"]
    command = [COMPILER, *options, f"-I{INCLUDE}", "-x", "c++", "-", "-o", str(made)]
    done = subprocess.run(command, input=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[:4000]
    made.replace(path)
    return path


class ShimDevice:
    """A device whose kernels are CUDA C or Metal; handles are arrays of bytes."""

    fresh_is_zero = False

    def __init__(self, name: str, target: Target) -> None:
        self.name, self.target = name, target
        self.identity = f"shim of {target}"
        self.built: dict[str, Library] = {}

    def allocate(self, nbytes: int, large_pages: bool = False) -> np.ndarray:
        return np.full(nbytes, 0xA5, np.uint8)  # nobody may count on zeros

    def part(self, handle: np.ndarray, offset: int, nbytes: int) -> np.ndarray:
        return handle[offset : offset + nbytes]

    def wrap(self, array: np.ndarray) -> np.ndarray:
        return np.frombuffer(array.tobytes(), np.uint8)

    def read(self, handle: np.ndarray, nbytes: int) -> np.ndarray:
        return handle[:nbytes].copy()

    def write(self, handle: np.ndarray, data: np.ndarray) -> None:
        handle[: data.nbytes] = np.frombuffer(data.tobytes(), np.uint8)

    def copy(self, source: np.ndarray, target: np.ndarray, nbytes: int) -> None:
        target[:nbytes] = source[:nbytes]

    def forget(self, handle: np.ndarray) -> None: ...

    def prepare(self, steps: Sequence[Step]) -> None:
        functions = list(dict.fromkeys(s.function for s in steps))
        fresh = [f for f in functions if f.name not in self.built]
        if fresh:
            source = assemble(fresh, self.target) + "\n" + entry_points(fresh, self.target)
            self.built |= dict.fromkeys(
                (f.name for f in fresh), Library(source, self.target.dialect)
            )

    def replay(self, steps: Sequence[Step], repeated: bool):
        self.prepare(steps)

        def run(values: Mapping[Expr, int]) -> None:
            for step in steps:
                if groups := evaluate(step.groups, values):
                    self._launch(step, groups, values)

        return run

    def _launch(self, step: Step, groups: int, values: Mapping[Expr, int]) -> None:
        f = step.function
        ints = np.array([values[v] for v in step.variables], np.int32)
        given = [b.ctypes.data for b in step.buffers]
        numbers = np.array([0, groups] if f.has_ints else [groups], np.int32)
        if f.has_ints:
            given.append(ints.ctypes.data)
        if self.target.dialect == "metal":  # it takes them by reference
            given += [numbers[i:].ctypes.data for i in range(len(numbers))]
        else:
            given += numbers.tolist()
        team = f.team if f.team > 1 else ALONE
        launched = groups if f.team > 1 else -(-groups // ALONE)
        self.built[f.name].launch(f"{f.name}_", given, launched, team)
