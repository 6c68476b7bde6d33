"""NVIDIA GPUs through cuda-bindings: the driver's functions, and NVRTC as the compiler.

All work of a device is on one stream, in the order in which it was asked for: memory that a handle
gives back while kernels still use it is freed behind them. What the driver has is of the thread
that calls it (the current context), so every way into this file sets that first.
"""

from __future__ import annotations

import atexit
import hashlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.ir import Target
from engine.render import Rendered, assemble, entry_points
from engine.runtime import DEBUG, DeviceError, Found, Step, UnknownDevice
from engine.runtime.host import cache_folder, save, saved
from engine.runtime.ints import Ints
from engine.symbolic import Expr, evaluate

ALONE = 64  # work-items of a block where each makes outputs of its own
TEAM = 128  # and where they work together
SMALL = 1 << 16  # bytes that are copied aside rather than waited for, when they go to the device
MOST_KEPT = 64  # such copies, before we wait for them
KNOWN = (75, 80, 86, 89, 90, 100, 120)  # generations of processors that code may tell apart


class CudaDevice:
    """A GPU and its one stream. Handles are Memory."""

    fresh_is_zero = False

    def __init__(self, which: str = "") -> None:
        self.name = "cuda" + (f":{which}" if which else "")
        self.cuda, self.nvrtc = import_cuda()
        self.closed = False
        device, versions = self._open(which)
        ask = self.cuda.CUdevice_attribute
        major, minor, cores, pools = (
            self.call("cuDeviceGetAttribute", attribute, device)
            for attribute in (
                ask.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                ask.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                ask.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                ask.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
            )
        )
        number = major * 10 + minor
        self.processor = f"sm_{number}"
        title = self.call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace")
        if not pools or number not in self.compile_call("nvrtcGetSupportedArchs"):
            raise DeviceError(
                f"{title} ({self.processor}) can't be used through CUDA {versions[1]}: "
                "use --device opencl"
            )
        self.identity = f"{title} {self.processor} driver {versions[0]} nvrtc {versions[1]}"
        self.target = Target(
            dialect="cuda",
            is_cpu=False,
            lanes=1,
            cores=cores,
            features=frozenset(f"sm_{n}" for n in KNOWN if n <= number),
            team=TEAM,
        )
        self.context = self.call("cuDevicePrimaryCtxRetain", device)
        self.here()
        self.stream = self.call("cuStreamCreate", self.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.pool = self.call("cuDeviceGetDefaultMemPool", device)
        # what was freed stays ours: else each wait would give it back to the system
        release = self.cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self.call("cuMemPoolSetAttribute", self.pool, release, self.cuda.cuuint64_t(2**64 - 1))
        self.built: dict[Rendered, Any] = {}
        self.kept: list[np.ndarray] = []  # host memory that copies may still read
        atexit.register(self._end)

    def _open(self, which: str) -> tuple[Any, tuple[int, str]]:
        """The device numbered `which`, and the versions of the driver and of NVRTC."""
        try:
            self.call("cuInit", 0)
            driver = self.call("cuDriverGetVersion")
            count = self.call("cuDeviceGetCount")
        except RuntimeError as error:  # cuda-bindings found no libcuda, or the driver no GPU
            raise DeviceError(
                f"no CUDA device: install NVIDIA's driver, or use --device opencl ({_line(error)})"
            ) from error
        try:
            major, minor = self.compile_call("nvrtcVersion")
        except DeviceError:
            raise
        except RuntimeError as error:  # cuda-bindings found no libnvrtc
            raise DeviceError(
                f"NVRTC can't be loaded: pip install 'menagerie[cuda]' ({_line(error)})"
            ) from error
        if driver // 1000 < major:
            raise DeviceError(
                f"NVIDIA's driver is of CUDA {driver // 1000}.{driver % 1000 // 10}, too old for "
                f"the packages of CUDA {major}: update the driver, or use --device opencl"
            )
        if which and not (which.isascii() and which.isdigit() and int(which) < count):
            there = ", ".join(f"cuda:{i}" for i in range(count))
            raise UnknownDevice(f"no device cuda:{which}; there are {there}")
        return self.call("cuDeviceGet", int(which or 0)), (driver, f"{major}.{minor}")

    def _end(self) -> None:
        """Nothing may be freed or launched after the interpreter has begun to go."""
        self.closed = True
        with suppress(DeviceError):  # what failed has been told
            self.here()
            self.wait()

    # --- calls -------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """What a function of the driver gives; DeviceError with the error's name if it fails."""
        error, *values = getattr(self.cuda, name)(*arguments)
        if error != self.cuda.CUresult.CUDA_SUCCESS:
            hint = ""
            if error == self.cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                hint = ": take a smaller model, --dtype q4 or a smaller --ctx, or --device opencl"
            raise DeviceError(f"{self.name}: {name} failed with {error.name}{hint}")
        return _only(values)

    def compile_call(self, name: str, *arguments: Any) -> Any:
        """The same for NVRTC."""
        error, *values = getattr(self.nvrtc, name)(*arguments)
        if error != self.nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(f"{self.name}: {name} failed with {error.name}")
        return _only(values)

    def here(self) -> None:
        self.call("cuCtxSetCurrent", self.context)

    def wait(self) -> None:
        self.call("cuStreamSynchronize", self.stream)
        self.kept.clear()

    # --- memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int, large_pages: bool = False) -> Memory:
        self.here()
        size = max(1, nbytes)
        try:
            pointer = self.call("cuMemAllocAsync", size, self.stream)
        except DeviceError:  # what waits to be freed, or is kept for reuse, may be in pieces
            self.wait()
            self.call("cuMemPoolTrimTo", self.pool, 0)
            pointer = self.call("cuMemAllocAsync", size, self.stream)
        return Memory(int(pointer), Allocation(self, pointer))

    def free(self, pointer: Any) -> None:
        """Behind all that was launched so far; called by the collector, on any thread."""
        if not self.closed:
            self.here()
            self.call("cuMemFreeAsync", pointer, self.stream)

    def part(self, handle: Memory, offset: int, nbytes: int) -> Memory:
        return Memory(handle.address + offset, handle.owner)

    def wrap(self, array: np.ndarray) -> Memory:
        memory = self.allocate(array.nbytes)
        self.write(memory, array)
        return memory

    def read(self, handle: Memory, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            self.here()
            source = self.cuda.CUdeviceptr(handle.address)
            self.call("cuMemcpyDtoHAsync", out.ctypes.data, source, nbytes, self.stream)
            self.wait()
        return out

    def write(self, handle: Memory, data: np.ndarray) -> None:
        """The array may change at once afterwards, so a large one is waited for."""
        if not data.nbytes:
            return
        is_small = data.nbytes <= SMALL
        data = np.array(data, order="C") if is_small else np.ascontiguousarray(data)
        self.here()
        self.kept.append(data)
        target = self.cuda.CUdeviceptr(handle.address)
        self.call("cuMemcpyHtoDAsync", target, data.ctypes.data, data.nbytes, self.stream)
        if not is_small or len(self.kept) > MOST_KEPT:
            self.wait()

    def copy(self, source: Memory, target: Memory, nbytes: int) -> None:
        if nbytes:
            self.here()
            to, start = (self.cuda.CUdeviceptr(m.address) for m in (target, source))
            self.call("cuMemcpyDtoDAsync", to, start, nbytes, self.stream)

    def forget(self, handle: Memory) -> None:
        """Files were copied to the device: nothing of theirs is held."""

    # --- programs ----------------------------------------------------------------------------

    def build(self, source: str) -> Any:
        """The module of a source, from the cache on disk where it is."""
        key = hashlib.sha256(f"{self.identity}\0{source}".encode()).hexdigest()
        path = cache_folder() / f"{key}.cubin"
        binary = saved(path)
        if binary is not None:
            try:
                return self.call("cuModuleLoadData", binary)
            except DeviceError:  # one that this driver can't read after all
                binary = None
        binary = self._compile(source)
        module = self.call("cuModuleLoadData", binary)
        save(path, binary)
        return module

    def _compile(self, source: str) -> bytes:
        program = self.compile_call("nvrtcCreateProgram", source.encode(), b"zoo.cu", 0, [], [])
        options = [f"--gpu-architecture={self.processor}".encode(), b"-default-device"]
        try:
            (error,) = self.nvrtc.nvrtcCompileProgram(program, len(options), options)
            if error != self.nvrtc.nvrtcResult.NVRTC_SUCCESS:
                # of bytearrays: NVRTC writes into them
                log = bytearray(self.compile_call("nvrtcGetProgramLogSize", program))
                self.compile_call("nvrtcGetProgramLog", program, log)
                lines = log.rstrip(b"\0").decode(errors="replace").splitlines()
                first = next((line for line in lines if "error" in line), error.name)
                raise DeviceError(f"{self.name} can't compile a kernel: {first}")
            binary = bytearray(self.compile_call("nvrtcGetCUBINSize", program))
            self.compile_call("nvrtcGetCUBIN", program, binary)
            return bytes(binary)
        finally:
            self.nvrtc.nvrtcDestroyProgram(program)

    def prepare(self, steps: Sequence[Step]) -> None:
        """Compile the functions of these steps that have no kernel yet, all in one program."""
        fresh = [f for f in dict.fromkeys(s.function for s in steps) if f not in self.built]
        if not fresh:
            return
        self.here()
        source = assemble(fresh, self.target) + "\n" + entry_points(fresh, self.target)
        module = self.build(source)
        for f in fresh:
            self.built[f] = self.call("cuModuleGetFunction", module, f"{f.name}_".encode())

    def replay(self, steps: Sequence[Step], repeated: bool) -> Launches | Graph:
        self.prepare(steps)
        launches = Launches(self, list(steps))
        return Graph(launches) if repeated and steps and DEBUG == 0 else launches


class Allocation:
    """Memory of the device, given back when nothing refers to it any more."""

    def __init__(self, device: CudaDevice, pointer: Any) -> None:
        self.device, self.pointer = device, pointer

    def __del__(self) -> None:
        with suppress(DeviceError):  # the GPU has failed: whoever waits for it next is told
            self.device.free(self.pointer)


@dataclass(frozen=True)
class Memory:
    """An address on the device, and the allocation that it lies in."""

    address: int
    owner: Allocation


class Launch:
    """One step's kernel with its arguments, each in a word of its own; the last is `groups`."""

    def __init__(self, device: CudaDevice, step: Step, ints: Ints) -> None:
        values = [b.address for b in step.buffers]
        if step.variables:
            values += [ints.memory.address, ints.places[step.variables]]
        self.values = np.array([*values, 0], np.uint64)
        places = self.values.ctypes.data + 8 * np.arange(len(self.values), dtype=np.uint64)
        self.pointers = places.astype(np.uint64)
        self.arguments = self.pointers.ctypes.data
        self.kernel = device.built[step.function]
        self.team = step.function.team

    def shape(self, groups: int) -> tuple[int, int]:
        """Blocks, and work-items of each, for so many groups, which the arguments tell too."""
        self.values[-1] = groups
        return (groups, self.team) if self.team > 1 else (-(-groups // ALONE), ALONE)


class Launches:
    """Kernels launched one by one."""

    def __init__(self, device: CudaDevice, steps: list[Step]) -> None:
        self.device, self.steps = device, steps
        self.ints = Ints(device, steps)
        self.each = [Launch(device, step, self.ints) for step in steps]

    def __call__(self, values: Mapping[Expr, int]) -> None:
        self.ints.set(values)
        self.device.here()
        timed = []
        for step, launch in zip(self.steps, self.each):
            if groups := evaluate(step.groups, values):
                begun = self._event() if DEBUG >= 1 else None
                self._launch(launch, groups)
                if begun is not None:
                    timed.append((step, begun, self._event()))
        if timed:
            self._report(timed, values)

    def _launch(self, launch: Launch, groups: int) -> None:
        blocks, items = launch.shape(groups)
        self.device.call(
            "cuLaunchKernel",
            launch.kernel,
            *(blocks, 1, 1),
            *(items, 1, 1),
            0,
            self.device.stream,
            launch.arguments,
            0,
        )

    def _event(self) -> Any:
        event = self.device.call("cuEventCreate", 0)
        self.device.call("cuEventRecord", event, self.device.stream)
        return event

    def _report(self, timed: list[tuple[Step, Any, Any]], values: Mapping[Expr, int]) -> None:
        self.device.wait()
        for step, begun, ended in timed:
            taken = self.device.call("cuEventElapsedTime", begun, ended) * 1e3
            print(step.report(taken, values), file=sys.stderr)
            for event in (begun, ended):
                self.device.call("cuEventDestroy", event)


class Graph:
    """The launches as one CUDA graph: a chain of kernels that the GPU starts by itself.

    Symbolic ints lie in memory, so they change nothing in it. Where the number of groups depends on
    them, that step's node is set anew when the number changes: a graph of its own for each length
    would be made again with every token of a reply.
    """

    def __init__(self, launches: Launches) -> None:
        self.launches, self.device = launches, launches.device
        self.moving = [i for i, s in enumerate(launches.steps) if isinstance(s.groups, Expr)]
        self.nodes: list[Any] = []
        self.groups: list[int] = []  # of each step, as the graph has them now
        self.graph = self.ready = None

    def __call__(self, values: Mapping[Expr, int]) -> None:
        self.device.here()
        if self.ready is None:
            self._make(values)
        for i in self.moving:
            groups = evaluate(self.launches.steps[i].groups, values)
            if groups != self.groups[i]:
                self._change(i, groups)
        self.launches.ints.set(values)
        self.device.call("cuGraphLaunch", self.ready, self.device.stream)

    def _make(self, values: Mapping[Expr, int]) -> None:
        call, steps = self.device.call, self.launches.steps
        self.groups = [evaluate(step.groups, values) for step in steps]
        self.graph = call("cuGraphCreate", 0)
        for i, groups in enumerate(self.groups):
            after = self.nodes[-1:]
            node = call(
                "cuGraphAddKernelNode", self.graph, after, len(after), self._node(i, groups)
            )
            self.nodes.append(node)
        self.ready = call("cuGraphInstantiate", self.graph, 0)
        for node, groups in zip(self.nodes, self.groups):
            if not groups:
                call("cuGraphNodeSetEnabled", self.ready, node, 0)

    def _node(self, number: int, groups: int) -> Any:
        launch = self.launches.each[number]
        node = self.device.cuda.CUDA_KERNEL_NODE_PARAMS()
        node.func = launch.kernel
        node.gridDimX, node.blockDimX = launch.shape(max(1, groups))  # 0 is no grid; see _make
        node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1
        node.kernelParams = launch.arguments
        return node

    def _change(self, number: int, groups: int) -> None:
        call, node = self.device.call, self.nodes[number]
        if groups:
            given = self._node(number, groups)
            call("cuGraphExecKernelNodeSetParams", self.ready, node, given)
        if bool(groups) != bool(self.groups[number]):
            call("cuGraphNodeSetEnabled", self.ready, node, int(groups > 0))
        self.groups[number] = groups

    def __del__(self) -> None:
        if self.device.closed:
            return
        with suppress(DeviceError):  # as for an Allocation
            self.device.here()
            if self.ready is not None:
                self.device.wait()
                self.device.call("cuGraphExecDestroy", self.ready)
            if self.graph is not None:
                self.device.call("cuGraphDestroy", self.graph)


def devices() -> list[Found]:
    """What there is, in the order of its numbers, without opening any."""
    cuda, _ = import_cuda()

    def ask(name: str, *arguments: Any) -> Any:
        error, *values = getattr(cuda, name)(*arguments)
        if error != cuda.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"no CUDA device: {name} failed with {error.name}")
        return _only(values)

    try:
        ask("cuInit", 0)
        version, count = ask("cuDriverGetVersion"), ask("cuDeviceGetCount")
    except DeviceError:
        raise
    except RuntimeError as error:  # cuda-bindings found no libcuda
        raise DeviceError(f"no CUDA device: install NVIDIA's driver ({_line(error)})") from error
    driver = f"CUDA {version // 1000}.{version % 1000 // 10}"
    found = []
    for i in range(count):
        device = ask("cuDeviceGet", i)
        title = ask("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace")
        found.append(Found(f"cuda:{i}", title, driver, ask("cuDeviceTotalMem", device)))
    return found


def import_cuda() -> tuple[Any, Any]:
    """The driver's functions and NVRTC's."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise DeviceError(
            f"cuda-bindings can't be loaded ({_line(error)}): pip install 'menagerie[cuda]', "
            "or use --device opencl"
        ) from error
    return driver, nvrtc


def _only(values: Sequence[Any]) -> Any:
    """None, the one value, or all of several."""
    return values[0] if len(values) == 1 else tuple(values) or None


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
