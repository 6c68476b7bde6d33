"""Sampling: each step against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from zoo.errors import UsageError, UserError
from zoo.llama.sampling import Sampler, SamplingOptions, candidates, largest, penalised

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))


def kept(**options) -> list[int]:
    ids, _ = candidates(LOGITS, SamplingOptions(temperature=1, **{**OFF, **options}))
    return ids.tolist()


def test_nothing_on_keeps_everything_most_likely_first():
    assert kept() == [1, 3, 4, 0, 2]


@pytest.mark.parametrize(("k", "expected"), [(1, [1]), (3, [1, 3, 4]), (99, [1, 3, 4, 0, 2])])
def test_top_k(k, expected):
    assert kept(top_k=k) == expected


@pytest.mark.parametrize(
    ("p", "expected"), [(0, [1]), (0.3, [1]), (0.5, [1, 3]), (0.9, [1, 3, 4, 0])]
)
def test_top_p_keeps_the_fewest_that_reach_it(p, expected):
    assert kept(top_p=p) == expected


def test_top_p_is_taken_among_what_top_k_left():
    # 0.4 and 0.25 make 0.65: renormalised 0.615 and 0.385.
    assert kept(top_k=2, top_p=0.6) == [1]
    assert kept(top_k=2, top_p=0.62) == [1, 3]


@pytest.mark.parametrize(
    ("p", "expected"), [(0.49, [1, 3, 4]), (0.6, [1, 3]), (0.3, [1, 3, 4]), (1.0, [1])]
)
def test_min_p_is_relative_to_the_best(p, expected):
    assert kept(min_p=p) == expected


def test_temperature_comes_after_the_cuts():
    # However hot, what top-p cut at temperature 1 stays cut.
    sampler = Sampler(SamplingOptions(temperature=50, top_k=0, top_p=0.5, min_p=0), seed=3)
    assert {sampler(LOGITS) for _ in range(200)} == {1, 3}


def test_temperature_zero_is_greedy_and_needs_no_seed():
    sampler = Sampler(SamplingOptions(temperature=0))
    assert {sampler(LOGITS) for _ in range(20)} == {1}


def test_same_seed_same_tokens():
    options = SamplingOptions(temperature=1.5, **OFF)
    one, other, third = Sampler(options, 7), Sampler(options, 7), Sampler(options, 8)
    drawn = [[sampler(LOGITS) for _ in range(64)] for sampler in (one, other, third)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_draws_follow_the_probabilities():
    sampler = Sampler(SamplingOptions(temperature=1, **OFF), seed=0)
    counts = np.bincount([sampler(LOGITS) for _ in range(20000)], minlength=5)
    # Three standard deviations of 20,000 draws are below 0.011 for every p here.
    assert np.abs(counts / 20000 - np.exp(LOGITS)).max() < 0.011


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits():
    logits = np.array([2.0, -2.0, 1.0], np.float32)
    assert penalised(logits, [0, 1, 0], 2.0).tolist() == [1.0, -4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]


def test_repeat_penalty_looks_back_a_limited_way():
    logits = np.array([2.0, 1.5], np.float32)
    near = Sampler(SamplingOptions(repeat_penalty=4, repeat_last_n=2))
    assert near(logits, [0, 1]) == 0  # both penalised: 0.5 and 0.375
    assert near(logits, [0, 9, 9]) == 0
    assert near(logits, [9, 0]) == 1


def test_repeat_penalty_one_changes_nothing():
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    options = {"temperature": 0.8}
    plain = Sampler(SamplingOptions(**options), 5)
    same = Sampler(SamplingOptions(**options, repeat_penalty=1.0), 5)
    context = list(range(1000))
    assert [plain(logits) for _ in range(50)] == [same(logits, context) for _ in range(50)]


@pytest.mark.parametrize("k", [1, 40, 999, 1000])
def test_largest_equals_a_full_sort_with_ties(k):
    logits = np.random.default_rng(1).integers(0, 50, 1000).astype(np.float32)
    expected = sorted(range(1000), key=lambda i: (-logits[i], i))[:k]
    ties_at_the_cut = logits[largest(logits, k)].tolist() == logits[expected].tolist()
    assert ties_at_the_cut
    above = [i for i in expected if logits[i] > logits[expected[-1]]]
    assert largest(logits, k)[: len(above)].tolist() == above


def test_masked_logits_are_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf], np.float32)
    sampler = Sampler(SamplingOptions(temperature=2, **OFF), 1)
    assert {sampler(logits) for _ in range(50)} == {1}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(value):
    with pytest.raises(UserError, match="not finite"):
        Sampler(SamplingOptions())(np.array([0.0, value], np.float32))


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"min_p": 2},
        {"repeat_penalty": 0},
        {"repeat_last_n": -1},
    ],
)
def test_option_out_of_range_is_named(option):
    (name,) = option
    with pytest.raises(UsageError, match=name):
        SamplingOptions(**option)
