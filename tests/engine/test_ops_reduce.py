"""Reductions and matrix products equal NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine import ShapeError, Tensor
from engine import dtype as dt
from tests.engine.oracle import (
    EPSILON,
    FLOATS,
    INTS,
    each_device,
    numpy_cast,
    property_test,
    rng,
    same,
    shapes,
    small,
    tensor,
    wide,
)

# Sides around the sizes at which kernels are cut into tiles, vectors and work-groups.
SIDES = st.sampled_from([1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129])


def some_axes(data: st.DataObject, rank: int) -> int | tuple[int, ...] | None:
    if not rank:
        return None
    return data.draw(
        st.none()
        | st.integers(-rank, rank - 1)
        | st.lists(st.integers(0, rank - 1), min_size=1, unique=True).map(tuple)
    )


@property_test(reference=120, opencl=20)
def test_sum_is_exact_for_whole_numbers(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((*FLOATS, *INTS, dt.bool_)))
    a = small(rng(data), data.draw(shapes(max_side=9)), dtype)
    axis, keep = some_axes(data, a.ndim), data.draw(st.booleans())
    wide_type = np.float32 if dtype.is_float else np.int64
    got = tensor(a, device, dtype).sum(axis, keepdim=keep)
    want = a.astype(wide_type).sum(axis, keepdims=keep)
    same(got, want, got.dtype)
    assert got.dtype is (dtype if dtype.is_float or dtype.itemsize >= 4 else dt.int32)


@property_test(reference=120, opencl=13)
def test_max_min(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((*FLOATS, *INTS, dt.bool_)))
    draw = data.draw(st.sampled_from([small, wide]))
    a = draw(rng(data), data.draw(shapes(max_side=9, min_side=1)), dtype)
    axis, keep = some_axes(data, a.ndim), data.draw(st.booleans())
    same(tensor(a, device, dtype).max(axis, keepdim=keep), a.max(axis, keepdims=keep), dtype)
    same(tensor(a, device, dtype).min(axis, keepdim=keep), a.min(axis, keepdims=keep), dtype)


@property_test()
def test_mean(device: str, data: st.DataObject) -> None:
    """The sum is exact; the division rounds twice."""
    dtype = data.draw(st.sampled_from((*FLOATS, dt.int32, dt.uint8)))
    a = small(rng(data), data.draw(shapes(max_side=9, min_side=1)), dtype)
    axis, keep = some_axes(data, a.ndim), data.draw(st.booleans())
    out = dtype if dtype.is_float else dt.float32
    want = a.astype(np.float64).mean(axis, keepdims=keep)
    tolerance = 4 * EPSILON[out]
    same(tensor(a, device, dtype).mean(axis, keepdim=keep), want, out, tolerance, tolerance)


@property_test(reference=80, opencl=8)
def test_argmax_gives_the_first_of_equals(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((dt.float32, dt.float16, dt.int32, dt.uint8)))
    draw = data.draw(st.sampled_from([small, small, wide]))
    a = draw(rng(data), data.draw(shapes(max_side=9, min_side=1)) + (7,), dtype)
    axis = data.draw(st.integers(-a.ndim, a.ndim - 1))
    np.testing.assert_array_equal(tensor(a, device, dtype).argmax(axis).numpy(), a.argmax(axis))


@property_test(opencl=13)
def test_long_sums_stay_accurate(device: str, data: st.DataObject) -> None:
    """Partial sum i has size sqrt(i) and rounds by eps of that: n / sqrt(2) * eps at 1 sigma."""
    n = data.draw(st.sampled_from([1000, 4099, 20000]))
    rows = data.draw(st.integers(1, 3))
    a = rng(data).standard_normal((rows, n)).astype(np.float32)
    axis = data.draw(st.sampled_from([0, 1, None]))
    want = a.astype(np.float64).sum(axis)
    bound = 4 * EPSILON[dt.float32] * (a.size if axis is None else a.shape[axis])
    same(tensor(a, device).sum(axis), want, dt.float32, atol=bound)


@property_test(opencl=5)
def test_halves_accumulate_in_float32(device: str, data: st.DataObject) -> None:
    """4000 ones and more: a float16 sum would stop at 2048, a bfloat16 one at 256."""
    dtype = data.draw(st.sampled_from([dt.float16, dt.bfloat16]))
    n = data.draw(st.integers(2050, 6000))
    ones = Tensor.ones(2, n, dtype=dtype, device=device).contiguous()
    want = numpy_cast(np.full(2, n, np.float32), dtype)
    same(ones.sum(1), want, dtype)
    same(ones @ Tensor.ones(n, dtype=dtype, device=device).contiguous(), want, dtype)


@property_test(reference=80, opencl=10)
def test_reduction_of_a_reduction(device: str, data: st.DataObject) -> None:
    a = small(rng(data), data.draw(shapes(max_rank=2, min_side=1)) + (4, 5))
    x = tensor(a, device)
    same((x - x.max(-1, keepdim=True)).sum(-1), (a - a.max(-1, keepdims=True)).sum(-1))
    same((x.sum(-1) * 2).max(-1), (a.sum(-1) * 2).max(-1))
    same((x + x.sum(-2, keepdim=True)).sum(), np.float32((a + a.sum(-2, keepdims=True)).sum()))


@each_device
def test_sums_over_nothing(device: str) -> None:
    x = Tensor(np.zeros((3, 0, 2), np.float32), device=device)
    same(x.sum(1), np.zeros((3, 2), np.float32))
    same(x.sum(), np.float32(0))
    same(x.sum(0), np.zeros((0, 2), np.float32))
    product = Tensor.zeros(3, 0, device=device) @ Tensor.zeros(0, 4, device=device)
    same(product, np.zeros((3, 4), np.float32))


@each_device
def test_max_passes_infinity(device: str) -> None:
    a = np.array([[-np.inf, -np.inf], [np.inf, 0]], np.float32)
    same(tensor(a, device).max(1), a.max(1))
    same(tensor(a, device).min(1), a.min(1))


@property_test(reference=80, opencl=16)
def test_matmul_is_exact_for_whole_numbers(device: str, data: st.DataObject) -> None:
    m, k, n = (data.draw(SIDES) for _ in range(3))
    r = rng(data)
    a, b = small(r, (m, k)), small(r, (k, n))
    x, y = tensor(a, device), tensor(b, device)
    match data.draw(st.sampled_from(["plain", "left transposed", "right transposed", "both"])):
        case "left transposed":
            x = tensor(np.ascontiguousarray(a.T), device).transpose(0, 1)
        case "right transposed":
            y = tensor(np.ascontiguousarray(b.T), device).transpose(0, 1)
        case "both":
            x = tensor(np.ascontiguousarray(a.T), device).transpose(0, 1)
            y = tensor(np.ascontiguousarray(b.T), device).transpose(0, 1)
    same(x @ y, a @ b)


@property_test(reference=80, opencl=13)
def test_matmul_of_vectors_and_broadcast_batches(device: str, data: st.DataObject) -> None:
    r = rng(data)
    m, k, n = (data.draw(st.integers(1, 20)) for _ in range(3))
    batches = data.draw(
        hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=1, max_side=3, max_dims=2)
    ).input_shapes
    a = small(r, (k,) if data.draw(st.booleans()) else (*batches[0], m, k))
    b = small(r, (k,) if data.draw(st.booleans()) else (*batches[1], k, n))
    same(tensor(a, device) @ tensor(b, device), np.asarray(a @ b, np.float32))


@property_test(reference=60, opencl=9)
def test_matmul_of_other_types(device: str, data: st.DataObject) -> None:
    first, second = (data.draw(st.sampled_from((*FLOATS, dt.int8, dt.int32))) for _ in range(2))
    m, k, n = (data.draw(SIDES) for _ in range(3))
    r = rng(data)
    a, b = small(r, (m, k), first), small(r, (k, n), second)
    got = tensor(a, device, first) @ tensor(b, device, second)
    want = a.astype(np.float32) @ b.astype(np.float32)
    if got.dtype is dt.int8:
        want = want.astype(np.int64).astype(np.int8)
    same(got, want, got.dtype)


@property_test(opencl=9)
def test_matmul_with_work_on_both_sides(device: str, data: st.DataObject) -> None:
    """What models do around a product: bias, activation, residual; a dequantised weight."""
    m, k, n = (data.draw(st.sampled_from([1, 2, 7, 16, 33, 64])) for _ in range(3))
    k *= 2
    r = rng(data)
    a, bias = small(r, (m, k)), small(r, (n,))
    raw = r.integers(0, 16, (n, k // 2), np.uint8)
    q = np.stack([raw & 3, raw >> 2], 1).reshape(n, k).astype(np.float32) - 2
    shift = (Tensor.arange(2, device=device) * 2).cast(dt.uint8).reshape(2, 1)
    packed = tensor(raw, device).unsqueeze(1) >> shift
    first = Tensor.where(Tensor.arange(2, device=device).reshape(2, 1) == 0, packed & 3, packed)
    w = first.reshape(n, k).cast(dt.float32) - 2
    got = ((tensor(a, device) + 1) @ w.transpose(0, 1) + tensor(bias, device)).relu() * 2
    same(got, np.maximum((a + 1) @ q.T + bias, 0) * 2)


@property_test(opencl=10)
def test_matmul_of_views(device: str, data: st.DataObject) -> None:
    r = rng(data)
    heads, t, d = (
        data.draw(st.integers(1, 4)),
        data.draw(SIDES),
        data.draw(st.sampled_from([2, 8, 9])),
    )
    a = small(r, (t, heads * d))
    x = tensor(a, device).reshape(t, heads, d).permute(1, 0, 2)
    h = a.reshape(t, heads, d).transpose(1, 0, 2)
    same(x @ x.transpose(-2, -1), h @ h.transpose(0, 2, 1))
    half = t // 2
    got = x[:, ::-1] @ x.transpose(-2, -1)[:, :, :half]
    same(got, h[:, ::-1] @ h.transpose(0, 2, 1)[:, :, :half])


@property_test(opencl=10)
def test_matmul_of_random_floats(device: str, data: st.DataObject) -> None:
    """Sum i of k has size sqrt(i) and rounds by eps of that: k / sqrt(2) * eps together at 1 sigma;
    the bound is at 5.7."""
    m, n = (data.draw(st.sampled_from([1, 3, 16, 65])) for _ in range(2))
    k = data.draw(st.sampled_from([64, 577, 1536]))
    r = rng(data)
    a, b = (r.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
    want = a.astype(np.float64) @ b.astype(np.float64)
    bound = 4 * k * EPSILON[dt.float32]
    same(tensor(a, device) @ tensor(b, device), want, dt.float32, atol=bound)


@each_device
def test_matmul_that_does_not_fit_names_both_shapes(device: str) -> None:
    with pytest.raises(ShapeError, match=r"\[2, 3\].*\[4, 5\]"):
        Tensor.zeros(2, 3, device=device) @ Tensor.zeros(4, 5, device=device)
