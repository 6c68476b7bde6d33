"""What a model takes, gives and needs, without loading its tensors or a device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weights import onnx
from weights.checkpoint import printable
from weights.onnx import Graph, OnnxModel, OnnxTensor, Type, Value
from zoo.onnx.functions import Inliner
from zoo.onnx.model import operators, unsupported
from zoo.onnx.node import graphs_of
from zoo.onnx.registry import find


def inspection(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts, as plain values. WeightError for a file that is no model."""
    file = onnx.load(Path(path))
    counts = operators(file)
    missing = unsupported(file)
    return {
        "model": str(path),
        "producer": file.producer,
        "ir_version": file.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in file.opsets.items()},
        "inputs": [_value(value) for value in file.graph.inputs],
        "outputs": [_value(value) for value in file.graph.outputs],
        "parameters": sum(tensor.size for tensor in _tensors(file)),
        "operators": dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
        "by_numpy": sorted(name for name in counts if _on_host(name, file.opsets)),
        "unsupported": dict(missing),
    }


def _tensors(file: OnnxModel) -> Iterator[OnnxTensor]:
    """What the model holds: initializers, and constants, as which Paddle keeps all its weights."""
    inliner = Inliner(file)

    def of(graph: Graph) -> Iterator[OnnxTensor]:
        yield from graph.initializers.values()
        for node, _ in inliner.nodes(graph.nodes, file.opsets):
            value = node.attributes.get("value")
            if node.op == "Constant" and isinstance(value, OnnxTensor):
                yield value
            for inner in graphs_of(node).values():
                yield from of(inner)

    return of(file.graph)


def _on_host(name: str, opsets: Any) -> bool:
    domain, _, op = name.rpartition(".")
    row = find(domain, op, opsets.get(domain, 1))
    return row is not None and row.on_host


def _value(value: Value) -> dict[str, Any]:
    kind = value.type
    while kind.inner is not None:
        kind = kind.inner
    shape = None if kind.shape is None else list(kind.shape)
    return {"name": value.name, "type": _spelt(value.type), "shape": shape}


def _spelt(kind: Type) -> str:
    if kind.inner is not None:
        return f"{kind.kind}({_spelt(kind.inner)})"
    return kind.dtype or kind.kind


def text(found: dict[str, Any]) -> str:
    """The facts as lines."""
    opsets = ", ".join(
        f"{printable(domain)} {version}" for domain, version in found["opsets"].items()
    )
    producer = printable(found["producer"]) or "an unknown exporter"
    lines = [f"{found['model']}: {opsets}; made by {producer}"]
    for title in ("inputs", "outputs"):
        lines += [f"{title[:-1]} {_line(value)}" for value in found[title]]
    lines.append(f"parameters {found['parameters']:,}")
    lines.append("operators " + _counted(found["operators"]))
    if found["by_numpy"]:
        lines.append("computed by NumPy " + ", ".join(found["by_numpy"]))
    if found["unsupported"]:
        lines.append("not supported " + _counted(found["unsupported"]))
    return "\n".join(lines)


def _line(value: dict[str, Any]) -> str:
    return f"{printable(value['name'])}: {value['type']} {_sizes(value['shape'])}"


def _sizes(shape: Sequence[Any] | None) -> str:
    if shape is None:
        return "of any shape"
    return "[" + ", ".join("?" if n is None else printable(str(n)) for n in shape) + "]"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{printable(name)} {count}" for name, count in counts.items())
