"""Convolutions are recognised however they are spelled, and 3x3 ones are made of 36 products."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from engine import Tensor
from engine.convolution import conv1d, conv2d
from engine.graph import Node, Op, toposort
from engine.recipes import convolution, product, winograd
from engine.recipes.gemm import RegisterTile
from engine.recipes.winograd import INPUT, KERNEL, OUTPUT
from tests.engine.intrinsics import Recipe
from tests.engine.kernels import cpu
from tests.engine.oracle import each_device, property_test, rng, small


def sum_of(out: Tensor) -> Node:
    """The one reduction of a convolution."""
    (node,) = (n for n in toposort([out.node]) if n.op is Op.REDUCE)
    return node


def constant(a: np.ndarray, device: str) -> Tensor:
    return Tensor.from_numpy(a, device)


# --- recognition -----------------------------------------------------------------------------


def spell(a: np.ndarray, form: str, device: str) -> Tensor:
    """A tensor with a's values that lies in memory in one of several ways."""
    if form == "last":
        return constant(np.ascontiguousarray(np.moveaxis(a, 1, -1)), device).permute(
            0, a.ndim - 1, *range(1, a.ndim - 1)
        )
    if form == "flat":
        return constant(a.reshape(-1), device).reshape(*a.shape)
    return constant(a, device)


