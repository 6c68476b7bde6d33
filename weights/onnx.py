"""Read ONNX models: the graph as plain values, tensors left in the file until they are used.

A model is one protobuf message; large tensors may lie in files beside it. Nothing is run, and no
operator is known here. Source: onnx/onnx.proto and docs/IR.md, docs/ExternalData.md of onnx.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.checkpoint import WeightError
from weights.mapped import open_mapped
from weights.onnx_schema import ATTRIBUTES, NAMES, SCHEMA
from weights.onnx_tensor import External, OnnxTensor
from weights.protobuf import Reader

__all__ = ["Function", "Graph", "Node", "OnnxModel", "OnnxTensor", "Reference", "Type", "Value",
           "load"]  # fmt: skip

_DOMAINS = {"ai.onnx": ""}  # two spellings of the standard operators
_MAX_TYPE_DEPTH = 16
Scopes = tuple[set[str], ...]  # the names of the graphs around, outermost first


@dataclass(frozen=True, slots=True)
class Type:
    """What a value is: `kind` tensor, sequence, optional, …; of a tensor its type and shape.

    An axis of the shape is a size, a name, or None where nothing is known; shape None: any.
    """

    kind: str
    dtype: str | None = None
    shape: tuple[int | str | None, ...] | None = None
    inner: Type | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A named input or output of a graph."""

    name: str
    type: Type


@dataclass(frozen=True, slots=True)
class Reference:
    """An attribute of a node in a function: the value that the call gives for this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Node:
    """One operation; an empty input or output is one that isn't there."""

    op: str
    domain: str
    name: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes, each after those whose outputs it reads; `inputs` don't list the initializers."""

    name: str
    nodes: tuple[Node, ...]
    initializers: Mapping[str, OnnxTensor]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """An operator that the model itself defines, with the defaults of its attributes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    nodes: tuple[Node, ...]
    opsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A whole file: `opsets` from domain to version, `functions` by (domain, name, overload)."""

    path: Path
    ir_version: int
    producer: str
    opsets: Mapping[str, int]
    graph: Graph
    functions: Mapping[tuple[str, str, str], Function]
    metadata: Mapping[str, str]


def load(path: str | os.PathLike[str]) -> OnnxModel:
    """Open a model. WeightError, naming the file, for what breaks the format.

    Also for a node that reads a value which no node before it makes, as in a cycle.
    """
    path = Path(path)
    data = open_mapped(path)
    raw = Reader(path, data, SCHEMA).message("Model", 0, len(data))
    if "graph" not in raw:
        problem = "not an ONNX model: it has no graph"
        raise WeightError(problem, file=path, expected="what torch.onnx.export writes")
    build = _Builder(path, External(path))
    graph = build.graph(raw["graph"], ())
    functions = {}
    for each in raw.get("functions", ()):
        key = (_domain(each), each.get("name", ""), each.get("overload", ""))
        if key in functions:
            build.fail("two functions have one name", got=key[1])
        functions[key] = build.function(each)
    producer = " ".join(filter(None, (raw.get("producer_name"), raw.get("producer_version"))))
    metadata = {pair.get("key", ""): pair.get("value", "") for pair in raw.get("metadata", ())}
    opsets = _opsets(raw)
    return OnnxModel(path, raw.get("ir_version", 0), producer, opsets, graph, functions, metadata)


def _domain(raw: Mapping[str, Any]) -> str:
    domain = raw.get("domain", "")
    return _DOMAINS.get(domain, domain)


def _opsets(raw: Mapping[str, Any]) -> dict[str, int]:
    return {_domain(each): each.get("version", 0) for each in raw.get("opset_import", ())}


