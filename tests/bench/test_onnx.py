"""`bench onnx` compares only sides whose outputs agree; torch runs a graph as eager code."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from bench import onnx
from bench.measure import SideError
from tests.weights import build_onnx as b
from tests.zoo.onnx import driving
from zoo.onnx.model import load


def network() -> bytes:
    """Convolutions of several kinds, a hard swish as exporters spell it, scales per channel."""
    net = driving.Builder()
    net.weights |= {f"n{n}": np.array(n, np.float32) for n in (0, 3, 6)}
    x = net.conv("x", 3, 8, 3, stride=2)
    clipped = net.add("Clip", f"{net.add('Add', f'{x} n3')} n0 n6")
    x = net.add("Div", f"{net.add('Mul', f'{x} {clipped}')} n6")
    x = net.conv(x, 8, 8, 3, group=8)
    scale = net.add("HardSigmoid", net.conv(net.add("GlobalAveragePool", x), 8, 8, 1))
    x = net.add("Relu", net.add("Mul", f"{x} {scale}"))
    x = net.add("ConvTranspose", f"{x} {net.weight(8, 2, 2, 2)}", strides=[2, 2])
    y = net.add("Sigmoid", x)
    inputs, outputs = [b.value("x", ("batch", 3, "h", "w"))], [b.value(y, ("batch", 2, "H", "W"))]
    return b.model(b.graph(net.nodes, inputs, outputs, **net.weights), opset=13)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr("bench.measure.SETTLE_S", 0)
    path = tmp_path / "net.onnx"
    path.write_bytes(network())
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", action="store_true")
    onnx.add_arguments(parser)
    return parser.parse_args([str(path), "--shape", "x=1,3,16,12", "--rounds", "2"])


def test_our_side_alone(arguments: argparse.Namespace) -> None:
    report = onnx.run(arguments)
    assert json.loads(onnx.to_json(report))["sides"][onnx.OURS]["apart"] == 0
    assert "net.onnx: median of 2 rounds" in onnx.text(report)


def test_a_side_that_disagrees_stops_the_comparison(arguments: argparse.Namespace) -> None:
    class Fixed:
        def __init__(self, name: str, value: float) -> None:
            self.name, self.value = name, value

        def call(self, method: str) -> list[float] | float:
            return [1.0, self.value] if method == "result" else 0.5

    for value in (1.1, float("nan")):
        with pytest.raises(SideError, match="other: results differ from ours"):
            onnx.measure([Fixed(onnx.OURS, 1.0), Fixed("other", value)], {}, arguments)
    report = onnx.measure([Fixed(onnx.OURS, 1.0), Fixed("other", 1.001)], {"no": "why"}, arguments)
    assert report["speedup"]["other"]["median"] == 1
    assert "no: skipped, why" in onnx.text(report)


@pytest.mark.parametrize("text", ["x", "=1", "x=1,b", "x="])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected NAME="):
        onnx.shape(text)


@pytest.mark.peers
def test_eager_torch_runs_the_same_network(arguments: argparse.Namespace) -> None:
    torch = pytest.importorskip("torch")
    from bench.onnx_torch import Net

    x = np.random.default_rng(0).standard_normal((1, 3, 16, 12)).astype(np.float32)
    net = Net(arguments.model, torch.channels_last)
    assert "hardswish" in {getattr(function, "__name__", "") for function, _, _ in net.calls}
    for name, ours in load(arguments.model).run({"x": x}).items():
        np.testing.assert_allclose(net({"x": x})[name], ours, atol=1e-5)  # 1e-6 of some sums


@pytest.mark.peers
def test_eager_torch_runs_what_pytorch_exports_at_the_end_of_a_network(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from bench.onnx_torch import Net

    net = driving.Builder()
    net.weights |= {"axes": np.array([-1, -2]), "shape": np.array([1, 8])}
    mean = net.add("ReduceMean", f"{net.add('Gelu', net.conv('x', 3, 8, 3))} axes", keepdims=1)
    y = net.add("Reshape", f"{mean} shape")
    inputs, outputs = [b.value("x", (1, 3, "h", "w"))], [b.value(y, (1, 8))]
    path = tmp_path / "net.onnx"
    path.write_bytes(b.model(b.graph(net.nodes, inputs, outputs, **net.weights), opset=20))
    x = np.random.default_rng(0).standard_normal((1, 3, 16, 12)).astype(np.float32)
    theirs, ours = Net(path, torch.channels_last)({"x": x}), load(path).run({"x": x})
    np.testing.assert_allclose(theirs[y], ours[y], atol=1e-6)
