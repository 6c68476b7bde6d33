"""OpenCL through pyopencl: pocl on CPUs, whatever driver there is on GPUs."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.ir import Target
from engine.runtime import DeviceError, Step
from engine.symbolic import Expr, evaluate

LOCAL = 64  # work-items per group on a GPU
MOST_RUNNING = 64  # lists of kernels under way before we wait for them


def cache_folder() -> Path:
    """Where compiled programs are kept: ZOO_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("ZOO_CACHE"):
        return Path(chosen) / "kernels"
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home())
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "menagerie" / "kernels"


class OpenCLDevice:
    """Handles are pyopencl Buffers, executables (program, kernel name)."""

    def __init__(self, which: str = "") -> None:
        self.cl = _import()
        self.device = self._pick(which)
        self.name = "opencl" + (f":{which}" if which else "")
        self.context = self.cl.Context([self.device])
        self.queue = self.cl.CommandQueue(self.context)
        is_cpu = bool(self.device.type & self.cl.device_type.CPU)
        flags = cpu_flags() if is_cpu else frozenset()
        lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
        self.target = Target(
            dialect="opencl-cpu" if is_cpu else "opencl-gpu",
            is_cpu=is_cpu,
            lanes=lanes if is_cpu else 1,
            cores=min(self.device.max_compute_units, usable_cores()) if is_cpu else 1,
            features=flags,
        )
        self.running: dict[int, _Replay] = {}  # launched, maybe not done: their memory must stay
        self.identity = f"{self.device.platform.version} {self.device.name} {self.device.driver_version}"

    def _pick(self, which: str) -> Any:
        """The device numbered `which`, else the first GPU, else the first CPU."""
        try:
            platforms = self.cl.get_platforms()
        except self.cl.Error:
            platforms = []
        devices = [d for p in platforms for d in _devices(self.cl, p)]
        if not devices:
            raise DeviceError(
                "no OpenCL device: install a driver (on Linux x86-64: pip install 'pyopencl[pocl]'; "
                "elsewhere the GPU's own or your system's pocl), or use --device reference"
            )
        if which:
            if not which.isdigit() or int(which) >= len(devices):
                names = ", ".join(f"opencl:{i} ({d.name})" for i, d in enumerate(devices))
                raise DeviceError(f"no device opencl:{which}; there are {names}")
            chosen = devices[int(which)]
        else:
            gpus = [d for d in devices if d.type & self.cl.device_type.GPU]
            chosen = (gpus or devices)[0]
        if "Portable Computing Language" in chosen.platform.name and not shutil.which("ld"):
            raise DeviceError(
                "pocl needs the linker `ld` on PATH: install binutils, or pip install "
                "'menagerie[linker]', or use --device reference"
            )
        return chosen

    # --- memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Any:
        return self.cl.Buffer(self.context, self.cl.mem_flags.READ_WRITE, nbytes)

    def part(self, handle: Any, offset: int, nbytes: int) -> Any:
        return handle.get_sub_region(offset, nbytes)

    def wrap(self, array: np.ndarray) -> Any:
        """A read-only buffer over the array's memory on a CPU, a copy of it elsewhere."""
        flags = self.cl.mem_flags
        how = flags.USE_HOST_PTR if self.target.is_cpu else flags.COPY_HOST_PTR
        return self.cl.Buffer(self.context, flags.READ_ONLY | how, hostbuf=array)

    def read(self, handle: Any, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            self.cl.enqueue_copy(self.queue, out, handle)  # waits for all that was launched before
            self.running.clear()
        return out

    def write(self, handle: Any, data: np.ndarray) -> None:
        if data.nbytes:
            self.cl.enqueue_copy(self.queue, handle, np.ascontiguousarray(data))

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        if nbytes:
            self.cl.enqueue_copy(self.queue, target, source, byte_count=nbytes)

    # --- programs ----------------------------------------------------------------------------

    def compile(self, source: str, names: Sequence[str]) -> list[_Executable]:
        """Executables for the named kernels, from the cache on disk where they are."""
        key = hashlib.sha256(f"{self.identity}\0{source}".encode()).hexdigest()
        path = cache_folder() / f"{key}.bin"
        found = self._cached(path)
        program = _Program(found or self._build(source), path, saved=found is not None)
        return [_Executable(program, name) for name in names]

    def _cached(self, path: Path) -> Any:
        try:
            binary = path.read_bytes()
            return self.cl.Program(self.context, [self.device], [binary]).build(cache_dir=False)
        except (OSError, self.cl.Error):  # none yet, or one that this driver can't read
            return None

    def _build(self, source: str) -> Any:
        try:
            return self.cl.Program(self.context, source).build(cache_dir=False)
        except self.cl.Error as error:
            raise DeviceError(f"{self.name} can't compile a kernel: {error}") from error

    def replay(self, steps: Sequence[Step], variables: Sequence[Expr]) -> _Replay:
        return _Replay(self, list(steps), list(variables))


class _Program:
    """A built program that is written to the disk after its first run.

    pocl compiles a kernel when it is first launched, so only then is the binary worth keeping.
    """

    def __init__(self, program: Any, path: Path, saved: bool) -> None:
        self.program = program
        self.path = path
        self.saved = saved

    def save(self) -> None:
        """Atomic, and silent where the cache can't be written: it only costs the next start time."""
        if self.saved:
            return
        self.saved = True
        try:
            (binary,) = self.program.binaries
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(binary)
            os.replace(name, self.path)
        except OSError:
            return


class _Executable:
    def __init__(self, program: _Program, name: str) -> None:
        self.program = program
        self.name = name


class _Replay:
    """Kernels with their arguments set, launched in order on the device's queue.

    Symbolic ints lie in one small buffer: a kernel is told where its own begin, so nothing but that
    buffer changes from one run to the next.
    """

    def __init__(self, device: OpenCLDevice, steps: list[Step], variables: list[Expr]) -> None:
        self.device = device
        self.steps = steps
        self.places: dict[tuple[Expr, ...], int] = {}
        order: list[Expr] = []
        for step in steps:
            if step.variables and step.variables not in self.places:
                self.places[step.variables] = len(order)
                order += step.variables
        self.order = order
        self.ints = np.zeros(max(1, len(order)), np.int32)
        self.buffer = device.allocate(self.ints.nbytes) if order else None
        self.kernels = [self._kernel(step) for step in steps]
        self.fixed = [s.groups if isinstance(s.groups, int) else None for s in steps]
        self.fresh = True

    def _kernel(self, step: Step) -> Any:
        kernel = self.device.cl.Kernel(step.executable.program.program, step.executable.name)
        arguments = list(step.buffers)
        if step.variables:
            arguments += [self.buffer, np.int32(self.places[step.variables])]
        for i, argument in enumerate(arguments):  # set_args would generate code for each kernel
            kernel.set_arg(i, argument)
        return kernel

    def __call__(self, values: Mapping[Expr, int]) -> None:
        device = self.device
        cl, queue = device.cl, device.queue
        if self.order:
            self.ints[:] = [values[v] for v in self.order]
            cl.enqueue_copy(queue, self.buffer, self.ints, is_blocking=True)
        local = (1,) if device.target.is_cpu else (LOCAL,)
        debug = DEBUG >= 1
        for step, kernel, groups in zip(self.steps, self.kernels, self.fixed):
            count = evaluate(step.groups, values) if groups is None else groups
            if not device.target.is_cpu:
                count = (count + LOCAL - 1) // LOCAL * LOCAL
            if debug:
                self._timed(step, kernel, count, local)
            elif count:
                cl.enqueue_nd_range_kernel(queue, kernel, (count,), local)
        device.running[id(self)] = self
        if self.fresh:
            self._save()
        if len(device.running) > MOST_RUNNING:
            queue.finish()
            device.running.clear()
        queue.flush()

    def _timed(self, step: Step, kernel: Any, count: int, local: tuple[int]) -> None:
        self.device.queue.finish()
        start = time.perf_counter()
        self.device.cl.enqueue_nd_range_kernel(self.device.queue, kernel, (count,), local)
        self.device.queue.finish()
        taken = (time.perf_counter() - start) * 1e6
        print(f"{taken:9.1f} us  {count:6} groups  {step.label}", file=sys.stderr)

    def _save(self) -> None:
        self.fresh = False
        unsaved = {s.executable.program for s in self.steps if not s.executable.program.saved}
        if unsaved:
            self.device.queue.finish()
        for program in unsaved:
            program.save()


DEBUG = int(os.environ.get("DEBUG", "0") or 0)


def _import() -> Any:
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")  # the cache above keeps what matters
    try:
        import pyopencl
    except ImportError as error:
        raise DeviceError(f"pyopencl can't be loaded ({error}); or use --device reference") from error
    warnings.filterwarnings("ignore", category=pyopencl.CompilerWarning)
    return pyopencl


def _devices(cl: Any, platform: Any) -> list[Any]:
    try:
        return platform.get_devices()
    except cl.Error:  # a driver without a device
        return []


def cpu_flags() -> frozenset[str]:
    """The processor's feature flags as the system names them; empty where it doesn't tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def usable_cores() -> int:
    """Cores this process may use: affinity and the control group's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, int(quota) // int(period))) if quota != "max" else cores
