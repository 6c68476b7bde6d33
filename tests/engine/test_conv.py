"""Convolution, pooling and resizing equal their definitions in NumPy, and read plain addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from engine import ShapeError, Tensor, Var, program
from engine import dtype as dt
from engine.convolution import (
    avg_pool,
    avg_pool2d,
    conv1d,
    conv2d,
    max_pool,
    max_pool2d,
    upsample_nearest,
)
from engine.functional import group_norm
from engine.graph import MOVEMENT, Op
from engine.indexing import flat_index, move_index
from engine.recipes.analysis import Load, analyse
from engine.schedule import schedule
from engine.symbolic import Expr
from tests.engine.oracle import (
    EPSILON,
    FLOATS,
    each_device,
    numpy_cast,
    property_test,
    rng,
    same,
    small,
    tensor,
)

Pair = tuple[int, int]


class Tree(dict):
    """Weights by attribute; `"bias" in p` says which are there."""

    __getattr__ = dict.__getitem__


# --- windows ---------------------------------------------------------------------------------


def windows(a: np.ndarray, axes: tuple, sizes: tuple, strides: tuple, apart: tuple) -> np.ndarray:
    """What Tensor.windows is to give."""
    whole = tuple(d * (k - 1) + 1 for k, d in zip(sizes, apart))
    out = np.lib.stride_tricks.sliding_window_view(a, whole, axes)
    at: list = [slice(None)] * out.ndim
    for i, axis in enumerate(axes):
        at[axis] = slice(None, None, strides[i])
        at[a.ndim + i] = slice(None, None, apart[i])
    return out[tuple(at)]


@property_test(opencl=10)
def test_windows_of_any_axes(device: str, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    axes = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    apart = tuple(data.draw(st.integers(1, 3)) for _ in axes)
    sizes = tuple(data.draw(st.integers(1, (shape[a] - 1) // d + 1)) for a, d in zip(axes, apart))
    strides = tuple(data.draw(st.integers(1, 4)) for _ in axes)
    a = small(rng(data), shape)
    how = tuple(axes), sizes, strides, apart
    same(tensor(a, device).windows(*how) + 1, windows(a, *how) + 1)


@pytest.mark.parametrize("n", range(1, 14))
def test_the_address_of_a_window_is_a_plain_sum(n: int) -> None:
    x = Tensor(np.zeros((3, n, 2), np.float32), device="reference")
    for size in range(1, 6):
        for stride in range(1, 5):
            for apart in range(1, 4):
                if apart * (size - 1) + 1 > n:
                    continue
                view = x.windows((1,), (size,), (stride,), (apart,))
                c, y, z, k = (
                    Var(f"v{i}", 0, m - 1) if m > 1 else 0 for i, m in enumerate(view.shape)
                )
                index, node = (c, y, z, k), view.node
                while node.op in MOVEMENT:
                    index, guard = move_index(node, index)
                    assert guard == ()
                    node = node.src[0]
                plain = c * (2 * n) + (y * stride + k * apart) * 2 + z
                assert flat_index(index, x.shape) is plain, (size, stride, apart)


def test_windows_that_do_not_fit_are_named() -> None:
    x = Tensor.zeros(2, 4)
    with pytest.raises(ShapeError, match=r"3 elements 2 apart don't fit axis 1 of \[2, 4\]"):
        x.windows((1,), (3,), (1,), (2,))
    with pytest.raises(ShapeError, match="stride 0"):
        x.windows((1,), (3,), (0,), (1,))


# --- convolution -----------------------------------------------------------------------------


class Case(NamedTuple):
    """Sizes of one convolution; each pair is (along H, along W)."""

    x: tuple[int, int, int, int]
    weight: tuple[int, int, int, int]
    stride: Pair
    sides: tuple[Pair, Pair]
    dilation: Pair
    groups: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    few = st.integers(1, 3)
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    c, o = draw(st.sampled_from([1, 2, 5, 16])), draw(st.sampled_from([1, 3, 4, 16]))
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (3, 3), (1, 3), (5, 2)]))
    sides = tuple((draw(st.integers(0, 5)), draw(st.integers(0, 5))) for _ in range(2))
    dilation = draw(few), draw(few)
    # 17, 33 and 50 leave a rest in every number of lanes; 7 is below it
    space = [draw(st.sampled_from([1, 2, 7, 16, 17, 33, 50])) for _ in range(2)]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    assume(all(n + sum(s) >= r for n, s, r in zip(space, sides, reach)))
    return Case(
        (draw(st.sampled_from([1, 2])), c * groups, *space),
        (o * groups, c, *kernel),
        (draw(few), draw(few)),
        sides,
        dilation,
        groups,
    )


def convolve(x: np.ndarray, w: np.ndarray, case: Case) -> np.ndarray:
    """The definition, in float64."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *case.sides))
    view = windows(padded, (2, 3), w.shape[2:], case.stride, case.dilation)
    b, _, *rest = view.shape
    view = view.reshape(b, case.groups, w.shape[1], *rest)
    split = w.astype(np.float64).reshape(case.groups, -1, *w.shape[1:])
    out = np.einsum("bgchwij,gocij->bgohw", view, split)
    return out.reshape(b, w.shape[0], *out.shape[3:])


