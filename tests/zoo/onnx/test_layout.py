"""Operators give the same for a picture whose channels lie last, as a convolution leaves it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import Tensor
from tests.weights import build_onnx as b
from zoo.onnx import layout
from zoo.onnx.model import load

C, H, W = 16, 6, 5
RNG = np.random.default_rng(0)
CONSTANTS = {
    name: RNG.standard_normal(shape).astype(np.float32)
    for name, shape in {"row": (W,), "scale": (C, 1, 1), "whole": (1, C, H, W), "mean": (C,),
                        "gain": (C,), "each": (C, 1, 3, 3), "pixel": (24, C, 1, 1),
                        "few": (3, C, 3, 3), "slopes": (C, 1, 1)}.items()
} | {
    "none": np.zeros(0, np.float32),
    "one": np.array(0.5, np.float32), "two": np.array([2.0], np.float32),
    "variance": np.abs(RNG.standard_normal(C)).astype(np.float32) + 1,
    "twice": np.array([1, 1, 2, 2], np.float32), "half": np.array([1, 1, 1, 0.5], np.float32),
    "sizes": np.array([4, 12]), "flat": np.array([1, -1]),
}  # fmt: skip
NODES = {
    "number": b.node("Add", "x one", "y"),
    "row": b.node("Mul", "row x", "y"),
    "channels": b.node("Sub", "x scale", "y"),
    "picture": b.node("Div", "x whole", "y"),
    "power": b.node("Pow", "x two", "y"),
    "clip": b.node("Clip", "x one two", "y"),
    "hard swish": b.node("HardSwish", "x", "y"),
    "slopes": b.node("PRelu", "x slopes", "y"),
    "itself": b.node("Max", "x x whole", "y"),
    "norm": b.node("BatchNormalization", "x gain mean mean variance", "y"),
    "softmax": b.node("Softmax", "x", "y", axis=1),
    "joined": b.node("Concat", "x x whole", "y", axis=1),
    "all last": b.node("Concat", "x x", "y", axis=1),
    "lines": b.node("Concat", "x x", "y", axis=2),
    "split": b.node("Split", "x sizes", "z y", axis=1),
    "turned": b.node("Transpose", "x", "y", perm=[0, 2, 3, 1]),
    "flat": b.node("Reshape", "x flat", "y"),
    "larger": b.node("Resize", "x none twice", "y", mode="nearest"),
    "smaller": b.node("Resize", "x none half", "y", mode="linear"),
    "mean": b.node("GlobalAveragePool", "x", "y"),
    "largest": b.node("GlobalMaxPool", "x", "y"),
    "max pool": b.node("MaxPool", "x", "y", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]),
    "mean pool": b.node("AveragePool", "x", "y", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    "of channels": b.node("Conv", "x each", "y", group=C, pads=[1, 1, 1, 1]),
    "pixels": b.node("Conv", "x pixel", "y", strides=[2, 2]),
    "few": b.node("Conv", "x few", "y"),
}


@pytest.mark.parametrize("what", NODES)
def test_an_operator_behind_a_convolution(what: str, tmp_path: Path) -> None:
    """A convolution that changes nothing, since each of its sums is one number and zeros."""
    x = RNG.standard_normal((1, C, H, W)).astype(np.float32)
    same = np.eye(C, dtype=np.float32)[:, :, None, None]
    answers = []
    for name, nodes in {
        "plain": [b.node("Identity", "given", "x"), NODES[what]],
        "behind": [b.node("Conv", "given same", "x"), NODES[what]],
    }.items():
        path = tmp_path / f"{name}.onnx"
        inputs, outputs = [b.value("given", x.shape)], [b.value("y", ("…",))]
        path.write_bytes(b.model(b.graph(nodes, inputs, outputs, same=same, **CONSTANTS)))
        answers.append(load(path, "reference")(given=x)["y"])
    # Sums of some dozen numbers, in another order.
    np.testing.assert_allclose(*answers, rtol=1e-5, atol=1e-6)


def test_elements_are_computed_as_they_lie() -> None:
    x = Tensor.zeros(1, 4, 4, 16).contiguous()
    last = layout.channels_first(x)
    assert layout.lies_last(last) and not layout.lies_last(x)
    seen = []

    def function(a: Tensor, b: Tensor, c: None) -> Tensor:
        seen.append((a.shape, b.shape))
        return a + b

    out = layout.as_it_lies(function, (last, Tensor.zeros(16, 1, 1), None))
    assert seen == [((1, 4, 4, 16), (1, 1, 1, 16))]
    assert layout.lies_last(out) and out.shape == (1, 16, 4, 4)
    assert layout.stored(last).node is last.node
    layout.as_it_lies(function, (x, Tensor.zeros(4, 16), None))
    assert seen[1] == ((1, 4, 4, 16), (4, 16))
