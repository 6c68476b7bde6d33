"""`python -m zoo.onnx`: run, inspect and bench; exit codes and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.weights import build_onnx as b
from zoo.onnx.__main__ import main

DEVICE = ("--device", "reference")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model y = x + x, NonZero of y, and an input."""
    monkeypatch.chdir(tmp_path)
    nodes = [b.node("Add", "x x", "y"), b.node("NonZero", "y", "i")]
    io = [b.value("x", ("n", 2))], [b.value("y", ("n", 2)), b.value("i", (2, "k"), "int64")]
    Path("model.onnx").write_bytes(b.model(b.graph(nodes, *io)))
    np.save("x.npy", np.array([[1, 0]], np.float32))


def test_run_writes_the_outputs_by_name() -> None:
    assert main(["run", "model.onnx", "--input", "x=x.npy", "-o", "out", *DEVICE]) == 0
    with np.load("out") as out:
        assert out["y"].tolist() == [[2, 0]] and out["i"].tolist() == [[0], [0]]


def test_run_without_a_file_prints_a_line_for_each(capsys) -> None:
    assert main(["run", "model.onnx", "-i", "x=x.npy", *DEVICE]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "y float32 [1, 2]: [[2.0, 0.0]]",
        "i int64 [2, 1]: [[0], [0]]",
    ]


def test_numbers_are_printed_with_the_digits_that_they_have(capsys) -> None:
    np.save("x.npy", np.array([[0.05, 1e-9]], np.float32))
    assert main(["run", "model.onnx", "-i", "x=x.npy", *DEVICE]) == 0
    assert capsys.readouterr().out.startswith("y float32 [1, 2]: [[0.1, 2e-09]]\n")


def test_inspect_counts_weights_that_are_constants(capsys) -> None:
    weight = np.ones((3, 2), np.float32)
    nodes = [b.node("Constant", "", "w", value=weight), b.node("Add", "x w", "y")]
    Path("paddle.onnx").write_bytes(b.model(b.graph(nodes, [b.value("x")], [b.value("y")])))
    assert main(["inspect", "paddle.onnx", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 6


def test_inspect_says_what_a_model_takes_gives_and_needs(capsys) -> None:
    assert main(["inspect", "model.onnx", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["inputs"] == [{"name": "x", "type": "float32", "shape": ["n", 2]}]
    assert found["operators"] == {"Add": 1, "NonZero": 1}
    assert (found["by_numpy"], found["unsupported"]) == (["NonZero"], {})
    assert main(["inspect", "model.onnx"]) == 0
    assert "input x: float32 [n, 2]" in capsys.readouterr().out


def test_inspect_names_what_isnt_supported(capsys) -> None:
    nodes = [b.node("Warp", "x", "y", domain="own"), b.node("Warp", "y", "z", domain="own")]
    Path("other.onnx").write_bytes(b.model(b.graph(nodes, [b.value("x")], [b.value("z")])))
    assert main(["inspect", "other.onnx"]) == 0
    assert "not supported own.Warp 2" in capsys.readouterr().out


def test_bench_makes_up_inputs(capsys) -> None:
    how = ["--shape", "x=3,2", "-r", "2", "--json", *DEVICE]
    assert main(["bench", "model.onnx", *how]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"first_s", "run_s"} and found["run_s"] > 0


@pytest.mark.parametrize(
    ("args", "code", "problem"),
    [
        (["run", "model.onnx"], 2, "input x is missing"),
        (["run", "model.onnx", "-i", "x"], 2, "--input must be NAME=FILE.npy"),
        (["run", "model.onnx", "-i", "x=model.onnx"], 1, "not an array of numpy.save"),
        (["run", "model.onnx", "-i", "x=none.npy"], 1, "none.npy"),
        (["run", "x.npy"], 1, "not an ONNX model"),
        (["inspect", "none.onnx"], 1, "none.onnx"),
        (["bench", "model.onnx", "--shape", "x=a"], 2, "no whole number"),
    ],
)
def test_mistakes_are_one_line(capsys, args: list[str], code: int, problem: str) -> None:
    device = [] if args[0] == "inspect" else DEVICE
    assert main([*args, *device]) == code
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