@property_test(reference=80, opencl=20)
def test_conv2d(device: str, data: st.DataObject) -> None:
    case = data.draw(cases())
    r = rng(data)
    x, w, bias = small(r, case.x), small(r, case.weight), small(r, case.weight[:1])
    made = Tensor.from_numpy if data.draw(st.booleans(), label="constant") else Tensor
    weight = made(w, device=device)
    out = conv2d(
        tensor(x, device),
        weight,
        tensor(bias, device),
        case.stride,
        case.sides,
        case.dilation,
        case.groups,
    )
    want = convolve(x, w, case) + bias[:, None, None]  # sums of whole numbers: exact
    same(out, want, dt.float32)


@property_test(opencl=8)
def test_conv1d_is_conv2d_in_one_row(device: str, data: st.DataObject) -> None:
    case = data.draw(cases())
    r = rng(data)
    row = case._replace(x=(*case.x[:2], 1, case.x[3]), weight=(*case.weight[:2], 1, case.weight[3]))
    row = row._replace(sides=((0, 0), case.sides[1]), stride=(1, case.stride[1]))
    x, w = small(r, row.x), small(r, row.weight)
    out = conv1d(
        tensor(x[:, :, 0], device),
        tensor(w[:, :, 0], device),
        None,
        case.stride[1],
        case.sides[1],
        case.dilation[1],
        case.groups,
    )
    same(out, convolve(x, w, row)[:, :, 0], dt.float32)


@each_device
def test_one_padding_for_all_sides_or_one_for_each_axis(device: str) -> None:
    r = np.random.default_rng(0)
    x, w = small(r, (1, 2, 6, 7)), small(r, (3, 2, 3, 3))
    for padding, sides in ((1, ((1, 1), (1, 1))), ((2, 0), ((2, 2), (0, 0)))):
        case = Case(x.shape, w.shape, (1, 1), sides, (1, 1), 1)
        out = conv2d(tensor(x, device), tensor(w, device), padding=padding)
        same(out, convolve(x, w, case), dt.float32)


@property_test(reference=20, opencl=6)
def test_halves_accumulate_in_float32(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS[1:]))
    r = rng(data)
    x, w = (numpy_cast(r.standard_normal(s), dtype) for s in ((1, 64, 5, 6), (3, 64, 3, 3)))
    out = conv2d(tensor(x, device, dtype), tensor(w, device, dtype), padding=1)
    want = convolve(x, w, Case(x.shape, w.shape, (1, 1), ((1, 1), (1, 1)), (1, 1), 1))
    # One rounding of the result; the float32 sum of 576 products near 1 is off by less than 1e-4.
    same(out, want, dtype, rtol=2 * EPSILON[dtype], atol=1e-4)


@each_device
def test_a_symbolic_batch_and_a_symbolic_length(device: str) -> None:
    r = np.random.default_rng(1)
    x, w = small(r, (5, 3, 20)), small(r, (4, 3, 3))
    row = Case((5, 3, 1, 20), (4, 3, 1, 3), (1, 2), ((0, 0), (1, 1)), (1, 1), 1)
    # A program returns whole tensors, so the sum over what is symbolic stands for its parts.
    out = program(
        lambda x, w, b, t: conv1d(x[:b, :, :t], w, stride=2, padding=1).sum((0, 2)),
        b=(1, 5),
        t=(3, 20),
    )
    given = tensor(x, device), tensor(w, device)
    for b, t in ((1, 20), (5, 3), (2, 8), (4, 19)):
        want = convolve(x[:b, :, None, :t], w[:, :, None], row).sum((0, 2, 3))
        same(out(*given, b=b, t=t), want, dt.float32)


