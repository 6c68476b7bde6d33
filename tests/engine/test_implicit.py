"""Convolutions whose windows are read where the picture lies equal the direct ones.

Data are small whole numbers: sums are exact in any order, so results must be equal.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Tensor
from engine import dtype as dt
from engine.convolution import conv
from engine.recipes.gemm import RegisterTile
from engine.recipes.implicit import Windows
from tests.engine.intrinsics import Recipe, few, with_lanes
from tests.engine.kernels import cpu


@pytest.fixture(params=(16, 8, 4), ids="{} lanes".format, autouse=True)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The device as one with vectors of so many lanes."""
    return with_lanes(request.param, monkeypatch)


def whole(*shape: int, dtype: dt.DType = dt.float32, weight: bool = False) -> Tensor:
    """Whole numbers -4 … 4."""
    array = np.random.default_rng(list(shape)).integers(-4, 5, shape).astype(dtype.numpy)
    make = Tensor.from_numpy if weight else Tensor
    return make(array, device=cpu().name)


@pytest.mark.parametrize("rank", [1, 2])
def test_convolutions_of_any_geometry(rank: int) -> None:
    @few(2)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        pick = lambda *of: data.draw(st.sampled_from(of))  # noqa: E731
        kernel = [pick(1, 2, 3, 5) for _ in range(rank)]
        kernel[-1] = kernel[-1] if max(kernel) > 1 else 3
        stride, dilation = ([pick(1, 1, 2, 3) for _ in kernel] for _ in "sd")
        sides = [(pick(0, 1, 2), pick(0, 1, 2)) for _ in kernel]
        space = [pick(3, 8, 17) + d * (k - 1) for d, k in zip(dilation, kernel)]
        c, o, batch = pick(5, 16, 33, 300), pick(4, 20, 32, 70), pick(1, 2)
        weight = whole(o, c, *kernel, dtype=pick(dt.float32, dt.float16), weight=True)
        bias = whole(o, weight=True)

        def function(x: Tensor) -> Tensor:
            return conv(x, weight.float(), bias, stride, sides, dilation, 1).relu()

        answers = Recipe(function, "f32")(whole(batch, c, *space))
        answers.used(Windows).close(0, 0)
        assert answers.fused()

    check()


def test_a_chain_writes_pictures_into_the_next_frame() -> None:
    """No kernel between two convolutions but those that write zeros."""
    first, second = whole(24, 5, 3, 3, weight=True), whole(40, 24, 3, 3, weight=True)
    how = (1, 1), [(1, 1)] * 2, (1, 1), 1

    def net(x: Tensor) -> Tensor:
        return conv(conv(x, first, None, *how).relu(), second, None, *how)

    answers = Recipe(net, "f32")(whole(1, 5, 20, 12))
    answers.used(Windows, Windows).close(0, 0)
    assert answers.fused()


OTHERS = {
    "a weight that changes": ({"fixed": False}, RegisterTile),
    "groups": ({"groups": 2, "outputs": 40}, RegisterTile),
    "a volume": ({"rank": 3}, RegisterTile),
    "one tap": ({"kernel": 1}, RegisterTile),
    "few outputs": ({"outputs": 3}, None),
    "few outputs of a group": ({"groups": 2}, None),
}


@pytest.mark.parametrize("what", OTHERS)
def test_others_are_products_of_a_matrix_of_windows_or_left_to_loops(what: str) -> None:
    how = {"outputs": 16, "kernel": 3, "fixed": True, "groups": 1, "rank": 2} | OTHERS[what][0]
    groups, kernel = how["groups"], (how["kernel"],) * how["rank"]
    weight = whole(how["outputs"], 8 // groups, *kernel, weight=how["fixed"])
    sides, ones = [(1, 1)] * len(kernel), (1,) * len(kernel)

    def function(x: Tensor) -> Tensor:
        return conv(x, weight, None, ones, sides, ones, groups)

    kinds = {OTHERS[what][1]} - {None}
    Recipe(function, "f32")(whole(2, 8, *(6 for _ in kernel))).used(*kinds).close(0, 0)


def test_a_matrix_of_windows_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.recipes.implicit.LARGEST", 4 * 2 * 36 * 36 - 1)
    weight = whole(32, 4, 3, 3, weight=True)
    how = (1, 1), [(1, 1)] * 2, (1, 1), 2
    answers = Recipe(lambda x: conv(x, weight, None, *how), "f32")(whole(1, 8, 6, 6))
    answers.used().close(0, 0)
