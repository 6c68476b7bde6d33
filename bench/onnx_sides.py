"""The runtimes that `bench onnx` compares, each behind the same few methods.

Imports of a runtime happen in `load`, in that side's own process.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SHOWN = 4096  # values of the results that are compared
RUNS = 8  # of which a round's figure is the median; the first ones wake threads up


class Side:
    """A loaded model with its inputs: `run` computes its outputs, in the model's order."""

    inputs: dict[str, np.ndarray]

    def run(self) -> list[np.ndarray]:
        raise NotImplementedError

    def prepare(self, path: str, shapes: dict[str, list[int]]) -> Any:
        """Our own model of the file, and the same random inputs for all sides."""
        from zoo.onnx import benchmark, model

        ours = model.load(path)
        given = {name: tuple(shape) for name, shape in shapes.items()}
        self.inputs = benchmark.random_inputs(ours, given)
        return ours

    def result(self) -> list[float]:
        """Some values of the outputs; also compiles and fills caches."""
        flat = np.concatenate([np.ravel(out) for out in self.run()]).astype(np.float64)
        return flat[:: max(1, len(flat) // SHOWN)].tolist()

    def seconds(self) -> float:
        times = []
        for _ in range(2 * RUNS):
            begun = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - begun)
        return median(times[RUNS:])


class Menagerie(Side):
    """This project."""

    def load(self, path: str, shapes: dict[str, list[int]], threads: int) -> None:
        self.model = self.prepare(path, shapes)

    def run(self) -> list[np.ndarray]:
        return list(self.model.run(self.inputs).values())


class OnnxRuntime(Side):
    """onnxruntime on the CPU."""

    def load(self, path: str, shapes: dict[str, list[int]], threads: int) -> None:
        import onnxruntime

        self.prepare(path, shapes)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(path, options, providers=providers)

    def run(self) -> list[np.ndarray]:
        return self.session.run(None, self.inputs)


class Torch(Side):
    """Eager torch, channels last: see onnx_torch.py."""

    def load(self, path: str, shapes: dict[str, list[int]], threads: int) -> None:
        import torch

        from bench.onnx_torch import Net

        torch.set_num_threads(threads)
        self.prepare(path, shapes)
        self.net = Net(Path(path), torch.channels_last)

    def run(self) -> list[np.ndarray]:
        return list(self.net(self.inputs).values())
