"""Views equal NumPy's: any chain of them, under elementwise work and reductions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import strategies as st

from engine import ShapeError, Tensor
from engine import dtype as dt
from tests.engine.oracle import (
    FLOATS,
    INTS,
    each_device,
    property_test,
    rng,
    same,
    shapes,
    small,
    tensor,
)

LIMIT = 3000  # elements: chains must stay small enough to compile and compare quickly


def factors(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """A shape with `size` elements, ones among its sides."""
    sides = []
    while size > 1 and len(sides) < 4:
        side = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        sides.append(side)
        size //= side
    sides.append(size)
    return tuple(sides)


def reshape(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    shape = factors(draw, a.size) if a.size else (0, *a.shape[1:], 3)[: a.ndim + 1]
    return x.reshape(*shape), a.reshape(shape)


def permute(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    axes = draw(st.permutations(range(a.ndim)))
    return x.permute(*axes), a.transpose(axes)


def expand(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    if a.ndim >= 5 or a.size * 3 > LIMIT:
        return x, a
    axis, n = draw(st.integers(0, a.ndim)), draw(st.integers(1, 3))
    shape = (*a.shape[:axis], n, *a.shape[axis:])
    return x.unsqueeze(axis).expand(*shape), np.broadcast_to(np.expand_dims(a, axis), shape)


def pad(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    amounts = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in a.shape)
    if math.prod(n + b + e for n, (b, e) in zip(a.shape, amounts)) > LIMIT:
        return x, a
    return x.pad(amounts), np.pad(a, amounts) if a.ndim else a


def shrink(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in a.shape]
    slices = tuple(slice(s, max(e, min(s + 1, n))) for (s, e), n in zip(ends, a.shape))
    return x[slices], a[slices]


def flip(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    axes = tuple(i for i in range(a.ndim) if draw(st.booleans()))
    return (x.flip(*axes), np.flip(a, axes)) if axes else (x, a)


def add_one(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    return x + 1, a + np.array(1, a.dtype)  # what a later pad adds must still be 0


def realize(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    return x.realize(), a


def contiguous(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    return x.contiguous(), a


def sum_one_axis(draw: st.DrawFn, x: Tensor, a: np.ndarray) -> tuple[Tensor, np.ndarray]:
    if a.dtype != np.float32 or not a.ndim:
        return x, a
    axis, keep = draw(st.integers(0, a.ndim - 1)), draw(st.booleans())
    # Modulo, so that a few sums in a row keep to numbers that float32 holds exactly.
    return x.sum(axis, keepdim=keep) % 64, a.sum(axis, keepdims=keep) % 64


MOVES = [reshape, permute, expand, pad, shrink, flip]


def chain(
    data: st.DataObject, x: Tensor, a: np.ndarray, moves: list, longest: int = 6
) -> tuple[Tensor, np.ndarray]:
    for _ in range(data.draw(st.integers(1, longest), label="moves")):
        move = data.draw(st.sampled_from(moves), label="move")
        x, a = move(data.draw, x, a)
        assert x.shape == a.shape, f"{move.__name__} gives {x.shape}, expected {a.shape}"
    return x, a


def start(data: st.DataObject, device: str, types: tuple = (dt.float32,)) -> tuple:
    dtype = data.draw(st.sampled_from(types))
    a = small(
        rng(data), data.draw(shapes(max_side=5, min_side=data.draw(st.integers(0, 1)))), dtype
    )
    return tensor(a, device, dtype), a, dtype


@property_test(reference=200, opencl=16)
def test_chain_of_views(device: str, data: st.DataObject) -> None:
    x, a, dtype = start(data, device, (*FLOATS, *INTS, dt.bool_))
    x, a = chain(data, x, a, MOVES)
    same(x, a, dtype)


@property_test(reference=200, opencl=16)
def test_views_between_elementwise_work(device: str, data: st.DataObject) -> None:
    x, a, dtype = start(data, device, (dt.float32, dt.int32, dt.uint8))
    x, a = chain(data, x, a, [*MOVES, add_one, add_one, realize, contiguous], longest=8)
    y, b = flip(data.draw, x, a)
    same(x * 2 + y, a * np.array(2, a.dtype) + b, dtype)


@property_test(reference=200, opencl=16)
def test_views_between_reductions(device: str, data: st.DataObject) -> None:
    x, a, dtype = start(data, device)
    x, a = chain(data, x, a, [*MOVES, add_one, sum_one_axis, sum_one_axis], longest=8)
    same(x.sum(), a.sum(dtype=np.float32))
    same(x, a, dtype)


@property_test(reference=100, opencl=10)
def test_two_chains_over_one_buffer(device: str, data: st.DataObject) -> None:
    x, a, _ = start(data, device)
    y, b = chain(data, x, a, [*MOVES, add_one])
    z, c = chain(data, x, a, [*MOVES, add_one])
    same(y.sum() + z.sum() * 3, np.float32(b.sum() + c.sum() * 3))
    same(y.flatten() + z.flatten().sum(), b.reshape(-1) + c.sum(dtype=np.float32))


@property_test(reference=150, opencl=13)
def test_indexing(device: str, data: st.DataObject) -> None:
    a = small(rng(data), data.draw(shapes(max_side=5, min_side=1)))
    key: list = []
    for n in a.shape[: data.draw(st.integers(0, a.ndim))]:
        kind = data.draw(st.sampled_from(["int", "slice", "none"]))
        if kind == "int":
            key.append(data.draw(st.integers(-n, n - 1)))
        else:
            ends = st.none() | st.integers(-n - 1, n + 1)
            key.append(slice(data.draw(ends), data.draw(ends)))
        if kind == "none":
            key.append(None)
    if data.draw(st.booleans()):
        key.insert(data.draw(st.integers(0, len(key))), Ellipsis)
    same(tensor(a, device)[tuple(key)], a[tuple(key)])


@property_test(reference=100, opencl=13)
def test_gather_along_an_axis(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((*FLOATS, dt.int32, dt.uint8)))
    a = small(rng(data), data.draw(shapes(max_rank=3, max_side=5, min_side=1)) + (4,), dtype)
    axis = data.draw(st.integers(0, a.ndim - 1))
    n = a.shape[axis]
    index_type = data.draw(st.sampled_from((dt.int32, dt.int64, dt.uint8)))
    low = -n if index_type.kind == "i" else 0
    shape = data.draw(shapes(max_rank=2, max_side=4))
    index = rng(data).integers(low, n, shape).astype(index_type.numpy)
    key = (slice(None),) * axis
    got = tensor(a, device, dtype)[(*key, tensor(index, device))]
    same(got, a[(*key, index)], dtype)


@property_test(reference=60, opencl=10)
def test_gather_from_a_computed_table_with_computed_ids(device: str, data: st.DataObject) -> None:
    """As an embedding over quantised rows: both sides are expressions, not buffers."""
    r = rng(data)
    table = r.integers(0, 255, (data.draw(st.integers(1, 9)), 6), np.uint8)
    index = r.integers(0, len(table), data.draw(shapes(max_rank=2)))
    x = (
        (tensor(table, device).cast(dt.float32) * 0.5 - 3)
        .reshape(len(table), 2, 3)
        .permute(0, 2, 1)
    )
    want = (table.astype(np.float32) * np.float32(0.5) - 3).reshape(-1, 2, 3).transpose(0, 2, 1)
    ids = len(table) - 1 - tensor(index, device)
    same(x[ids] + 1, want[len(table) - 1 - index] + 1)
    same(x[ids].sum(-1), want[len(table) - 1 - index].sum(-1))


@property_test(reference=100, opencl=13)
def test_cat_and_stack(device: str, data: st.DataObject) -> None:
    r = rng(data)
    types = (dt.float32, dt.int32, dt.uint8, dt.bool_)
    shape = data.draw(shapes(max_rank=3, max_side=4)) + (3,)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    dtype = data.draw(st.sampled_from(types))
    parts = []
    for _ in range(data.draw(st.integers(1, 4))):
        sides = list(shape)
        sides[axis] = data.draw(st.integers(0, 4))
        parts.append(small(r, sides, dtype))
    got = Tensor.cat(*(tensor(p, device) for p in parts), axis=axis)
    same(got, np.concatenate(parts, axis))
    equal = [small(r, shape, dtype) for _ in range(3)]
    same(Tensor.stack(*(tensor(p, device) for p in equal), axis=axis), np.stack(equal, axis))


@property_test(reference=60, opencl=8)
def test_cat_of_views_then_reduce(device: str, data: st.DataObject) -> None:
    r = rng(data)
    a, b = small(r, (4, 5)), small(r, (5, 3))
    x, y = tensor(a, device), tensor(b, device)
    n = data.draw(st.integers(0, 4))
    want = np.concatenate([a[:n].T + 1, b[::-1] * 2], 1)
    got = Tensor.cat(x[:n].permute(1, 0) + 1, y.flip(0) * 2, axis=1)
    same(got, want)
    same(got.sum(data.draw(st.integers(0, 1))).sum(), np.float32(want.sum()))


@property_test(reference=40, opencl=8)
def test_made_tensors(device: str, data: st.DataObject) -> None:
    shape = data.draw(shapes())
    dtype = data.draw(st.sampled_from((dt.float32, dt.float16, dt.int32, dt.uint8, dt.int64)))
    n = data.draw(st.integers(0, 40))
    same(Tensor.zeros(*shape, dtype=dtype, device=device), np.zeros(shape, dtype.numpy))
    same(Tensor.ones(*shape, dtype=dtype, device=device) + 1, np.full(shape, 2, dtype.numpy))
    same(Tensor.full(shape, 7, dtype, device), np.full(shape, 7, dtype.numpy))
    same(Tensor.arange(n, dtype, device) * 2, np.arange(n).astype(dtype.numpy) * 2)


@each_device
def test_from_numpy_shares_memory_and_new_tensors_do_not(device: str) -> None:
    a = np.arange(6, dtype=np.float32)
    shared, copied = Tensor.from_numpy(a, device), Tensor(a, device=device)
    a[0] = 100
    same(copied + 0, np.arange(6, dtype=np.float32))
    assert shared.shape == (6,)


@each_device
def test_a_readonly_memory_map_is_read(device: str, tmp_path) -> None:
    path = tmp_path / "raw"
    np.arange(50, dtype=np.uint8).tofile(path)
    mapped = np.memmap(path, np.uint8, "r")[3:43].reshape(5, 8)  # an odd offset in the file
    got = Tensor.from_numpy(mapped, device)[1:, 2:4].bitcast(dt.uint16)
    same(got, mapped[1:, 2:4].copy().view(np.uint16))


@each_device
def test_impossible_views_are_shape_errors(device: str) -> None:
    x = Tensor.zeros(2, 3, device=device)
    for wrong in (
        lambda: x.reshape(4),
        lambda: x.reshape(-1, 4),
        lambda: x.expand(2, 4),
        lambda: x.permute(0, 0),
        lambda: x.sum(2),
    ):
        with pytest.raises(ShapeError):
            wrong()
    with pytest.raises(IndexError):
        x[2]
    with pytest.raises(IndexError):
        x[0, 0, 0]
