"""Loading and running models: stretches, numbers that nodes must see, errors before a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.weights import build_onnx as b
from tests.zoo.onnx import driving
from weights import WeightError
from zoo.errors import UserError
from zoo.onnx.model import Model, load

F32 = np.float32


@pytest.fixture
def loaded(tmp_path: Path):
    def load_(graph: bytes, device: str | None = "reference", **more) -> Model:
        path = tmp_path / "model.onnx"
        path.write_bytes(b.model(graph, **more))
        return load(path, device)

    return load_


def test_a_small_net_on_the_default_device(loaded) -> None:
    rng = np.random.default_rng(0)
    w, bias = rng.standard_normal((4, 3, 3, 3), F32), rng.standard_normal(4, F32)
    x = rng.standard_normal((1, 3, 6, 5), F32)
    nodes = [b.node("Conv", "x w b", "y", pads=[1] * 4), b.node("Relu", "y", "z"),
             b.node("GlobalAveragePool", "z", "m")]  # fmt: skip
    io = [b.value("x", (1, 3, "h", "w"))], [b.value("m", (1, 4, 1, 1))]
    model = loaded(b.graph(nodes, *io, w=w, b=bias), device=None)
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    expected = np.einsum("bchwij,ocij->bohw", windows, w) + bias[:, None, None]
    expected = np.maximum(expected, 0).mean((2, 3), keepdims=True)
    # Sums of 27 products and of 30 numbers in float32.
    np.testing.assert_allclose(model(x=x)["m"], expected, rtol=1e-5)
    assert len(model.plan.stretches) == 1


def test_shapes_fold_and_each_set_of_them_is_captured_once(loaded) -> None:
    """The shape arithmetic of an exported view: x.view(x.shape[0], -1)."""
    nodes = [b.node("Shape", "x", "s"), b.node("Gather", "s zero", "n"),
             b.node("Unsqueeze", "n axis", "u"), b.node("Concat", "u minus", "t", axis=0),
             b.node("Reshape", "x t", "y")]  # fmt: skip
    constants = {"zero": np.array(0), "axis": np.array([0]), "minus": np.array([-1])}
    graph = b.graph(nodes, [b.value("x", ("a", "b", "c"))], [b.value("y", ("a", "d"))], **constants)
    model = loaded(graph)
    for shape in ((2, 3, 4), (5, 1, 2), (2, 3, 4)):
        x = np.arange(np.prod(shape), dtype=F32).reshape(shape)
        np.testing.assert_array_equal(model(x=x)["y"], x.reshape(shape[0], -1))
    (stretch,) = model.plan.stretches
    assert len(stretch.nodes) == 5 and len(stretch.captures) == 2


def test_a_node_that_must_see_numbers_splits_the_graph(loaded) -> None:
    nodes = [b.node("Mul", "x x", "y"), b.node("NonZero", "y", "i"),
             b.node("Transpose", "i", "t"), b.node("Exp", "y", "e")]  # fmt: skip
    io = [b.value("x", ("n",))], [b.value("t", ("m", 1), "int64"), b.value("e", ("n",))]
    model = loaded(b.graph(nodes, *io))
    for x in (np.arange(9, dtype=F32) % 2, np.arange(9, dtype=F32) % 3):
        out = model(x=x)
        assert out["t"].tolist() == [[i] for i in np.flatnonzero(x)]
        np.testing.assert_allclose(out["e"], np.exp(x * x), rtol=1e-6)
    assert [s.on_host for s in model.plan.stretches] == [False, True]
    assert [n.node.op for n in model.plan.stretches[0].nodes] == ["Mul", "Exp"]


def test_inputs_that_are_shapes_are_part_of_the_capture(loaded) -> None:
    nodes = [b.node("Reshape", "x s", "y"), b.node("Neg", "y", "z")]
    io = [b.value("x", ("n",)), b.value("s", (2,), "int64")], [b.value("z", ("a", "b"))]
    model = loaded(b.graph(nodes, *io))
    x = np.arange(6, dtype=F32)
    for shape in ((2, 3), (3, 2)):
        out = model(x=x, s=np.array(shape))["z"]
        np.testing.assert_array_equal(out, -x.reshape(shape))


def test_loop_with_a_condition_of_the_device(loaded) -> None:
    """Doubles x until its sum is 100 or more; collects each step's sum."""
    body = b.graph(
        [b.node("Add", "v v", "w"), b.node("ReduceSum", "w", "t", keepdims=0),
         b.node("Less", "t end", "go"), b.node("Identity", "t", "u")],
        [b.value("i", (), "int64"), b.value("c", (), "bool"), b.value("v", (3,))],
        [b.value("go", (), "bool"), b.value("w", (3,)), b.value("u")],
    )  # fmt: skip
    nodes = [b.node("Exp", "x", "e"), b.node("Loop", "- - e", "y sums", body=body)]
    io = [b.value("x", (3,))], [b.value("y", (3,)), b.value("sums", ("n",))]
    model = loaded(b.graph(nodes, *io, end=np.array(100, F32)))
    out = model(x=np.zeros(3, F32))
    assert out["sums"].tolist() == [6, 12, 24, 48, 96, 192]
    assert out["y"].tolist() == [64] * 3


