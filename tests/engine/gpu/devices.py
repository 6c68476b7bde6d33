"""GPUs for tests, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine import runtime
from engine.runtime.opencl import OpenCLDevice
from tests.engine.gpu.recorder import CUDA, METAL
from tests.engine.gpu.shim import COMPILER, ShimDevice


def _opencl(name: str, team: int) -> OpenCLDevice:
    """A GPU's kernels on OpenCL's CPU."""
    device = OpenCLDevice(as_gpu=team)
    device.name = name
    return device


KINDS: dict[str, Callable] = {
    "opencl": _opencl,
    "cuda": lambda name, team: ShimDevice(name, replace(CUDA, team=team)),
    "metal": lambda name, team: ShimDevice(name, replace(METAL, team=team)),
}


def opened(kind: str, team: int) -> str:
    """The name of a device whose work-items are in teams of so many; a skip if it can't be had."""
    if kind != "opencl" and COMPILER is None:
        pytest.skip("there is no C++ compiler")
    name = f"{kind}-gpu{team}"
    runtime.BACKENDS.setdefault(name, lambda which: KINDS[kind](name, team))
    return name
