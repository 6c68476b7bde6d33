"""Products in float32, of many rows and of few, equal what they mean on vectors of every width.

Nothing is rounded before the sums, so there is one tolerance: float32 sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product as product_of

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Tensor
from engine import dtype as dt
from engine.convolution import conv2d
from engine.functional import silu
from engine.graph import Op, toposort
from engine.recipes import amx, gemm, gemv
from engine.recipes.amx import Tiles
from engine.recipes.gemm import RegisterTile
from engine.recipes.gemv import Stream
from engine.recipes.implicit import Windows
from engine.specialise import _packed
from tests.engine.intrinsics import (
    SAME_NUMBERS,
    Recipe,
    few,
    need,
    normal,
    quantised,
    random,
    with_lanes,
)
from tests.engine.kernels import cpu

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
FLOATS = (dt.float32, dt.float16, dt.bfloat16)
SIZES = ((16, 16), (50, 40), (129, 67))  # columns, depth


@pytest.fixture(params=[16, 8, 4], ids=["16 lanes", "8 lanes", "4 lanes"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The device as one with vectors of so many lanes."""
    return with_lanes(request.param, monkeypatch)


def each_width(names: str, *axes: tuple) -> Callable:
    """Every combination of `axes`, which are the arguments `names`, on vectors of every width.

    By default those of 8 and of 4 lanes share them, as the fields of a chessboard: each meets
    every value, and no kernel is compiled for both. The `slow` run does what is left.
    """
    cases = []
    for places in product_of(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places)]
        name = "-".join(str(value) for value in values)
        for lanes in (16, 8, 4):
            left = lanes == (4, 8)[sum(places) % 2]
            marks = [pytest.mark.slow] if left else []
            cases.append(pytest.param(lanes, *values, id=f"{lanes} lanes-{name}", marks=marks))
    return pytest.mark.parametrize(f"lanes,{names}", cases, indirect=["lanes"])


def weight(dtype: dt.DType, *shape: int, number: int = 0) -> Tensor:
    """A weight that holds numbers of a type, as float32."""
    x = random(*shape, number=number)
    if dtype is dt.bfloat16:
        return Tensor.from_numpy(
            (x.view(np.uint32) >> 16).astype(np.uint16), cpu().name, dtype
        ).float()
    return Tensor.from_numpy(x.astype(dtype.numpy), cpu().name).float()


def product(w: Tensor) -> Callable:
    return lambda x: x @ w.transpose()


# --- many rows -------------------------------------------------------------------------------

ORDERS: dict[str, Callable] = {
    "as it lies": lambda x: x,
    "transposed": lambda x: x.transpose(),
    "every other row": lambda x: x.reshape(*x.shape[:-2], -1, 2, x.shape[-1])[..., 0, :],
    "reversed": lambda x: x.flip(-2),
    "computed": lambda x: x.relu() + 1,
}


@few(6)
@given(st.data())
def _check_activations(data: st.DataObject) -> None:
    """Neither factor is a weight; sizes that no tile divides, batches, factors in any order."""
    m, n, k = (data.draw(st.integers(*ends)) for ends in ((32, 90), (16, 140), (16, 70)))
    batch = data.draw(st.sampled_from([(), (3,), (2, 2)]))
    order = data.draw(st.sampled_from(sorted(ORDERS)))
    shape = {"transposed": (k, m), "every other row": (2 * m, k)}.get(order, (m, k))
    right = (n, k) if data.draw(st.booleans()) else (k, n)

    def function(a: Tensor, b: Tensor) -> Tensor:
        return ORDERS[order](a) @ (b if right == (k, n) else b.transpose())

    answers = Recipe(function, "f32")(normal(*batch, *shape), normal(*batch, *right, number=1))
    answers.used(RegisterTile).close(SAME_NUMBERS, SAME_NUMBERS)


def test_products_of_activations(lanes: int) -> None:
    _check_activations()


