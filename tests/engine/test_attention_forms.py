"""What is recognised as attention, with which mask, and what isn't; which tensors are views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Tensor, Var
from engine import dtype as dt
from engine.functional import attention, causal_mask, softmax
from engine.graph import Op, toposort
from engine.recipes.softmax import Attention, find_attention
from engine.recipes.views import strided
from tests.engine.intrinsics import Recipe, few, normal
from tests.engine.kernels import cpu

T, S = 6, 70
DEVICE = "reference"  # nothing runs on it; it can be opened everywhere


def found(output: Tensor) -> list[Attention]:
    nodes = [find_attention(n) for n in toposort([output.node]) if n.op is Op.REDUCE]
    return [a for a in nodes if a is not None]


def empty(*shape: Any) -> Tensor:
    return Tensor.zeros(*shape, device=DEVICE).contiguous()


def column(n: Any) -> Tensor:
    return Tensor.arange(n, device=DEVICE).reshape(n, 1)


def row(n: Any) -> Tensor:
    return Tensor.arange(n, device=DEVICE).reshape(1, n)


# --- masks -----------------------------------------------------------------------------------

# How many keys row 0 sees, each later row one more; None for all.
CAUSAL: dict[str, tuple[Callable[[], Tensor], int | None]] = {
    "k <= q": (lambda: row(S) <= column(T) + 9, 10),
    "k < q": (lambda: row(S) < column(T) + 9, 9),
    "q >= k": (lambda: column(T) + 9 >= row(S), 10),
    "q > k": (lambda: column(T) + 9 > row(S), 9),
    "from before the first key on": (lambda: row(S) <= column(T) - 2, -1),
    "past the end": (lambda: row(S) <= column(T) + S, None),
    "k < s": (lambda: row(S) < S, None),
    "of a larger one": (lambda: (row(100) <= column(100) + 9)[20 : 20 + T, :S], 30),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_a_number_of_keys(name: str) -> None:
    mask, visible = CAUSAL[name]
    (seen,) = found(attention(empty(4, T, 32), empty(2, S, 32), empty(2, S, 40)[..., :32], mask()))
    assert (seen.heads, seen.visible) == (2, visible)
    assert seen.scale == pytest.approx(32**-0.5)
    assert [x.shape for x in (seen.queries, seen.keys, seen.values)] == [
        (4, T, 32),
        (2, S, 32),
        (2, S, 32),
    ]


def test_a_mask_of_symbolic_sizes() -> None:
    start, t = Var("start", 0, 50), Var("t", 1, 8)
    q, cache = empty(4, 8, 32)[:, :t], empty(2, 60, 32)[:, : start + t]
    (seen,) = found(attention(q, cache, cache, causal_mask(t, start + t, start)))
    assert seen.visible == start + 1
    (one,) = found(attention(q[:, :1], cache, cache, causal_mask(1, start + t, start + t - 1)))
    assert one.visible is None


@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (4, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("t", [1, T])
def test_any_number_of_heads_and_queries(heads: int, groups: int, t: int) -> None:
    (seen,) = found(attention(empty(heads, t, 32), empty(groups, S, 32), empty(groups, S, 32)))
    assert seen.keys.shape == (groups, S, 32) and seen.visible is None
    batch, rows, _ = seen.queries.shape
    assert batch * rows == heads * t and batch == groups * seen.heads


def test_limits_that_are_computed() -> None:
    """One for all that share keys: as it is, or out of an index of keys."""
    q, k, v = empty(4, T, 32), empty(2, S, 32), empty(2, S, 32)
    limits = Tensor(np.array([5, S], np.int32), device=DEVICE)
    for mask in (
        row(S) < 50,
        row(S) < limits.reshape(2, 1, 1, 1),
        row(S).reshape(1, 1, 1, S) < limits.reshape(2, 1, 1, 1) + 1,
    ):
        (seen,) = found(attention(q, k, v, mask))
        assert seen.visible is None and seen.limits.shape == (2,)


def bias(scores: Tensor) -> Tensor:
    """ALiBi (Press et al. 2022)."""
    return scores + (row(S) - column(T)).float() * 0.1


MASKS: dict[str, Callable[[], Tensor]] = {
    "any": lambda: Tensor(np.random.default_rng(1).random((T, S)) < 0.7, device=DEVICE),
    "window": lambda: (row(S) <= column(T) + 30) & (row(S) > column(T) + 5),
    "later keys": lambda: row(S) >= column(T),
    "two keys more per row": lambda: row(S) <= column(T) * 2 + 3,
    "per head": lambda: row(S) <= column(T) + Tensor.arange(2, device=DEVICE).reshape(2, 1, 1),
    "rows reversed": lambda: (row(S) <= column(T) + 5).flip(0),
    "keys reversed": lambda: (row(S) <= column(T) + 5).flip(1),
    "rows in turns": lambda: row(S) <= column(T) % 4 + 5,
    "and one key more": lambda: (row(S) < column(T) + 5) | (row(S) == column(T) + 9),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_another_form_are_none(name: str) -> None:
    q, k, v = empty(4, T, 32), empty(2, S, 32), empty(2, S, 32)
    assert not found(attention(q, k, v, MASKS[name]()))


def test_masks_of_another_form_are_computed() -> None:
    def network(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        row, column = (Tensor.arange(n).reshape(*s) for n, s in ((S, (1, S)), (T, (T, 1))))
        window = (row <= column + 30) & (row > column + 5)
        alibi = softmax(q @ k.transpose() + (row - column).float() * 0.1)
        return attention(q, k, v, window), alibi @ v

    cpu()
    answers = Recipe(network)(*(normal(2, n, 32, number=n) for n in (T, S, S))).used()
    answers.close(1e-5, 1e-5)  # float32 sums in another order


# --- what looks like it ----------------------------------------------------------------------


def weights(scores: Tensor, power: float = 1, more: float = 0, largest: Any = None) -> Tensor:
    """softmax(scores), or one in another base, with another sum or shifted otherwise."""
    largest = scores.max(-1, keepdim=True) if largest is None else largest
    e = ((scores - largest) * (power / np.log(2))).exp2()
    total = e.sum(-1, keepdim=True)
    return e / (total + more if more else total)


def regrouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads of twelve queries, taken as four of six."""
    scores = q.reshape(2, 2 * T, 32) @ k[:2].transpose()
    return weights(scores.reshape(4, T, S)) @ v


OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "over queries": lambda q, k, v: softmax(q @ k.transpose(), 1) @ v,
    "over heads": lambda q, k, v: softmax(q @ k.transpose(), 0) @ v,
    "base 2": lambda q, k, v: weights(q @ k.transpose(), np.log(2)) @ v,
    "another temperature": lambda q, k, v: weights(q @ k.transpose(), 0.5) @ v,
    "one added to the sum": lambda q, k, v: weights(q @ k.transpose(), more=1) @ v,
    "another maximum": lambda q, k, v: (
        weights(q @ k.transpose(), largest=(q @ k.transpose() * 2).max(-1, keepdim=True)) @ v
    ),
    "the maximum of all heads": lambda q, k, v: (
        weights(q @ k.transpose(), largest=(q @ k.transpose()).max((0, 2), keepdim=True)) @ v
    ),
    "over parts of the keys": lambda q, k, v: (
        softmax((q @ k.transpose()).reshape(4, T, 7, 10)).reshape(4, T, S) @ v
    ),
    "heads and queries exchanged": lambda q, k, v: (
        softmax(q @ k.transpose()).permute(1, 0, 2) @ v[:1]
    ),
    "heads and queries regrouped": lambda q, k, v: (
        softmax(q @ k.transpose()).reshape(T, 4, S) @ v[:1].expand(T, S, 32)
    ),
    "scores regrouped": regrouped,
    "biased": lambda q, k, v: softmax(bias(q @ k.transpose())) @ v,
    "masked before the scale": lambda q, k, v: (
        softmax(Tensor.where(row(S) <= column(T), q @ k.transpose(), -float("inf")) * 0.2) @ v
    ),
    "masked by a number": lambda q, k, v: (
        softmax(Tensor.where(row(S) <= column(T), q @ k.transpose(), -1e4)) @ v
    ),
    "no softmax": lambda q, k, v: (q @ k.transpose()) @ v,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_attention(name: str) -> None:
    q, k, v = empty(4, T, 32), empty(4, S, 32), empty(4, S, 32)
    assert found(weights(q @ k.transpose() * 0.2) @ v)
    assert not found(OTHERS[name](q, k, v))


