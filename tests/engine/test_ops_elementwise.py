"""Elementwise ops equal NumPy's, with its broadcasting and integer promotion."""

from __future__ import annotations

import operator

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


def broadcastable(count: int = 2) -> st.SearchStrategy:
    return hnp.mutually_broadcastable_shapes(
        num_shapes=count, min_side=0, max_side=6, max_dims=4
    ).map(lambda drawn: drawn.input_shapes)


def promoted(a: dt.DType, b: dt.DType) -> dt.DType:
    """NumPy's rule for ints; a float beside an int stays; two different halves give float32."""
    if a is b:
        return a
    if a.is_float != b.is_float:
        return a if a.is_float else b
    if a.is_float:
        return dt.float32
    wider = np.promote_types(a.numpy, b.numpy)
    return dt.int64 if wider.kind == "f" else dt.BY_NAME[wider.name]


@property_test()
def test_arithmetic_promotes_and_broadcasts(device: str, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from([operator.add, operator.sub, operator.mul]))
    types = st.sampled_from(FLOATS + INTS)
    first, second = data.draw(types), data.draw(types)
    r = rng(data)
    a, b = (small(r, s, t) for s, t in zip(data.draw(broadcastable()), (first, second)))
    out = promoted(first, second)
    want = op(numpy_cast(a, out), numpy_cast(b, out))
    same(op(tensor(a, device, first), tensor(b, device, second)), want, out)


@property_test()
def test_integer_arithmetic_wraps_around(device: str, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from([operator.add, operator.sub, operator.mul]))
    dtype = data.draw(st.sampled_from(INTS))
    r = rng(data)
    a, b = (wide(r, s, dtype) for s in data.draw(broadcastable()))
    with np.errstate(over="ignore"):
        want = op(a, b)
    same(op(tensor(a, device), tensor(b, device)), want)


@property_test()
def test_float_arithmetic_rounds_once(device: str, data: st.DataObject) -> None:
    """One addition or product of two values of a type is its nearest value, also for halves."""
    op = data.draw(st.sampled_from([operator.add, operator.sub, operator.mul]))
    dtype = data.draw(st.sampled_from(FLOATS))
    r = rng(data)
    a, b = (wide(r, s, dtype) for s in data.draw(broadcastable()))
    exact = op(a.astype(np.float64), b.astype(np.float64))  # float64 holds it
    want = numpy_cast(exact.astype(np.float32), dtype)
    same(op(tensor(a, device, dtype), tensor(b, device, dtype)), want, dtype)


@property_test()
def test_comparisons(device: str, data: st.DataObject) -> None:
    names = ["lt", "le", "gt", "ge", "eq", "ne"]
    op = getattr(operator, data.draw(st.sampled_from(names)))
    dtype = data.draw(st.sampled_from((*FLOATS, *INTS, dt.bool_)))
    r = rng(data)
    draw = data.draw(st.sampled_from([small, wide]))
    a, b = (draw(r, s, dtype) for s in data.draw(broadcastable()))
    if dtype.is_float and a.ndim:
        a[..., :1] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, -0.0]))
    same(op(tensor(a, device, dtype), tensor(b, device, dtype)), op(a, b))


