"""Apple's GPUs through pyobjc. Memory is one for both sides, so it is read and written in place.

A list of steps is one command buffer with one encoder, where Metal itself orders steps that touch
the same memory. Nothing is waited for until memory is read or written.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.ir import Target
from engine.render import Rendered, assemble, entry_points
from engine.runtime import DEBUG, DeviceError, Found, Step, UnknownDevice
from engine.runtime.ints import Ints
from engine.symbolic import Expr, evaluate

ALONE = 64  # work-items of a threadgroup where each makes outputs of its own
TEAM = 128  # and where they work together
CORES = 10  # Metal doesn't tell; those of the smaller chips
MOST_RUNNING = 64  # command buffers under way: a queue has no more


class MetalDevice:
    """A GPU and its one queue. Handles are Memory."""

    fresh_is_zero = False

    def __init__(self, which: str = "") -> None:
        self.name = "metal" + (f":{which}" if which else "")
        self.metal, self.objc = import_metal()
        self.device = pick(self.metal, which)
        self.queue = self.device.newCommandQueue()
        self.identity = f"Metal {self.device.name()}"
        is_apple7 = self.device.supportsFamily_(self.metal.MTLGPUFamilyApple7)
        features = frozenset({"apple7"} if is_apple7 else ())
        self.target = Target("metal", False, 1, CORES, features, TEAM)
        self.pipelines: dict[Rendered, Any] = {}
        self.running: list[Any] = []  # command buffers that were committed, maybe not done

    # --- memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int, large_pages: bool = False) -> Memory:
        size = max(1, nbytes)
        shared = self.metal.MTLResourceStorageModeShared
        buffer = self.device.newBufferWithLength_options_(size, shared)
        if buffer is None:
            raise DeviceError(
                f"{self.name}: no memory for {size >> 20} MiB: take a smaller model, --dtype q4 or "
                "a smaller --ctx"
            )
        view = np.frombuffer(buffer.contents().as_buffer(size), np.uint8)
        return Memory(buffer, 0, view.ctypes.data)

    def part(self, handle: Memory, offset: int, nbytes: int) -> Memory:
        return Memory(handle.buffer, handle.offset + offset, handle.address + offset)

    def wrap(self, array: np.ndarray) -> Memory:
        """A copy: Metal takes whole pages only, and what lies in a file begins anywhere."""
        data = np.ascontiguousarray(array)
        memory = self.allocate(data.nbytes)
        ctypes.memmove(memory.address, data.ctypes.data, data.nbytes)
        return memory

    def read(self, handle: Memory, nbytes: int) -> np.ndarray:
        self.wait()
        out = np.empty(nbytes, np.uint8)
        ctypes.memmove(out.ctypes.data, handle.address, nbytes)
        return out

    def write(self, handle: Memory, data: np.ndarray) -> None:
        self.wait()
        data = np.ascontiguousarray(data)
        ctypes.memmove(handle.address, data.ctypes.data, data.nbytes)

    def copy(self, source: Memory, target: Memory, nbytes: int) -> None:
        """Behind what runs, where Metal can: it copies words of 4 bytes."""
        if self.running and nbytes and not (source.offset | target.offset | nbytes) % 4:
            with self.commands() as commands:
                encoder = commands.blitCommandEncoder()
                encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
                    *(source.buffer, source.offset, target.buffer, target.offset, nbytes)
                )
                encoder.endEncoding()
            return
        self.wait()
        ctypes.memmove(target.address, source.address, nbytes)

    @contextmanager
    def commands(self) -> Iterator[Any]:
        """A command buffer to be filled, which is on its way at the end of the block."""
        if len(self.running) >= MOST_RUNNING:
            self.wait()
        with self.objc.autorelease_pool():  # else what a run makes would stay until the end
            commands = self.queue.commandBuffer()
            yield commands
            self.running.append(commands)  # before: an interrupt must not hide that it runs
            commands.commit()

    def forget(self, handle: Memory) -> None:
        """Files were copied: nothing of theirs is held."""

    def wait(self) -> None:
        """Until nothing runs; DeviceError if something that did has failed."""
        running, self.running = self.running, []
        for commands in running:
            commands.waitUntilCompleted()
        for commands in running:
            if commands.status() == self.metal.MTLCommandBufferStatusError:
                raise DeviceError(f"{self.name}: a kernel failed: {_line(commands.error())}")

    # --- programs ----------------------------------------------------------------------------

    def prepare(self, steps: Sequence[Step]) -> None:
        """Compile the functions of these steps that have no pipeline yet, all in one library."""
        fresh = [f for f in dict.fromkeys(s.function for s in steps) if f not in self.pipelines]
        if not fresh:
            return
        source = assemble(fresh, self.target) + "\n" + entry_points(fresh, self.target)
        options = self.metal.MTLCompileOptions.alloc().init()
        options.setFastMathEnabled_(False)  # infinities mask, and sums keep their order
        library, error = self.device.newLibraryWithSource_options_error_(source, options, None)
        if library is None:  # else an error holds warnings
            raise DeviceError(f"{self.name} can't compile a kernel: {_line(error)}")
        for f in fresh:
            self.pipelines[f] = self._pipeline(library, f)

    def _pipeline(self, library: Any, f: Rendered) -> Any:
        entry = library.newFunctionWithName_(f"{f.name}_")
        pipeline, error = self.device.newComputePipelineStateWithFunction_error_(entry, None)
        if pipeline is None:
            raise DeviceError(f"{self.name} can't make a kernel ready: {_line(error)}")
        most = pipeline.maxTotalThreadsPerThreadgroup()
        if most < max(f.team, ALONE):
            raise DeviceError(
                f"{self.name} runs only {most} threads of a kernel together, where "
                f"{max(f.team, ALONE)} are needed: use --device opencl"
            )
        return pipeline

    def replay(self, steps: Sequence[Step], repeated: bool) -> Launches:
        self.prepare(steps)
        return Launches(self, list(steps))


@dataclass(frozen=True)
class Memory:
    """A place in a buffer, and where this process sees it."""

    buffer: Any
    offset: int
    address: int


class Launches:
    """A list of steps, encoded anew for each run: their numbers of groups may differ."""

    def __init__(self, device: MetalDevice, steps: list[Step]) -> None:
        self.device, self.steps = device, steps
        self.ints = Ints(device, steps)

    def __call__(self, values: Mapping[Expr, int]) -> None:
        device = self.device
        self.ints.set(values)
        counted = [(step, evaluate(step.groups, values)) for step in self.steps]
        work = [(step, groups) for step, groups in counted if groups]
        if DEBUG >= 1:
            for step, groups in work:
                commands = self._commit([(step, groups)])
                device.wait()
                taken = (commands.GPUEndTime() - commands.GPUStartTime()) * 1e6
                print(step.report(taken, values), file=sys.stderr)
        elif work:
            self._commit(work)

    def _commit(self, work: Sequence[tuple[Step, int]]) -> Any:
        """Steps with their numbers of groups, on their way in one command buffer."""
        with self.device.commands() as commands:
            encoder = commands.computeCommandEncoder()
            for step, groups in work:
                self._encode(encoder, step, groups)
            encoder.endEncoding()
        return commands

    def _encode(self, encoder: Any, step: Step, groups: int) -> None:
        metal, f = self.device.metal, step.function
        encoder.setComputePipelineState_(self.device.pipelines[f])
        buffers, numbers = list(step.buffers), [groups]
        if step.variables:
            buffers.append(self.ints.memory)
            numbers.insert(0, self.ints.places[step.variables])
        for i, memory in enumerate(buffers):
            encoder.setBuffer_offset_atIndex_(memory.buffer, memory.offset, i)
        for i, number in enumerate(numbers, len(buffers)):
            encoder.setBytes_length_atIndex_(np.int32(number).tobytes(), 4, i)
        items = f.team if f.team > 1 else ALONE
        launched = groups if f.team > 1 else -(-groups // ALONE)
        encoder.dispatchThreadgroups_threadsPerThreadgroup_(
            metal.MTLSizeMake(launched, 1, 1), metal.MTLSizeMake(items, 1, 1)
        )


def devices() -> list[Found]:
    """What there is, without opening any; DeviceError when there is nothing, and why."""
    metal, _ = import_metal()
    return [
        Found(f"metal:{i}", str(d.name()), "Metal", int(d.recommendedMaxWorkingSetSize()))
        for i, d in enumerate(_all(metal))
    ]


def pick(metal: Any, which: str) -> Any:
    """The device numbered `which`, else the system's own choice."""
    there = _all(metal)
    if not which:
        return metal.MTLCreateSystemDefaultDevice() or there[0]
    if not (which.isascii() and which.isdigit() and int(which) < len(there)):
        names = ", ".join(f"metal:{i} ({d.name()})" for i, d in enumerate(there))
        raise UnknownDevice(f"no device metal:{which}; there are {names}")
    return there[int(which)]


def _all(metal: Any) -> list[Any]:
    found = list(metal.MTLCopyAllDevices() or ())
    if not found:
        raise DeviceError("this Mac has no Metal device: use --device opencl")
    return found


def import_metal() -> tuple[Any, Any]:
    """pyobjc's modules Metal and objc."""
    if sys.platform != "darwin":
        raise DeviceError("metal needs macOS: use --device opencl")
    try:
        import Metal
        import objc
    except ImportError as error:
        raise DeviceError(
            f"Metal can't be loaded: pip install 'menagerie[metal]' ({error})"
        ) from error
    return Metal, objc


def _line(error: Any) -> str:
    """What an NSError says of the first mistake, on one line."""
    lines = str(error.localizedDescription()).splitlines() or ["no reason given"]
    return next((line for line in lines if "error" in line), lines[0]).strip()
