"""The small functions that generated code calls: exact, or as exact as they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine import dtype as dt
from engine.clib import VECTORS, helpers
from engine.ir import Target
from engine.spell import C_TYPES
from tests.engine.kernels import cpu, run_source

WIDTHS = pytest.mark.parametrize("n", VECTORS)
# With the processor's own instructions, and with none: another spelling of the helpers.
FEATURES = pytest.mark.parametrize("features", [None, frozenset()], ids=["native", "plain"])


def pattern(name: str, n: int) -> str:
    """A body that calls a helper on n numbers of p1 at a time."""
    if n == 1:
        return f"p0[i] = {name}(p1[i]);"
    return f"vstore{n}({name}(vload{n}(i, p1)), i, p0);"


def target(features: frozenset | None) -> Target:
    device = cpu()
    return device.target if features is None else replace(device.target, features=features)


HALVES = np.arange(1 << 16).astype(np.uint16)


@WIDTHS
@FEATURES
def test_every_float16_is_read_exactly(n: int, features: frozenset | None) -> None:
    name = f"unpack_float16_float{n if n > 1 else ''}"
    got = _apply(name, n, HALVES, np.float32, features)
    np.testing.assert_array_equal(got, HALVES.view(np.float16).astype(np.float32))


@WIDTHS
def test_every_bfloat16_is_read_exactly(n: int) -> None:
    got = _apply(f"unpack_bfloat16_float{n if n > 1 else ''}", n, HALVES, np.float32)
    want = HALVES.astype(np.uint32) << 16
    nan = np.isnan(want.view(np.float32))
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want[~nan])
    assert np.isnan(got[nan]).all()


def _hard_floats(to: type) -> np.ndarray:
    """Every value of a half type, the midpoints to the next, and their neighbours in float32."""
    if to is np.float16:
        values = HALVES.view(np.float16).astype(np.float32)
    else:
        values = (HALVES.astype(np.uint32) << 16).view(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    ends = np.array([65519.99, 65520, 65536, 3.4e38, np.inf, -np.inf, 0.0, -0.0], np.float32)
    near = np.concatenate([values, middle, ends])
    with np.errstate(over="ignore"):
        around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, -near)]
    out = np.concatenate(around)
    return np.append(out, np.zeros(-len(out) % 16, np.float32))


@WIDTHS
def test_float32_is_rounded_to_the_nearest_float16_or_the_even_one(n: int) -> None:
    x = _hard_floats(np.float16)
    got = _apply(f"pack_float16_float{n if n > 1 else ''}", n, x, np.uint16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, x.astype(np.float16).view(np.uint16))


@WIDTHS
def test_float32_is_rounded_to_the_nearest_bfloat16_or_the_even_one(n: int) -> None:
    x = _hard_floats(np.uint16)
    got = _apply(f"pack_bfloat16_float{n if n > 1 else ''}", n, x, np.uint16)
    bits = x.view(np.uint32)
    high, low = bits >> 16, bits & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & (high & 1 == 1))
    expected = (high + up).astype(np.uint16)
    if n == 16 and "avx512_bf16" in cpu().target.features:
        # the instruction takes numbers below 2**-126 for zeros, and keeps their signs
        expected[np.abs(x) < 2.0**-126] &= 0x8000
    np.testing.assert_array_equal(got, expected)


@WIDTHS
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_nan_stays_one(half: str, n: int) -> None:
    bits = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001], np.uint32)
    x = np.repeat(bits, 4).view(np.float32)
    got = _apply(f"pack_{half}_float{n if n > 1 else ''}", n, x, np.uint16)
    exponent, mantissa = (0x7C00, 0x3FF) if half == "float16" else (0x7F80, 0x7F)
    assert (got & exponent == exponent).all()
    assert (got & mantissa != 0).all()


def _apply(
    name: str, n: int, x: np.ndarray, kind: Any, features: frozenset | None = None
) -> np.ndarray:
    device = cpu()
    called = {name: helpers(target(features))[name]}
    out = np.zeros(len(x), kind)
    return run_source(device, called, pattern(name, n), [x], out, len(x) // n)


@pytest.mark.parametrize("kind", [d for d in dt.ALL if d.is_int], ids=str)
def test_division_and_modulo_round_down_and_never_trap(kind: dt.DType) -> None:
    """Also the lowest number by -1, which wraps, and anything by 0, which gives 0."""
    info = np.iinfo(kind.numpy)
    some = [0, 1, 2, 3, 7, 100, info.max, info.max - 1, info.max // 2, info.min, info.min + 1]
    some += [-1, -2, -3, -7, -100, info.min // 2] if kind.kind == "i" else []
    pairs = [(a, b) for a in some for b in some]
    a, b = (np.array(x, kind.numpy) for x in zip(*pairs))
    span = 1 << kind.bits
    name = C_TYPES[kind]
    for helper, exact in (("idiv", lambda x, y: x // y), ("mod", lambda x, y: x % y)):
        called = {k: v for k, v in helpers(cpu().target).items() if k == f"zoo_{helper}_{name}"}
        body = f"p0[i] = zoo_{helper}_{name}(p1[i], p2[i]);"
        got = run_source(cpu(), called, body, [a, b], np.zeros_like(a), len(a))
        want = [exact(x, y) if y else 0 for x, y in pairs]
        wrapped = [(w - info.min) % span + info.min for w in want]
        np.testing.assert_array_equal(got, np.array(wrapped, kind.numpy))


@WIDTHS
@FEATURES
def test_exp2_over_the_whole_range(n: int, features: frozenset | None) -> None:
    """2e-7 relative, which is under two units in the last place; results below the smallest normal
    number are 0. Whole powers are exact."""
    r = np.random.default_rng(0)
    x = np.concatenate(
        [
            np.linspace(-160, 130, 100_000),
            r.uniform(-1, 1, 50_000),
            np.arange(-160, 131) + 0.5,
            np.arange(-160, 131),
            [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 127.99999, 128],
        ]
    ).astype(np.float32)
    x = np.append(x, np.zeros(-len(x) % 16, np.float32))
    name = f"zoo_exp2_float{n if n > 1 else ''}"
    got = _apply(name, n, x, np.float32, features).astype(np.float64)
    with np.errstate(over="ignore"):
        want = np.exp2(x.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    huge = x >= 128
    assert np.isposinf(got[huge]).all()
    normal = (want >= 2.0**-126) & ~huge
    error = np.abs(got[normal] / want[normal] - 1)
    assert error.max() < 2e-7
    assert (got[x < -126] == 0).all()
    whole = (x == np.trunc(x)) & normal
    np.testing.assert_array_equal(got[whole], want[whole])


@WIDTHS
@FEATURES
def test_log2_over_the_whole_range(n: int, features: frozenset | None) -> None:
    """3e-7 relative, a few units: also next to 1, where the result is small, and of denormals."""
    r = np.random.default_rng(0)
    bits = r.integers(0, 0x7F800000, 50_000, dtype=np.uint32).view(np.float32)
    near = 1 + r.uniform(-1e-3, 1e-3, 20_000).astype(np.float32)
    ends = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        -1,
        1,
        2,
        0.75,
        1e-45,
        1e-39,
        1.4e-45,
        3.4e38,
        -1e-45,
    ]
    x = np.concatenate([bits, near, r.uniform(0, 2, 20_000), ends]).astype(np.float32)
    x = np.append(x, np.ones(-len(x) % 16, np.float32))
    name = f"zoo_log2_float{n if n > 1 else ''}"
    got = _apply(name, n, x, np.float32, features).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        want = np.log2(x.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=0)


@WIDTHS
@FEATURES
def test_sin_of_small_and_of_large_angles(n: int, features: frozenset | None) -> None:
    """3e-7, of which the parts of pi leave 1e-7; the library's sine of larger ones is as good. A
    large angle among small ones changes nothing for those."""
    r = np.random.default_rng(0)
    small = np.concatenate([r.uniform(-k, k, 20_000) for k in (1e-3, 4, 100, 25_000)])
    large = np.concatenate([r.uniform(-k, k, 500) for k in (26_000, 1e6, 1e20, 3e38)])
    turns = np.arange(-2000, 2000) * (np.pi / 2)
    x = np.concatenate([small, turns, large, [0.0, np.nan, 1e-45, 25_000]]).astype(np.float32)
    x = r.permutation(np.append(x, np.zeros(-len(x) % 16, np.float32)))
    name = f"zoo_sin_float{n if n > 1 else ''}"
    got = _apply(name, n, x, np.float32, features).astype(np.float64)
    np.testing.assert_allclose(got, np.sin(x.astype(np.float64)), rtol=0, atol=3e-7)
    ends = np.array([np.inf, -np.inf] * 8, np.float32)
    assert np.isnan(_apply(name, n, ends, np.float32, features)).all()


@WIDTHS
@FEATURES
def test_square_roots_and_whole_parts_are_exact(n: int, features: frozenset | None) -> None:
    r = np.random.default_rng(0)
    x = r.integers(0, 1 << 32, 32_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        wanted = {"sqrt": np.sqrt(x), "trunc": np.trunc(x)}
    for op, want in wanted.items():
        got = _apply(f"zoo_{op}_float{n if n > 1 else ''}", n, x, np.float32, features)
        np.testing.assert_array_equal(got, want)


@WIDTHS
@FEATURES
def test_max_keeps_a_nan_on_either_side(n: int, features: frozenset | None) -> None:
    a, b = (
        x.reshape(-1) for x in np.meshgrid([np.nan, -np.inf, -1, 0, 5, np.inf], [np.nan, 1, -9])
    )
    a, b = (np.resize(x, 48).astype(np.float32) for x in (a, b))
    name = f"zoo_max_float{n if n > 1 else ''}"
    load = (lambda p: f"{p}[i]") if n == 1 else (lambda p: f"vload{n}(i, {p})")
    call = f"{name}({load('p1')}, {load('p2')})"
    body = f"p0[i] = {call};" if n == 1 else f"vstore{n}({call}, i, p0);"
    called = {name: helpers(target(features))[name]}
    got = run_source(cpu(), called, body, [a, b], np.zeros(48, np.float32), 48 // n)
    np.testing.assert_array_equal(got, np.maximum(a, b))