def test_shapes_that_do_not_fit_are_both_named() -> None:
    x = Tensor.zeros(1, 6, 8, 8)
    for weight, more in (
        (Tensor.zeros(4, 5, 3, 3), {}),
        (Tensor.zeros(4, 6, 3), {}),
        (Tensor.zeros(5, 3, 3, 3), {"groups": 2}),
        (Tensor.zeros(4, 6, 9, 3), {}),
    ):
        with pytest.raises(ShapeError) as error:
            conv2d(x, weight, **more)
        assert str(list(weight.shape)) in str(error.value)
        assert str(list(x.shape)) in str(error.value)
    with pytest.raises(ShapeError, match=r"bias \[3\]"):
        conv2d(x, Tensor.zeros(4, 6, 3, 3), Tensor.zeros(3))
    with pytest.raises(ShapeError, match=r"conv1d: x \[1, 6, 8, 8\] and weight \[4, 6, 3\]"):
        conv1d(x, Tensor.zeros(4, 6, 3))


# --- the generated loops ---------------------------------------------------------------------


def only_kernel(out: Tensor) -> tuple[list[Load], list[Expr | None]]:
    kernel = schedule([out.node], out.device).kernels[-1]
    assert [n.op for n in kernel.reads] == [Op.BUFFER, Op.BUFFER]
    facts = analyse(kernel)
    return facts.loads, facts.axes


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [8, 16, 50])
def test_a_convolution_reads_in_a_row_along_x(size: int, stride: int, dilation: int) -> None:
    x = Tensor(np.zeros((2, 4, size, size), np.float32), device="reference")
    w = Tensor(np.zeros((8, 4, 3, 3), np.float32), device="reference")
    loads, axes = only_kernel(conv2d(x, w, stride=stride, dilation=dilation))
    assert sorted((load.stride(axes[-1]), load.stride(axes[1])) for load in loads) == [
        (0, 4 * 9),  # the weights: by output channel only
        (stride, 0),  # the picture: by place only
    ]
    assert all("div" not in str(load.index) and "mod" not in str(load.index) for load in loads)


# --- norms, pooling, resizing ----------------------------------------------------------------


@property_test(opencl=8)
def test_group_norm(device: str, data: st.DataObject) -> None:
    groups, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    space = data.draw(st.sampled_from([(3,), (7,), (4, 5), (16, 17)]))
    r = rng(data)
    x = r.standard_normal((2, groups * each, *space)).astype(np.float32)
    w, b = (r.standard_normal(groups * each).astype(np.float32) for _ in range(2))
    flat = x.astype(np.float64).reshape(2, groups, -1)
    scaled = (flat - flat.mean(-1, keepdims=True)) / np.sqrt(flat.var(-1, keepdims=True) + 1e-5)
    scaled = scaled.reshape(x.shape)
    column = (-1, *(1,) * len(space))
    p = Tree(weight=tensor(w, device), bias=tensor(b, device))
    want = scaled * w.reshape(column) + b.reshape(column)
    # float32 with values near 1 and a handful of roundings after each other
    same(group_norm(p, tensor(x, device), groups), want, dt.float32, rtol=1e-5, atol=2e-6)
    same(group_norm(Tree(), tensor(x, device), groups), scaled, dt.float32, rtol=1e-5, atol=2e-6)


def test_groups_that_do_not_divide_the_channels_are_named() -> None:
    with pytest.raises(ShapeError, match=r"4 groups .* \[1, 6, 2\]"):
        group_norm(Tree(), Tensor.zeros(1, 6, 2), 4)


class Pool(NamedTuple):
    """One pooling: each pair is (along H, along W)."""

    space: Pair
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil: bool


@st.composite
def pools(draw: st.DrawFn, dilated: bool) -> Pool:
    few = st.integers(1, 3)
    space = draw(st.tuples(st.integers(1, 18), st.integers(1, 18)))
    kernel, stride = draw(st.tuples(few, few)), draw(st.tuples(few, few))
    dilation = draw(st.tuples(few, few)) if dilated else (1, 1)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    assume(all(n + 2 * p >= r for n, p, r in zip(space, padding, reach)))
    return Pool(space, kernel, stride, padding, dilation, draw(st.booleans()))


def starts(pool: Pool, axis: int) -> list[int]:
    """Where windows begin: in the padding at the earliest, in the data at the latest."""
    n, k, s, p, d = (part[axis] for part in pool[:5])
    last = n + p - d * (k - 1) - 1
    reaches = [y for y in range(-p, n, s) if y - s < last] if pool.ceil else range(-p, last + 1, s)
    return list(reaches)


