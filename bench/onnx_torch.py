"""An ONNX graph as the eager torch code that someone would write for it, node by node.

Weights are tensors beforehand, in the memory format of the activations; x * clip(x + 3, 0, 6) / 6,
which is how exporters spell it, is torch's own `hardswish`. Only the operators of the compared
networks are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from weights import onnx
from weights.onnx import Node, OnnxTensor

Attributes = Mapping[str, Any]
Call = tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]


class Net:
    """A float32 model; `memory_format` is what pictures and their weights lie in."""

    def __init__(self, path: Path, memory_format: torch.memory_format) -> None:
        graph, self.format = onnx.load(path).graph, memory_format
        arrays = {name: tensor.read() for name, tensor in graph.initializers.items()}
        arrays |= {n.outputs[0]: n.attributes["value"].read() for n in graph.nodes
                   if isinstance(n.attributes.get("value"), OnnxTensor)}  # fmt: skip
        self.constants = {name: self._tensor(array) for name, array in arrays.items()}
        nodes = _with_hardswish([n for n in graph.nodes if n.op != "Constant"], arrays)
        self.calls = [self._call(node, arrays) for node in nodes]
        self.outputs = [value.name for value in graph.outputs]
        last = {name: i for i, (_, ins, _) in enumerate(self.calls) for name in ins}
        kept = {*self.constants, *self.outputs}
        self.done = [[name for name, at in last.items() if at == i and name not in kept]
                     for i in range(len(self.calls))]  # fmt: skip

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Every output by name. What nothing reads any more is let go, as in Python code."""
        values = self.constants | {name: self._tensor(x) for name, x in inputs.items()}
        with torch.inference_mode():
            for (function, ins, outs), done in zip(self.calls, self.done):
                result = function(*(values[name] for name in ins))
                values.update(zip(outs, result if isinstance(result, (tuple, list)) else [result]))
                for name in done:
                    values.pop(name, None)
        return {name: values[name].numpy() for name in self.outputs}

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        made = torch.from_numpy(np.array(array))
        return made.contiguous(memory_format=self.format) if made.ndim == 4 else made

    def _call(self, node: Node, arrays: Mapping[str, np.ndarray]) -> Call:
        if node.op not in OPERATORS:
            raise NotImplementedError(f"{node.op} isn't among the operators of bench/onnx_torch.py")
        function, inputs = OPERATORS[node.op](node.attributes), node.inputs
        if node.op == "Clip":  # bounds are Python's numbers in torch code
            low, high = (float(arrays[name]) if name else None for name in inputs[1:3])
            function, inputs = (lambda x: x.clamp(low, high)), inputs[:1]
        elif node.op == "Resize":
            factors = [float(f) for f in arrays[inputs[2]][2:]]
            function = lambda x: F.interpolate(x, scale_factor=factors)  # noqa: E731
            inputs = inputs[:1]
        elif node.op == "ReduceMean":  # axes are an attribute before opset 18, then an input
            axes = arrays[inputs[1]] if len(inputs) > 1 else node.attributes.get("axes", ())
            axes = [int(axis) for axis in axes] or None
            keep = bool(node.attributes.get("keepdims", 1))
            function, inputs = (lambda x: x.mean(axes, keepdim=keep)), inputs[:1]
        elif node.op == "Reshape":
            if inputs[1] not in arrays or 0 in arrays[inputs[1]]:
                raise NotImplementedError("a Reshape to sizes that depend on the input")
            shape = [int(n) for n in arrays[inputs[1]]]
            function, inputs = (lambda x: x.reshape(shape)), inputs[:1]
        return function, tuple(name for name in inputs if name), node.outputs


def _conv(a: Attributes) -> Callable[..., torch.Tensor]:
    rank = len(a["kernel_shape"])
    pads = a.get("pads", (0,) * 2 * rank)
    if pads[:rank] != pads[rank:] or a.get("auto_pad", "NOTSET") not in ("NOTSET", b"NOTSET"):
        raise NotImplementedError("padding that differs from side to side")
    how = {"stride": a["strides"], "padding": pads[:rank], "groups": a.get("group", 1)}
    how["dilation"] = a.get("dilations", (1,) * rank)
    return lambda x, weight, bias=None: F.conv2d(x, weight, bias, **how)


