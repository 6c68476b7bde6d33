"""From a model's graph to nodes that run: operators looked up, functions written out, constants
folded. What isn't supported is all named before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weights import WeightError
from weights.checkpoint import printable
from weights.onnx import Graph, Node, OnnxModel
from zoo.onnx.functions import Inliner
from zoo.onnx.node import BoundNode, Device, graphs_of
from zoo.onnx.plan import Plan
from zoo.onnx.registry import find

_FOLDED = 1 << 26  # elements: a constant that is larger is made when it is needed
_SHOWN = 20  # problems that one error names
_LARGE = frozenset({"ConstantOfShape", "Expand", "Tile", "Range"})  # make much out of little
_GROWING = frozenset(
    {"CenterCropPad", "OneHot", "Pad", "Resize", "Upsample"}
)  # as much as they like


class Binder:
    """Binds the graphs of one model; `problems` collects what isn't supported."""

    def __init__(self, model: OnnxModel, device: Device) -> None:
        self.model, self.device = model, device
        self.inliner = Inliner(model)
        self.problems: dict[str, None] = {}

    def check(self) -> None:
        """WeightError that names every unsupported node with its operator, opset and file."""
        if self.problems:
            shown = list(self.problems)[:_SHOWN]
            more = len(self.problems) - len(shown)
            text = "; ".join(shown) + (f"; and {more} more" if more else "")
            raise WeightError(f"not supported: {text}", file=self.model.path)

    def graph(self, graph: Graph, opsets: Mapping[str, int]) -> Plan:
        """A graph, of which the nodes that depend on constants alone have been run."""
        constants: dict[str, Any] = {}
        for name, tensor in graph.initializers.items():
            constants[name] = tensor.read()
        nodes = []
        for node, versions in self.inliner.nodes(graph.nodes, opsets):
            bound = self.node(node, versions)
            if bound is not None and not self._fold(bound, constants):
                nodes.append(bound)
        for array in constants.values():
            self.device.remember(array)
        outputs = tuple(value.name for value in graph.outputs)
        inputs = tuple(value.name for value in graph.inputs)
        return Plan(tuple(nodes), inputs, outputs, constants, self.device)

    def node(self, node: Node, opsets: Mapping[str, int]) -> BoundNode | None:
        """A node with its operator, or None where that is one of the problems."""
        opset = opsets.get(node.domain, 1 if node.domain else 0)
        kind = f"{node.domain}.{node.op}" if node.domain else node.op
        title = node.name or (node.outputs[0] if node.outputs else "")
        where = f"node '{printable(title)}' ({printable(kind)}, opset {opset})"
        operator = find(node.domain, node.op, opset)
        if operator is None:
            self.problems[where] = None
            return None
        bodies = {name: self.graph(g, opsets) for name, g in graphs_of(node).items()}
        implicit = sorted({name for body in bodies.values() for name in body.reads})
        try:
            bound = BoundNode(node, operator, opset, where, bodies, implicit)
        except WeightError as error:
            self.problems[str(error)] = None
            return None
        problem = bound.problem()
        if problem is not None:
            self.problems[f"{where}: {problem}"] = None
            return None
        return bound

    def _fold(self, node: BoundNode, constants: dict[str, Any]) -> bool:
        """Run a node that depends on constants alone."""
        operator = node.operator
        if self.problems or operator.random or operator.heavy or node.bodies:
            return False
        if any(name not in constants for name in node.reads):
            return False
        sizes = sum(np.size(constants[name]) for name in node.reads)
        if operator.name in _GROWING or sizes > _FOLDED:
            return False
        if operator.name in _LARGE and _elements(node, constants) > _FOLDED:
            return False
        constants.update(zip(node.outputs, node(constants, self.device)))
        return True


def _elements(node: BoundNode, constants: Mapping[str, Any]) -> float:
    """The most elements that an operator which makes much out of little can make.

    Inputs that make no sense might make any number: that is told when the node runs.
    """
    try:
        return _counted(node, constants)
    except (IndexError, TypeError, ValueError):
        return math.inf


def _counted(node: BoundNode, constants: Mapping[str, Any]) -> float:
    arrays = [np.asarray(constants[name]) for name in node.reads]
    sizes = arrays[-1 if node.operator.name != "ConstantOfShape" else 0]
    if node.operator.name == "Range":
        start, limit, step = (float(a.reshape(-1)[0]) for a in arrays)
        return abs((limit - start) / (step or 1))
    return float(np.prod(np.maximum(sizes.astype(float), 1))) * max(1, arrays[0].size)
