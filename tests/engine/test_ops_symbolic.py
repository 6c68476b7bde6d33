"""A program with symbolic ints gives what fixed ints give, for every family of ops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st

from engine import Tensor, program
from engine import dtype as dt
from engine import functional as F
from tests.engine.oracle import each_device, property_test, rng, same, small, tensor

LONGEST = 17
D = 6

# Each takes x (LONGEST, D), y (D, LONGEST), ids (LONGEST,) and a length n in 1 … LONGEST, and
# returns a tensor of which some axis may have length n. What Python and NumPy would give for the
# fixed length is the same function run eagerly: those results have tests of their own.
FAMILIES: dict[str, Callable[..., Tensor]] = {
    "elementwise": lambda x, y, ids, n: x[:n] * 2 + y[:, :n].transpose(0, 1),
    "slice with an offset": lambda x, y, ids, n: x[LONGEST - n : LONGEST] + x[:n],
    "integer index": lambda x, y, ids, n: x[n - 1] * 2,
    "broadcast over n": lambda x, y, ids, n: x[0:1].expand(n, D) + x[:n],
    "where and iota": lambda x, y, ids, n: Tensor.where(
        Tensor.arange(n).reshape(n, 1) < 3, x[:n], -1.0
    ),
    "sum over n": lambda x, y, ids, n: x[:n].sum(0),
    "sum beside n": lambda x, y, ids, n: x[:n].sum(1),
    "max over n": lambda x, y, ids, n: x[:n].max(0),
    "mean over n": lambda x, y, ids, n: x[:n].mean(0),
    "argmax over n": lambda x, y, ids, n: x[:n].argmax(0),
    "sum of all": lambda x, y, ids, n: x[:n].sum(),
    "reduction of a reduction": lambda x, y, ids, n: (x[:n] - x[:n].max(0, keepdim=True)).sum(0),
    "permute": lambda x, y, ids, n: x[:n].permute(1, 0) + y[:, :n],
    "split an axis": lambda x, y, ids, n: x[:n].reshape(n, 2, 3).permute(1, 0, 2) + 1,
    "merge axes": lambda x, y, ids, n: (x[:n].reshape(n, 2, 3).permute(0, 2, 1)).reshape(n, D) * 2,
    "flatten": lambda x, y, ids, n: x[:n].reshape(n * D) + 1,
    "flip": lambda x, y, ids, n: x[:n].flip(0, 1) + x[:n],
    "pad by a fixed number": lambda x, y, ids, n: x[:n].pad(((1, 2), (0, 1))) + 1,
    "pad to the longest": lambda x, y, ids, n: (x[:n] + 1).pad(((0, LONGEST - n), (0, 0))),
    "cat with n": lambda x, y, ids, n: Tensor.cat(x[:n], x[:3] * 2, axis=0),
    "cat along another axis": lambda x, y, ids, n: Tensor.cat(x[:n], x[:n] + 1, axis=1),
    "stack": lambda x, y, ids, n: Tensor.stack(x[:n], x[:n] * 2, axis=1),
    "gather n rows": lambda x, y, ids, n: x[ids[:n]] + 1,
    "gather from n columns": lambda x, y, ids, n: y[:, :n].transpose(0, 1)[ids[:3] % n],
    "cast": lambda x, y, ids, n: x[:n].cast(dt.int8).cast(dt.float16) + 1,
    "bitcast": lambda x, y, ids, n: x[:n].bitcast(dt.int32) ^ 5,
    "integer division": lambda x, y, ids, n: (ids[:n] * 7 - 50) // 3 + ids[:n] % 4,
    "shift": lambda x, y, ids, n: ids[:n] >> 1,
    "n as a value": lambda x, y, ids, n: x[:n] * Tensor(n).cast(dt.float32),
    "matmul, n rows": lambda x, y, ids, n: x[:n] @ y,
    "matmul, n columns": lambda x, y, ids, n: x @ y[:, :n],
    "matmul over n": lambda x, y, ids, n: y[:, :n] @ x[:n],
    "matmul, n by n": lambda x, y, ids, n: x[:n] @ x[:n].transpose(0, 1),
    "vector by matrix over n": lambda x, y, ids, n: y[0, :n] @ x[:n],
    "softmax over n": lambda x, y, ids, n: F.softmax(y[:, :n]),
    "norms": lambda x, y, ids, n: F.layer_norm({}, x[:n]),
    "causal attention": lambda x, y, ids, n: F.attention(
        x[:n].reshape(n, 3, 2).permute(1, 0, 2),
        x[:n, :2].reshape(n, 1, 2).permute(1, 0, 2),
        x[:n, 2:4].reshape(n, 1, 2).permute(1, 0, 2),
        F.causal_mask(n, n, 0),
    ),
}  # fmt: skip


def run_fixed(fn: Callable, x: Tensor, y: Tensor, ids: Tensor, n: int, shape: tuple) -> np.ndarray:
    """The eager result, in the corner of a zeroed array that holds the longest."""
    whole = np.zeros(shape, np.float32)
    got = fn(x, y, ids, n).numpy()
    whole[tuple(slice(0, s) for s in got.shape)] = got
    return whole


@each_device
@pytest.mark.parametrize("family", FAMILIES)
def test_symbolic_length_equals_fixed_length(device: str, family: str) -> None:
    """Softmax and the norms sum floats in an order that may differ: a few roundings of values
    near 1. Everything else is whole numbers, and equal."""
    fn = FAMILIES[family]
    r = np.random.default_rng(7)
    x, y = (tensor(small(r, s), device) for s in ((LONGEST, D), (D, LONGEST)))
    ids = tensor(r.integers(0, LONGEST, LONGEST, np.int32), device)
    shape = fn(x, y, ids, LONGEST).shape
    tolerance = 2e-6 if family in ("softmax over n", "norms", "causal attention") else 0
    tolerance = 1e-6 if family == "mean over n" else tolerance

    def body(x: Tensor, y: Tensor, ids: Tensor, n: int) -> Tensor:
        got = fn(x, y, ids, n).cast(dt.float32)
        out = Tensor.zeros(*shape, device=device).contiguous()
        out[tuple(slice(0, s) for s in got.shape)] = got
        return out

    step = program(body, n=(1, LONGEST))
    for n in (5, 1, LONGEST, 2, 16):
        got = step(x, y, ids, n=n)
        same(got, run_fixed(fn, x, y, ids, n, shape), dt.float32, tolerance, tolerance)


@property_test(reference=30, opencl=8)
def test_a_cache_written_at_a_symbolic_position(device: str, data: st.DataObject) -> None:
    """Blocks of any length go in behind each other; reads see what was written so far.

    The cache has room for the longest block at the last position: bounds are checked when the
    program is captured, for all values at once.
    """
    size, room = 24, 24 + 8
    cache = Tensor.zeros(2, room, 3, device=device).contiguous().realize()

    def body(new: Tensor, start_pos: int, length: int) -> tuple[Tensor, Tensor]:
        cache[:, start_pos : start_pos + length] = new[:, :length]
        seen = cache[:, : start_pos + length]
        return seen.sum(1), seen[:, start_pos + length - 1] * 2

    step = program(body, start_pos=(0, size - 1), length=(1, 8))
    r, position = rng(data), 0
    expected = np.zeros((2, room, 3), np.float32)
    while position < size:
        length = min(data.draw(st.integers(1, 8)), size - position)
        new = small(r, (2, 8, 3))
        expected[:, position : position + length] = new[:, :length]
        total, last = step(tensor(new, device), start_pos=position, length=length)
        same(total, expected[:, : position + length].sum(1))
        same(last, expected[:, position + length - 1] * 2)
        position += length
    same(cache, expected)


@property_test(reference=20, opencl=6)
def test_two_symbolic_lengths(device: str, data: st.DataObject) -> None:
    a, b = small(rng(data), (9, 5)), small(rng(data), (5, 11))

    def body(x: Tensor, y: Tensor, m: int, n: int) -> Tensor:
        out = Tensor.zeros(9, 11, device=device).contiguous()
        out[:m, :n] = x[:m] @ y[:, :n] + Tensor.arange(n).reshape(1, n) * m
        return out

    step = program(body, m=(1, 9), n=(1, 11))
    for _ in range(3):
        m, n = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 11))
        want = np.zeros((9, 11), np.float32)
        want[:m, :n] = a[:m] @ b[:, :n] + np.arange(n) * m
        same(step(tensor(a, device), tensor(b, device), m=m, n=n), want)


@each_device
def test_two_programs_may_bound_the_same_name_differently(device: str) -> None:
    """As two models with contexts of different lengths do in one process."""
    a = np.arange(32, dtype=np.float32)
    x = tensor(a, device)

    def body(y: Tensor, at: int) -> Tensor:
        return (x[: at + 1] * Tensor(at, device=device).cast(dt.float32)).sum() + y

    for highest in (7, 31):
        got = program(body, at=(0, highest))(Tensor(np.float32(1), device=device), at=5)
        same(got, np.float32(a[:6].sum() * 5 + 1))


@each_device
def test_a_program_recaptures_for_new_shapes_and_types(device: str) -> None:
    calls = []

    def body(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return x * 2 + 1

    step = program(body)
    for a in (np.ones(3, np.float32), np.ones(4, np.float32), np.full(3, 5, np.float32)):
        same(step(tensor(a, device)), a * 2 + 1)
    same(step(tensor(np.ones(3, np.int32), device)), np.full(3, 3, np.int32))
    assert len(calls) == 3


@each_device
def test_a_program_takes_views_and_expressions(device: str) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    step = program(lambda x: x.sum(-1))
    x = tensor(a, device)
    same(step(x.permute(1, 0)), a.T.sum(-1))
    same(step(x.permute(1, 0) + 1), (a.T + 1).sum(-1))


@each_device
def test_values_outside_the_bounds_and_unknown_names_are_errors(device: str) -> None:
    step = program(lambda x, n: x[:n].sum(), n=(1, 4))
    x = Tensor.ones(4, device=device).contiguous()
    with pytest.raises(ValueError, match="n = 5"):
        step(x, n=5)
    with pytest.raises(TypeError):
        step(x)
    with pytest.raises(TypeError):
        step(x, n=1, m=2)
    with pytest.raises(IndexError, match="start"):
        program(lambda x, start: x[start], start=(0, 9))(x, start=3)
