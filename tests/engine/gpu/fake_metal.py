"""pyobjc's modules Metal and objc, as far as the runtime uses them, over Metal that runs on a CPU.

Names and results are pyobjc's. Work is done at `waitUntilCompleted`, not before: who reads without
waiting reads what was there.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

from tests.engine.gpu.shim import Library

MTLResourceStorageModeShared = 0
MTLGPUFamilyApple7 = 1007
MTLCommandBufferStatusCompleted, MTLCommandBufferStatusError = 4, 5
autorelease_pool = nullcontext


class Error:
    def __init__(self, text: str) -> None:
        self.text = text

    def localizedDescription(self) -> str:
        return self.text


class MTLCompileOptions:
    fast_math = True  # Metal's default

    @classmethod
    def alloc(cls):
        return cls()

    def init(self):
        return self

    def setFastMathEnabled_(self, on: bool) -> None:
        self.fast_math = on


def MTLSizeMake(width: int, height: int, depth: int) -> tuple[int, int, int]:
    return width, height, depth


class Buffer:
    def __init__(self, nbytes: int) -> None:
        self.memory = np.full(nbytes, 0xA5, np.uint8)  # nobody may count on zeros

    def contents(self):
        return SimpleNamespace(as_buffer=lambda nbytes: memoryview(self.memory)[:nbytes])


class Encoder:
    def __init__(self, work: list) -> None:
        self.work, self.arguments = work, {}

    def setComputePipelineState_(self, pipeline) -> None:
        self.pipeline, self.arguments = pipeline, {}

    def setBuffer_offset_atIndex_(self, buffer: Buffer, offset: int, index: int) -> None:
        assert 0 <= offset < buffer.memory.size and offset % 4 == 0
        self.arguments[index] = buffer.memory[offset:]

    def setBytes_length_atIndex_(self, data: bytes, length: int, index: int) -> None:
        assert len(data) == length
        self.arguments[index] = np.frombuffer(data, np.uint8)

    def dispatchThreadgroups_threadsPerThreadgroup_(self, groups: tuple, items: tuple) -> None:
        given = [self.arguments[i] for i in range(len(self.arguments))]
        pipeline = self.pipeline
        self.work.append(lambda: pipeline.launch(given, groups[0], items[0]))

    def endEncoding(self) -> None: ...


def _copy(target: np.ndarray, source: np.ndarray, nbytes: int) -> None:
    target[:nbytes] = source[:nbytes]


class BlitEncoder:
    def __init__(self, work: list) -> None:
        self.work = work

    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
        self, source: Buffer, start: int, target: Buffer, to: int, nbytes: int
    ) -> None:
        assert not (start | to | nbytes) % 4
        assert max(start + nbytes - source.memory.size, to + nbytes - target.memory.size) <= 0
        self.work.append(lambda: _copy(target.memory[to:], source.memory[start:], nbytes))

    def endEncoding(self) -> None: ...


class Commands:
    def __init__(self, queue) -> None:
        self.queue, self.work, self.done, self.failure = queue, [], False, None

    def computeCommandEncoder(self) -> Encoder:
        return Encoder(self.work)

    def blitCommandEncoder(self) -> BlitEncoder:
        return BlitEncoder(self.work)

    def commit(self) -> None:
        self.queue.append(self)

    def waitUntilCompleted(self) -> None:
        while not self.done:  # those before it come first
            commands = self.queue.pop(0)
            for do in commands.work:
                do()
            commands.done = True

    def status(self) -> int:
        assert self.done
        return MTLCommandBufferStatusError if self.failure else MTLCommandBufferStatusCompleted

    def error(self) -> Error | None:
        return self.failure

    def GPUStartTime(self) -> float:
        return 1.0

    def GPUEndTime(self) -> float:
        return 1.5


class Pipeline:
    most = 1024

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name = library, name

    def maxTotalThreadsPerThreadgroup(self) -> int:
        return self.most

    def launch(self, given: list[np.ndarray], groups: int, items: int) -> None:
        self.library.launch(self.name, [a.ctypes.data for a in given], groups, items)


class Device:
    largest = 1 << 30

    def __init__(self, title: str) -> None:
        self.title = title
        self.compilations = 0

    def supportsFamily_(self, family: int) -> bool:
        return family <= MTLGPUFamilyApple7

    def name(self) -> str:
        return self.title

    def recommendedMaxWorkingSetSize(self) -> int:
        return 8 << 30

    def newCommandQueue(self):
        waiting: list[Commands] = []
        return SimpleNamespace(commandBuffer=lambda: Commands(waiting))

    def newBufferWithLength_options_(self, nbytes: int, options: int) -> Buffer | None:
        assert nbytes > 0 and options == MTLResourceStorageModeShared
        return Buffer(nbytes) if nbytes <= self.largest else None

    def newLibraryWithSource_options_error_(self, source: str, options, error: None) -> tuple:
        assert not options.fast_math
        self.compilations += 1
        try:
            library = Library(source, "metal")
        except AssertionError as mistake:
            return None, Error(f"program_source:\n{mistake}")
        return SimpleNamespace(newFunctionWithName_=lambda name: (library, name)), None

    def newComputePipelineStateWithFunction_error_(self, function: tuple, error: None) -> tuple:
        return Pipeline(*function), None


DEVICES = [Device("Fake M1"), Device("Fake M2")]


def MTLCreateSystemDefaultDevice() -> Device | None:
    return DEVICES[0] if DEVICES else None


def MTLCopyAllDevices() -> list[Device]:
    return DEVICES