def pooled(x: np.ndarray, pool: Pool, how: Callable[..., np.ndarray]) -> np.ndarray:
    """how(values inside, elements of the window that are data or padding) for each window."""
    rows, columns = starts(pool, 0), starts(pool, 1)
    out = np.zeros((*x.shape[:2], len(rows), len(columns)))
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            inside, counted = [], 1
            for axis, begin in ((0, top), (1, left)):
                n, k, _, p, d = (part[axis] for part in pool[:5])
                places = [begin + d * m for m in range(k)]
                inside.append([y for y in places if 0 <= y < n])
                counted *= sum(y < n + p for y in places)
            out[:, :, i, j] = how(x[:, :, inside[0]][:, :, :, inside[1]], counted)
    return out


@property_test(opencl=8)
def test_max_pool2d(device: str, data: st.DataObject) -> None:
    pool = data.draw(pools(dilated=True))
    dtype = data.draw(st.sampled_from([dt.float32, dt.bfloat16, dt.int32, dt.uint8]))
    x = small(rng(data), (1, 2, *pool.space), dtype) - (0 if dtype.kind == "u" else 9)
    x = numpy_cast(x, dtype)
    assume(all(0 <= y < n for a, n in enumerate(pool.space) for y in seen(pool, a)))
    out = max_pool2d(
        tensor(x, device, dtype), pool.kernel, pool.stride, pool.padding, pool.dilation, pool.ceil
    )
    same(out, pooled(x, pool, lambda v, _: v.max((2, 3))), dtype)


def seen(pool: Pool, axis: int) -> list[int]:
    """For each window along an axis one place of it that is data, or -1."""
    n, k, _, _, d = (part[axis] for part in pool[:5])
    places = [[y + d * m for m in range(k)] for y in starts(pool, axis)]
    return [next((y for y in each if 0 <= y < n), -1) for each in places]


@property_test(opencl=8)
def test_avg_pool2d(device: str, data: st.DataObject) -> None:
    pool = data.draw(pools(dilated=False))
    x = small(rng(data), (1, 2, *pool.space))
    given, how = tensor(x, device), (pool.kernel, pool.stride, pool.padding, pool.ceil)
    with_padding = pooled(x, pool, lambda v, n: v.sum((2, 3)) / n)
    same(avg_pool2d(given, *how), with_padding, dt.float32, rtol=1e-6)  # two roundings
    alone = pooled(x, pool, lambda v, _: v.sum((2, 3)) / (v.shape[2] * v.shape[3]))
    same(avg_pool2d(given, *how, count_include_pad=False), alone, dt.float32, rtol=1e-6)


@each_device
def test_pools_of_volumes_along_any_axes(device: str) -> None:
    """The same numbers with channels first and last; a maximum is one along an axis at a time."""
    x = np.random.default_rng(5).integers(-9, 10, (2, 3, 7, 6, 5)).astype(np.float32)
    how = (3, 2, 2), (2, 2, 1), [(1, 1), (0, 1), (0, 0)], (1, 1, 1), True
    first, last = tensor(x, device), tensor(np.moveaxis(x, 1, -1).copy(), device)
    for function in (max_pool, avg_pool):
        got = function(first, (2, 3, 4), *how).numpy()
        assert got.shape == (2, 3, 4, 3, 4)
        np.testing.assert_array_equal(
            np.moveaxis(function(last, (1, 2, 3), *how).numpy(), -1, 1), got
        )
    steps = first
    for axis, *each in zip((2, 3, 4), *how[:4]):
        steps = max_pool(steps, (axis,), *([one] for one in each), True)
    np.testing.assert_array_equal(steps.numpy(), max_pool(first, (2, 3, 4), *how).numpy())


@each_device
def test_pooling_takes_its_kernel_as_stride_and_means_of_halves_are_sums_in_float32(
    device: str,
) -> None:
    x = np.full((1, 1, 64, 64), 1.5, np.float32)
    out = avg_pool2d(tensor(x, device, dt.bfloat16), 32)
    same(out, np.full((1, 1, 2, 2), 1.5), dt.bfloat16)  # 1024 terms: bfloat16 alone stops at 512


@property_test(opencl=6)
def test_upsample_nearest(device: str, data: st.DataObject) -> None:
    x = small(rng(data), (2, 3, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 17))))
    factor = data.draw(st.sampled_from([1, 2, 3, (2, 1), (1, 4)]))
    h, w = (factor, factor) if isinstance(factor, int) else factor
    same(upsample_nearest(tensor(x, device), factor), x.repeat(h, 2).repeat(w, 3))
