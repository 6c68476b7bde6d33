"""What kernels look like in each language, kept in `golden/`: a change of them is seen in review.

`python -m tests.engine.gpu.test_golden` writes them anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import engine.functional as F
from engine import Tensor, program
from engine.ir import Target
from engine.render import assemble, entry_points
from tests.engine.gpu.recorder import CUDA, METAL, recording

FOLDER = Path(__file__).parent / "golden"
TARGETS: dict[str, Target] = {
    "opencl": replace(CUDA, dialect="opencl-gpu", features=frozenset()),
    "cuda": CUDA,
    "metal": METAL,
}


def _work() -> None:
    """A sum of elements, rows of a norm, one row by a matrix, a product of many rows, a write to a
    cache at a place that is known when it runs."""

    def tensor(*shape: int) -> Tensor:
        return Tensor(np.zeros(shape, np.float32), device="recorder")

    (tensor(3, 50) + tensor(3, 50)).realize()
    F.softmax(tensor(7, 300)).realize()
    (tensor(1, 512) @ tensor(96, 512).transpose()).realize()
    multiply = program(lambda x, w: F.gelu(x @ w.transpose()), precision="auto")
    multiply(tensor(100, 70), tensor(200, 70))
    cache = tensor(40, 8).realize()

    def step(x, start):
        cache[start : start + 1] = x
        return cache[: start + 1].sum(0)

    program(step, start=(0, 39))(tensor(1, 8), start=3)


def sources(target: Target) -> str:
    with recording(target) as device:
        _work()
    functions = list(device.functions)
    return assemble(functions, target) + "\n" + entry_points(functions, target) + "\n"


@pytest.mark.parametrize("name", TARGETS)
def test_sources_are_the_ones_on_record(name):
    assert sources(TARGETS[name]) == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    for name, target in TARGETS.items():
        (FOLDER / f"{name}.txt").write_text(sources(target))
