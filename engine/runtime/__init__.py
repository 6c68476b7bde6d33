"""Devices: one file per backend, opened by name.

A backend module imports on any machine; it opens its driver only when its device is made.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.ir import Target
from engine.symbolic import Expr, Int, evaluate


def _level(text: str) -> int:
    """DEBUG's value; what is no number counts as 0, and is told."""
    if text.isdigit():
        return int(text)
    if text:
        print(f"DEBUG={text} is ignored: it is a number from 0 to 4", file=sys.stderr)
    return 0


# 1: time per step; 2: its float operations and bytes too; 3: the plan of each new kernel; 4: source
DEBUG = _level(os.environ.get("DEBUG", ""))


class DeviceError(RuntimeError):
    """A device that can't be used, in one line with the way out."""

    exit_code = 1  # of a command that ends by it


class UnknownDevice(DeviceError):
    """A name that no device has: the mistake of who typed it."""

    exit_code = 2


@dataclass
class Step:
    """One kernel in a replayable list: what to run, on which memory, how many work-groups."""

    function: Any  # render.Rendered, or the Kernel itself where there is no generated code
    buffers: list[Any]  # the backend's handles; the written one first
    groups: Int
    label: str
    variables: tuple[Expr, ...] = ()  # the symbolic ints it is passed
    sizes: tuple[int, ...] = ()  # bytes of each buffer
    flops: Int = 0
    nbytes: Int = 0

    def report(self, microseconds: float, values: Mapping[Expr, int]) -> str:
        """A line for people: time, work-groups, what it is, and from DEBUG=2 on its rates."""
        groups = evaluate(self.groups, values)
        line = f"{microseconds:9.1f} us  {groups:6} groups  {self.label}"
        if DEBUG >= 2:
            flops, nbytes = evaluate(self.flops, values), evaluate(self.nbytes, values)
            giga = 1e-3 / max(microseconds, 1e-3)
            line += f"  {flops * giga:.1f} GFLOP/s  {nbytes * giga:.1f} GB/s"
        return line


@dataclass(frozen=True)
class Found:
    """A device that a backend could open."""

    name: str  # what get_device takes
    title: str  # what its maker calls it
    driver: str
    memory: int  # bytes; 0: unknown


class Replay(Protocol):
    """A list of steps made ready to run again and again."""

    def __call__(self, values: Mapping[Expr, int]) -> None: ...


class Device(Protocol):
    """What every backend offers. A handle is whatever the backend uses for memory."""

    name: str
    identity: str  # hardware and driver: what binaries and timings of theirs are good for
    target: Target | None  # None: the backend evaluates kernels itself, without generated code
    fresh_is_zero: bool  # memory from `allocate` holds zeros

    def allocate(self, nbytes: int, large_pages: bool = False) -> Any: ...
    def part(self, handle: Any, offset: int, nbytes: int) -> Any: ...
    def wrap(self, array: np.ndarray) -> Any: ...
    def read(self, handle: Any, nbytes: int) -> np.ndarray: ...
    def write(self, handle: Any, data: np.ndarray) -> None: ...
    def copy(self, source: Any, target: Any, nbytes: int) -> None: ...
    def forget(self, handle: Any) -> None: ...  # its bytes, if read from a file, are not needed now
    def prepare(self, steps: Sequence[Step]) -> None: ...  # compile what they need, together
    def replay(self, steps: Sequence[Step], repeated: bool) -> Replay: ...


def _opencl(which: str) -> Device:
    from engine.runtime.opencl import OpenCLDevice

    return OpenCLDevice(which)


def _cuda(which: str) -> Device:
    from engine.runtime.cuda import CudaDevice

    return CudaDevice(which)


def _metal(which: str) -> Device:
    from engine.runtime.metal import MetalDevice

    return MetalDevice(which)


def _reference(which: str) -> Device:
    from engine.runtime.reference import ReferenceDevice

    return ReferenceDevice()


BACKENDS: dict[str, Callable[[str], Device]] = {
    "cuda": _cuda,
    "metal": _metal,
    "opencl": _opencl,
    "reference": _reference,
}

# One thread at a time captures, launches or reads: buffers and queues are shared
LOCK = threading.RLock()

_opened: dict[str, Device] = {}
_owner = os.getpid()
_default: str | None = None


def set_default_device(name: str) -> None:
    """Use `name` wherever no device is given; the device is opened now, so errors come early."""
    global _default
    get_device(name)
    _default = name


def default_device() -> str:
    """The name set by `set_default_device`, or ZOO_DEVICE, or "opencl"."""
    return _default or os.environ.get("ZOO_DEVICE") or "opencl"


def list_devices(backend: str) -> list[Found]:
    """What a backend could open, in the order of its numbers; nothing is opened.

    Raises DeviceError, saying why, when there is nothing.
    """
    return importlib.import_module(f"engine.runtime.{backend}").devices()


def get_device(name: str | None = None) -> Device:
    """The device called `name` ("opencl", "opencl:1", "cuda", "metal", "reference"), opened once.

    Raises DeviceError for a name that no backend knows, or a device that can't be opened.
    """
    name = name or default_device()
    if os.getpid() != _owner and _opened:
        raise DeviceError(
            "a device was opened before this process was forked and can't be used in it; "
            "start processes with the method spawn"
        )
    if name not in _opened:
        backend, _, which = name.partition(":")
        if backend not in BACKENDS:
            there = ", ".join(sorted(BACKENDS))
            hint = " (opencl also runs on the CPU)" if name == "cpu" else ""
            raise UnknownDevice(f"no device {name!r}; there are {there}{hint}")
        _opened[name] = BACKENDS[backend](which)
    return _opened[name]
