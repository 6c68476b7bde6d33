"""OpenCL through pyopencl: pocl on CPUs, whatever driver there is on GPUs."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import mmap
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from engine.ir import Target
from engine.render import Rendered, assemble, entry_points
from engine.runtime import DEBUG, DeviceError, Found, Step, UnknownDevice
from engine.runtime.host import (
    allow_tiles,
    cache_folder,
    cpu_flags,
    provide_linker,
    save,
    saved,
    scratch_folder,
    usable_cores,
)
from engine.runtime.ints import Ints
from engine.runtime.probe import accepted
from engine.symbolic import Expr, evaluate

if TYPE_CHECKING:
    from engine.runtime.persistent import Persistent

PAGE = 4096
LARGE = 1 << 21  # bytes of a large page
LOCAL = 64  # work-items per group on a GPU, each with an output of its own
TEAM = 128  # and where they work together
MOST_RUNNING = 64  # lists of kernels under way before we wait for them


class OpenCLDevice:
    """An OpenCL device and its one in-order queue. Handles are Memory.

    as_gpu: take a CPU for a GPU with teams of so many work-items.
    """

    def __init__(self, which: str = "", as_gpu: int = 0) -> None:
        self.cl = import_pyopencl()
        self.device = pick(self.cl, which)
        self.name = "opencl" + (f":{which}" if which else "")
        self.context = self.cl.Context([self.device])
        self.queue = self.cl.CommandQueue(self.context)
        self.unsaved: WeakSet[Built] = WeakSet()  # compiled here; those that are still in use
        atexit.register(self._end)
        d = self.device
        self.identity = f"{d.platform.version} {d.name} {d.driver_version}"
        is_cpu = bool(d.type & self.cl.device_type.CPU) and not as_gpu
        flags = accepted(which, self.identity, cpu_flags()) if is_cpu else frozenset()
        if not allow_tiles():
            flags -= {"amx_bf16", "amx_int8"}
        lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
        self.target = Target(
            dialect="opencl-cpu" if is_cpu else "opencl-gpu",
            is_cpu=is_cpu,
            lanes=lanes if is_cpu else 1,
            cores=min(d.max_compute_units, usable_cores()) if is_cpu else 1,
            features=flags,
            team=1 if is_cpu else as_gpu or _team(d.max_work_group_size),
        )
        self.fresh_is_zero = is_cpu
        self.built: dict[Rendered, Built] = {}
        self.shared: dict[Rendered, Any] = {}  # kernels whose arguments change with each launch
        self.running: dict[int, Any] = {}  # launched, maybe not done: their memory must stay

    def _end(self) -> None:
        self.queue.finish()  # or kernels outlive the memory they work on
        for built in self.unsaved:
            if built.some and built.left:
                built.save()

    # --- memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int, large_pages: bool = False) -> Memory:
        flags = self.cl.mem_flags
        if not self.target.is_cpu:
            return Memory(self.cl.Buffer(self.context, flags.READ_WRITE, nbytes))
        return self.wrap_shared(_pages(nbytes, large_pages and nbytes >= LARGE))

    def part(self, handle: Memory, offset: int, nbytes: int) -> Memory:
        address = None if handle.address is None else handle.address + offset
        return Memory(handle.buffer.get_sub_region(offset, nbytes), address, handle)

    def wrap(self, array: np.ndarray) -> Memory:
        """A read-only buffer over the array's memory on a CPU, a copy of it elsewhere."""
        flags = self.cl.mem_flags
        how = flags.USE_HOST_PTR if self.target.is_cpu else flags.COPY_HOST_PTR
        buffer = self.cl.Buffer(self.context, flags.READ_ONLY | how, hostbuf=array)
        return Memory(buffer, array.ctypes.data if self.target.is_cpu else None, array)

    def wrap_shared(self, array: np.ndarray) -> Memory:
        """A buffer over an array that both sides write to, on a CPU."""
        flags = self.cl.mem_flags
        buffer = self.cl.Buffer(self.context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=array)
        return Memory(buffer, array.ctypes.data, array)

    def read(self, handle: Memory, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        if nbytes and handle.address is not None:
            self._wait()
            ctypes.memmove(out.ctypes.data, handle.address, nbytes)
        elif nbytes:  # waits for all that was launched before
            self.cl.enqueue_copy(self.queue, out, handle.buffer)
            self.running.clear()
        return out

    def write(self, handle: Memory, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        if data.nbytes and handle.address is not None:
            self._wait()
            ctypes.memmove(handle.address, data.ctypes.data, data.nbytes)
        elif data.nbytes:
            self.cl.enqueue_copy(self.queue, handle.buffer, data)

    def copy(self, source: Memory, target: Memory, nbytes: int) -> None:
        if nbytes and source.address is not None and target.address is not None:
            self._wait()
            ctypes.memmove(target.address, source.address, nbytes)
        elif nbytes:
            self.cl.enqueue_copy(self.queue, target.buffer, source.buffer, byte_count=nbytes)

    def _wait(self) -> None:
        """Until nothing runs: then memory of our own is read and written as it is."""
        if self.running:
            self.queue.finish()
            self.running.clear()

    def forget(self, handle: Memory) -> None:
        """Give the pages of a mapped file back; they are read again when they are needed again."""
        array = handle.owner
        mapped = array
        while isinstance(mapped, (np.ndarray, memoryview)):
            mapped = mapped.base if isinstance(mapped, np.ndarray) else mapped.obj
        if not isinstance(mapped, mmap.mmap) or not hasattr(mapped, "madvise"):
            return
        self.queue.finish()
        start = array.ctypes.data - np.frombuffer(mapped, np.uint8, 1).ctypes.data
        page = -(-start // PAGE) * PAGE
        length = (start + array.nbytes) // PAGE * PAGE - page
        if length > 0:
            mapped.madvise(mmap.MADV_DONTNEED, page, length)

    # --- programs ----------------------------------------------------------------------------

    def build(self, source: str, names: Iterable[str] = ()) -> Built:
        """A compiled source, from the cache on disk where it is.

        It gets there once the functions of these names have run, if there are any.
        """
        key = hashlib.sha256(f"{self.identity}\0{source}".encode()).hexdigest()
        path = cache_folder() / f"{key}.bin"
        found = self._cached(path)
        built = Built(found or self._compile(source), path, () if found else names)
        if built.left:
            self.unsaved.add(built)
        return built

    def _cached(self, path: Path) -> Any:
        binary = saved(path)
        if binary is None:
            return None
        try:
            return self.cl.Program(self.context, [self.device], [binary]).build(cache_dir=False)
        except self.cl.Error:  # one that this driver can't read after all
            return None

    def _compile(self, source: str) -> Any:
        try:
            return self.cl.Program(self.context, source).build(["-w"], cache_dir=False)
        except self.cl.Error as error:
            lines = [line for line in str(error).splitlines() if "error:" in line]
            first = lines[0] if lines else str(error).splitlines()[0]
            raise DeviceError(f"{self.name} can't compile a kernel: {first}") from error

    def kernels(self, functions: Sequence[Rendered]) -> None:
        """Build the functions that have no kernel yet, all in one program."""
        fresh = [f for f in dict.fromkeys(functions) if f not in self.built]
        if fresh:
            source = assemble(fresh, self.target) + "\n" + entry_points(fresh, self.target)
            program = self.build(source, [f.name for f in fresh])
            self.built |= dict.fromkeys(fresh, program)

    def prepare(self, steps: Sequence[Step]) -> None:
        """Compile the kernels of steps that will be launched one by one, in one program."""
        self.kernels([s.function for s in steps])

    def replay(self, steps: Sequence[Step], repeated: bool) -> Launches | Persistent:
        from engine.runtime.persistent import Persistent

        if repeated and steps and self.target.is_cpu:
            return Persistent(self, list(steps))
        return Launches(self, list(steps), repeated)


def _team(most: int) -> int:
    """The largest power of two up to `most`, and TEAM."""
    return 1 << (min(TEAM, most).bit_length() - 1)


def _pages(nbytes: int, large: bool) -> np.ndarray:
    """Zeros from the start of a page; pages appear when they are first touched.

    Large ones suit what is read whole at gigabytes a second, where small ones would have to be
    looked up all the time; a cache that fills slowly takes less memory in small ones.
    """
    if not large or not hasattr(mmap, "MADV_HUGEPAGE"):
        array, page = np.zeros(nbytes + PAGE, np.uint8), PAGE
    else:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no large pages
        mapped, page = mmap.mmap(-1, nbytes + LARGE, private), LARGE
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(mapped, np.uint8)
    start = -array.ctypes.data % page
    return array[start : start + nbytes]


@dataclass(frozen=True)
class Memory:
    """A buffer, and where it lies if the device's memory is ours.

    owner is what must live as long: the array under the buffer, or the memory it is a part of.
    """

    buffer: Any
    address: int | None = None
    owner: Any = None


class Built:
    """A compiled program, written to the disk once its functions have run.

    pocl compiles a kernel when it is first launched, and gives out one binary for good: it is asked
    for when all are in it, or at the process's end, if some have run.
    """

    def __init__(self, program: Any, path: Path, names: Iterable[str]) -> None:
        self.program, self.path = program, path
        self.left = set(names)  # what has to run before it is written
        self.some = False

    def ran(self, names: Iterable[str]) -> None:
        """Functions have run to their end."""
        if self.left:
            self.some = True
            self.left.difference_update(names)
            if not self.left:
                self.save()

    def save(self) -> None:
        (binary,) = self.program.binaries
        save(self.path, binary)


class Launches:
    """Kernels launched one by one on the device's queue.

    If they run often, each step has a kernel of its own with its arguments set; making one takes
    longer than a launch, so otherwise steps share the kernels of their functions.
    """

    def __init__(self, device: OpenCLDevice, steps: list[Step], repeated: bool) -> None:
        self.device = device
        self.steps = steps
        self.ints = Ints(device, steps)
        device.kernels([s.function for s in steps])
        self.kernels = [self._own(step) for step in steps] if repeated else None
        self.fresh = True  # some function may never have run

    def _own(self, step: Step) -> Any:
        program = self.device.built[step.function].program
        kernel = self.device.cl.Kernel(program, step.function.name + "_")
        self._set(kernel, step)
        return kernel

    def _shared(self, step: Step) -> Any:
        kernel = self.device.shared.get(step.function)
        if kernel is None:
            kernel = self.device.shared[step.function] = self._own(step)
        else:
            self._set(kernel, step)
        return kernel

    def _set(self, kernel: Any, step: Step) -> None:
        arguments = [b.buffer for b in step.buffers]
        if step.variables:
            arguments += [self.ints.memory.buffer, np.int32(self.ints.places[step.variables])]
        for i, argument in enumerate(arguments):  # set_args would generate code for each kernel
            kernel.set_arg(i, argument)

    def __call__(self, values: Mapping[Expr, int]) -> None:
        device = self.device
        self.ints.set(values)
        device.running[id(self)] = self  # before the first launch: it may be interrupted
        for number, step in enumerate(self.steps):
            groups = evaluate(step.groups, values)
            if groups == 0:
                continue
            kernel = self.kernels[number] if self.kernels else self._shared(step)
            if DEBUG >= 1:
                self._timed(step, kernel, groups, values)
            else:
                self._launch(kernel, groups, step.function.team)
        if self.fresh:
            self._keep(values)
        if len(device.running) > MOST_RUNNING:
            device.queue.finish()
            device.running.clear()
        device.queue.flush()

    def _launch(self, kernel: Any, groups: int, team: int) -> None:
        cl, queue = self.device.cl, self.device.queue
        if self.device.target.is_cpu:
            cl.enqueue_nd_range_kernel(queue, kernel, (groups,), (1,))
        else:
            kernel.set_arg(kernel.num_args - 1, np.int32(groups))
            items = team if team > 1 else LOCAL
            launched = groups if team > 1 else -(-groups // LOCAL)
            cl.enqueue_nd_range_kernel(queue, kernel, (launched * items,), (items,))

    def _timed(self, step: Step, kernel: Any, groups: int, values: Mapping[Expr, int]) -> None:
        self.device.queue.finish()
        start = time.perf_counter()
        self._launch(kernel, groups, step.function.team)
        self.device.queue.finish()
        taken = (time.perf_counter() - start) * 1e6
        print(step.report(taken, values), file=sys.stderr)

    def _keep(self, values: Mapping[Expr, int]) -> None:
        """Tell the programs which of their functions have run now for the first time."""
        built, self.fresh = self.device.built, False
        first = [s for s in self.steps if s.function.name in built[s.function].left]
        if first:
            self.device.queue.finish()
        for step in first:
            if evaluate(step.groups, values):
                built[step.function].ran([step.function.name])
            else:
                self.fresh = True  # with other values it may


def devices() -> list[Found]:
    """What there is, in the order of its numbers, without opening any."""
    return [
        Found(f"opencl:{i}", d.name.strip(), d.platform.version.strip(), d.global_mem_size)
        for i, d in enumerate(_all(import_pyopencl()))
    ]


def pick(cl: Any, which: str) -> Any:
    """The device numbered `which`, else the first GPU, else the first CPU."""
    devices = _all(cl)
    if which:
        if not (which.isascii() and which.isdigit()) or int(which) >= len(devices):
            names = ", ".join(f"opencl:{i} ({d.name})" for i, d in enumerate(devices))
            raise UnknownDevice(f"no device opencl:{which}; there are {names}")
        chosen = devices[int(which)]
    else:
        gpus = [d for d in devices if d.type & cl.device_type.GPU]
        chosen = (gpus or devices)[0]
    if "Portable Computing Language" in chosen.platform.name:
        provide_linker()
    return chosen


def import_pyopencl() -> Any:
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")  # ours keeps what matters
    os.environ.setdefault("POCL_KERNEL_CACHE", "0")
    os.environ.setdefault("POCL_CACHE_DIR", str(scratch_folder()))
    try:
        import pyopencl
    except ImportError as error:
        raise DeviceError(
            f"pyopencl can't be loaded ({error}); or use --device reference"
        ) from error
    warnings.filterwarnings("ignore", category=pyopencl.CompilerWarning)
    return pyopencl


def _all(cl: Any) -> list[Any]:
    try:
        platforms = cl.get_platforms()
    except cl.Error:
        platforms = []
    found = [d for p in platforms for d in _devices(cl, p)]
    if not found:
        raise DeviceError(
            "no OpenCL device: install a driver (pip install 'pyopencl[pocl]' on Linux x86-64, "
            "elsewhere the GPU's own or your system's pocl), or use --device reference"
        )
    return found


def _devices(cl: Any, platform: Any) -> list[Any]:
    try:
        return platform.get_devices()
    except cl.Error:  # a driver without a device
        return []
