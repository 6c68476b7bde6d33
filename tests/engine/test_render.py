"""Generated source: the same in every process; constants and indices in it are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from engine import Var
from engine import dtype as dt
from engine.spell import Speller, _of_all_lanes, c_index
from engine.symbolic import Expr, Int, bounds, evaluate, less
from tests.engine.kernels import cpu, run_source
from tests.engine.process import output
from tests.engine.test_symbolic import build

NETWORK = """
    import hashlib
    import sys
    import numpy as np
    from engine import Tensor, program
    from engine.functional import attention, rms_norm, softmax
    from engine.runtime.opencl import OpenCLDevice

    def record(name):
        original = getattr(OpenCLDevice, name)
        def wrapped(self, source, *names):
            print(name, hashlib.sha256(source.encode()).hexdigest())
            return original(self, source, *names)
        setattr(OpenCLDevice, name, wrapped)

    record("build")
    record("_compile")

    class Norm(dict):
        __getattr__ = dict.__getitem__

    r = np.random.default_rng(0)
    w = Tensor.from_numpy(r.normal(size=(48, 48)).astype(np.float32), "opencl")
    norm = Norm(weight=w[0])
    state = Tensor.zeros(3, 20, 16, device="opencl").contiguous().realize()

    def network(x, at):
        q = (rms_norm(norm, x, 1e-5) @ w).reshape(1, 3, 16).permute(1, 0, 2)
        state[:, at : at + 1] = q * 2
        seen = state[:, : at + 1]
        return attention(q, seen, seen), softmax(x), x.cast(x.dtype).argmax(-1)

    step = program(network, at=(0, 19))
    x = Tensor(np.ones((1, 48), np.float32), device="opencl")
    print(step(x, at=3)[2].tolist())
    print((x * 2).sum().item())
"""


def test_sources_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """Equal sources whatever the order of sets: else the binaries on disk would never be found."""
    cpu()
    runs = []
    for hashes in ("0", "12345"):
        env = {"PYTHONHASHSEED": hashes, "ZOO_CACHE": str(tmp_path)}
        runs.append(output(NETWORK, env))
    first, *others = runs
    compiled = [line for line in first if line.startswith("_compile")]
    assert len(compiled) >= 2
    for other in others:
        assert other == [line for line in first if line not in compiled], (
            "nothing is compiled twice"
        )


def test_constants_are_the_float_that_numpy_rounds_to() -> None:
    r = np.random.default_rng(0)
    values = [0.1, -2.5, 1 / 3, 1e-45, 1.4e-45, 3.4028235e38, 1e39, 2.0**-126, -0.0, 65504.0]
    values += list(r.normal(size=200) * 10.0 ** r.integers(-38, 38, 200))
    _compare_constants(values)


def test_a_constant_between_two_floats_is_the_even_one() -> None:
    _compare_constants([1 + 2.0**-24, 1 + 3 * 2.0**-24, 16777217.0])


def _compare_constants(values: list[float]) -> None:
    number = Speller.number
    body = "".join(f"p0[{i}] = {number(v, dt.float32)};" for i, v in enumerate(values))
    got = run_source(cpu(), {}, body, [], np.zeros(len(values), np.float32), 1)
    with np.errstate(over="ignore"):
        want = np.array(values).astype(np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kind", [d for d in dt.ALL if d.is_int], ids=str)
def test_int_constants_are_exact_at_both_ends(kind: dt.DType) -> None:
    info = np.iinfo(kind.numpy)
    values = [info.min, info.max, 0, 1, info.max // 3]
    body = "".join(f"p0[{i}] = {Speller.number(v, kind)};" for i, v in enumerate(values))
    got = run_source(cpu(), {}, body, [], np.zeros(len(values), kind.numpy), 1)
    assert got.tolist() == values


# --- indices ---------------------------------------------------------------------------------

BIG, WIDE, SMALL = Var("big", 0, 2**31 - 1), Var("wide", 0, 100_000), Var("small", 1, 50)


def test_indices_that_32_bits_cannot_hold_are_64_bits_wide() -> None:
    assert c_index(Var("x", 0, 2**31)) == "(long)x"
    assert c_index(WIDE * 50_000).startswith("((long)wide")
    small = less(WIDE * 50_000, Var("other", 0, 7))  # 0 or 1, but not what it is made of
    assert "long" in c_index(small)
    assert "long" not in c_index(WIDE * 20_000 + 7)
    assert c_index(2**31) == "2147483648L"
    assert c_index(2**31 - 1) == "2147483647"


def index_trees() -> st.SearchStrategy[Any]:
    """Trees without subtraction: an index is never negative, and C's division rounds to 0."""
    leaf = st.one_of(st.sampled_from((BIG, WIDE, SMALL)), st.integers(0, 100_000))
    divisor = st.one_of(st.sampled_from((1, 3, 4, 32, 1000, 2**20)), st.just(SMALL))

    def more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.tuples(st.sampled_from(("+", "min", "max", "<")), inner, inner),
            st.tuples(st.just("*"), inner, leaf),
            st.tuples(st.sampled_from(("//", "%")), inner, divisor),
        )

    return st.recursive(leaf, more, max_leaves=8)


