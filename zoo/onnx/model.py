"""A loaded ONNX model: named arrays in, named arrays out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import zoo.onnx.operators  # noqa: F401 - fills the table
from engine import get_device
from weights import WeightError, onnx
from weights.checkpoint import printable
from weights.onnx import OnnxModel, Value
from weights.onnx_tensor import dtype_of
from zoo.errors import UsageError, UserError
from zoo.onnx.bind import Binder
from zoo.onnx.node import Device, graphs_of
from zoo.onnx.registry import find

DTYPES = ("f32", "high", "auto")


class Model:
    """An ONNX model that runs: `model.run({"x": array})` or `model(x=array)`.

    The first run with inputs of some shapes captures what later ones with these shapes replay.
    """

    def __init__(self, file: OnnxModel, device: Device) -> None:
        self.file, self.device = file, device
        binder = Binder(file, device)
        self.plan = binder.graph(file.graph, file.opsets)
        binder.check()

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Name and type of each input."""
        return self.file.graph.inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Name and type of each output."""
        return self.file.graph.outputs

    def __call__(self, **inputs: Any) -> dict[str, np.ndarray]:
        """`run` with the inputs as keywords."""
        return self.run(inputs)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Every output by name. UsageError for inputs that aren't what the model says."""
        known = {value.name: value for value in self.inputs}
        unknown = sorted(inputs.keys() - known.keys() - self.file.graph.initializers.keys())
        if unknown:
            theirs, ours = (", ".join(map(printable, names)) for names in (unknown, known))
            raise UsageError(f"the model has no input {theirs}; it has {ours or 'none'}")
        values, sizes = {}, {}
        for name, value in known.items():
            if name not in inputs and value.type.kind != "optional":
                raise UsageError(f"input {printable(name)} is missing")
            values[name] = _checked(value, inputs.get(name), sizes)
        results = self.plan.run(values)
        return {v.name: _typed(x, v) for v, x in zip(self.outputs, results)}


def load(path: str | os.PathLike[str], device: str | None = None, dtype: str = "f32") -> Model:
    """A model from an .onnx file. WeightError, naming file, node and opset, for what can't run.

    dtype "f32" multiplies as other runtimes do; "auto" takes what the device is fast at, bfloat16
    perhaps; "high" is nearly as exact as f32. DeviceError without the device.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    get_device(device)
    return Model(onnx.load(Path(path)), Device(device, dtype))


def unsupported(file: OnnxModel) -> Counter[str]:
    """The operators that nothing runs, as `domain.Name`, and how many nodes have each."""
    return Counter(
        {name: count for (domain, op, name), count in _operators(file).items()
         if find(domain, op, file.opsets.get(domain, 1)) is None}
    )  # fmt: skip


def operators(file: OnnxModel) -> Counter[str]:
    """All operators, and how many nodes have each; functions are counted as what they hold."""
    return Counter({name: count for (_, _, name), count in _operators(file).items()})


def _operators(file: OnnxModel) -> Counter[tuple[str, str, str]]:
    from zoo.onnx.functions import Inliner

    inliner, counts = Inliner(file), Counter()

    def count(graph: Any) -> None:
        for node, _ in inliner.nodes(graph.nodes, file.opsets):
            name = f"{node.domain}.{node.op}" if node.domain else node.op
            counts[node.domain, node.op, name] += 1
            for inner in graphs_of(node).values():
                count(inner)

    count(file.graph)
    return counts


def _checked(value: Value, given: Any, sizes: dict[str, int]) -> Any:
    """An input as an array of the model's type; `sizes` are those that names stand for so far."""
    kind = value.type
    if given is None or kind.kind != "tensor":
        return [np.asarray(each) for each in given] if isinstance(given, (list, tuple)) else given
    array = np.asarray(given)
    if array.dtype.kind in "US":
        array = array.astype(object)
    if kind.dtype is not None:
        wanted = dtype_of(kind.dtype)
        same = array.dtype == wanted or isinstance(given, (int, float, list, tuple))
        if not same and not np.can_cast(array.dtype, wanted, "same_kind"):
            got = f"{array.dtype.name} {list(array.shape)}"
            raise UsageError(f"input {printable(value.name)} must be {kind.dtype}, got {got}")
        array = array.astype(wanted, copy=False)
    if kind.shape is not None:
        fits = len(kind.shape) == array.ndim
        for size, n in zip(kind.shape, array.shape):
            fits = fits and (not isinstance(size, int) or size == n)
        if not fits:
            shown = ", ".join("?" if size is None else printable(str(size)) for size in kind.shape)
            got = list(array.shape)
            raise UsageError(
                f"input {printable(value.name)} must have the shape [{shown}], got {got}"
            )
    return array


def _typed(result: Any, value: Value) -> Any:
    """An output in the type that the model states: the device has no float64."""
    stated = value.type.dtype
    if not isinstance(result, np.ndarray) or stated in (None, "str"):
        return result
    if result.dtype.kind in "OUS":
        raise UserError(f"output {printable(value.name)} is stated to be {stated}, but holds texts")
    return result.astype(dtype_of(stated), copy=False)


__all__ = ["Model", "WeightError", "load", "operators", "unsupported"]