# --- views -----------------------------------------------------------------------------------


def moved(data: st.DataObject, x: Tensor, like: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """One movement op on a tensor and on the array that shows where its elements lie."""
    axis = data.draw(st.integers(0, x.ndim - 1))
    match data.draw(st.sampled_from(("slice", "permute", "split", "join", "flip"))):
        case "slice":
            start = data.draw(st.integers(0, like.shape[axis] - 1))
            stop = data.draw(st.integers(start + 1, like.shape[axis]))
            key = (slice(None),) * axis + (slice(start, stop),)
            return x[key], like[key]
        case "permute":
            order = data.draw(st.permutations(range(x.ndim)))
            return x.permute(*order), like.transpose(order)
        case "flip":
            return x.flip(axis), np.flip(like, axis)
        case "split" if like.shape[axis] % 2 == 0:
            shape = (*like.shape[:axis], 2, like.shape[axis] // 2, *like.shape[axis + 1 :])
            return x.reshape(*shape), like.reshape(shape)
        case "join" if axis > 0:
            shape = (*like.shape[: axis - 1], -1, *like.shape[axis + 1 :])
            return x.reshape(*shape), like.reshape(shape)
    return x, like


@few(200)
@given(st.data())
def test_a_view_of_a_cache_has_the_strides_that_numpy_gives_it(data: st.DataObject) -> None:
    cache = empty(3, 8, 12)
    cache[:, 2:5] = Tensor.ones(3, 3, 12, device=DEVICE)
    places = np.arange(288).reshape(3, 8, 12)
    x, like = cache, places
    for _ in range(data.draw(st.integers(1, 5))):
        x, like = moved(data, x, like)
    operand = strided(x.node)
    if operand is None:  # what is reversed across axes would do without a copy, too
        assert not np.shares_memory(like, places) or min(like.strides) < 0
        return
    assert operand.base is cache.node and operand.view.of(operand.base) is x.node
    steps = np.indices(like.shape).reshape(like.ndim, -1)
    at = operand.view.offset + np.array(operand.view.strides) @ steps
    np.testing.assert_array_equal(at, like.reshape(-1))


def test_what_is_no_view() -> None:
    """Arithmetic, padding, and casts that round; halves are read as what they are."""
    cache, half = empty(2, 60, 32), empty(2, 60, 32).cast(dt.float16).contiguous()
    start = Var("start", 0, 30)
    for x in (cache * 2, cache.pad(((0, 0), (0, 4), (0, 0))), cache.cast(dt.int32).float()):
        assert strided(x.node) is None
    assert strided(cache.cast(dt.float16).float().node) is None
    assert strided(half.float().cast(dt.bfloat16).float().node) is None
    assert strided(cache[:, start : start + 5].node) is None  # its place isn't known
    assert strided(cache[:, : start + 5].node).view.strides == (1920, 32, 1)
    view = strided(half.permute(0, 2, 1)[1:].float().node).view
    assert (view.strides, view.offset, view.half) == ((1920, 1, 32), 1920, True)
