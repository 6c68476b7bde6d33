"""Attention without a matrix of scores equals softmax(scores) times values, in any layout.

FewQueries computes in float32: what differs from NumPy is the order of additions, and an
exponential to 2e-7. Flash rounds to bfloat16: queries, keys and values like its `meaning`, and the
weights relative to the largest score so far, where `meaning` has the largest of all: a rounding of
8 bits either way, of which the average of some dozen weights keeps less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Tensor
from engine import dtype as dt
from engine.functional import attention, causal_mask, softmax
from engine.graph import Op, toposort
from engine.recipes import amx
from engine.recipes.attention import Flash
from engine.recipes.few_queries import FewQueries
from tests.engine.intrinsics import Recipe, few, need, normal, random
from tests.engine.kernels import cpu

EXACT = {FewQueries: (2e-6, 2e-6), Flash: (2.0**-8, 2.0**-6)}  # to meaning, and to float32
FLASH = amx.NEEDED | {"avx512dq"}
KINDS = {FewQueries: (6, "f32"), Flash: (40, "auto")}  # queries and precision that lead to each
both = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def needed(kind: type) -> tuple[int, str]:
    """KINDS[kind], or a skip."""
    need(FLASH if kind is Flash else ())
    if cpu().target.lanes < 4:
        pytest.skip("attention of few queries wants vectors")
    return KINDS[kind]


def qkv(heads: int, groups: int, t: int, s: int, size: int, number: int = 0) -> list[Tensor]:
    shapes = (heads, t, size), (groups, s, size), (groups, s, size)
    return [normal(*shape, number=number + i) for i, shape in enumerate(shapes)]


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "groups", "size", "stored"),
    [
        (4, 2, 32, dt.float32),
        (9, 3, 64, dt.float16),
        (2, 2, 40, dt.float16),
        (4, 1, 80, dt.float32),
        (3, 3, 96, dt.bfloat16),
        (2, 1, 128, dt.float16),
    ],
)
@both
def test_new_tokens_at_any_place(
    kind: type, heads: int, groups: int, size: int, stored: dt.DType
) -> None:
    """Causal, over a cache into which their keys and values are written first."""
    most, precision = needed(kind)
    keys, values = (
        Tensor(random(groups, 660, size, number=i), device=cpu().name).cast(stored).realize()
        for i in (8, 9)
    )

    def step(q: Tensor, k: Tensor, v: Tensor, start: Any, t: Any) -> Tensor:
        keys[:, start : start + t] = k[:, :t].cast(stored)
        values[:, start : start + t] = v[:, :t].cast(stored)
        seen = slice(0, start + t)
        return attention(q[:, :t], keys[:, seen], values[:, seen], causal_mask(t, start + t, start))

    recipe = Recipe(step, precision, start=(0, 600), t=(1, most))

    @few(5)
    @given(st.sampled_from((0, 1, 31, 224, 250, 256, 511, 512, 600)), st.integers(1, most))
    def check(start: int, t: int) -> None:
        inputs = qkv(heads, groups, most, most, size, number=start)
        recipe(*inputs, start=start, t=t).used(kind).close(*EXACT[kind])

    check()


@pytest.mark.parametrize(
    ("heads", "groups", "t", "s", "size"),
    [(9, 3, 1, 300, 64), (6, 6, 1, 77, 40), (1, 1, 1, 40, 128), (4, 2, 5, 1100, 32)],
)
def test_a_known_number_of_few_queries_sees_all_keys(
    heads: int, groups: int, t: int, s: int, size: int
) -> None:
    needed(FewQueries)
    answers = Recipe(attention, "f32")(*qkv(heads, groups, t, s, size)).used(FewQueries)
    answers.close(*EXACT[FewQueries])


@pytest.mark.parametrize(
    ("heads", "groups", "t", "s", "size"), [(4, 4, 50, 77, 40), (3, 1, 33, 600, 64)]
)
def test_a_known_number_of_many_queries_sees_all_keys(
    heads: int, groups: int, t: int, s: int, size: int
) -> None:
    needed(Flash)
    Recipe(attention)(*qkv(heads, groups, t, s, size)).used(Flash).close(*EXACT[Flash])


@both
def test_values_of_another_size_than_keys(kind: type) -> None:
    t, precision = needed(kind)
    q, k, v = normal(2, t, 32), normal(2, 70, 32), normal(2, 70, 80)
    recipe = Recipe(lambda q, k, v: softmax(q @ k.transpose()) @ v, precision)
    recipe(q, k, v).used(kind).close(*EXACT[kind])


@both
@pytest.mark.parametrize("size", [1e2, 1e30])
def test_large_scores(kind: type, size: float) -> None:
    """A single key then takes all the weight."""
    t, precision = needed(kind)
    recipe = Recipe(lambda q, k, v: attention(q, k, v, causal_mask(t, 300, 300 - t)), precision)
    q, k, v = qkv(2, 1, t, 300, 32)
    q = Tensor(q.numpy() * np.float32(size), device=cpu().name)
    answers = recipe(q, k, v).used(kind)
    answers.close(EXACT[kind][0], np.inf if kind is Flash else 1e-5)  # rounded, others may win


@both
def test_nan_stays_where_it_belongs(kind: type) -> None:
    """In the row of its query; in every row that sees its key."""
    t, precision = needed(kind)
    recipe = Recipe(lambda q, k, v: attention(q, k, v, causal_mask(t, 70, 70 - t)), precision)
    arrays = [x.numpy().copy() for x in qkv(4, 2, t, 70, 32)]
    for place, at in ((0, (1, 2, 5)), (1, (1, 68, 3))):
        harmed = [x.copy() for x in arrays]
        harmed[place][at] = np.nan
        answers = recipe(*(Tensor(x, device=cpu().name) for x in harmed)).used(kind)
        assert np.isnan(answers.exact[0]).any()
        answers.close(*EXACT[kind])


# --- layouts ---------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
    "tokens first": (
        lambda q, k, v: attention(*(x.permute(1, 0, 2) for x in (q, k, v))).permute(1, 0, 2),
        [(-1, 4, 32), (70, 2, 32), (70, 2, 32)],
    ),
    "heads in a row": (
        lambda q, k, v: (
            attention(*(x.reshape(x.shape[0], -1, 48).permute(1, 0, 2) for x in (q, k, v)))
            .permute(1, 0, 2)
            .reshape(-1, 192)
        ),
        [(-1, 192), (70, 96), (70, 96)],
    ),
    "keys side by side": (
        lambda q, k, v: attention(q, k.transpose(), v),
        [(4, -1, 32), (2, 32, 70), (2, 70, 32)],
    ),
    "values side by side": (
        lambda q, k, v: attention(q, k, v.transpose()),
        [(4, -1, 32), (2, 70, 32), (2, 32, 70)],
    ),
    "reversed and not": (
        lambda q, k, v: (attention(q, k.flip(1), v.flip(0)), attention(q, k, v)),
        [(4, -1, 32), (2, 70, 32), (2, 70, 32)],
    ),
    "keys and values in one tensor, of two layers": (
        lambda q, x: (attention(q, x[0], x[1]), attention(q, x[2], x[3])),
        [(4, -1, 32), (4, 2, 70, 32)],
    ),
    "keys that are values": (lambda q, k: attention(q, k, k), [(4, -1, 32), (2, 70, 32)]),
    "a batch": (
        lambda q, k, v: softmax(q @ k.transpose() * 0.2) @ v,
        [(2, 3, -1, 32), (2, 3, 70, 32), (2, 3, 70, 32)],
    ),
    "computed": (
        lambda q, k, v: attention(q * 2, k * 2, v + 1),
        [(4, -1, 32), (2, 70, 32), (2, 70, 32)],
    ),
    "rounded": (
        lambda q, k, v: attention(q, (k * 4).cast(dt.int32).float(), v.cast(dt.float16).float()),
        [(4, -1, 32), (2, 70, 32), (2, 70, 32)],
    ),
}


@both
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(kind: type, name: str) -> None:
    t, precision = needed(kind)
    function, shapes = LAYOUTS[name]
    shapes = [tuple(t if n == -1 else n for n in shape) for shape in shapes]
    inputs = [normal(*shape, number=i) for i, shape in enumerate(shapes)]
    answers = Recipe(function, precision)(*inputs)
    answers.used(*[kind] * len(answers.got)).close(*EXACT[kind])


@pytest.mark.parametrize(("cores", "parts"), [(1, 1), (2, 2), (4, 4), (16, 8)])
def test_keys_of_one_query_are_split_among_cores(
    cores: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some parts have no key at all; the result of each is divided only at the end."""
    needed(FewQueries)
    monkeypatch.setattr(cpu(), "target", replace(cpu().target, cores=cores))
    keys, values = (
        Tensor(random(3, 660, 40, number=i), device=cpu().name).cast(dt.float16).realize()
        for i in (8, 9)
    )
    recipe = Recipe(lambda q, n: attention(q, keys[:, :n], values[:, :n]), "f32", n=(1, 660))
    for n in (1, 63, 64, 65, 200, 660):
        answers = recipe(normal(9, 1, 40), n=n).used(FewQueries)
        answers.close(*EXACT[FewQueries])
    (node,) = {n for k in answers.kernels for n in toposort([k.root]) if n.op is Op.INTRINSIC}
    assert (node.arg.strip, node.arg.parts) == (3, parts)


