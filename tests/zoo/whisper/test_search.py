"""Searches and rules against slow and plain versions of themselves."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from zoo.errors import UsageError
from zoo.whisper.decode import DecodingOptions, _timestamps, compression_ratio
from zoo.whisper.search import NEVER, Beam, Sampling

EOT = 4
IDS = SimpleNamespace(eot=4, no_timestamps=9, timestamp_begin=10)
RANDOM = np.random.default_rng(0)


def chances(seed: int, depth: int) -> dict[tuple[int, ...], np.ndarray]:
    """The log-probabilities of 5 tokens after every text of up to `depth` of them; of others 0."""
    draw = np.random.default_rng(seed)
    texts = [t for n in range(depth + 1) for t in itertools.product(range(EOT), repeat=n)]
    logits = {text: np.append(draw.normal(size=5) * 2, [NEVER] * 65) for text in texts}
    return {text: row - np.log(np.exp(row).sum()) for text, row in logits.items()}


def run(search, after: dict, steps: int) -> None:
    for _ in range(steps):
        rows = [tuple(row) for row in search.rows]
        known = [after.get(row, after[()]) for row in rows]
        search.advance(np.array(known, np.float32))
        if search.done:
            return


def test_greedy_takes_the_likeliest_and_sums_the_logs() -> None:
    after = chances(1, 4)
    search = Sampling(1, 0.0, EOT, RANDOM)
    run(search, after, 4)
    text, total = [], 0.0
    while len(text) < 4:
        best = int(after[tuple(text)].argmax())
        total += after[tuple(text)][best]
        if best == EOT:
            break
        text.append(best)
    assert search.finished() == [(text, pytest.approx(total, abs=1e-5))]


def test_a_row_that_has_ended_stays_as_it_is() -> None:
    search = Sampling(2, 0.0, EOT, RANDOM)
    search.advance(np.array([[0, 0, 0, 0, 9], [9, 0, 0, 0, 0]], np.float32))
    sums = list(search.sums)
    search.advance(np.array([[9, 0, 0, 0, 0], [0, 9, 0, 0, 0]], np.float32))
    assert search.rows == [[EOT, EOT], [0, 1]]
    assert search.sums[0] == sums[0]
    assert search.finished()[0][0] == []


def test_draws_follow_the_temperature_and_the_seed() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125, 0.0]] * 4000, np.float32) + 1e-30)

    def shares(temperature: float) -> np.ndarray:
        search = Sampling(4000, temperature, EOT, np.random.default_rng(3))
        search.advance(logits)
        return np.bincount([row[0] for row in search.rows], minlength=5) / 4000

    # 4000 draws: three standard deviations of a share are below 0.024
    np.testing.assert_allclose(shares(1.0), [0.5, 0.25, 0.125, 0.125, 0], atol=0.024)
    np.testing.assert_allclose(shares(0.5), [8 / 11, 2 / 11, 0.5 / 11, 0.5 / 11, 0], atol=0.024)
    np.testing.assert_array_equal(shares(1.0), shares(1.0))


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_all_texts_finds_the_likeliest_of_all(seed: int) -> None:
    after = chances(seed, 3)
    search = Beam(64, EOT, 4.0)  # 4 x 4 x 4 texts of three tokens; more ends than there are
    run(search, after, 4)
    found = {tuple(text): t for text, t in search.finished() if t > NEVER and len(text) < 4}
    for text, total in found.items():
        parts = [after[text[:n]][token] for n, token in enumerate(text)]
        assert total == pytest.approx(sum(parts) + after[text][EOT], abs=1e-4)
    texts = [t for n in range(4) for t in itertools.product(range(EOT), repeat=n)]
    totals = {
        t: sum(after[t[:n]][token] for n, token in enumerate(t)) + after[t][EOT] for t in texts
    }
    assert max(found, key=found.get) == max(totals, key=totals.get)


def allowed(said: list[int], logits: np.ndarray | None = None, latest: int | None = 2) -> list[int]:
    row = np.zeros((1, 15), np.float32) if logits is None else logits
    _timestamps(row, [said], IDS, latest)
    return np.flatnonzero(row[0] > NEVER).tolist()


def likely_text() -> np.ndarray:
    row = np.zeros((1, 15), np.float32)
    row[:, :9] = 5
    return row


def test_a_text_begins_with_an_early_timestamp() -> None:
    assert allowed([], likely_text()) == [10, 11, 12]
    assert allowed([], likely_text(), latest=None) == [10, 11, 12, 13, 14]


def test_after_a_pair_of_timestamps_comes_text() -> None:
    assert allowed([10], likely_text()) == list(range(9))
    assert allowed([10, 1, 12, 12], likely_text()) == list(range(9))


def test_after_the_end_of_a_stretch_comes_a_timestamp_or_the_end() -> None:
    assert allowed([10, 1, 12], likely_text()) == [4, 5, 6, 7, 8, 12, 13, 14]


def test_timestamps_never_go_back_and_no_stretch_is_empty() -> None:
    assert allowed([10, 1], likely_text()) == [*range(9), 11, 12, 13, 14]
    assert allowed([10, 1, 12, 12, 1], likely_text()) == [*range(9), 13, 14]


def test_timestamps_together_likelier_than_any_text_win() -> None:
    assert allowed([10, 1]) == [11, 12, 13, 14]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"beam_size": 5, "best_of": 5, "temperature": 0.5}, "exclude"),
        ({"beam_size": 5, "temperature": 0.5}, "temperature 0"),
        ({"best_of": 5}, "above 0"),
        ({"patience": 2.0}, "beam_size"),
        ({"length_penalty": 1.5}, "0 to 1"),
        ({"beam_size": 0}, "from 1 to 128"),
        ({"beam_size": 10**9}, "from 1 to 128"),
        ({"beam_size": 1.5}, "beam_size must be a whole number"),
        ({"beam_size": "5"}, "beam_size must be a whole number"),
        ({"patience": float("nan"), "beam_size": 2}, "patience must be from"),
        ({"sample_len": -1}, "sample_len must be from 1"),
        ({"language": 5}, "language must be a text"),
        ({"prefix": 5}, "prefix must be a text"),
        ({"suppress_tokens": 5}, "suppress_tokens must be a text"),
        ({"max_initial_timestamp": -1}, "max_initial_timestamp must be from 0"),
        ({"temperature": None}, "temperature must be a number"),
        ({"temperature": float("inf")}, "temperature must be from 0"),
        ({"task": "sing"}, "transcribe or translate"),
        ({"temperature": -0.1}, "from 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict, rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        DecodingOptions(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    DecodingOptions(beam_size=np.int64(2), patience=np.float32(2), suppress_tokens=np.arange(3))


def test_the_highest_temperature_draws_from_all_tokens() -> None:
    search = Sampling(50, 1e6, EOT, np.random.default_rng(0))
    search.advance(np.tile(np.float32([0, 5, NEVER, -5]), (50, 1)))
    assert {row[0] for row in search.rows} == {0, 1, 3}


def test_a_text_that_repeats_itself_has_a_high_compression_ratio() -> None:
    assert compression_ratio("Thanks for watching! " * 20) == pytest.approx(12.353, abs=5e-4)