class _Builder:
    """Makes values of messages; every error names the file."""

    def __init__(self, path: Path, external: External) -> None:
        self.path, self.external = path, external

    def fail(self, problem: str, **facts: object) -> None:
        raise WeightError(problem, file=self.path, **facts)

    def graph(self, raw: Mapping[str, Any], outer: Scopes) -> Graph:
        """A graph within others, whose names so far are `outer`."""
        if raw.get("sparse_initializer"):
            self.fail("it has sparse initializers", remedy="save it with dense ones")
        tensors = [self.tensor(each) for each in raw.get("initializer", ())]
        initializers = {each.name: each for each in tensors}
        if len(initializers) != len(tensors):
            self.fail("two initializers have one name", got=_twice(t.name for t in tensors))
        inputs = [self.value(each) for each in raw.get("input", ())]
        outputs = [self.value(each) for each in raw.get("output", ())]
        names = {*initializers, *(value.name for value in inputs)}
        nodes = self.nodes(raw.get("node", ()), names, outer)
        for value in outputs:
            if not _knows((*outer, names), value.name):
                self.fail("an output of the graph is made by no node", got=value.name)
        own = tuple(value for value in inputs if value.name not in initializers)
        return Graph(raw.get("name", ""), nodes, initializers, own, tuple(outputs))

    def nodes(self, raw: Iterable[Any], names: set[str], outer: Scopes) -> tuple[Node, ...]:
        """The nodes, whose outputs are added to the `names` known at the end."""
        out = []
        for each in raw:
            node = self.node(each, (*outer, names))
            for name in node.inputs:
                if name and not _knows((*outer, names), name):
                    problem = f"node {node.op} reads a value that no node before it makes"
                    self.fail(problem, got=name, remedy="its nodes are in a cycle or out of order")
            for name in node.outputs:
                if name and name in names:
                    self.fail(f"node {node.op} makes a value that is there already", got=name)
                names.add(name)
            out.append(node)
        return tuple(out)

    def node(self, raw: Mapping[str, Any], known: Scopes) -> Node:
        attributes = self.attributes(raw.get("attribute", ()), known)
        name, overload = raw.get("name", ""), raw.get("overload", "")
        inputs, outputs = tuple(raw.get("input", ())), tuple(raw.get("output", ()))
        op = raw.get("op_type", "")
        return Node(op, _domain(raw), name, overload, inputs, outputs, attributes)

    def attributes(self, raw: Iterable[Any], known: Scopes) -> dict[str, Any]:
        return {each.get("name", ""): self.attribute(each, known) for each in raw}

    def attribute(self, raw: Mapping[str, Any], known: Scopes) -> Any:
        if "ref_attr_name" in raw:
            return Reference(raw["ref_attr_name"])
        kind = raw.get("type", 0)
        field = ATTRIBUTES.get(kind)
        if not kind:  # written before there were types: there is one value
            field = next((name for name in ATTRIBUTES.values() if name in raw), None)
        if field is None:
            problem = f"attribute {raw.get('name', '')} is of a kind that is not read"
            self.fail(problem, got="a sparse tensor" if "sparse_tensor" in raw else kind)
        empty = {"f": 0.0, "i": 0, "s": memoryview(b""), "t": {}, "g": {}, "tp": {}}
        value = raw.get(field, empty.get(field, ()))
        match field:
            case "s":
                return _text(value)
            case "strings":
                return tuple(map(_text, value))
            case "t":
                return self.tensor(value)
            case "tensors":
                return tuple(map(self.tensor, value))
            case "g":
                return self.graph(value, known)
            case "graphs":
                return tuple(self.graph(each, known) for each in value)
            case "tp":
                return self.type(value)
        return value if field in ("f", "i") else tuple(value)

    def tensor(self, raw: Mapping[str, Any]) -> OnnxTensor:
        return OnnxTensor(self.path, raw, self.external)

    def value(self, raw: Mapping[str, Any]) -> Value:
        return Value(raw.get("name", ""), self.type(raw.get("type", {})))

    def type(self, raw: Mapping[str, Any], depth: int = 0) -> Type:
        for kind in ("sequence", "optional"):
            if kind in raw and depth < _MAX_TYPE_DEPTH:
                return Type(kind, inner=self.type(raw[kind].get("elem_type", {}), depth + 1))
        kind = next(iter(raw), "tensor")
        facts = raw.get(kind, {})
        shape = None
        if kind == "tensor" and "shape" in facts:
            dims = facts["shape"].get("dim", ())
            shape = tuple(_dim(dim) for dim in dims)
        return Type(kind, NAMES.get(facts.get("elem_type", 0)), shape)

    def function(self, raw: Mapping[str, Any]) -> Function:
        inputs, outputs = tuple(raw.get("input", ())), tuple(raw.get("output", ()))
        defaults = self.attributes(raw.get("attribute_proto", ()), ())
        names = set(inputs)
        nodes = self.nodes(raw.get("node", ()), names, ())
        if not names.issuperset(outputs):
            self.fail(f"function {raw.get('name', '')} has an output that no node makes")
        return Function(inputs, outputs, defaults, nodes, _opsets(raw))


def _dim(raw: Mapping[str, Any]) -> int | str | None:
    size = raw.get("dim_value")
    return size if size is not None and size >= 0 else raw.get("dim_param")


def _knows(scopes: Scopes, name: str) -> bool:
    return any(name in names for names in scopes)


def _text(raw: memoryview) -> str:
    return bytes(raw).decode("utf-8", "replace")


def _twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
