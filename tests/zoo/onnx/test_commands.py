"""`python -m zoo.onnx`: run, inspect and bench; exit codes and one-line errors."""

from __future__ import annotations

import json
import os
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
        (["bench", "model.onnx", "--shape", "x=-1,2"], 2, "a size below 0"),
        (["bench", "model.onnx", "--shape", "z=1,2"], 2, "no input z"),
    ],
)
def test_mistakes_are_one_line(capsys, args: list[str], code: int, problem: str) -> None:
    device = [] if args[0] == "inspect" else DEVICE
    assert main([*args, *device]) == code
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def header(text: str) -> bytes:
    """The beginning of an array file that says what it likes."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


FACTS = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s, 2)}"


@pytest.mark.parametrize(
    "content",
    [b"", header("[" * 9000), header(FACTS % 10**12) + bytes(64), header(FACTS % -1) + bytes(64)],
)
def test_an_input_is_not_believed_what_it_says(capsys, content: bytes) -> None:
    Path("bad.npy").write_bytes(content)
    assert main(["run", "model.onnx", "-i", "x=bad.npy", *DEVICE]) == 1
    error = capsys.readouterr().err
    assert "bad.npy: not an array of numpy.save" in error and error.count("\n") == 1


def test_an_archive_or_a_pipe_is_no_array(capsys) -> None:
    np.savez("many.npz", x=np.ones((1, 2), np.float32))
    os.mkfifo("pipe.npy")
    for name, problem in (("many.npz", "but an .npz"), ("pipe.npy", "neither a file nor")):
        assert main(["run", "model.onnx", "-i", f"x={name}", *DEVICE]) == 1
        assert problem in capsys.readouterr().err


def test_an_empty_array_is_one(capsys) -> None:
    np.save("x.npy", np.zeros((0, 2), np.float32))
    assert main(["run", "model.onnx", "-i", "x=x.npy", *DEVICE]) == 0
    assert "y float32 [0, 2]: []" in capsys.readouterr().out


def test_names_are_shown_on_one_line_however_they_are(capsys) -> None:
    name = "a\n\x1b[31m" * 1000
    graph = b.graph([b.node(name, "x", "y")], [b.value("x", (name,))], [b.value("y")])
    Path("other.onnx").write_bytes(b.model(graph))
    assert main(["inspect", "other.onnx"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and len(out) < 1000 and "\na" not in out
