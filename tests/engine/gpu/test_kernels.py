"""What a GPU runs, in each language, equals the reference backend: by teams of few and of many.

Arrays hold small whole numbers where only sums and products are taken: those are exact in any
order, so nothing is allowed for. Where functions of them are, the tolerance is that of test_math.
"""

from __future__ import annotations

import numpy as np
import pytest

import engine.functional as F
from engine import Tensor, program
from engine import dtype as dt
from engine.convolution import conv2d
from engine.runtime import get_device
from tests.engine.gpu.devices import KINDS, opened

pytestmark = pytest.mark.peers  # the default tests need no C++ compiler

# few work-items have several blocks of a tile each, 128 one; those of CUDA show each other values
GPUS = (("opencl", 4), ("cuda", 4), ("cuda", 128), ("metal", 4), ("metal", 128))


def _silu_gate(x, a, b):
    return F.silu(x @ a.transpose()) * (x @ b.transpose())


EXACT = {
    "add": (lambda a, b: a + b, (37, 53), (37, 53)),
    "product": (lambda a, b: a @ b, (37, 53), (53, 41)),
    "product of whole tiles": (lambda a, b: a @ b, (64, 32), (32, 128)),
    "many rows by columns": (lambda a, b: a @ b.transpose() + 1.0, (137, 70), (99, 70)),
    "few rows": (lambda a, b: a @ b.transpose(), (3, 531), (77, 531)),
    "one row": (lambda a, b: a @ b.transpose(), (1, 531), (77, 531)),
    "batch": (lambda a, b: a @ b, (3, 37, 53), (3, 53, 41)),
    "sum": (lambda a: a.sum(-1), (37, 531)),
    "sum of all": (lambda a: a.sum(), (37, 53)),
    "largest of columns": (lambda a: a.max(0), (37, 53)),
    "convolution": (
        lambda x, w, b: conv2d(x, w, b, padding=1),
        (2, 32, 9, 16),
        (48, 32, 3, 3),
        (48,),
    ),
    "convolution by steps": (
        lambda x, w: conv2d(x, w, padding=1, stride=2),
        (2, 32, 15, 17),
        (48, 32, 3, 3),
    ),
    "convolution in groups": (lambda x, w: conv2d(x, w, groups=2), (1, 32, 9, 8), (48, 16, 3, 1)),
}
ROUNDED = {
    "softmax": (lambda a: F.softmax(a), (37, 531)),
    "softmax of columns": (lambda a: F.softmax(a, 0), (37, 51)),
    "norm": (lambda a: F.layer_norm({}, a), (37, 531)),
    "two products in one kernel": (_silu_gate, (70, 40), (99, 40), (99, 40)),
    "attention": (lambda q, k, v: F.attention(q, k, v), (4, 40, 64), (4, 40, 64), (4, 40, 64)),
}


def _both(kind: str, team: int, case: tuple, scale: float) -> tuple[np.ndarray, np.ndarray]:
    function, *shapes = case
    draw = np.random.default_rng(0)
    arrays = [draw.integers(-3, 4, shape).astype(np.float32) * scale for shape in shapes]
    names = opened(kind, team), "reference"
    return tuple(function(*(Tensor(a, device=d) for a in arrays)).numpy() for d in names)


@pytest.mark.parametrize(("kind", "team"), GPUS)
@pytest.mark.parametrize("case", EXACT)
def test_sums_of_products_are_exact(case, kind, team):
    got, wanted = _both(kind, team, EXACT[case], 1)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("kind", "team"), GPUS)
@pytest.mark.parametrize("case", ROUNDED)
def test_functions_of_sums_are_as_exact_as_float32(case, kind, team):
    got, wanted = _both(kind, team, ROUNDED[case], 0.25)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_tensor_cores_multiply_what_was_rounded_to_bfloat16():
    """Small whole numbers are bfloat16 ones: the sums are exact, whatever the tile's corners."""
    name = opened("cuda", 128)
    draw = np.random.default_rng(1)
    for m, k, n in ((64, 64, 64), (100, 70, 200), (33, 300, 17), (20, 16, 16)):
        a, b = (draw.integers(-9, 10, s).astype(np.float32) for s in ((m, k), (n, k)))
        multiply = program(lambda x, y: x @ y.transpose(), precision="auto")
        got = multiply(Tensor(a, device=name), Tensor(b, device=name)).numpy()
        np.testing.assert_array_equal(got, a @ b.T)
    sources = [lib.source for lib in get_device(name).built.values()]
    assert any("_mma_" in source for source in sources)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_round_as_numpy_does(kind):
    draw = np.random.default_rng(2)
    x = draw.standard_normal(4000).astype(np.float32) * 2.0 ** draw.integers(-30, 18, 4000)
    x = np.concatenate([x, [65504, 65519.9, 65520, 2.0**-24, 2.0**-25, np.inf, np.nan, -0.0]])
    x = x.astype(np.float32)
    halves = Tensor(x, device=opened(kind, 4)).cast(dt.float16)
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16)
    np.testing.assert_array_equal(halves.numpy(), wanted)
    np.testing.assert_array_equal(halves.cast(dt.float32).numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_replays_with_other_lengths(kind):
    name = opened(kind, 4)
    cache = Tensor(np.zeros((40, 8), np.float32), device=name).realize()

    def step(x, start):
        cache[start : start + 1] = x
        return cache[: start + 1].sum(0)

    run = program(step, start=(0, 39))
    total = np.zeros(8, np.float32)
    for i in range(40):
        row = np.full((1, 8), i, np.float32)
        total += row[0]
        np.testing.assert_array_equal(run(Tensor(row, device=name), start=i).numpy(), total)
