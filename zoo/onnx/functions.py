"""Functions that a model defines, written out where they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from weights import WeightError
from weights.onnx import Function, Graph, Node, OnnxModel, Reference, Value

_MAX_NODES = 500_000  # functions that call functions may double what is written out each time
_MAX_DEPTH = 32

Placed = tuple[Node, Mapping[str, int]]  # a node, and the opsets that it was written for


class Inliner:
    """Writes out the calls of one model's functions."""

    def __init__(self, model: OnnxModel) -> None:
        self.model, self.count = model, 0

    def nodes(
        self, nodes: tuple[Node, ...], opsets: Mapping[str, int], depth: int = 0
    ) -> Iterator[Placed]:
        """The nodes, with the opsets of each. WeightError for functions without end."""
        for node in nodes:
            self.count += 1
            if depth > _MAX_DEPTH or self.count > _MAX_NODES:
                problem = "its functions call each other without end"
                raise WeightError(problem, file=self.model.path, got=node.op)
            function = self.model.functions.get((node.domain, node.op, node.overload))
            if function is None:
                yield node, opsets
            else:
                body = _written_out(node, function, f"{node.op}.{self.count}/")
                yield from self.nodes(body, function.opsets, depth + 1)


def _written_out(call: Node, function: Function, prefix: str) -> tuple[Node, ...]:
    """A function's nodes in the names and with the attributes of its call."""
    given = (*call.inputs, *("",) * len(function.inputs))
    names = dict(zip(function.inputs, given))
    names |= dict(zip(function.outputs, call.outputs))
    attributes = {**function.attributes, **call.attributes}

    def rename(name: str) -> str:
        return names.get(name, prefix + name) if name else ""

    return tuple(_renamed(node, rename, attributes) for node in function.nodes)


def _renamed(node: Node, rename: Callable[[str], str], given: Mapping[str, Any]) -> Node:
    attributes = {}
    for name, value in node.attributes.items():
        if isinstance(value, Reference):
            if value.name not in given:
                continue  # the operator's own default
            value = given[value.name]
        if isinstance(value, Graph):
            value = _renamed_graph(value, rename, given)
        attributes[name] = value
    return replace(
        node,
        inputs=tuple(map(rename, node.inputs)),
        outputs=tuple(map(rename, node.outputs)),
        attributes=attributes,
    )


def _renamed_graph(graph: Graph, rename: Callable[[str], str], given: Mapping[str, Any]) -> Graph:
    return replace(
        graph,
        nodes=tuple(_renamed(node, rename, given) for node in graph.nodes),
        initializers={rename(name): tensor for name, tensor in graph.initializers.items()},
        inputs=tuple(Value(rename(value.name), value.type) for value in graph.inputs),
        outputs=tuple(Value(rename(value.name), value.type) for value in graph.outputs),
    )
