"""Functions of one number, over all of float32 and in every width of lanes, beside float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from engine import Tensor
from engine import functional as F
from engine.schedule import schedule
from tests.engine.kernels import LANES, Variants, cpu

Exact = Callable[[np.ndarray], np.ndarray]

UNIT = 2.0**-24  # the most that rounding a number changes it, relatively
SMALLEST = 2.0**-126  # below it are denormals, which some functions take for 0
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, 3.4e38, -3.4e38)


@dataclass(frozen=True)
class Case:
    """A function, what it approximates, and how far off it may be at x (whose exact value is y)."""

    function: Callable[[Tensor], Tensor]
    exact: Exact
    tolerance: Callable[[np.ndarray, np.ndarray], np.ndarray]
    near: tuple[float, ...]  # numbers are drawn from ± these ranges too
    domain: float = np.inf  # how far from 0 the tolerance holds


erf, erfc = (np.vectorize(f, otypes=[np.float64]) for f in (math.erf, math.erfc))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


CASES = {
    # exp2's own 2e-7
    "exp2": Case(lambda x: x.exp2(), np.exp2, lambda x, y: 2e-7 * y, (1, 30, 150)),
    # x times 1 / log(2) is rounded, and that factor is: both change the result by x units
    "exp": Case(
        lambda x: x.exp(), np.exp, lambda x, y: (2e-7 + 3 * UNIT * abs(x)) * y, (1, 20, 110)
    ),
    # a sum whose parts cancel to no less than 0.4: a few units
    "log2": Case(lambda x: x.log2(), np.log2, lambda x, y: 3e-7 * abs(y), (1, 2, 1e30)),
    "log": Case(lambda x: x.log(), np.log, lambda x, y: 4e-7 * abs(y), (1, 2, 1e30)),
    # the parts of pi leave 1e-7, the polynomial's rounding the rest; relative near 0
    "sin": Case(
        lambda x: x.sin(), np.sin, lambda x, y: np.minimum(3e-7, 2e-7 * abs(x)), (1, 100, 1e4, 1e30)
    ),
    # 2 sin² of half the angle: four times the sine's error
    "cos": Case(lambda x: x.cos(), np.cos, lambda x, y: 1e-6 + 0 * x, (1, 100, 1e4, 1e30)),
    # fitted to 2e-8; two polynomials, a reciprocal and two products of a unit or so each
    "tanh": Case(lambda x: x.tanh(), np.tanh, lambda x, y: 4e-7 * abs(y), (0.01, 1, 10)),
    "erf": Case(F.erf, erf, lambda x, y: 4e-7 * abs(y), (0.01, 1, 5)),
    # as exp, whose error counts for as much as it contributes to 1 + exp(-x)
    "sigmoid": Case(
        lambda x: x.sigmoid(),
        lambda x: 1 / (1 + np.exp(-x)),
        lambda x, y: (4e-7 + 3 * UNIT * abs(x)) * y,
        (1, 20, 100),
    ),
    "silu": Case(
        F.silu,
        lambda x: x / (1 + np.exp(-x)),
        lambda x, y: (5e-7 + 3 * UNIT * abs(x)) * abs(y),
        (1, 20, 80),
    ),
    # Φ is good to 3e-7 where it isn't small, and to 2e-4 of itself down to x = -5
    "gelu": Case(
        F.gelu,
        lambda x: x * 0.5 * erfc(-x / np.sqrt(2)),
        lambda x, y: np.minimum(3e-7 * abs(x) + 2e-7 * abs(y), 2e-4 * abs(y)),
        (1, 5),
        5,
    ),
    "gelu, far": Case(
        F.gelu,
        lambda x: x * 0.5 * erfc(-x / np.sqrt(2)),
        lambda x, y: 3e-7 * abs(x) * (abs(x) < 20) + 2e-7 * abs(y),
        (20, 1e30),
    ),
    # half the sigmoid's error at twice sqrt(2 / pi) (x + 0.044715 x³): below 100 for |x| < 10
    "gelu by tanh": Case(
        lambda x: F.gelu(x, approximate=True),
        gelu_tanh,
        lambda x, y: 1e-6 * abs(x) * (abs(x) < 10) + 3e-7 * abs(y),
        (1, 10, 1e12),
        1e12,  # the cube must not overflow
    ),
}


def numbers(case: Case) -> np.ndarray:
    """Any float32 at all, ones from the ranges of interest, and the special ones. No multiple of
    the lanes, so that some are left over."""
    r = np.random.default_rng(0)
    any_bits = r.integers(0, 1 << 32, 3000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    drawn = [r.uniform(-n, n, 4000).astype(np.float32) for n in case.near]
    x = np.concatenate([*drawn, any_bits])
    x = x[np.abs(x) <= case.domain]
    x = np.concatenate([x[: len(x) // 16 * 16], np.array(SPECIAL, np.float32)])
    return x[~np.isfinite(x) | (np.abs(x) <= case.domain)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_function_is_as_exact_as_it_says(name: str) -> None:
    case, device = CASES[name], cpu()
    x = numbers(case)
    (kernel,) = schedule([case.function(Tensor(x, device=device.name)).node], device.name).kernels
    variants = Variants(device, kernel)
    assert {p.lanes for p in variants.plans.values()} == set(LANES)
    want = case.exact(x.astype(np.float64))
    allowed = np.nan_to_num(case.tolerance(x.astype(np.float64), want))
    for which in variants.plans:
        got = variants.run(which, {})[: x.nbytes].view(np.float32)
        _compare(f"{name}, {which}", x, got.astype(np.float64), want, allowed)


def _compare(
    what: str, x: np.ndarray, got: np.ndarray, want: np.ndarray, allowed: np.ndarray
) -> None:
    with np.errstate(over="ignore"):
        infinite = np.isinf(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), f"{what}: NaN")
    np.testing.assert_array_equal(got[infinite], want.astype(np.float32)[infinite], what)
    finite = np.isfinite(want) & ~infinite
    # two units of a denormal, or all of it
    least = np.where(np.abs(want) < SMALLEST, np.where(got == 0, SMALLEST, 2.0**-148), 2.0**-149)
    off = np.abs(got - want)[finite]
    worst = np.argmax(off - (allowed + least)[finite])
    at = x[finite][worst]
    assert (off <= (allowed + least)[finite]).all(), (
        f"{what}: {got[finite][worst]!r} at {at!r}, not {want[finite][worst]!r}"
    )


@pytest.mark.parametrize("name", ["sin", "tanh", "erf"])
def test_odd_functions_keep_the_sign_of_zero(name: str) -> None:
    zeros = np.array([0.0, -0.0] * 16, np.float32)
    got = CASES[name].function(Tensor(zeros, device=cpu().name)).numpy()
    np.testing.assert_array_equal(np.signbit(got), np.signbit(zeros))


@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_what_lies_between_minus_one_and_one_never_leaves_them(name: str) -> None:
    x = np.linspace(-12, 12, 200_003).astype(np.float32)
    got = CASES[name].function(Tensor(x, device=cpu().name)).numpy()
    assert np.abs(got).max() == 1


def test_the_largest_of_many_is_nan_if_one_is() -> None:
    """Wherever it stands, in lanes or in what is left over, and whatever its sign and payload."""
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    a = np.random.default_rng(0).normal(size=(4 * 83, 83)).astype(np.float32)
    a[np.arange(4 * 83), np.arange(4 * 83) % 83] = np.repeat(nans, 83)
    a[:, 0] = np.where(np.isnan(a[:, 0]), a[:, 0], np.inf)
    got = Tensor(a, device=cpu().name).max(-1).numpy()
    assert np.isnan(got).all()
    whole = np.where(np.isnan(a), -np.inf, a)
    np.testing.assert_array_equal(Tensor(whole, device=cpu().name).max(-1).numpy(), whole.max(-1))
