"""A net of the shape of openpilot's driving model of 2022: its 12 operators, inputs and output."""

from __future__ import annotations

import numpy as np

from tests.weights import build_onnx as b


class Builder:
    """Adds nodes and random weights one after the other."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[bytes] = []
        self.weights: dict[str, np.ndarray] = {}

    def weight(self, *shape: int) -> str:
        """Random numbers that keep the variance of what they multiply."""
        name = f"w{len(self.weights)}"
        scale = np.sqrt(2 / max(1, np.prod(shape[1:])))
        self.weights[name] = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        return name

    def add(self, op: str, inputs: str, **attributes) -> str:
        """A node with one output."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(b.node(op, inputs, name, **attributes))
        return name

    def conv(self, x: str, ins: int, outs: int, k: int, stride: int = 1, group: int = 1) -> str:
        """A convolution with a bias that keeps the size, but for the stride."""
        weight, bias = self.weight(outs, ins // group, k, k), self.weight(outs)
        how = {
            "group": group,
            "strides": [stride] * 2,
            "pads": [k // 2] * 4,
            "kernel_shape": [k] * 2,
        }
        return self.add("Conv", f"{x} {weight} {bias}", **how)

    def linear(self, x: str, ins: int, outs: int) -> str:
        """x Wᵀ + b."""
        return self.add("Gemm", f"{x} {self.weight(outs, ins)} {self.weight(outs)}", transB=1)


def _block(net: Builder, x: str, width: int) -> str:
    """An inverted bottleneck, as in EfficientNet."""
    y = net.add("Elu", net.conv(x, width, 2 * width, 1), alpha=1.0)
    y = net.add("Elu", net.conv(y, 2 * width, 2 * width, 3, group=2 * width), alpha=1.0)
    return net.add("Add", f"{x} {net.conv(y, 2 * width, width, 1)}")


def _recurrent(net: Builder, x: str, state: str, size: int) -> str:
    """One step of a GRU by its formula: Split, Sigmoid, Tanh, Mul, Sub, Add."""
    gates = net.add("Gemm", f"{x} {net.weight(3 * size, size)} {net.weight(3 * size)}", transB=1)
    hidden = net.linear(state, size, 3 * size)
    parts = []
    for source in (gates, hidden):
        names = [f"{source}_{i}" for i in range(3)]
        net.nodes.append(b.node("Split", source, " ".join(names), axis=1))
        parts.append(names)
    (xr, xz, xn), (hr, hz, hn) = parts
    reset = net.add("Sigmoid", net.add("Add", f"{xr} {hr}"))
    update = net.add("Sigmoid", net.add("Add", f"{xz} {hz}"))
    reset_hidden = net.add("Mul", f"{reset} {hn}")
    new = net.add("Tanh", net.add("Add", f"{xn} {reset_hidden}"))
    kept = net.add("Mul", f"{update} {net.add('Sub', f'{state} {new}')}")
    return net.add("Add", f"{new} {kept}")


def driving(width: int = 32, blocks: int = 2, height: int = 128, wide: int = 256) -> bytes:
    """The model's bytes: output (1, 6472), of which the last 512 are the new state."""
    net = Builder()
    x = net.add("Concat", "input_imgs big_input_imgs", axis=1)
    channels, size = 24, [height, wide]
    for stage in range(4):
        x = net.add("Elu", net.conv(x, channels, width << stage, 3, stride=2), alpha=1.0)
        channels, size = width << stage, [-(-n // 2) for n in size]
        for _ in range(blocks):
            x = _block(net, x, channels)
    x = net.add("Elu", net.conv(x, channels, 32, 3, stride=2), alpha=1.0)
    size = [-(-n // 2) for n in size]
    x = net.add("Flatten", x, axis=1)
    x = net.add("Concat", f"{x} desire traffic_convention", axis=1)
    x = net.add("Relu", net.linear(x, 32 * size[0] * size[1] + 10, 512))
    state = _recurrent(net, x, "initial_state", 512)
    heads = [net.linear(net.add("Relu", net.linear(state, 512, 256)), 256, n)
             for n in (4955, 840, 165)]  # fmt: skip
    net.nodes.append(b.node("Concat", " ".join([*heads, state]), "outputs", axis=1))
    inputs = [b.value(name, array.shape) for name, array in inputs_of(height, wide).items()]
    outputs = [b.value("outputs", (1, 6472))]
    return b.model(b.graph(net.nodes, inputs, outputs, **net.weights), opset=12)


def inputs_of(height: int = 128, wide: int = 256, seed: int = 1) -> dict[str, np.ndarray]:
    """Random inputs."""
    rng = np.random.default_rng(seed)
    images = (1, 12, height, wide)
    shapes = {"input_imgs": images, "big_input_imgs": images, "desire": (1, 8),
              "traffic_convention": (1, 2), "initial_state": (1, 512)}  # fmt: skip
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