@property_test(opencl=10)
def test_integer_division_and_modulo_floor(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(INTS))
    draw = data.draw(st.sampled_from([small, wide]))
    r = rng(data)
    a, b = (draw(r, s, dtype) for s in data.draw(broadcastable()))
    b = np.where(b == 0, np.array(3, b.dtype), b)
    if dtype.kind == "i":  # min // -1 has no value of its type
        b = np.where(b == -1, np.array(-7, b.dtype), b)
    x, y = tensor(a, device), tensor(b, device)
    same(x // y, a // b)
    same(x % y, a % b)


@property_test(opencl=10)
def test_division_and_modulo_by_a_constant_floor(device: str, data: st.DataObject) -> None:
    """A constant divisor may become shifts or multiplications: those must floor as well."""
    dtype = data.draw(st.sampled_from(INTS))
    divisor = data.draw(st.integers(1, 100))
    if dtype.kind == "i" and data.draw(st.booleans()):
        divisor = -divisor - 1
    a = wide(rng(data), (data.draw(st.integers(1, 50)),), dtype)
    same(tensor(a, device) // divisor, a // np.array(divisor, a.dtype))
    same(tensor(a, device) % divisor, a % np.array(divisor, a.dtype))


@property_test()
def test_true_division(device: str, data: st.DataObject) -> None:
    """Two roundings (1 / b, then the product) of half a unit each, and one for the oracle's."""
    first, second = (data.draw(st.sampled_from((*FLOATS, dt.int32, dt.uint8))) for _ in range(2))
    out = promoted(first, second)
    out = out if out.is_float else dt.float32
    r = rng(data)
    a, b = (small(r, s, t) for s, t in zip(data.draw(broadcastable()), (first, second)))
    b = np.where(b == 0, np.array(5, b.dtype), b)
    want = a.astype(np.float64) / b.astype(np.float64)
    got = tensor(a, device, first) / tensor(b, device, second)
    same(got, want, out, rtol=4 * EPSILON[out])


@property_test(opencl=10)
def test_bitwise(device: str, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from([operator.and_, operator.or_, operator.xor]))
    dtype = data.draw(st.sampled_from((*INTS, dt.bool_)))
    r = rng(data)
    a, b = (wide(r, s, dtype) for s in data.draw(broadcastable()))
    same(op(tensor(a, device), tensor(b, device)), op(a, b))
    same(~tensor(a, device), ~a)


@property_test(opencl=10)
def test_shifts_keep_the_sign_and_the_type(device: str, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from([operator.lshift, operator.rshift]))
    dtype = data.draw(st.sampled_from(INTS))
    r = rng(data)
    first, second = data.draw(broadcastable())
    a = wide(r, first, dtype)
    b = r.integers(0, dtype.bits, second).astype(dtype.numpy)
    same(op(tensor(a, device), tensor(b, device)), op(a, b))
    n = data.draw(st.integers(0, dtype.bits - 1))
    same(op(tensor(a, device), n), op(a, np.array(n, a.dtype)))


@property_test(opencl=9)
def test_minimum_maximum_clip_abs_negate(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS + INTS))
    draw = data.draw(st.sampled_from([small, wide]))
    r = rng(data)
    a, b = (draw(r, s, dtype) for s in data.draw(broadcastable()))
    x, y = tensor(a, device, dtype), tensor(b, device, dtype)
    same(x.maximum(y), np.maximum(a, b), dtype)
    same(x.minimum(y), np.minimum(a, b), dtype)
    with np.errstate(over="ignore"):
        same(x.abs(), np.abs(a), dtype)
        same(-x, -a, dtype)


@property_test(opencl=9)
def test_where_broadcasts_three_ways(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS + INTS))
    r = rng(data)
    c, s, t = data.draw(broadcastable(3))
    condition, a, b = small(r, c, dt.bool_), wide(r, s, dtype), wide(r, t, dtype)
    on = tensor(condition, device)
    x, y = tensor(a, device, dtype), tensor(b, device, dtype)
    same(Tensor.where(on, x, y), np.where(condition, a, b), dtype)
    same(Tensor.where(on, x, 1), np.where(condition, a, np.array(1, a.dtype)), dtype)
    same(Tensor.where(on, 1, y), np.where(condition, np.array(1, b.dtype), b), dtype)


@property_test()
def test_where_does_not_spread_what_it_leaves_out(device: str, data: st.DataObject) -> None:
    a = wide(rng(data), data.draw(shapes()), dt.float32)
    x = tensor(a, device)
    got = Tensor.where(x > 0, x, float("nan"))
    same(Tensor.where(x > 0, got, 0.0), np.where(a > 0, a, np.float32(0)))


@property_test()
def test_rounding_functions(device: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["trunc", "floor", "ceil", "round"]))
    dtype = data.draw(st.sampled_from(FLOATS))
    r = rng(data)
    a = numpy_cast(small(r, data.draw(shapes())) / data.draw(st.sampled_from([1, 2, 4])), dtype)
    want = getattr(np, "rint" if name == "round" else name)(a)
    same(getattr(tensor(a, device, dtype), name)(), want, dtype)


UNARY = {
    # name: (NumPy's, smallest and largest argument, relative and absolute tolerance in float32)
    # exp multiplies by log2(e) first: the rounding of a product up to 29 is up to 29 units of
    # 2^-24 in the exponent, so 29 * ln 2 * 2^-24 = 1.2e-6 relative, before exp2's own 3 units.
    "exp": (np.exp, -20, 20, 3e-6, 0),
    "exp2": (np.exp2, -20, 20, 1e-6, 0),  # OpenCL allows 3 units in the last place
    "log": (np.log, 1e-3, 1e3, 1e-6, 1e-6),  # relative error has no bound near log(1) = 0
    "log2": (np.log2, 1e-3, 1e3, 1e-6, 1e-6),
    "sqrt": (np.sqrt, 0, 1e3, 3e-7, 0),  # OpenCL allows 3 units in the last place
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1e-3, 1e3, 5e-7, 0),
    "sin": (np.sin, -50, 50, 0, 1e-6),  # the argument's own rounding isn't an error of sin
    "cos": (np.cos, -50, 50, 0, 5e-6),  # sin(x + pi/2): the sum rounds to 2^-19 = 2e-6 at 50
    "tanh": (np.tanh, -10, 10, 0, 1e-6),  # 2 * sigmoid(2x) - 1 loses relative accuracy at 0
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -20, 20, 3e-6, 0),  # as exp
}


