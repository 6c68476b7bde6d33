"""A CUDA driver and NVRTC that run on the CPU: what engine.runtime.cuda calls of cuda.bindings.

Names, arguments and results are those of cuda-bindings 13: a tuple of an error and values. Work on
the stream is done only when somebody waits for it, so host memory that is gone or changed too
early, and device memory freed too early, are seen. Memory is checked: an address must lie in an
allocation that is still there.
"""

from __future__ import annotations

import ctypes
import re
import threading
from bisect import bisect_right
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.engine.gpu.shim import Library

CUresult = IntEnum(
    "CUresult",
    {
        "CUDA_SUCCESS": 0,
        "CUDA_ERROR_INVALID_VALUE": 1,
        "CUDA_ERROR_OUT_OF_MEMORY": 2,
        "CUDA_ERROR_NO_DEVICE": 100,
        "CUDA_ERROR_INVALID_IMAGE": 200,
        "CUDA_ERROR_INVALID_CONTEXT": 201,
        "CUDA_ERROR_NOT_FOUND": 500,
        "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
    },
)
CUdevice_attribute = IntEnum(
    "CUdevice_attribute",
    {
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
        "CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED": 115,
    },
)
nvrtcResult = IntEnum("nvrtcResult", {"NVRTC_SUCCESS": 0, "NVRTC_ERROR_COMPILATION": 6})
OK, FINE = CUresult.CUDA_SUCCESS, nvrtcResult.NVRTC_SUCCESS
STREAM = "stream"