@property_test(reference=80, opencl=1)
def test_what_is_recognised_is_the_same_convolution(device: str, data: st.DataObject) -> None:
    few, form = st.integers(1, 3), st.sampled_from(["plain", "last", "flat"])
    groups = data.draw(st.sampled_from([1, 1, 2]))
    kernel, stride, dilation = (data.draw(st.tuples(few, few)) for _ in range(3))
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]
    space = [data.draw(st.integers(r + 1, 12)) for r in reach]
    padding = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    r = rng(data)
    x = small(r, (data.draw(few), groups * data.draw(few), *space))
    w = small(r, (groups * data.draw(few), x.shape[1] // groups, *kernel))
    given = spell(x, data.draw(form), device), spell(w, data.draw(form), device)
    out = conv2d(*given, None, stride, padding, dilation, groups)
    if not any(n.op is Op.REDUCE for n in toposort([out.node])):
        return  # a single product
    found = convolution.find(sum_of(out))
    assert found is not None
    assert found.groups == groups
    again = conv2d(
        Tensor(found.x, device=device),
        Tensor(found.weight, device=device),
        None,
        found.stride,
        0,
        found.dilation,
        groups,
    )
    np.testing.assert_array_equal(again.numpy(), out.numpy())


def test_strides_and_dilations_are_read_from_the_addresses() -> None:
    x, w = Tensor.zeros(2, 6, 20, 20).contiguous(), Tensor.zeros(4, 3, 3, 2).contiguous()
    found = convolution.find(sum_of(conv2d(x, w, None, (2, 3), 1, (1, 4), 2)))
    assert (found.stride, found.dilation, found.groups) == ((2, 3), (1, 4), 2)
    assert found.weight is w.node
    column = convolution.find(sum_of(conv2d(x[:, :, :, :1], w[:, :, :, :1], None, (2, 1), 0, 1, 2)))
    assert (column.stride, column.out, column.x.shape) == ((2, 1), (9, 1), (2, 6, 19, 1))
    row = convolution.find(sum_of(conv1d(x[:, :, 0], w[:, :3, 0], None, 2, groups=2)))
    assert (row.stride, row.out) == ((2,), (10,))


@pytest.mark.parametrize(
    "out",
    [
        Tensor.ones(4, 5) @ Tensor.ones(5, 6),
        Tensor.ones(4, 5, 6, 7).sum(),
        (Tensor.ones(1, 1, 1, 2, 2, 3, 3, 3) * Tensor.ones(1, 1, 4, 1, 1, 3, 3, 3)).sum((5, 6, 7)),
    ],
    ids=["matrix product", "sum", "windows that do not slide"],
)
def test_other_sums_are_no_convolution(out: Tensor) -> None:
    made = [n for n in toposort([out.node]) if n.op is Op.REDUCE]
    assert all(convolution.find(n) is None for n in made)


# --- the transforms --------------------------------------------------------------------------


def test_the_transforms_multiply_polynomials() -> None:
    r = np.random.default_rng(0)
    x, w = r.standard_normal((6, 6)), r.standard_normal((3, 3))
    transformed = (np.array(INPUT) @ x @ np.array(INPUT).T) * (
        np.array(KERNEL) @ w @ np.array(KERNEL).T
    )
    got = np.array(OUTPUT) @ transformed @ np.array(OUTPUT).T
    view = np.lib.stride_tricks.sliding_window_view(x, (3, 3))
    np.testing.assert_allclose(got, np.einsum("yxij,ij->yx", view, w), atol=1e-13)  # float64


def direct(x: np.ndarray, w: np.ndarray, padding: tuple) -> np.ndarray:
    """The definition, in float64."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *padding))
    view = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    return np.einsum("bchwij,ocij->bohw", view, w.astype(np.float64), optimize=True)


def near(got: np.ndarray, want: np.ndarray) -> None:
    """The transforms add numbers of up to 10 times the result's size, and float32 keeps 24 bits of
    those: 1e-5 of the results' mean square on some 100 channels. An error in them shows as 0.1."""
    scale = np.sqrt((want**2).mean())
    np.testing.assert_allclose(got.reshape(want.shape) / scale, want / scale, rtol=0, atol=1e-4)


@property_test(reference=12, opencl=3)
def test_it_equals_the_direct_convolution(device: str, data: st.DataObject) -> None:
    sides = st.tuples(st.integers(0, 4), st.integers(0, 4))
    padding = data.draw(st.tuples(sides, sides))
    channels = st.sampled_from([32, 33, 50])
    c, o = data.draw(channels), data.draw(st.sampled_from([16, 32, 50]))
    space = data.draw(st.sampled_from([(32, 32), (30, 35), (45, 23), (16, 80)]))  # tiles left over
    r = rng(data)
    x = r.standard_normal((data.draw(st.integers(1, 2)), c, *space)).astype(np.float32)
    w = r.standard_normal((o, c, 3, 3)).astype(np.float32)
    out = conv2d(Tensor(x, device=device), constant(w, device), padding=padding)
    made = winograd.by_products(sum_of(out))
    assert made is not None
    assert made.shape == sum_of(out).shape
    near(Tensor(made, device=device).numpy(), direct(x, w, padding))


def test_it_is_36_products_of_channels_and_tiles() -> None:
    x = Tensor(np.zeros((2, 48, 64, 32), np.float32), device="reference")
    w = constant(np.zeros((40, 48, 3, 3), np.float32), "reference")
    made = winograd.by_products(sum_of(conv2d(x, w, padding=1)))
    (node,) = (n for n in toposort([made]) if n.op is Op.REDUCE)
    found = product.find(node)
    assert found.left.shape == (36, 2 * 16 * 8, 48)
    assert found.right.shape == (36, 40, 48)


@each_device
def test_work_around_the_convolution_stays(device: str) -> None:
    r = np.random.default_rng(2)
    x = r.standard_normal((1, 32, 33, 40)).astype(np.float32)
    w = r.standard_normal((32, 32, 3, 3)).astype(np.float32)
    b = r.standard_normal(32).astype(np.float32)
    inner = conv2d(Tensor(x, device=device).relu(), constant(w, device), constant(b, device), 1, 1)
    made = winograd.by_products(sum_of(inner))
    total = Tensor(made, device=device).reshape(*inner.shape) + constant(b, device).reshape(
        32, 1, 1
    )
    near(total.numpy(), direct(np.maximum(x, 0), w, ((1, 1), (1, 1))) + b[:, None, None])


def test_a_program_multiplies_the_transforms_by_register_tiles() -> None:
    r = np.random.default_rng(3)
    x = r.standard_normal((2, 48, 30, 37)).astype(np.float32)
    w = r.standard_normal((40, 48, 3, 3)).astype(np.float32)
    weight = constant(w, cpu().name)
    answers = Recipe(lambda x: conv2d(x, weight, padding=1), "f32")(Tensor(x, device=cpu().name))
    near(answers.used(RegisterTile).got[0], direct(x, w, ((1, 1), (1, 1))))


OTHERS = {
    "stride": {"stride": 2},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "kernel": {"kernel": 5},
    "a weight that changes": {"fixed": False},
    "few channels": {"channels": 24},
    "few tiles": {"side": 28},
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_convolutions_are_left_alone(what: str) -> None:
    how = {"side": 40, "channels": 64, "kernel": 3, "fixed": True} | OTHERS[what]
    side, c, k, fixed = (how.pop(n) for n in ("side", "channels", "kernel", "fixed"))
    w = np.zeros((c, c // how.get("groups", 1), k, k), np.float32)
    x = Tensor(np.zeros((1, c, side, side), np.float32), device="reference")
    weight = constant(w, "reference") if fixed else Tensor(w, device="reference")
    assert winograd.by_products(sum_of(conv2d(x, weight, padding=1, **how))) is None
