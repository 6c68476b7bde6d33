"""Casts and bitcasts equal NumPy's wherever the result is defined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from engine import ShapeError, Tensor
from engine import dtype as dt
from tests.engine.oracle import (
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
    to_bfloat16,
    wide,
)

ANY = (*FLOATS, *INTS, dt.bool_)


@property_test(reference=120, opencl=20)
def test_small_whole_numbers_survive_any_cast(device: str, data: st.DataObject) -> None:
    first, second = (data.draw(st.sampled_from(ANY)) for _ in range(2))
    a = np.abs(small(rng(data), data.draw(shapes()), dt.float32)).astype(np.float32)
    a = numpy_cast(a, first)
    same(tensor(a, device, first).cast(second), numpy_cast(a, second), second)


@property_test(opencl=20)
def test_integers_wrap_around(device: str, data: st.DataObject) -> None:
    first, second = (data.draw(st.sampled_from(INTS)) for _ in range(2))
    a = wide(rng(data), data.draw(shapes()), first)
    same(tensor(a, device).cast(second), a.astype(second.numpy))


@property_test()
def test_integers_round_to_the_nearest_float(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((dt.int32, dt.uint32, dt.int16, dt.int64, dt.uint64)))
    a = wide(rng(data), data.draw(shapes()), dtype)
    same(tensor(a, device).cast(dt.float32), a.astype(np.float32))


@property_test()
def test_floats_truncate_to_integers(device: str, data: st.DataObject) -> None:
    first = data.draw(st.sampled_from(FLOATS))
    second = data.draw(st.sampled_from((dt.int8, dt.int16, dt.int32, dt.int64, dt.uint8)))
    low = 0 if second.kind == "u" else -127
    a = rng(data).uniform(low, 127, data.draw(shapes())).astype(np.float32)
    a = numpy_cast(a, first)
    same(tensor(a, device, first).cast(second), np.trunc(a).astype(second.numpy))


@property_test()
def test_anything_but_zero_is_true(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS + INTS))
    a = small(rng(data), data.draw(shapes()), dtype)
    if dtype.is_float and a.ndim:
        a[..., :1] = data.draw(st.sampled_from([np.nan, -0.0, 0.25, np.inf]))
    same(tensor(a, device, dtype).cast(dt.bool_), a != 0)


@property_test()
def test_halves_round_to_nearest_even(device: str, data: st.DataObject) -> None:
    """Values near and exactly at the middle between two halves, from bits and from ranges."""
    dtype = data.draw(st.sampled_from([dt.float16, dt.bfloat16]))
    r = rng(data)
    shape = data.draw(shapes())
    a = np.exp2(r.uniform(-12, 14, shape)) * r.choice([-1.0, 1.0], shape)
    if data.draw(st.booleans()):  # exactly in the middle: one bit more than the type holds
        bits = 11 if dtype is dt.float16 else 8
        mantissa, exponent = np.frexp(a)
        a = np.ldexp((np.floor(mantissa * 2**bits) + 0.5), exponent - bits)
    a = a.astype(np.float32)
    want = to_bfloat16(a) if dtype is dt.bfloat16 else a.astype(np.float16)
    same(tensor(a, device).cast(dtype), want, dtype)
    same(tensor(a, device).cast(dtype).cast(dt.float32), want.astype(np.float32))


@each_device
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_and_overflow(device: str, dtype: dt.DType) -> None:
    a = np.array([np.nan, np.inf, -np.inf, -0.0, 3.4e38, -3.4e38, 7e4], np.float32)
    got = tensor(a, device).cast(dtype)
    want = numpy_cast(a, dtype)
    same(got, want, dtype)
    np.testing.assert_array_equal(np.signbit(got.numpy()[1:]), np.signbit(want[1:]))


@each_device
def test_every_float16_value_is_read_exactly(device: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    same(Tensor(bits, device=device).bitcast(dt.float16).cast(dt.float32),
         bits.view(np.float16).astype(np.float32))  # fmt: skip
    finite = bits.view(np.float16)[np.isfinite(bits.view(np.float16))]
    same(tensor(finite.astype(np.float32), device).cast(dt.float16), finite)


@each_device
def test_every_bfloat16_value_is_read_exactly(device: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    want = (bits.astype(np.uint32) << 16).view(np.float32)
    got = Tensor.from_numpy(bits, device, dtype=dt.bfloat16)
    same(got.cast(dt.float32), want)
    same(got, want, dt.bfloat16)


@property_test(opencl=16)
def test_bitcast_reinterprets(device: str, data: st.DataObject) -> None:
    """Same size: same shape. Other sizes: the last axis scales, little-endian."""
    types = (dt.float32, dt.float16, *INTS)
    first, second = (data.draw(st.sampled_from(types)) for _ in range(2))
    count = data.draw(st.integers(1, 3)) * max(1, second.itemsize // first.itemsize)
    r = rng(data)
    a = wide(r, (*data.draw(shapes(max_rank=2)), count), first)
    if second.is_float:  # no NaN: its bits may change on the way through a float
        a = wide(r, (*a.shape[:-1], count * first.itemsize // second.itemsize), second)
        a = np.ascontiguousarray(a).view(first.numpy)
    want = np.ascontiguousarray(a).view(second.numpy)
    same(tensor(a, device).bitcast(second), want)


@property_test(opencl=8)
def test_bitcast_of_a_view(device: str, data: st.DataObject) -> None:
    """As blocks of a quantised file are read: bytes sliced out of a row, seen as a half."""
    rows, start = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3)) * 2
    raw = rng(data).integers(0, 120, (rows, 3, 10), np.uint8)
    part = np.ascontiguousarray(raw[:, 1:, start : start + 4])
    x = tensor(raw, device)[:, 1:, start : start + 4]
    same(x.bitcast(dt.float16).cast(dt.float32), part.view(np.float16).astype(np.float32))
    same(x.bitcast(dt.int8), part.view(np.int8))
    same(x.bitcast(dt.uint32), part.view(np.uint32))


@each_device
def test_bitcast_that_does_not_divide_is_an_error(device: str) -> None:
    with pytest.raises(ShapeError):
        Tensor.zeros(2, 3, dtype=dt.uint8, device=device).bitcast(dt.float16)