def test_index_expressions_in_c_equal_their_values() -> None:
    device = cpu()
    found: list[Int] = []

    @seed(1)
    @settings(max_examples=150, deadline=None, database=None)
    @given(index_trees())
    def collect(tree: Any) -> None:
        x = build(tree)
        if isinstance(x, Expr) and max(map(abs, _reach(x))) < 2**62:
            found.append(x)

    collect()
    assert len(found) > 50
    r = np.random.default_rng(0)
    body = "const int big = p1[3*i], wide = p1[3*i+1], small = p1[3*i+2];"
    body += "".join(f"p0[{len(found)}*i + {k}] = {c_index(x)};" for k, x in enumerate(found))
    at = [{v: int(r.integers(v.min, v.max + 1)) for v in (BIG, WIDE, SMALL)} for _ in range(20)]
    at += [{v: v.max for v in (BIG, WIDE, SMALL)}, {v: v.min for v in (BIG, WIDE, SMALL)}]
    given_values = np.array([list(a.values()) for a in at], np.int32)
    out = np.zeros((len(at), len(found)), np.int64)
    got = run_source(device, {}, body, [given_values], out, len(at))
    np.testing.assert_array_equal(got, [[evaluate(x, a) for x in found] for a in at])


def _reach(x: Int) -> tuple[int, int]:
    """The bounds of an expression and all its parts."""
    low, high = bounds(x)
    if isinstance(x, Expr):
        parts = [t for t, _ in x.args[1]] if x.op == "sum" else x.args
        for p in parts:
            if isinstance(p, Expr):
                a, b = _reach(p)
                low, high = min(low, a), max(high, b)
    return low, high


@given(st.integers(-40, 40), st.integers(-3, 3), st.sampled_from((1, -1, 2)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_comparison_loses_its_lane_only_where_all_lanes_agree(
    c: int, k: int, step: int, swapped: bool
) -> None:
    i, lane, lanes = Var("i", 0, 9), Var("lane", 0, 15), 16
    e = i * (k * lanes) + lane * step + c
    guard = less(-e, 5) if swapped else less(e, 5)
    found = _of_all_lanes(guard, lane, lanes)
    for n in range(10):
        each = {evaluate(guard, {i: n, lane: m}) for m in range(lanes)}
        assert {evaluate(found, {i: n, lane: m}) for m in range(lanes)} == each
        assert len(each) == 1 or found is guard


def test_the_border_of_a_whole_vector_is_one_comparison() -> None:
    i, lane = Var("i", 0, 39), Var("lane", 0, 15)
    assert lane not in _of_all_lanes(less(i * 16 + lane, 320), lane, 16).vars
    assert lane not in _of_all_lanes(less(-1, i * 16 + lane - 320), lane, 16).vars
    assert lane in _of_all_lanes(less(i * 16 + lane, 321), lane, 16).vars