def _conv_transpose(a: Attributes) -> Callable[..., torch.Tensor]:
    if any(a.get("pads", ())) or "output_padding" in a:
        raise NotImplementedError("padding of a transposed convolution")
    return lambda x, weight, bias=None: F.conv_transpose2d(x, weight, bias, a["strides"])


def _gemm(a: Attributes) -> Callable[..., torch.Tensor]:
    if not a.get("transB") or a.get("transA"):
        return lambda x, weight, bias=0: x @ weight + bias
    return lambda x, weight, bias=None: F.linear(x, weight, bias)


def _hard_sigmoid(a: Attributes) -> Callable[..., torch.Tensor]:
    alpha, beta = a.get("alpha", 0.2), a.get("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return F.hardsigmoid
    return lambda x: (x * alpha + beta).clamp_(0, 1)


def _batch_norm(a: Attributes) -> Callable[..., torch.Tensor]:
    eps = a.get("epsilon", 1e-5)
    return lambda x, scale, bias, mean, var: F.batch_norm(x, mean, var, scale, bias, eps=eps)


OPERATORS: dict[str, Callable[[Attributes], Callable[..., Any]]] = {
    "Add": lambda a: torch.add,
    "BatchNormalization": _batch_norm,
    "Clip": lambda a: torch.clamp,
    "Concat": lambda a: lambda *xs: torch.cat(xs, a["axis"]),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": lambda a: torch.div,
    "Elu": lambda a: lambda x: F.elu(x, a.get("alpha", 1.0)),
    "Flatten": lambda a: lambda x: x.flatten(a.get("axis", 1)),
    "Gelu": lambda a: lambda x: F.gelu(x, approximate=a.get("approximate", "none")),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda a: lambda x: F.adaptive_avg_pool2d(x, 1),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda a: F.hardswish,
    "Mul": lambda a: torch.mul,
    "ReduceMean": lambda a: torch.mean,
    "Relu": lambda a: F.relu,
    "Reshape": lambda a: torch.reshape,
    "Resize": lambda a: F.interpolate,
    "Sigmoid": lambda a: torch.sigmoid,
    "Split": lambda a: lambda x: x.chunk(3, a.get("axis", 0)),
    "Sub": lambda a: torch.sub,
    "Tanh": lambda a: torch.tanh,
}


def _with_hardswish(nodes: list[Node], arrays: Mapping[str, np.ndarray]) -> list[Node]:
    """Four nodes, x + 3, clip, x *, / 6, as one HardSwish, where nothing else reads them."""
    reads = Counter(name for node in nodes for name in node.inputs)
    makers = {name: node for node in nodes for name in node.outputs}
    gone: set[int] = set()
    made: dict[int, Node] = {}

    def single(name: str, op: str) -> Node | None:
        node = makers.get(name)
        return node if node and node.op == op and reads[name] == 1 else None

    def is_number(name: str, value: float) -> bool:
        return name in arrays and arrays[name].size == 1 and float(arrays[name].item()) == value

    for node in nodes:
        if node.op != "Div" or not is_number(node.inputs[1], 6):
            continue
        times = single(node.inputs[0], "Mul")
        clips = [single(name, "Clip") for name in times.inputs] if times else []
        clip = next(filter(None, clips), None)
        plus = single(clip.inputs[0], "Add") if clip else None
        if plus is None or not is_number(clip.inputs[1], 0) or not is_number(clip.inputs[2], 6):
            continue
        x = next(name for name in times.inputs if name != clip.outputs[0])
        if x in plus.inputs and any(is_number(name, 3) for name in plus.inputs):
            gone.update(map(id, (times, clip, plus)))
            made[id(node)] = Node("HardSwish", "", node.name, "", (x,), node.outputs, {})
    return [made.get(id(node), node) for node in nodes if id(node) not in gone]
