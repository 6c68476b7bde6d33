"""What surrounds a product by int8 dots or tiles: computed from its tile where that fits.

Bias, activation, rotation, residual and layout have to be right both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Tensor
from engine import dtype as dt
from engine.functional import rope, silu, softmax
from engine.recipes import amx, tile_dots, tiles, vnni
from engine.recipes.amx import Tiles
from engine.recipes.tile_dots import TileDots
from engine.recipes.vnni import Dots
from tests.engine.intrinsics import EXACT, SAME_NUMBERS, Recipe, need, normal, quantised


def rotated(x: Tensor, weight: Tensor, size: int) -> Tensor:
    """Heads of an attention as zoo/llama/model.py makes them."""
    t, heads = x.shape[0], weight.shape[0] // size
    angles = normal(2, t, size // 2, number=1)
    y = (x @ weight.transpose()).reshape(t, heads, size).permute(1, 0, 2)
    return rope(y, angles[0], angles[1])


EPILOGUES: dict[str, Callable] = {
    "bias": lambda x, w, v: x @ w.transpose() + normal(96),
    "gate": lambda x, w, v: silu(x @ w.transpose()) * (x @ v.transpose()),
    "residual": lambda x, w, v: x[:, :32] + x @ w[:32].transpose(),
    "heads of 32": lambda x, w, v: rotated(x, w, 32),
    "heads of 40": lambda x, w, v: rotated(x, w[:80], 40),
    "heads of 16": lambda x, w, v: rotated(x, w, 16),
    "transposed": lambda x, w, v: (x @ w.transpose()).transpose() * 2,
    "weight first": lambda x, w, v: w @ x.transpose(),
    "halves": lambda x, w, v: (x @ w.transpose()).cast(dt.float16),
}
OTHERS: dict[str, Callable] = {
    "reversed and added": lambda x, w, v: x @ w.transpose() + (x @ w.transpose()).flip(1),
    "padded": lambda x, w, v: (x @ w.transpose()).pad(((1, 2), (3, 1))),
    "part": lambda x, w, v: (x @ w.transpose())[1:3, 7:44],
    "sum": lambda x, w, v: (x @ w.transpose()).sum(-1),
    "softmax": lambda x, w, v: softmax(x * 0.1 @ w.transpose()),
    "used twice": lambda x, w, v: (x @ w.transpose() * 2, (x @ w.transpose()).sum(0)),
}


def both_ways(function: Callable, products: int, fused: bool, rounding: float) -> None:
    """Run it with few rows and with many. What follows may double an error."""
    w, v = quantised("Q4_1", 96, 64), quantised("Q4_1", 96, 64, number=1)
    for rows, kind, recipe in ((3, Dots, vnni), (20, TileDots, tile_dots), (40, Tiles, amx)):
        need(recipe.NEEDED)
        answers = Recipe(lambda x: function(x, w, v))(normal(rows, 64)).used(*[kind] * products)
        answers.close(2 * SAME_NUMBERS + rounding, 2 * EXACT[kind] + rounding)
        assert answers.fused() == fused


@pytest.mark.parametrize("name", EPILOGUES)
def test_what_follows_a_product_reads_its_tile(name: str) -> None:
    products = 2 if name == "gate" else 1
    rounding = 2.0**-11 if name == "halves" else 0  # where a last bit decides the other way
    both_ways(EPILOGUES[name], products, True, rounding)


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_fit_a_tile_reads_the_stored_product(name: str) -> None:
    both_ways(OTHERS[name], 1, False, 0)


def test_a_product_is_written_into_a_cache_at_a_symbolic_place() -> None:
    """Heads apart and as halves, as zoo/llama keeps its keys."""
    need(vnni.NEEDED)
    weight, keys = quantised("Q4_1", 96, 64), Tensor(np.ones((3, 60, 32), np.float16))

    def step(x: Tensor, start: Any) -> Tensor:
        heads = (x @ weight.transpose()).reshape(4, 3, 32).permute(1, 0, 2)
        keys[:, start : start + 4] = heads.cast(dt.float16)
        return keys[:, : start + 4].float() * 2

    recipe = Recipe(step, start=(0, 56))
    for start in (0, 4, 31, 56):
        answers = recipe(normal(4, 64, number=start), start=start).used(Dots)
        answers.close(SAME_NUMBERS + 2.0**-11, EXACT[Dots] + 2.0**-11)  # halves, rounded once more
        assert answers.fused()


def test_a_chain_of_products_hands_over_in_the_form_that_the_next_one_reads() -> None:
    """The second rounds what the first gives: numbers that differ in their last bit may then differ
    in a quantum of it, which is what the first tolerance allows for."""
    a, b = quantised("Q4_0", 96, 64), quantised("Q5_1", 50, 96)
    for rows, kind, recipe, quantum in (
        (5, Dots, vnni, 2e-5),
        (20, TileDots, tile_dots, 2e-5),
        (64, Tiles, amx, 2.0**-8),
    ):
        need(recipe.NEEDED)
        answers = Recipe(lambda x: silu(x @ a.transpose()) @ b.transpose())(normal(rows, 64))
        answers.used(kind, kind).close(quantum, 2 * EXACT[kind])


@pytest.mark.parametrize("columns", [96, 80, 72])
def test_results_past_the_caches_are_the_same(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only whole vectors go there: of 72 columns none do, since rows begin anywhere."""
    need(amx.NEEDED)
    monkeypatch.setattr(tiles, "HUGE", 0)
    monkeypatch.setattr(amx, "CACHE", 0)  # tiles beside each other write rows that lie together
    weight, bias = normal(columns, 64, weight=True), normal(columns, weight=True)
    recipe = Recipe(lambda x: (x @ weight.transpose() + bias).cast(dt.bfloat16))
    answers = recipe(normal(77, 64))
    answers.used(Tiles).close(2.0**-8, 2.0**-6)  # the result is rounded to 8 bits as well
    (capture,) = recipe.program.captures.values()
    texts = [f.text for f in capture.prepared.replay.functions if "tiles_" in f.text]
    assert ["sfence" in text for text in texts] == [columns % 16 == 0]