@each_width("dtype,size", FLOATS, SIZES)
def test_any_number_of_rows_times_a_weight(
    lanes: int, dtype: dt.DType, size: tuple[int, int]
) -> None:
    columns, depth = size
    recipe = Recipe(lambda x, m: x[:m] @ w.transpose(), "f32", m=(0, 70))
    w = weight(dtype, columns, depth)
    x = normal(70, depth)
    for rows in (0, 1, 5, 6, 8, 23, 24, 32, 33, 70):
        recipe(x, m=rows).used(RegisterTile).close(SAME_NUMBERS, SAME_NUMBERS)


@each_width("name", FORMATS)
def test_many_rows_times_a_quantised_weight(lanes: int, name: str) -> None:
    for columns, depth, rows in ((50, 64, 17), (33, 160, 70)):
        answers = Recipe(product(quantised(name, columns, depth)), "f32")(normal(rows, depth))
        answers.used(RegisterTile).close(SAME_NUMBERS, SAME_NUMBERS)


@each_width("dtype", FLOATS)
def test_a_weight_on_the_left(lanes: int, dtype: dt.DType) -> None:
    """Lying in rows it is read as it is; otherwise it becomes the right factor."""
    w = weight(dtype, 50, 40)
    for right in ((40, 70), (2, 40, 33)):
        answers = Recipe(lambda x: w @ x, "f32")(normal(*right))
        answers.used(RegisterTile).close(SAME_NUMBERS, SAME_NUMBERS)


def test_weights_that_are_computed_in_a_batch(lanes: int) -> None:
    """Whatever is made of weights alone is packed for good, on either side."""
    w, x = weight(dt.float32, 5, 40, 48) * 2 + 1, normal(5, 33, 40)
    Recipe(lambda x: x @ w, "f32")(x).used(RegisterTile).close(SAME_NUMBERS, SAME_NUMBERS)
    answers = Recipe(lambda x: w.transpose() @ x.transpose(), "f32")(x)
    answers.used(RegisterTile).close(SAME_NUMBERS, SAME_NUMBERS)


def test_columns_of_symbolic_number(lanes: int) -> None:
    recipe = Recipe(lambda x, y, n: x @ y[:, :n], "f32", n=(1, 150))
    x, y = normal(40, 24), normal(24, 150)
    for n in (1, 31, 64, 65, 150):
        recipe(x, y, n=n).used(RegisterTile).close(SAME_NUMBERS, SAME_NUMBERS)


def test_windows_are_not_stored_for_a_product(lanes: int) -> None:
    """They would take 25 times the memory of the picture."""
    w = weight(dt.float32, 32, 16, 5, 5)
    answers = Recipe(lambda x: conv2d(x, w, padding=2), "f32")(normal(1, 16, 24, 24))
    answers.used(Windows).close(SAME_NUMBERS, SAME_NUMBERS)
    assert max(k.target.numel for k in answers.kernels) == 32 * 24 * 24


# --- few rows --------------------------------------------------------------------------------


@each_width("dtype,size", FLOATS, SIZES)
def test_few_rows_times_a_weight(lanes: int, dtype: dt.DType, size: tuple[int, int]) -> None:
    columns, depth = size
    most = gemv.TOGETHER[lanes] if dtype is dt.float32 else gemv.MOST
    recipe = Recipe(lambda x, m: x[:m] @ w.transpose(), "f32", m=(0, most))
    w = weight(dtype, columns, depth)
    x = normal(most, depth)
    for rows in {0, 1, 2, min(3, most), most}:
        recipe(x, m=rows).used(Stream).close(SAME_NUMBERS, SAME_NUMBERS)
    Recipe(product(w), "f32")(x[:1]).used(Stream).close(SAME_NUMBERS, SAME_NUMBERS)


