"""How a window's tokens become pieces of time, and how far the recording moves on."""

from __future__ import annotations

import pytest

from zoo.errors import UsageError
from zoo.whisper.options import TranscribeOptions
from zoo.whisper.transcribe import cut, ends_whole

BEGIN = 100  # the id of <|0.00|>
SIZE, STEP = 3000, 0.02  # frames of a whole window, seconds from one timestamp to the next


def stamp(seconds: float) -> int:
    return BEGIN + round(seconds / STEP)


def pieces(*tokens: int, size: int = SIZE):
    return cut(list(tokens), BEGIN, size, STEP)


def test_two_timestamps_in_a_row_end_a_piece_and_the_rest_is_left_to_the_next_window() -> None:
    found, done = pieces(stamp(0), 1, 2, stamp(4), stamp(4), 3, stamp(6), stamp(6.5), 4, 5)
    assert [(s, round(e, 6)) for s, e, _ in found] == [(0.0, 4.0), (4.0, 6.0)]
    assert [tokens[1:-1] for _, _, tokens in found] == [[1, 2], [3]]
    assert done == 600


def test_a_single_timestamp_at_the_end_finishes_the_window() -> None:
    found, done = pieces(stamp(0), 1, stamp(4), stamp(5), 2, 3, stamp(9), size=1100)
    assert [(s, round(e, 6)) for s, e, _ in found] == [(0.0, 4.0), (5.0, 9.0)]
    assert done == 1100
    assert ends_whole([1, stamp(9)], BEGIN)
    assert not ends_whole([stamp(9), stamp(9)], BEGIN)
    assert not ends_whole([stamp(9)], BEGIN)


def test_one_piece_ends_at_its_last_timestamp() -> None:
    found, done = pieces(stamp(0), 1, 2, stamp(7))
    assert found == [(0.0, pytest.approx(7.0), [stamp(0), 1, 2, stamp(7)])]
    assert done == SIZE


@pytest.mark.parametrize("tokens", [(1, 2), (stamp(0), 1, 2)])
def test_without_an_end_the_piece_lasts_as_long_as_the_window(tokens: tuple[int, ...]) -> None:
    assert pieces(*tokens, size=1234) == ([(0.0, 12.34, list(tokens))], 1234)


def test_nothing_said_is_a_piece_without_tokens() -> None:
    assert pieces() == ([(0.0, 30.0, [])], SIZE)


@pytest.mark.parametrize(
    ("given", "clips"),
    [
        ("0", [(0, 5000)]),
        ("", [(0, 5000)]),
        ("1.5", [(150, 5000)]),
        ("1,2,30", [(100, 200), (3000, 5000)]),
        ([0, 10, 20, 99], [(0, 1000), (2000, 5000)]),  # no clip ends after the recording does
    ],
)
def test_clip_timestamps_are_frames_in_pairs(given, clips) -> None:
    assert TranscribeOptions(clip_timestamps=given).clips(5000) == clips


@pytest.mark.parametrize("given", ["a", "3,1", "-1,2", [None], "nan", "inf"])
def test_clip_timestamps_that_are_none_are_refused(given) -> None:
    with pytest.raises(UsageError, match="clip_timestamps"):
        TranscribeOptions(clip_timestamps=given).clips(5000)
