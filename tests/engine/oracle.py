"""What the property tests of the ops share: drawing arrays, NumPy's view of them, comparing.

Most arrays hold small whole numbers, also as floats: sums and products are then exact in any
order, so results must be equal and no tolerance can hide an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import wraps

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from engine import DeviceError, Tensor, get_device
from engine import dtype as dt

FLOATS = (dt.float32, dt.float16, dt.bfloat16)
SIGNED = (dt.int8, dt.int16, dt.int32, dt.int64)
UNSIGNED = (dt.uint8, dt.uint16, dt.uint32, dt.uint64)
INTS = SIGNED + UNSIGNED

# Relative size of one rounding, by type: half a unit in the last place.
EPSILON = {dt.float32: 2.0**-24, dt.float16: 2.0**-11, dt.bfloat16: 2.0**-8}


def property_test(reference: int = 60, opencl: int = 10, many: int = 300) -> Callable:
    """Run `check(device, data)` on drawn examples, on each device.

    The default run draws the same examples every time, few of them on OpenCL, where each new
    kernel costs a compile; the `slow` run draws `many` new ones.
    """

    def decorate(check: Callable[[str, st.DataObject], None]) -> Callable[..., None]:
        @pytest.mark.parametrize(
            ("device", "examples", "fresh"),
            [
                pytest.param("reference", reference, False, id="reference"),
                pytest.param("opencl", opencl, False, id="opencl"),
                pytest.param("opencl", many, True, id="opencl-many", marks=pytest.mark.slow),
            ],
        )
        def test(device: str, examples: int, fresh: bool) -> None:
            need(device)

            @settings(
                max_examples=examples,
                deadline=None,  # the first use of a kernel compiles it
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            @given(st.data())
            def run(data: st.DataObject) -> None:
                check(device, data)

            (run if fresh else seed(zlib.crc32(check.__name__.encode()))(run))()

        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate


def each_device(test: Callable) -> Callable:
    """Run `test(device=...)` on both devices."""

    @wraps(test)
    def run(device: str, **others: object) -> None:
        need(device)
        test(device=device, **others)

    return pytest.mark.parametrize("device", ["reference", "opencl"])(run)


def need(device: str) -> None:
    try:
        get_device(device)
    except DeviceError as error:
        pytest.skip(str(error))


def rng(data: st.DataObject) -> np.random.Generator:
    return np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 values rounded to bfloat16's 8 bits, halves to even, by way of the mantissa."""
    with np.errstate(over="ignore", invalid="ignore"):
        mantissa, exponent = np.frexp(np.asarray(x, np.float64))
        return np.ldexp(np.rint(mantissa * 256), exponent - 8).astype(np.float32)


def numpy_cast(x: np.ndarray, dtype: dt.DType) -> np.ndarray:
    """NumPy's array for `dtype`; bfloat16 is float32 that holds only bfloat16's values."""
    if dtype is dt.bfloat16:
        return to_bfloat16(np.asarray(x, np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x).astype(dtype.numpy)


def small(r: np.random.Generator, shape: Sequence[int], dtype: dt.DType = dt.float32) -> np.ndarray:
    """Whole numbers -8 … 8 (0 … 8 unsigned, 0 and 1 bool): exact in every type."""
    low, high = {"b": (0, 1), "u": (0, 8)}.get(dtype.kind, (-8, 8))
    return numpy_cast(r.integers(low, high + 1, tuple(shape)), dtype)


def wide(r: np.random.Generator, shape: Sequence[int], dtype: dt.DType) -> np.ndarray:
    """The whole range of an integer type, its ends often; floats of either sign, 2^-6 … 2^6."""
    shape = tuple(shape)
    if dtype.is_float:
        sign = r.choice([-1.0, 1.0], shape)
        return numpy_cast(sign * np.exp2(r.uniform(-6, 6, shape)), dtype)
    if dtype is dt.bool_:
        return small(r, shape, dtype)
    info = np.iinfo(dtype.numpy)
    anywhere = r.integers(info.min, info.max, shape, dtype.numpy, endpoint=True)
    ends = r.choice(np.array([info.min, info.max, 0, 1], dtype.numpy), shape)
    return np.where(r.random(shape) < 0.3, ends, anywhere).astype(dtype.numpy)


def tensor(x: np.ndarray, device: str, dtype: dt.DType | None = None) -> Tensor:
    """A Tensor with the values of a NumPy array (for bfloat16: of one from `numpy_cast`)."""
    if dtype is dt.bfloat16:
        bits = (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return Tensor.from_numpy(bits.reshape(x.shape), device, dtype=dt.bfloat16)
    return Tensor(x, device=device)


def same(
    got: Tensor, want: np.ndarray, dtype: dt.DType | None = None, rtol: float = 0, atol: float = 0
) -> None:
    """Equal shape, type and values: exactly, or within the tolerance that the caller explains."""
    want = np.asarray(want)
    dtype = dtype or dt.from_numpy(want.dtype)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    assert got.dtype is dtype, f"type {got.dtype}, expected {dtype}"
    array = got.numpy()
    assert array.shape == want.shape
    want = numpy_cast(want, dtype)
    if rtol or atol:
        np.testing.assert_allclose(
            array.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=atol
        )
    else:
        np.testing.assert_array_equal(array, want)


def shapes(max_rank: int = 4, max_side: int = 6, min_side: int = 0) -> st.SearchStrategy:
    """Shapes of rank 0 … max_rank; a side of 0 is drawn now and then, odd sizes often."""
    return st.lists(st.integers(min_side, max_side), min_size=0, max_size=max_rank).map(tuple)
