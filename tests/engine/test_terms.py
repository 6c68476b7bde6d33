"""Products in two bfloat16 terms are nearly as exact as float32; one term is as bfloat16 is.

A term holds 8 bits: two of them lack 2**-17 of a number at most, and the product of two second
terms, 2**-18, is left out. Sums grow that by chance only: 2**-15 of the largest result is allowed.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine import Tensor
from engine.convolution import conv1d, conv2d
from engine.functional import attention, gelu
from engine.recipes import amx
from engine.recipes.amx import Tiles
from engine.recipes.attention import Flash
from engine.recipes.conv import Conv
from tests.engine.intrinsics import SAME_NUMBERS, Recipe, need, normal, quantised

HIGH = 2.0**-15
ATTENTION = 2.0**-8  # its weights, of keys that share the work, are one term each


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(40, 64, 64), (33, 50, 80), (128, 96, 512), (70, 33, 31)]
)
def test_products(rows: int, columns: int, depth: int) -> None:
    need(amx.NEEDED)
    weight = normal(columns, depth, weight=True)
    recipe = Recipe(lambda x: gelu(x) @ weight.transpose(), "high")
    recipe(normal(rows, depth)).used(Tiles).close(4 * SAME_NUMBERS, HIGH)


def test_quantised_weights_are_one_term_which_they_are_coarser_than() -> None:
    need(amx.NEEDED)
    weight = quantised("Q8_0", 64, 128)
    recipe = Recipe(lambda x: x @ weight.transpose(), "high")
    recipe(normal(64, 128)).used(Tiles).close(4 * SAME_NUMBERS, 2.0**-6)


def test_convolutions() -> None:
    need(amx.NEEDED)
    first, second = normal(64, 80, 3, weight=True), normal(40, 64, 3, weight=True)
    picture, kernel = normal(1, 40, 12, 15), normal(33, 40, 3, 3, weight=True)

    def sound(x: Tensor) -> Tensor:
        return conv1d(gelu(conv1d(x, first * 0.1, padding=1)), second, stride=2, padding=1)

    Recipe(sound, "high")(normal(1, 80, 203)).used(Conv, Conv).close(HIGH, 2 * HIGH)
    recipe = Recipe(lambda x: conv2d(x, kernel, padding=1), "high")
    recipe(picture).used(Conv).close(4 * SAME_NUMBERS, HIGH)


@pytest.mark.parametrize(("heads", "t", "s", "size"), [(4, 40, 100, 64), (2, 150, 150, 40)])
def test_attention(heads: int, t: int, s: int, size: int) -> None:
    need(amx.NEEDED | {"avx512dq"})
    shapes = (heads, t, size), (heads, s, size), (heads, s, size)
    inputs = [normal(*shape, number=i) for i, shape in enumerate(shapes)]
    Recipe(attention, "high")(*inputs).used(Flash).close(2.0**-8, ATTENTION)


def test_infinity_stays_infinite() -> None:
    """What infinity lacks of its first term is nothing, and not the difference of infinities."""
    need(amx.NEEDED)
    x = np.ones((40, 64), np.float32)
    x[3, 5], x[4, 6] = np.inf, -np.inf
    x[5, 7] = 3.4e38  # rounds to infinity
    weight = normal(32, 64, weight=True)
    answers = Recipe(lambda x: x @ weight.transpose(), "high")(Tensor(x)).used(Tiles)
    (got,), (exact,) = answers.got, answers.exact
    np.testing.assert_array_equal(got[3:5], exact[3:5])
    assert np.isinf(got[5]).all()
    np.testing.assert_allclose(got[6:], exact[6:], atol=HIGH * np.abs(exact[6:]).max())