@pytest.mark.parametrize("on", [True, False])
def test_if_runs_one_branch_with_names_from_outside(loaded, on: bool) -> None:
    branches = {
        "then_branch": b.graph([b.node("Add", "y y", "r")], [], [b.value("r")]),
        "else_branch": b.graph([b.node("Neg", "y", "r2")], [], [b.value("r2")]),
    }
    nodes = [b.node("Relu", "x", "y"), b.node("If", "on", "z", **branches)]
    io = [b.value("x", (2,)), b.value("on", (), "bool")], [b.value("z", (2,))]
    out = loaded(b.graph(nodes, *io))(x=np.array([1, 2], F32), on=np.array(on))
    assert out["z"].tolist() == ([2, 4] if on else [-1, -2])


def test_functions_are_written_out(loaded) -> None:
    square = b.function("Square", "a", "c", [b.node("Mul", "a a", "c")])
    nodes = [b.node("Square", "a", "b", "own"), b.node("Square", "b", "c", "own")]
    twice = b.function("Fourth", "a", "c", nodes)
    io = [b.value("x", (2,))], [b.value("y", (2,))]
    graph = b.graph([b.node("Fourth", "x", "y", "own")], *io)
    out = loaded(graph, functions=[square, twice])(x=np.array([2, 3], F32))
    assert out["y"].tolist() == [16, 81]


def test_functions_without_end_are_refused(loaded) -> None:
    loop = b.function("F", "a", "c", [b.node("F", "a", "b", "own"), b.node("F", "b", "c", "own")])
    graph = b.graph([b.node("F", "x", "y", "own")], [b.value("x")], [b.value("y")])
    with pytest.raises(WeightError, match="call each other without end"):
        loaded(graph, functions=[loop])


def test_all_unsupported_operators_are_named_before_anything_runs(loaded) -> None:
    nodes = [b.node("Warp", "x", "a"), b.node("Relu", "a", "y", slope=2.0),
             b.node("Gemm", "y", "z")]  # fmt: skip
    with pytest.raises(WeightError) as caught:
        loaded(b.graph(nodes, [b.value("x")], [b.value("z")]))
    text = str(caught.value)
    assert "model.onnx: not supported: node 'a' (Warp, opset 17)" in text
    assert "attribute slope is not supported" in text and "input b is missing" in text


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({}, "input x is missing"),
        ({"x": np.zeros((2, 3), F32), "y": 1}, "no input y"),
        ({"x": np.zeros((2, 4), F32)}, r"must have the shape \[n, 3\], got \[2, 4\]"),
        ({"x": np.zeros((2, 3), complex)}, "must be float32"),
    ],
)
def test_wrong_inputs_are_told(loaded, inputs: dict, problem: str) -> None:
    model = loaded(b.graph([b.node("Relu", "x", "z")], [b.value("x", ("n", 3))], [b.value("z")]))
    with pytest.raises(UserError, match=problem):
        model.run(inputs)