@each_width("name", FORMATS)
def test_few_rows_times_a_quantised_weight(lanes: int, name: str) -> None:
    for columns, depth, rows in ((50, 64, 1), (33, 160, 7), (16, 32, 16)):
        answers = Recipe(product(quantised(name, columns, depth)), "f32")(normal(rows, depth))
        answers.used(Stream).close(SAME_NUMBERS, SAME_NUMBERS)


@each_width("dtype", FLOATS)
def test_one_row_for_each_of_a_batch_of_weights(lanes: int, dtype: dt.DType) -> None:
    w = weight(dtype, 3, 40, 70)
    answers = Recipe(lambda x: x @ w, "f32")(normal(3, 1, 40))
    answers.used(Stream).close(SAME_NUMBERS, SAME_NUMBERS)


# --- both ------------------------------------------------------------------------------------


@each_width("rows,dtype", (1, 2, 40), FLOATS)
def test_what_is_not_finite_stays_in_its_row(lanes: int, rows: int, dtype: dt.DType) -> None:
    """Also where a row is read to the end of a block of 32, and where rows are fewer than tiles."""
    x = random(rows + 2, 40)
    x[0, 3], x[-1, :] = np.nan, np.inf  # the rows before and after those that are multiplied
    w = weight(dtype, 50, 40)
    given = Tensor(x, device=cpu().name)
    Recipe(lambda x: x[1:-1] @ w.transpose(), "f32")(given).close(SAME_NUMBERS, SAME_NUMBERS)
    answers = Recipe(product(w), "f32")(given)
    (got,) = answers.got
    assert np.isnan(got[0]).all() and not np.isfinite(got[-1]).any()
    np.testing.assert_allclose(got[1:-1], answers.exact[0][1:-1], atol=1e-4)


@pytest.mark.parametrize("rows", [1, 40])
def test_gate_and_bias_are_in_the_kernel_of_the_products(lanes: int, rows: int) -> None:
    kind = Stream if rows == 1 else RegisterTile
    gate, up = quantised("Q4_0", 96, 64), quantised("Q4_0", 96, 64, number=1)
    bias = normal(96)
    answers = Recipe(lambda x: silu(product(gate)(x)) * product(up)(x) + bias, "f32")(
        normal(rows, 64)
    )
    answers.used(kind, kind).close(2 * SAME_NUMBERS, 2 * SAME_NUMBERS)  # two factors, both off
    assert answers.fused()


@each_width("name", ("float32", "float16", "bfloat16", "Q4_1"))
def test_many_rows_and_one_read_the_same_copy_of_a_weight(lanes: int, name: str) -> None:
    w = quantised(name, 50, 64) if name == "Q4_1" else weight(dt.BY_NAME[name], 50, 64)
    (storage,) = {n.arg[0] for n in toposort([w.node]) if n.op is Op.BUFFER}
    for rows, kind in ((1, Stream), (40, RegisterTile)):
        Recipe(product(w), "f32")(normal(rows, 64)).used(kind)
        assert len(_packed[storage]) == 1


def test_a_bfloat16_weight_in_tiles_serves_one_row_as_well() -> None:
    need(amx.NEEDED)
    w = weight(dt.bfloat16, 50, 64)
    (storage,) = {n.arg[0] for n in toposort([w.node]) if n.op is Op.BUFFER}
    for rows, kind in ((1, Stream), (40, Tiles)):
        Recipe(product(w))(normal(rows, 64)).used(kind)
    assert len(_packed[storage]) == 1


def test_small_products_are_left_to_loops(lanes: int) -> None:
    w = weight(dt.float32, 50, 64)
    few_rows = normal(gemm.FEWEST - 1, 64)
    Recipe(lambda x, y: x @ y.transpose(), "f32")(few_rows, few_rows).used()
    Recipe(lambda x: x[:, :7] @ w[:, :7].transpose(), "f32")(normal(40, 64)).used()
    Recipe(lambda x: x @ w[:15].transpose(), "f32")(normal(1, 64)).used()