class Driver:
    """cuda.bindings.driver, with devices of so much memory each."""

    CUresult, CUdevice_attribute = CUresult, CUdevice_attribute
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUmemPool_attribute = SimpleNamespace(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD=4)
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace
    CUdeviceptr = cuuint64_t = int

    def __init__(self, devices: int = 1, memory: int = 1 << 30, version: int = 13050) -> None:
        self.devices, self.memory, self.version = devices, memory, version
        self.queue: list[Callable[[], None]] = []
        self.allocations: dict[int, np.ndarray] = {}
        self.error = OK
        self.current = threading.local()  # a context is of the thread that set it
        self.calls: dict[str, int] = {}  # how often each function was called

    def __getattribute__(self, name: str) -> Any:
        """Count calls; after an error of the GPU every call fails, as with a real one."""
        found = object.__getattribute__(self, name)
        if not re.match("cu[A-Z]", name):
            return found
        self.calls[name] = self.calls.get(name, 0) + 1
        return found if self.error is OK else lambda *_: (self.error,)

    # --- devices -----------------------------------------------------------------------------

    def cuInit(self, flags):
        return (OK if self.devices else CUresult.CUDA_ERROR_NO_DEVICE,)

    def cuDriverGetVersion(self):
        return OK, self.version

    def cuDeviceGetCount(self):
        return OK, self.devices

    def cuDeviceGet(self, ordinal):
        return OK, ordinal

    def cuDeviceTotalMem(self, device):
        return OK, 8 << 30

    def cuDeviceGetName(self, length, device):
        return OK, b"Pretended GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute, device):
        return OK, {16: 4, 75: 8, 76: 0, 115: 1}[attribute]

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, "context"

    def cuCtxSetCurrent(self, context):
        self.current.context = context
        return (OK,)

    def cuStreamCreate(self, flags):
        return OK, STREAM

    def cuDeviceGetDefaultMemPool(self, device):
        return OK, "pool"

    def cuMemPoolSetAttribute(self, pool, attribute, value):
        return (OK,)

    def cuMemPoolTrimTo(self, pool, least):
        return (OK,)

    # --- work on the stream ------------------------------------------------------------------

    def _has_context(self) -> bool:
        return getattr(self.current, "context", None) is not None

    def _later(self, stream: Any, work: Callable[[], None]) -> tuple:
        assert stream is STREAM and self._has_context()
        self.queue.append(work)
        return (OK,)

    def cuStreamSynchronize(self, stream):
        queue, self.queue = self.queue, []
        for work in queue:
            if self.error is OK:
                work()
        return (self.error,)

    def cuMemAllocAsync(self, nbytes, stream):
        if sum(a.size for a in self.allocations.values()) + nbytes > self.memory:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        array = np.full(nbytes, 0xA5, np.uint8)  # nobody may count on zeros
        self.allocations[array.ctypes.data] = array
        return OK, array.ctypes.data

    def cuMemFreeAsync(self, pointer, stream):
        assert int(pointer) in self.allocations
        return self._later(stream, lambda: self.allocations.pop(int(pointer)))

    def _is_there(self, address: int, nbytes: int = 1) -> bool:
        starts = sorted(self.allocations)
        at = bisect_right(starts, address) - 1
        return at >= 0 and address + nbytes <= starts[at] + self.allocations[starts[at]].size

    def _move(self, target: int, source: int, nbytes: int, *on_device: int) -> None:
        if all(self._is_there(address, nbytes) for address in on_device):
            ctypes.memmove(target, source, nbytes)
        else:
            self.error = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

    def cuMemcpyHtoDAsync(self, target, source, nbytes, stream):
        return self._later(stream, lambda: self._move(target, source, nbytes, target))

    def cuMemcpyDtoHAsync(self, target, source, nbytes, stream):
        return self._later(stream, lambda: self._move(target, source, nbytes, source))

    def cuMemcpyDtoDAsync(self, target, source, nbytes, stream):
        return self._later(stream, lambda: self._move(target, source, nbytes, target, source))

    # --- kernels -----------------------------------------------------------------------------

    def cuModuleLoadData(self, image):
        if not image.startswith(b"sm_80\n"):
            return CUresult.CUDA_ERROR_INVALID_IMAGE, None
        return OK, Library(image.partition(b"\n")[2].decode(), "cuda")

    def cuModuleGetFunction(self, module, name):
        found = re.search(rf"\b{name.decode()}\(([^)]*)\)", module.source)
        if found is None:
            return CUresult.CUDA_ERROR_NOT_FOUND, None
        return OK, (module, name.decode(), ["*" in p for p in found[1].split(",")])

    def _ready(self, kernel, pointers: int, grid: tuple, block: tuple) -> Callable[[], None]:
        """The kernel with its arguments as they are now: a launch copies them."""
        module, name, are_buffers = kernel
        assert grid[0] > 0 and grid[1:] == block[1:] == (1, 1)
        places = (ctypes.c_uint64 * len(are_buffers)).from_address(pointers)
        values = [
            (ctypes.c_uint64 if is_buffer else ctypes.c_int32).from_address(place).value
            for place, is_buffer in zip(places, are_buffers)
        ]
        buffers = [v for v, is_buffer in zip(values, are_buffers) if is_buffer]

        def run() -> None:
            if all(self._is_there(b) for b in buffers):
                module.launch(name, values, grid[0], block[0])
            else:
                self.error = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

        return run

    def cuLaunchKernel(self, kernel, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        return self._later(stream, self._ready(kernel, pointers, (gx, gy, gz), (bx, by, bz)))

    def cuGraphCreate(self, flags):
        return OK, []

    def _of_node(self, p: SimpleNamespace) -> Callable[[], None]:
        grid, block = (p.gridDimX, p.gridDimY, p.gridDimZ), (p.blockDimX, p.blockDimY, p.blockDimZ)
        return self._ready(p.func, p.kernelParams, grid, block)

    def cuGraphAddKernelNode(self, graph, dependencies, count, node):
        assert len(dependencies) == count and all(d < len(graph) for d in dependencies)
        graph.append(self._of_node(node))
        return OK, len(graph) - 1

    def cuGraphInstantiate(self, graph, flags):
        return OK, {i: [work, True] for i, work in enumerate(graph)}

    def cuGraphExecKernelNodeSetParams(self, ready, node, params):
        ready[node][0] = self._of_node(params)
        return (OK,)

    def cuGraphNodeSetEnabled(self, ready, node, enabled):
        ready[node][1] = bool(enabled)
        return (OK,)

    def cuGraphLaunch(self, ready, stream):
        for work, is_enabled in ready.values():
            if is_enabled:
                self._later(stream, work)
        return (OK,)

    def cuGraphExecDestroy(self, ready):
        return (OK,)

    def cuGraphDestroy(self, graph):
        return (OK,)

    # --- events ------------------------------------------------------------------------------

    def cuEventCreate(self, flags):
        return OK, object()

    def cuEventRecord(self, event, stream):
        return (OK,)

    def cuEventElapsedTime(self, begun, ended):
        assert not self.queue, "the events are not over yet"
        return OK, 0.5

    def cuEventDestroy(self, event):
        return (OK,)


class Nvrtc:
    """cuda.bindings.nvrtc; a binary is its source with the processor in front."""

    nvrtcResult = nvrtcResult

    def __init__(self) -> None:
        self.compiled = 0

    def nvrtcVersion(self):
        return FINE, 13, 5

    def nvrtcGetSupportedArchs(self):
        return FINE, [75, 80, 90]

    def nvrtcCreateProgram(self, source, name, count, headers, names):
        return FINE, SimpleNamespace(source=source, log=b"\0", binary=b"")

    def nvrtcCompileProgram(self, program, count, options):
        assert len(options) == count
        self.compiled += 1
        (processor,) = (o.partition(b"=")[2] for o in options if b"architecture" in o)
        try:
            Library(program.source.decode(), "cuda")
        except AssertionError as error:
            program.log = str(error).encode() + b"\0"
            return (nvrtcResult.NVRTC_ERROR_COMPILATION,)
        program.binary = processor + b"\n" + program.source
        return (FINE,)

    def nvrtcGetProgramLogSize(self, program):
        return FINE, len(program.log)

    def nvrtcGetProgramLog(self, program, log):
        log[:] = program.log
        return (FINE,)

    def nvrtcGetCUBINSize(self, program):
        return FINE, len(program.binary)

    def nvrtcGetCUBIN(self, program, binary):
        binary[:] = program.binary
        return (FINE,)

    def nvrtcDestroyProgram(self, program):
        return (FINE,)