@pytest.mark.parametrize(("heads", "groups", "size"), [(9, 3, 64), (2, 2, 40), (4, 1, 32)])
def test_texts_side_by_side(heads: int, groups: int, size: int) -> None:
    """Each at its own place of a cache and of its own length; one alone gets the same, to the bit.

    A place or a length that there isn't is the nearest that there is.
    """
    needed(FewQueries)
    places, most = 7, 200
    keys, values = (
        Tensor(random(places * groups, most, size, number=i), device=cpu().name)
        .cast(dt.float16)
        .realize()
        for i in (8, 9)
    )

    def step(q: Tensor, texts: Tensor, lengths: Tensor, n: Any) -> Tensor:
        count = q.shape[0] // heads
        rows = texts.unsqueeze(-1) * groups + Tensor.arange(groups, device=q.device)
        k, v = (x[:, :n][rows.reshape(count * groups)] for x in (keys, values))
        limits = lengths.reshape(count, 1).expand(count, groups).reshape(count * groups, 1, 1, 1)
        return attention(q, k, v, Tensor.arange(n, device=q.device).reshape(1, 1, 1, n) < limits)

    together, alone = (Recipe(step, "f32", n=(1, most)) for _ in "ab")
    texts, lengths = [3, 6, 0, 1, 99], [1, 64, 150, 77, 1000]
    q = random(len(texts) * heads, 1, size)
    given = (Tensor(np.asarray(x, np.int32), device=cpu().name) for x in (texts, lengths))
    answers = together(Tensor(q, device=cpu().name), *given, n=150).used(FewQueries)
    answers.close(*EXACT[FewQueries])
    for i, (text, length) in enumerate(zip(texts, lengths)):
        mine = slice(i * heads, (i + 1) * heads)
        given = (Tensor(np.array([x], np.int32), device=cpu().name) for x in (text, length))
        (one,) = alone(Tensor(q[mine], device=cpu().name), *given, n=min(length, 150)).got
        np.testing.assert_array_equal(one, answers.got[0][mine])


def test_computed_keys_and_values_of_symbolic_length() -> None:
    """Packed, they have constant strides all the same."""
    needed(FewQueries)
    recipe = Recipe(lambda q, k, v, n: attention(q, k[:, :n] * 2, v[:, :n] + 1), "f32", n=(1, 90))
    for n in (1, 37, 90):
        answers = recipe(*qkv(4, 2, 3, 100, 32), n=n).used(FewQueries)
        answers.close(*EXACT[FewQueries])
