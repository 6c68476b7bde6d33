"""docs/onnx.md: its list of operators that NumPy computes, and its example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zoo.onnx.model  # noqa: F401 - fills the table
from zoo.onnx.registry import OPERATORS

DOCS = (Path(__file__).resolve().parents[3] / "docs" / "onnx.md").read_text("utf-8")


def test_operators_that_numpy_computes_are_listed() -> None:
    listed = re.search(r"<!-- by NumPy -->\n(.*?)\n<!-- end -->", DOCS, re.DOTALL)[1]
    found = {row.name for rows in OPERATORS.values() for row in rows if row.on_host}
    assert set(re.split(r",\s+", listed)) == found


def test_every_operator_says_what_it_does_or_is_in_a_table_of_plain_ones() -> None:
    functions = {row.function for rows in OPERATORS.values() for row in rows}
    plain = {"run"}  # what the tables of elementwise functions and reductions make
    assert all(f.__doc__ or f.__name__ in plain for f in functions)


@pytest.mark.peers
def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
        exec(compile(block, "onnx.md", "exec"), names)
    assert capsys.readouterr().out.splitlines()[-2:] == ["True", "True"]
