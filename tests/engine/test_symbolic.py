"""Symbolic ints: equal to direct evaluation, within bounds, in the forms codegen needs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Var
from engine.indexing import flat_index, reshape_index
from engine.symbolic import (
    Expr,
    Int,
    bounds,
    evaluate,
    less,
    linear_in,
    maximum,
    minimum,
    product,
    substitute,
    upper,
    variables,
)

X, Y, Z = Var("i", 0, 7), Var("j", 0, 31), Var("k", -5, 9)
N, M = Var("n", 1, 6), Var("m", 3, 40)  # may divide
ALL = (X, Y, Z, N, M)

Tree = Any  # an int, a Var, or (operation, Tree, Tree)

BINARY: dict[str, tuple[Callable, Callable]] = {  # name -> (on Exprs, on Python ints)
    "+": (operator.add, operator.add),
    "-": (operator.sub, operator.sub),
    "*": (operator.mul, operator.mul),
    "//": (operator.floordiv, operator.floordiv),
    "%": (operator.mod, operator.mod),
    "min": (minimum, min),
    "max": (maximum, max),
    "<": (less, lambda a, b: int(a < b)),
}


def trees() -> st.SearchStrategy[Tree]:
    leaf = st.one_of(st.sampled_from(ALL), st.integers(-4, 40))
    divisor = st.one_of(st.sampled_from((1, 2, 3, 4, 6, 8, 16, 32, 64)), st.sampled_from((N, M)))

    def more(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        return st.one_of(
            st.tuples(st.sampled_from(("+", "-", "min", "max", "<")), inner, inner),
            st.tuples(st.just("*"), inner, leaf),
            st.tuples(st.sampled_from(("//", "%")), inner, divisor),
        )

    return st.recursive(leaf, more, max_leaves=12)


def values() -> st.SearchStrategy[dict[Expr, int]]:
    return st.fixed_dictionaries({v: st.integers(v.min, v.max) for v in ALL})


def build(tree: Tree) -> Int:
    if not isinstance(tree, tuple):
        return tree
    name, a, b = tree
    return BINARY[name][0](build(a), build(b))


def direct(tree: Tree, at: Mapping[Expr, int]) -> int:
    if isinstance(tree, tuple):
        name, a, b = tree
        return BINARY[name][1](direct(a, at), direct(b, at))
    return at[tree] if isinstance(tree, Expr) else tree


@settings(max_examples=600, deadline=None)
@given(trees(), values())
def test_an_expression_is_what_direct_evaluation_gives(tree: Tree, at: dict) -> None:
    assert evaluate(build(tree), at) == direct(tree, at)


@settings(max_examples=600, deadline=None)
@given(trees(), values())
def test_values_stay_within_the_bounds(tree: Tree, at: dict) -> None:
    low, high = bounds(build(tree))
    assert low <= direct(tree, at) <= high


@settings(max_examples=300, deadline=None)
@given(trees(), values(), st.sets(st.sampled_from(ALL)))
def test_substituting_some_variables_and_then_the_rest_is_the_same(
    tree: Tree, at: dict, some: set
) -> None:
    part = substitute(build(tree), {v: at[v] for v in some})
    assert variables(part).isdisjoint(some)
    assert evaluate(part, {v: at[v] for v in ALL if v not in some}) == direct(tree, at)


@settings(max_examples=300, deadline=None)
@given(trees(), values())
def test_a_variable_may_become_an_expression_within_its_bounds(tree: Tree, at: dict) -> None:
    moved = substitute(build(tree), {Y: X * 4 + (N - 1) // 2})  # 0 … 30 lies inside j's 0 … 31
    assert evaluate(moved, at) == direct(tree, at | {Y: at[X] * 4 + (at[N] - 1) // 2})


@settings(max_examples=300, deadline=None)
@given(trees(), st.sampled_from(ALL), values())
def test_linear_in_gives_a_coefficient_and_a_rest_without_the_variable(
    tree: Tree, var: Expr, at: dict
) -> None:
    x = build(tree)
    found = linear_in(x, var)
    if found is None:
        assert var in variables(x)
        return
    step, rest = found
    assert var not in variables(rest)
    assert step * at[var] + evaluate(rest, at) == direct(tree, at)


def test_linear_in_sees_steps_and_refuses_what_is_not_linear() -> None:
    assert linear_in(Y * 34 + X, Y) == (34, X)
    assert linear_in(Y, Y) == (1, 0)
    assert linear_in(X * N, X) is None  # the step isn't a constant
    assert linear_in(Y // 4 + Y, Y) is None
    assert linear_in(7, Y) == (0, 7)


def test_equal_expressions_are_one_object_however_they_are_written() -> None:
    assert (X + Y) * 2 is Y * 2 + X + X
    assert X * N * M is M * (N * X)
    assert Y - Y == 0
    assert (X + N) * M is X * M + M * N
    assert Y * 0 == 0


def test_the_index_of_a_quantised_block_comes_apart_again() -> None:
    """How a matrix row of 32-value blocks, each of two 16-value halves, is addressed."""
    block, half, value = Var("kb", 0, 99), Var("h", 0, 1), Var("v", 0, 15)
    flat = block * 32 + half * 16 + value
    assert flat // 32 is block
    assert flat % 32 // 16 is half
    assert flat % 16 is value
    assert flat % 32 is half * 16 + value
    assert flat // 16 is block * 2 + half


@pytest.mark.parametrize("x", [Y, X + Y, X * 5 + Y * 2 + 3, Y + X * N, M - X], ids=str)
@pytest.mark.parametrize("m", [6, 7, 16])
def test_quotient_and_remainder_recombine(x: Expr, m: int) -> None:
    assert (x // m) * m + x % m is x
    assert (x // m) * (m * 7) + (x % m) * 7 + X is x * 7 + X


@pytest.mark.parametrize("m", [2, 3])
def test_quotient_and_remainder_recombine_when_the_modulus_is_below_a_coefficient(m: int) -> None:
    x = X * 5 + Y + 1
    assert (x // m) * m + x % m is x


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_reshape_there_and_back_leaves_the_index_alone(shape: list[int], r: Any) -> None:
    index = tuple(Var(f"x{a}", 0, n - 1) if n > 1 else 0 for a, n in enumerate(shape))
    factors = [p for n in shape for p in _prime_factors(n)]
    r.shuffle(factors)
    other: list[int] = []
    for f in factors:
        if other and r.random() < 0.5:
            other[-1] *= f
        else:
            other.append(f)
    there = reshape_index(index, tuple(shape), tuple(other))
    back = reshape_index(there, tuple(other), tuple(shape))
    at = {v: r.randrange(v.max + 1) for i in index for v in variables(i)}
    flat = evaluate(flat_index(index, tuple(shape)), at)
    assert evaluate(flat_index(there, tuple(other)), at) == flat
    assert [evaluate(i, at) for i in back] == [evaluate(i, at) for i in index]


@pytest.mark.parametrize("other", [(4, 6), (8, 3), (2, 2, 2, 3), (24,), (1, 8, 1, 3)], ids=str)
def test_merging_and_splitting_axes_back_leaves_no_trace(other: tuple[int, ...]) -> None:
    shape = (2, 4, 3)
    index = (Var("x0", 0, 1), Var("x1", 0, 3), Var("x2", 0, 2))
    there = reshape_index(index, shape, other)
    assert reshape_index(there, other, shape) == index
    assert flat_index(there, other) is flat_index(index, shape)


def _prime_factors(n: int) -> list[int]:
    for p in range(2, n + 1):
        if n % p == 0:
            return [p, *_prime_factors(n // p)]
    return []


def test_a_symbolic_axis_passes_through_a_reshape_without_a_division() -> None:
    t = Var("t", 0, 99)
    length = Var("length", 1, 100)
    assert reshape_index((t, Y), (length, 32), (length, 4, 8)) == (t, Y // 8, Y % 8)
    assert reshape_index((t, X, Y), (length, 8, 32), (1, length, 256)) == (0, t, X * 32 + Y)


def test_multiples_of_a_symbolic_divisor_come_out() -> None:
    length = Var("length", 8, 100)
    assert (Y * length) // length is Y
    assert (Y * length + X) // length is Y  # i is below every length
    assert (Y * length + X) % length is X
    assert length // length == 1
    assert length % length == 0
    assert 5 // length == 0
    assert (X * length) % length == 0


def test_products_and_sizes() -> None:
    assert product([]) == 1
    assert product([2, N, 3]) is N * 6
    assert upper(N * 6 + 1) == 37
    assert upper(5) == 5


def test_comparisons_that_bounds_decide_are_numbers() -> None:
    assert less(X, 8) == 1
    assert less(Y, 0) == 0
    assert less(X, X + 1) == 1
    assert minimum(X, 7) is X
    assert maximum(X, 0) is X
    assert less(Z, 0) is less(Z, 0)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="bad"):
        Var("bad", 3, 2)
    with pytest.raises(ValueError, match="positive"):
        X // 0
    with pytest.raises(ValueError, match="positive"):
        X % -2
    with pytest.raises(KeyError, match="j"):
        evaluate(X + Y, {X: 1})
