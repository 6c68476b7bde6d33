"""The reader of ONNX models: what is in them, and what is wrong with hostile ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.weights import build_onnx as b
from tests.weights import fuzz
from weights import WeightError, onnx


@pytest.fixture
def opened(tmp_path: Path):
    def open_(raw: bytes, name: str = "model.onnx") -> onnx.OnnxModel:
        path = tmp_path / name
        path.write_bytes(raw)
        return onnx.load(path)

    return open_


def refused(opened, raw: bytes) -> str:
    """The error's one line."""
    with pytest.raises(WeightError) as caught:
        model = opened(raw)
        for tensor in model.graph.initializers.values():
            tensor.read()
    text = str(caught.value)
    assert "model.onnx" in text and text.isprintable()
    return text


def test_graph_is_read_as_plain_values(opened) -> None:
    model = opened(b.varied())
    assert (model.ir_version, model.producer, model.opsets) == (8, "test", {"": 17})
    x, on = model.graph.inputs
    assert (x.name, x.type.dtype, x.type.shape) == ("x", "float32", (2, "n"))
    assert (on.type.dtype, on.type.shape) == ("bool", ())
    add, if_, pad = model.graph.nodes
    assert (add.op, add.domain, add.inputs, add.outputs) == ("Add", "own", ("x", "w"), ("y",))
    assert pad.attributes == {"mode": "edge", "a": (1.0, 2.0), "b": (1, 2, 300)}
    assert if_.attributes["then_branch"].nodes[0].op == "Relu"
    constant = if_.attributes["else_branch"].nodes[0].attributes["value"]
    np.testing.assert_array_equal(constant.read(), np.ones((2, 3), np.float32))
    function = model.functions["own", "Add", ""]
    assert (function.inputs, function.outputs) == (("a", "b"), ("c",))


def test_initializers_of_raw_and_packed_data(opened) -> None:
    tensors = opened(b.varied()).graph.initializers
    assert tensors["p"].read().tolist() == [1, -1, 300]
    assert tensors["h"].read().dtype == np.float16
    assert tensors["w"].shape == (2, 3)


@pytest.mark.parametrize(
    ("dtype", "bits", "expected"),
    [("float16", [0x3C00, 0xC000], [1.0, -2.0]), ("bool", [1, 0], [True, False]),
     ("int8", [5, -1], [5, -1]), ("uint8", [200, 3], [200, 3])],
)  # fmt: skip
def test_small_types_lie_in_int32_data(opened, dtype: str, bits: list, expected: list) -> None:
    data = b.field(5, b"".join(map(b.varint, bits)))
    raw = b.field(1, 2) + b.field(2, b.NUMBERS[dtype]) + b.field(8, "t") + data
    model = opened(b.model(b.graph([]) + b.field(5, raw)))
    assert model.graph.initializers["t"].read().tolist() == expected


def test_external_data_is_read_from_the_models_folder(opened, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.arange(8, dtype=np.float32).tofile(tmp_path / "data" / "weights")
    raw = b.external("w", (2, 2), "data/weights", offset="8", length="16")
    model = opened(b.model(b.graph([]) + b.field(5, raw)))
    assert model.graph.initializers["w"].read().tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../b", "C:\\x", "", "link"])
def test_external_data_outside_the_folder_is_refused(opened, tmp_path: Path, location: str) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    raw = b.external("w", (2,), location)
    assert "outside the model's folder" in refused(opened, b.model(b.graph([]) + b.field(5, raw)))


def test_external_data_that_ends_early_is_refused(opened, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(7))
    raw = b.external("w", (2,), "weights")
    assert "isn't all there" in refused(opened, b.model(b.graph([]) + b.field(5, raw)))


def test_cycles_are_refused(opened) -> None:
    nodes = [b.node("Relu", "b", "a"), b.node("Relu", "a", "b")]
    assert "in a cycle or out of order" in refused(opened, b.model(b.graph(nodes)))


def test_a_value_made_twice_is_refused(opened) -> None:
    nodes = [b.node("Relu", "x", "a"), b.node("Relu", "x", "a")]
    assert "there already" in refused(opened, b.model(b.graph(nodes, [b.value("x")])))


@pytest.mark.parametrize("shape", [(2**62, 2**62), (1 << 40,), (-1,), (1,) * 40, (0, 2**62)])
def test_shapes_that_the_data_doesnt_fill_are_refused(opened, shape: tuple) -> None:
    raw = b.fields(1, shape) + b.field(2, 1) + b.field(8, "w") + b.field(9, bytes(8))
    assert "'w'" in refused(opened, b.model(b.graph([]) + b.field(5, raw)))


def test_endless_fields_are_refused(opened) -> None:
    assert "more fields than" in refused(opened, b"\x78\x00" * 1_100_000)


def test_graphs_nested_too_deep_are_refused(opened) -> None:
    inner = b.graph([])
    for i in range(60):
        inner = b.graph([b.node("If", "", f"o{i}", then_branch=inner)])
    assert "nested too deep" in refused(opened, b.model(inner))


@pytest.mark.parametrize("raw", [b"no model", b"\x08\x08", bytes(100), b"\x3a\xff\xff\xff\xff\x0f"])
def test_other_files_are_refused(opened, raw: bytes) -> None:
    refused(opened, raw)


def test_fuzzed_models_give_one_line_or_open(tmp_path: Path) -> None:
    counts = fuzz.fuzz("onnx", 400, 0, tmp_path)
    assert set(counts) <= {"opened", "refused"}, counts
    assert counts["opened"] and counts["refused"]
