"""Products by int8 dots and by tiles of bfloat16 equal what their INTRINSICs mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Tensor
from engine import dtype as dt
from engine.recipes import amx, tile_dots, vnni
from engine.recipes.amx import Tiles
from engine.recipes.gemm import RegisterTile
from engine.recipes.gemv import Stream
from engine.recipes.tile_dots import TileDots
from engine.recipes.vnni import Dots
from tests.engine.intrinsics import (
    EXACT,
    SAME_NUMBERS,
    Recipe,
    dots,
    few,
    halves,
    need,
    normal,
    quantised,
    random,
)
from tests.engine.kernels import cpu
from tests.engine.oracle import tensor, to_bfloat16


def product(weight: Tensor) -> Callable:
    return lambda x: x @ weight.transpose()


# --- int8 dots -------------------------------------------------------------------------------

# One of a row's kinds: what it is made of, and whether two int8 terms hold it well.
ROWS = {
    "normal": lambda x: x,
    "zero": lambda x: x * 0,
    "huge": lambda x: x * np.float32(1e30),
    "tiny": lambda x: x * np.float32(1e-30),
    "one block": lambda x: np.where(np.arange(x.size) < 32, x, 0),
    "other scales": lambda x: x * np.float32(2.0) ** (np.arange(x.size) // 32 % 5 * 9),
    "equal": lambda x: np.full_like(x, x[0]),
}


@pytest.mark.parametrize(
    ("name", "columns", "depth"),
    [
        ("Q4_0", 50, 64),
        ("Q4_1", 33, 576),
        ("Q5_0", 96, 32),
        ("Q5_1", 7, 160),
        ("Q8_0", 64, 96),
    ],
)
def test_dots_of_any_rows(name: str, columns: int, depth: int) -> None:
    """One program for 1 to 32 rows of all magnitudes, each as exact as its own numbers are."""
    need(vnni.NEEDED)
    weight = quantised(name, columns, depth)
    recipe = Recipe(lambda x, m: x[:m] @ weight.transpose(), m=(1, 32))

    @few(5)
    @given(st.lists(st.sampled_from(sorted(ROWS)), min_size=1, max_size=32), st.integers(0, 99))
    def check(kinds: list[str], number: int) -> None:
        x = random(32, depth, number=number)
        x[: len(kinds)] = [ROWS[kind](row) for kind, row in zip(kinds, x)]
        answers = recipe(Tensor(x, device=cpu().name), m=len(kinds)).used(dots(32))
        answers.close(SAME_NUMBERS, EXACT[Dots], by_row=True)

    check()


@pytest.mark.parametrize("rows", [1, 7, 9, 32])
def test_dots_of_a_known_number_of_rows(rows: int) -> None:
    need(vnni.NEEDED)
    answers = Recipe(product(quantised("Q4_1", 100, 96)))(normal(rows, 96)).used(dots(rows))
    answers.close(SAME_NUMBERS, EXACT[Dots])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dots_of_a_row_are_the_same_beside_others(name: str) -> None:
    """By other instructions, to the last bit: a text doesn't depend on what is written beside it.

    The rows are of all magnitudes.
    """
    need(vnni.NEEDED | tile_dots.NEEDED)
    for columns, depth in ((50, 64), (96, 160)):
        multiply = product(quantised(name, columns, depth))
        x = random(27, depth)
        x[: len(ROWS)] = [make(row) for make, row in zip(ROWS.values(), x)]
        (together,) = Recipe(multiply)(Tensor(x, device=cpu().name)).used(TileDots).got
        alone = Recipe(multiply)
        for row, got in zip(x, together):
            (one,) = alone(Tensor(row[None], device=cpu().name)).used(Dots).got
            np.testing.assert_array_equal(one[0], got)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_dots_keep_what_is_not_finite_in_its_row(name: str) -> None:
    """A NaN makes its row NaN, an infinity makes it no number that could be taken for right."""
    need(vnni.NEEDED)
    x = random(8, 64)
    x[1, 5], x[3, 40], x[5, 2], x[6, :2] = np.nan, np.inf, -np.inf, (np.inf, np.nan)
    answers = Recipe(product(quantised(name, 50, 64)))(Tensor(x, device=cpu().name)).used(Dots)
    (got,), (exact,) = answers.got, answers.exact
    harmed = [1, 3, 5, 6]
    assert np.isnan(got[[1, 6]]).all() and not np.isfinite(got[harmed]).any()
    rest = np.setdiff1d(np.arange(8), harmed)
    np.testing.assert_allclose(got[rest], exact[rest], atol=EXACT[Dots] * np.abs(exact[rest]).max())


# --- tiles of bfloat16 -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "columns", "depth"),
    [
        ("Q4_0", 50, 64),
        ("Q4_1", 33, 160),
        ("Q5_0", 96, 32),
        ("Q5_1", 31, 96),
        ("Q8_0", 64, 96),
    ],
)
def test_tiles_of_quantised_weights_and_any_rows(name: str, columns: int, depth: int) -> None:
    need(amx.NEEDED)
    weight = quantised(name, columns, depth)
    recipe = Recipe(lambda x, m: x[:m] @ weight.transpose(), m=(0, 100))
    x = normal(100, depth)
    for rows in (0, 1, 32, 33, 64, 100):
        recipe(x, m=rows).used(Tiles).close(SAME_NUMBERS, EXACT[Tiles])


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(33, 16, 16), (40, 33, 40), (130, 50, 72), (64, 64, 64)]
)
def test_tiles_of_float32_weights(rows: int, columns: int, depth: int) -> None:
    need(amx.NEEDED)
    answers = Recipe(product(normal(columns, depth, weight=True)))(normal(rows, depth))
    answers.used(Tiles).close(SAME_NUMBERS, EXACT[Tiles])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 16), (16, 16)),
        ((40, 40), (40, 33)),
        ((65, 33), (33, 129)),
        ((3, 33, 48), (3, 48, 20)),
        ((3, 5, 32), (32, 40)),
        ((5, 32), (3, 32, 40)),
        ((2, 1, 5, 32), (1, 3, 32, 40)),
    ],
)
def test_products_of_bfloat16_are_exact(left: tuple, right: tuple) -> None:
    """Products of two 8-bit mantissas are float32 numbers: no precision is lost in tiles."""
    need(amx.NEEDED)
    recipe = Recipe(lambda a, b: a.float() @ b.float(), "f32")
    recipe(halves(*left), halves(*right)).used(Tiles).close(SAME_NUMBERS, SAME_NUMBERS)


@pytest.mark.parametrize("rows", [2, 40])
def test_bfloat16_weights_are_packed_as_they_are(rows: int) -> None:
    need(amx.NEEDED)
    weight = halves(50, 72)
    recipe = Recipe(lambda x: x.float() @ weight.float().transpose(), "f32")
    recipe(halves(rows, 72)).used(Tiles).close(SAME_NUMBERS, SAME_NUMBERS)


def test_products_over_several_and_over_leading_axes() -> None:
    need(amx.NEEDED)

    def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = a.float(), b.float()  # (16, 40, 3), (16, 50, 3)
        x = a.reshape(16, 40, 1, 3) * b.reshape(16, 1, 50, 3)
        return x.sum((0, 3)), (a[..., 0].unsqueeze(2) * b[..., 0].unsqueeze(1)).sum(0)

    answers = Recipe(both, "f32")(halves(16, 40, 3), halves(16, 50, 3))
    answers.used(Tiles, Tiles).close(SAME_NUMBERS, SAME_NUMBERS)


def test_tiles_of_a_symbolic_number_of_columns_and_matrices() -> None:
    need(amx.NEEDED)

    def attend(a: Tensor, b: Tensor, batch: Any, n: Any) -> Tensor:
        return a[:batch].float() @ b[:batch, :n].float().transpose()

    recipe = Recipe(attend, "f32", batch=(1, 3), n=(0, 70))
    for batch, n in ((1, 1), (3, 32), (2, 45), (3, 70)):
        answers = recipe(halves(3, 33, 40), halves(3, 70, 40), batch=batch, n=n)
        answers.used(Tiles).close(SAME_NUMBERS, SAME_NUMBERS)


def test_tiles_keep_what_is_not_finite_where_it_belongs() -> None:
    """Also beside the edges, where tiles hold zeros that must not meet an infinity."""
    need(amx.NEEDED)
    a, b = random(40, 40), random(40, 50)
    a[3, 39], a[39, 5], b[7, 49] = np.nan, np.inf, -np.inf
    recipe = Recipe(lambda a, b: a.float() @ b.float(), "f32")
    a, b = (tensor(to_bfloat16(x), cpu().name, dt.bfloat16) for x in (a, b))
    recipe(a, b).used(Tiles).close(SAME_NUMBERS, SAME_NUMBERS)


# --- when they are used ----------------------------------------------------------------------


def test_few_rows_are_multiplied_as_they_are_and_many_in_bfloat16() -> None:
    need(amx.NEEDED | vnni.NEEDED)
    weight, plain = quantised("Q4_1", 50, 64), normal(50, 64, weight=True)
    for rows, of_blocks, of_floats in ((32, [dots(32)], [RegisterTile]), (33, [Tiles], [Tiles])):
        Recipe(product(weight))(normal(rows, 64)).used(*of_blocks)
        Recipe(product(plain))(normal(rows, 64)).used(*of_floats)


def test_f32_and_factors_that_are_no_weights_are_never_rounded() -> None:
    """Float32 sums in another order, and nothing else."""
    weight, plain = quantised("Q5_0", 50, 64), normal(50, 64, weight=True)

    def network(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x @ weight.transpose(), x[:2] @ weight.transpose(), x @ plain.transpose(), x @ y

    answers = Recipe(network, "f32")(normal(40, 64), normal(64, 50))
    answers.used(RegisterTile, Stream, RegisterTile, RegisterTile).close(1e-5, 1e-5)
    answers = Recipe(lambda x, y: x @ y)(normal(40, 64), normal(64, 50))
    answers.used(RegisterTile).close(1e-5, 1e-5)
    Recipe(product(plain))(normal(9, 64)).used(RegisterTile).close(1e-5, 1e-5)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[7:70],
        lambda w: w[:, 32:96],
        lambda w: w.flip(0),
        lambda w: w.flip(1),
        lambda w: w.reshape(192, 64),
        lambda w: w.reshape(3, 32, 128).permute(1, 0, 2).reshape(96, 128),
    ],
    ids=["rows", "whole blocks", "rows reversed", "reversed", "reshaped", "rows permuted"],
)
def test_views_of_a_quantised_weight_are_packed_as_they_are(view: Callable) -> None:
    need(vnni.NEEDED)
    weight = view(quantised("Q4_1", 96, 128))
    answers = Recipe(product(weight))(normal(3, weight.shape[1])).used(Dots)
    answers.close(SAME_NUMBERS, EXACT[Dots])


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[:, 16:80],
        lambda w: w.transpose()[:, :64],
        lambda w: w.reshape(96, 4, 32).permute(0, 2, 1).reshape(96, 128),
        lambda w: w * 2,
        lambda w: w + w.flip(0),
    ],
    ids=["parts of blocks", "across blocks", "blocks interleaved", "scaled", "summed"],
)
def test_other_expressions_of_a_quantised_weight_are_no_blocks(view: Callable) -> None:
    weight = view(quantised("Q4_1", 96, 128))
    answers = Recipe(product(weight))(normal(3, weight.shape[1])).used()
    answers.close(1e-5, 1e-5)


@pytest.mark.parametrize("precision", ["auto", "f32"])
def test_rows_of_a_table_become_a_factor_that_is_padded(precision: str) -> None:
    """Lanes lie along the depth, whose end is guarded; the choice of a row isn't."""
    bits = (random(50, 48).view(np.uint32) >> 16).astype(np.uint16)
    table = Tensor.from_numpy(bits, cpu().name, dt.bfloat16)
    weight = normal(64, 48, weight=True)
    ids = Tensor(np.arange(40, dtype=np.int32) * 7 % 50, device=cpu().name)
    answers = Recipe(lambda i: table[i].float() @ weight.transpose(), precision)(ids)
    answers.close(SAME_NUMBERS, 2.0**-7 if precision == "auto" else SAME_NUMBERS)