def test_shapes_that_dont_fit_name_the_node(loaded) -> None:
    io = [b.value("x", ("n",)), b.value("y", ("m",))], [b.value("z", ("k",))]
    model = loaded(b.graph([b.node("Add", "x y", "z")], *io))
    with pytest.raises(UserError, match=r"node 'z' \(Add, opset 17\): .*\[2\].*\[3\]"):
        model(x=np.zeros(2, F32), y=np.zeros(3, F32))


def test_a_constant_too_large_for_memory_is_told(loaded) -> None:
    shape = np.array([1 << 40, 1 << 10])
    nodes = [b.node("ConstantOfShape", "s", "c"), b.node("Add", "x c", "y")]
    model = loaded(b.graph(nodes, [b.value("x", (1,))], [b.value("y")], s=shape))
    with pytest.raises(UserError, match="ConstantOfShape"):
        model(x=np.zeros(1, F32))


def test_constants_that_double_are_not_all_made_while_loading(loaded) -> None:
    nodes = [b.node("Concat", f"c{i} c{i}", f"c{i + 1}", axis=0) for i in range(60)]
    start = {"c0": np.zeros(1 << 20, F32)}
    model = loaded(b.graph(nodes, [], [b.value("c60", ("n",))], **start))
    assert max(a.size for a in model.plan.constants.values()) <= 1 << 27


def test_a_driving_model_of_twelve_operators(loaded, tmp_path: Path) -> None:
    """A sixteenth of the size, whose state must depend on every input."""
    path = tmp_path / "driving.onnx"
    path.write_bytes(driving.driving(width=4, blocks=1, height=32, wide=64))
    model = load(path, "reference")
    assert len({node.node.op for node in model.plan.nodes}) == 12
    inputs = driving.inputs_of(32, 64)
    first = model.run(inputs)["outputs"]
    assert first.shape == (1, 6472) and np.isfinite(first).all()
    for name in inputs:
        other = model.run({**inputs, name: inputs[name] + 1})["outputs"]
        assert np.abs(other - first).max() > 1e-4


@pytest.mark.parametrize(
    ("node", "x", "dtype", "problem"),
    [
        (b.node("Relu", "x", "y z"), [1.0], "float32", "has 2 outputs, but makes 1"),
        (b.node("And", "x x", "y"), [1.0], "float32", "have no bits"),
        (b.node("Cast", "x", "y", to=8), [1.0], "float32", "y is stated to be float32, but holds"),
        (b.node("GlobalLpPool", "x", "y", p=0.5), [1.0], "float32", "p must be int, got float"),
        (b.node("Unsqueeze", "x x", "y"), [0, 0], "int64", "Unsqueeze"),
        (b.node("Tile", "x n", "y"), [[1.0], [2.0]], "float32", "shape that is too large"),
    ],
)
def test_what_no_node_can_do_is_told_in_a_line(loaded, node, x, dtype, problem) -> None:
    graph = b.graph([node], [b.value("x", np.shape(x), dtype)], [b.value("y")],
                    n=np.array([0, 1 << 62]))  # fmt: skip
    with pytest.raises((UserError, WeightError), match=problem) as caught:
        loaded(graph).run({"x": np.array(x, dtype)})
    assert "\n" not in str(caught.value)


def test_constants_that_make_no_sense_are_told_when_the_node_runs(loaded) -> None:
    none = np.zeros(0, F32)
    graph = b.graph([b.node("Range", "n n n", "y")], [], [b.value("y")], n=none)
    with pytest.raises(UserError, match="Range"):
        loaded(graph).run({})


def test_a_huge_window_costs_no_more_than_what_there_is(loaded) -> None:
    nodes = [b.node("LRN", "x", "y", size=1 << 40, alpha=1.0)]
    io = [b.value("x", (1, 4, 2))], [b.value("y", (1, 4, 2))]
    x = np.ones((1, 4, 2), F32)
    # The sum of squares over 2**40: less than a rounding.
    np.testing.assert_allclose(loaded(b.graph(nodes, *io)).run({"x": x})["y"], x, rtol=1e-6)
