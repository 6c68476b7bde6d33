"""Sampling: each step against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from zoo.errors import UsageError, UserError
from zoo.llama.sampling import (
    Sampler,
    SamplingOptions,
    adjusted,
    candidates,
    largest,
    penalised,
    softmax,
)

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


# What llama.cpp's own samplers (llama-cpp-python 0.3.36) make of these logits.
TWELVE = np.array(
    [-1.604, -2.649, -0.497, 0.841, 2.272, 0.219, -1.105, -1.57, 1.497, 3.27, 0.546, -2.467],
    np.float32,
)
SEEN = [3, 3, 5, 7, 3, 1, 5]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"typical_p": 0.2}, [4]),
        ({"typical_p": 0.5}, [4, 9]),
        ({"typical_p": 0.9}, [3, 4, 8, 9]),
        ({"typical_p": 0.97}, [2, 3, 4, 5, 8, 9, 10]),
        ({"top_p": 0.5}, [9]),
        ({"top_p": 0.7}, [4, 9]),
        ({"top_p": 0.97}, [2, 3, 4, 5, 8, 9, 10]),
        ({"min_p": 0.01}, [2, 3, 4, 5, 6, 8, 9, 10]),
        ({"min_p": 0.3}, [4, 9]),
        ({"top_k": 6, "typical_p": 0.8, "top_p": 0.9, "min_p": 0.1}, [4, 8, 9]),
        ({"typical_p": 0.9, "top_p": 0.95, "min_p": 0.05}, [3, 4, 8, 9]),
        ({"top_k": 8, "typical_p": 0.5, "top_p": 0.8, "min_p": 0.2}, [4, 9]),
    ],
)
def test_cuts_keep_what_llama_cpp_keeps(option, expected):
    ids, logits = candidates(TWELVE, SamplingOptions(**{**OFF, **option}))
    assert sorted(ids) == expected
    assert logits.tolist() == sorted(logits, reverse=True)  # the likeliest first


@pytest.mark.parametrize(
    ("last", "penalties", "expected"),
    [
        (64, (1.5, 0, 0), {1: -3.9735, 3: 0.5607, 5: 0.146, 7: -2.355}),
        (64, (1, 0.4, 0.25), {1: -3.299, 3: -0.609, 5: -0.831, 7: -2.22}),
        (3, (1.3, 0.5, -0.5), {1: -3.4437, 3: 0.6469, 5: 0.1685}),
        (-1, (1, 0.4, 0.25), {1: -3.299, 3: -0.609, 5: -0.831, 7: -2.22}),
        (0, (1.5, 1, 1), {}),
    ],
)
def test_penalties_are_llama_cpps(last, penalties, expected):
    names = ("repeat_penalty", "frequency_penalty", "presence_penalty")
    options = SamplingOptions(repeat_last_n=last, **dict(zip(names, penalties)))
    right = TWELVE.copy()
    right[list(expected)] = list(expected.values())
    # The pinned values have four places.
    np.testing.assert_allclose(adjusted(TWELVE, SEEN, None, options), right, atol=1e-4)


# (tokens left by the cut, token drawn) in each step, at tau 1.5 and eta 0.3
MIROSTAT = [
    (2, 9), (2, 4), (2, 9), (3, 9), (3, 9), (3, 9), (3, 9), (4, 9), (5, 9), (5, 4), (5, 9), (5, 9),
    (6, 9), (6, 9),
]  # fmt: skip


def test_mirostat_cuts_as_llama_cpp_does_after_the_same_draws():
    options = SamplingOptions(temperature=1, mirostat=2, mirostat_tau=1.5, mirostat_eta=0.3)
    sampler = Sampler(options)
    for count, token in MIROSTAT:
        left = sampler.mirostat_cut(softmax(TWELVE.astype(np.float64)))
        assert len(left) == count
        sampler._draw = lambda p, left=left, token=token: left.tolist().index(token)
        assert sampler(TWELVE) == token


def test_mirostat_brings_the_surprise_to_its_aim():
    logits = np.random.default_rng(0).normal(size=5000).astype(np.float32) * 3
    log2_p = np.log2(softmax(logits.astype(np.float64)))
    for tau in (2.0, 5.0):
        options = SamplingOptions(temperature=1, mirostat=2, mirostat_tau=tau)
        sampler = Sampler(options, seed=1)
        kept = []
        for _ in range(1500):
            p = log2_p[sampler.mirostat_cut(2**log2_p)]
            total = np.log2((2**p).sum())
            kept.append(log2_p[sampler(logits)] - total)
        # The mean of 1,000 surprises, each some 2 bits from the aim, has a deviation of 0.06.
        assert np.mean(kept[500:]) == pytest.approx(-tau, abs=0.25)


def test_mirostat_takes_the_likeliest_even_if_that_surprises():
    flat = np.zeros(4096, np.float32)  # 12 bits each
    options = SamplingOptions(temperature=1, mirostat=2, mirostat_tau=1.0)
    assert 0 <= Sampler(options, 0)(flat) < 4096


def test_logit_bias_makes_a_token_certain_or_impossible():
    sure = Sampler(SamplingOptions(temperature=1, logit_bias={2: 100}), 0)
    assert {sure(LOGITS) for _ in range(20)} == {2}
    never = Sampler(SamplingOptions(temperature=0, logit_bias={1: -np.inf}))
    assert never(LOGITS) == 3
    assert LOGITS.argmax() == 1  # what was passed in is left as it was


def test_mask_comes_before_the_cuts():
    mask = np.array([True, False, True, False, False])
    options = SamplingOptions(temperature=1, top_k=2, top_p=0.9, min_p=0.1, typical_p=0.99)
    sampler = Sampler(options, 0)
    assert {sampler(LOGITS, mask=mask) for _ in range(50)} == {0, 2}
    for extra in ({"mirostat": 2}, {"typical_p": 0.5}, {"top_k": 0}, {"repeat_penalty": 9.0}):
        sampler = Sampler(SamplingOptions(temperature=1, **extra), 0)
        assert {sampler(LOGITS, [0, 2], mask) for _ in range(50)} <= {0, 2}
    with pytest.raises(UserError, match="not finite"):
        sampler(LOGITS, mask=np.zeros(5, bool))


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
        {"repeat_last_n": -2},
        {"typical_p": 1.5},
        {"frequency_penalty": float("inf")},
        {"presence_penalty": "much"},
        {"mirostat": 1},
        {"mirostat": 3},
        {"mirostat_tau": -1},
        {"top_k": 1.5},
        {"temperature": True},
        {"logit_bias": [1]},
        {"logit_bias": {-1: 2}},
        {"logit_bias": {"1": 2}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: float("inf")}},
    ],
)
def test_option_out_of_range_is_named(option):
    (name,) = option
    with pytest.raises(UsageError, match=name):
        SamplingOptions(**option)