@property_test(opencl=20)
def test_unary_functions(device: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(UNARY)))
    function, low, high, rtol, atol = UNARY[name]
    a = rng(data).uniform(low, high, data.draw(shapes(max_side=9))).astype(np.float32)
    want = function(a.astype(np.float64))
    same(getattr(tensor(a, device), name)(), want, dt.float32, rtol=rtol, atol=atol)


@property_test()
def test_unary_functions_of_halves(device: str, data: st.DataObject) -> None:
    """A half may round after each of up to four steps; |x| <= 4 keeps exp's argument error small:
    5.8 * ln 2 * 2^-p. Together below 12 roundings."""
    name = data.draw(st.sampled_from(sorted(UNARY)))
    dtype = data.draw(st.sampled_from([dt.float16, dt.bfloat16]))
    function, low, high, _, _ = UNARY[name]
    low, high = max(low, -4), min(high, 4)
    low = max(low, 0.25) if name in ("log", "log2", "rsqrt", "sqrt") else low
    a = numpy_cast(rng(data).uniform(low, high, data.draw(shapes())).astype(np.float32), dtype)
    want = function(a.astype(np.float64))
    tolerance = 12 * EPSILON[dtype]
    same(getattr(tensor(a, device, dtype), name)(), want, dtype, rtol=tolerance, atol=tolerance)


@each_device
def test_limits_of_unary_functions(device: str) -> None:
    a = np.array([0.0, np.inf, -np.inf, np.nan, -1.0, 200.0, -200.0], np.float32)
    x = tensor(a, device)
    inf, nan = np.inf, np.nan
    same(x.exp2(), np.array([1, inf, 0, nan, 0.5, inf, 0], np.float32))
    same(x.log2()[:5], np.array([-inf, inf, nan, nan, nan], np.float32))
    same(x.sqrt()[:5], np.array([0, inf, nan, nan, nan], np.float32))
    same(x.sigmoid(), np.array([0.5, 1, 0, nan, 1 / (1 + np.e), 1, 0], np.float32), rtol=1e-6)
    same(x.tanh(), np.array([0, 1, -1, nan, -np.tanh(1), 1, -1], np.float32), rtol=1e-6)


@property_test()
def test_powers(device: str, data: st.DataObject) -> None:
    exponent = data.draw(st.sampled_from([0, 1, 2, 3, -1, -2, 0.5, 1.5, 2.5]))
    a = rng(data).uniform(0.25, 4, data.draw(shapes())).astype(np.float32)
    # exp2(e * log2 x): |e log2 x| <= 5, so 5 * ln 2 * a few 2^-24, plus three functions' roundings
    same(tensor(a, device) ** exponent, a.astype(np.float64) ** exponent, dt.float32, rtol=3e-6)


@property_test(opencl=5)
def test_python_numbers_on_either_side(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((dt.float32, dt.float16, dt.int32, dt.int8, dt.uint8)))
    number = data.draw(st.integers(1, 7))
    a = small(rng(data), data.draw(shapes()), dtype)
    a = np.where(a == 0, np.array(3, a.dtype), a)
    x, n = tensor(a, device), np.array(number, a.dtype)
    same(x + number, a + n)
    same(number + x, n + a)
    same(number - x, n - a)
    same(number * x, n * a)
    same(x < number, a < n)
    same(number < x, n < a)
    if dtype.is_int:
        same(number // x, n // a)
        same(number % x, n % a)
        same(x + 0.5, a.astype(np.float32) + np.float32(0.5))


@each_device
@pytest.mark.parametrize("place", ["condition", "value", "index"])
def test_tensors_over_no_buffer_follow_the_others_device(device: str, place: str) -> None:
    """`Tensor.arange(n)` in a model names no device; it goes where the weights are."""
    a = small(np.random.default_rng(3), (5, 4))
    x, rows = tensor(a, device), Tensor.arange(5)
    if place == "condition":
        want = np.where(np.arange(5)[:, None] < 2, a, np.float32(0))
        same(Tensor.where(rows.reshape(5, 1) < 2, x, 0.0), want)
    elif place == "value":
        want = np.where(a > 0, np.arange(5)[:, None], 9).astype(np.int32)
        same(Tensor.where(x > 0, rows.reshape(5, 1), 9), want)
    else:
        same(x[4 - rows], a[::-1])


@each_device
def test_chain_of_many_operations_is_exact(device: str) -> None:
    a = small(np.random.default_rng(0), (37, 19))
    x, want = tensor(a, device), a
    for i in range(200):
        x = (x + 1).minimum(5) if i % 2 else -x * 2
        want = np.minimum(want + 1, 5) if i % 2 else -want * 2
        want = np.maximum(want, -1000)
        x = x.maximum(-1000)
    same(x, want)


@each_device
def test_shapes_that_do_not_broadcast_are_an_error_naming_both(device: str) -> None:
    a, b = Tensor.zeros(2, 3, device=device), Tensor.zeros(4, 3, device=device)
    with pytest.raises(ShapeError, match=r"\[2, 3\].*\[4, 3\]"):
        a + b
