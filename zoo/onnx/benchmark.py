"""How long a run takes, here and with onnxruntime."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weights.checkpoint import printable
from weights.onnx_tensor import dtype_of
from zoo.errors import UsageError, UserError
from zoo.onnx.model import Model


def random_inputs(
    model: Model, shapes: Mapping[str, tuple[int, ...]], seed: int = 0
) -> dict[str, np.ndarray]:
    """Normally distributed numbers, or ints of 0 and 1, for every tensor that the model takes.

    UserError for an input that isn't a tensor, or of unknown rank and in no `shapes`; UsageError
    for shapes below 0, or of inputs that there aren't.
    """
    unknown = shapes.keys() - {value.name for value in model.inputs}
    if unknown:
        raise UsageError(f"the model has no input {', '.join(map(printable, sorted(unknown)))}")
    rng, out = np.random.default_rng(seed), {}
    for value in model.inputs:
        shape = shapes.get(value.name)
        if shape is None and value.type.shape is not None:
            shape = tuple(n if isinstance(n, int) and n > 0 else 1 for n in value.type.shape)
        if min(shape or (), default=0) < 0:
            raise UsageError(f"--shape of {printable(value.name)} has a size below 0")
        if shape is None or value.type.dtype in (None, "str"):
            raise UserError(f"input {printable(value.name)} can't be made up; give it by --input")
        dtype = dtype_of(value.type.dtype)
        numbers = rng.standard_normal(shape) if "float" in dtype.name else rng.integers(0, 2, shape)
        out[value.name] = numbers.astype(dtype)
    return out


def measure(
    model: Model, inputs: Mapping[str, np.ndarray], runs: int, peers: bool = False
) -> dict[str, Any]:
    """Seconds of the first run and the median of the others; of onnxruntime too if asked for."""
    start = time.perf_counter()
    outputs = model.run(inputs)
    found = {"first_s": time.perf_counter() - start}
    found["run_s"] = _median(lambda: model.run(inputs), runs)
    if peers:
        run = _onnxruntime(model)
        theirs = run(inputs)
        found["onnxruntime_s"] = _median(lambda: run(inputs), runs)
        found["speedup"] = found["onnxruntime_s"] / found["run_s"]
        found["difference"] = max(
            (_difference(outputs[name], theirs[name]) for name in outputs), default=0.0
        )
    return found


def _median(run: Callable[[], Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _onnxruntime(model: Model) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    try:
        import onnxruntime
    except ImportError:
        raise UserError("--peers needs onnxruntime; pip install onnxruntime") from None
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(str(model.file.path), providers=providers)
    names = [value.name for value in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs))))


def _difference(ours: Any, theirs: Any) -> float:
    """The largest difference over the largest number."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30))


def text(found: Mapping[str, float]) -> str:
    """The figures as lines."""
    lines = [
        f"first run {found['first_s']:.2f} s (kernels are compiled, and kept)",
        f"run {found['run_s'] * 1000:.2f} ms",
    ]
    if "onnxruntime_s" in found:
        lines.append(f"onnxruntime {found['onnxruntime_s'] * 1000:.2f} ms: {found['speedup']:.2f}x")
        lines.append(f"largest difference {found['difference']:.1e} of the largest number")
    return "\n".join(lines)
