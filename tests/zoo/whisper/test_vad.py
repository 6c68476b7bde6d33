"""Speech is found by loudness; clips are packed into windows and mapped back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zoo.whisper import vad
from zoo.whisper.audio import load_audio

DATA = Path(__file__).parent / "data"


def loudness(samples: np.ndarray) -> np.ndarray:
    whole = samples[: len(samples) // 160 * 160].reshape(-1, 160).astype(np.float64)
    return (10 * np.log10(np.square(whole).mean(1) + 1e-10)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * 16000), np.float32)


def noise(count: int, db: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 10 ** (db / 20)).astype(np.float32)


def speechlike(seconds: float, db: float = -20) -> np.ndarray:
    """Noise in syllables, four a second, each rising from silence and falling back."""
    count = int(seconds * 16000)
    syllables = np.sin(4 * np.pi * np.arange(count) / 16000) ** 2
    return noise(count, db, seed=1) * syllables.astype(np.float32)


def covers(clips: list[vad.Clip], truth: list[vad.Clip], slack: int) -> None:
    """Each clip holds its truth and is at most `slack` frames longer at either end."""
    assert len(clips) == len(truth), clips
    for (start, end), (begin, finish) in zip(clips, truth):
        assert begin - slack <= start <= begin + 5 and finish - 5 <= end <= finish + slack, clips


@pytest.mark.parametrize("floor", [None, -70, -50, -40, -30])
def test_bursts_in_noise_are_found(floor):
    samples = np.concatenate(
        [silence(3), speechlike(2), silence(5), speechlike(4, -25), silence(3)]
    )
    if floor is not None:
        samples = samples + noise(len(samples), floor)
    covers(vad.speech(loudness(samples)), [(300, 500), (1000, 1400)], slack=42)


@pytest.mark.parametrize("floor", [None, -60, -45, -35])
def test_real_sentences_between_silences_are_found_whole(floor):
    first, second = (load_audio(DATA / f"austen-{n}.wav") for n in ("0870", "0890"))
    third = load_audio(DATA / "jfk.flac") * np.float32(0.3)
    samples = np.concatenate([silence(5), first, silence(4), second, silence(10), third])
    if floor is not None:
        samples = samples + noise(len(samples), floor)
    at = [len(first) // 160, len(second) // 160, 1100]
    truth = [(500, 500 + at[0]), (900 + at[0], 900 + at[0] + at[1])]
    truth.append((truth[1][1] + 1000, truth[1][1] + 2100))
    found = vad.speech(loudness(samples))
    # The recordings begin and end with up to 0.2 s, jfk.flac with 0.4 s, of room alone.
    for (start, end), (begin, finish) in zip(found, truth, strict=True):
        assert begin - 42 <= start <= begin + 20 and finish - 45 <= end <= finish + 42


@pytest.mark.parametrize("name", ["jfk.flac", "austen-0870.wav", "austen-0890.wav"])
def test_speech_alone_is_kept_whole(name):
    level = loudness(load_audio(DATA / name))
    assert vad.speech(level) == [(0, len(level))]


@pytest.mark.parametrize("db", [-100, -70, -40, -10])
def test_silence_and_steady_noise_hold_no_speech(db):
    assert vad.speech(loudness(noise(160000, db))) == []
    assert vad.speech(loudness(silence(10))) == vad.speech(np.zeros(0, np.float32)) == []


def test_a_click_is_not_speech_but_a_short_word_is():
    room = noise(160000, -60)
    click, word = room.copy(), room.copy()
    click[80000:80160] = 0.9
    word[80000:84800] += speechlike(0.3)
    assert vad.speech(loudness(click)) == []
    ((start, end),) = vad.speech(loudness(word))
    assert 455 <= start <= 505 and 520 <= end <= 575


def test_one_word_in_ten_minutes_is_found():
    samples = noise(9_600_000, -60)
    samples[4_800_000:4_816_000] += speechlike(1)
    covers(vad.speech(loudness(samples)), [(30000, 30100)], slack=45)


def test_durations_and_padding_are_options():
    samples = np.concatenate([silence(1), speechlike(1), silence(1), speechlike(1), silence(1)])
    samples += noise(len(samples), -60)
    level = loudness(samples)
    assert len(vad.speech(level)) == 1
    first, second = vad.speech(level, min_silence_duration_ms=500, speech_pad_ms=0)
    assert 98 <= first[0] < first[1] <= 202 and 298 <= second[0] < second[1] <= 402
    padded = vad.speech(level, min_silence_duration_ms=500, speech_pad_ms=5000)
    assert padded[0][0] == 0 and padded[0][1] == padded[1][0] and padded[1][1] == 500
    assert vad.speech(level, min_speech_duration_ms=3000) == []


# --- windows -------------------------------------------------------------------------------------


def test_short_clips_share_a_window_as_long_as_they_fit():
    clips = [(0, 1000), (2000, 3500), (4000, 4500), (5000, 5001)]
    assert vad.windows(clips, np.zeros(6000)) == [clips[:3], clips[3:]]
    assert vad.windows([], np.zeros(6000)) == []


def test_a_long_clip_is_cut_where_it_is_quietest():
    level = np.full(7000, -20.0)
    level[2480:2520] = -60  # a pause
    level[1000:1100] = -90  # a deeper one, but it would make a short window
    packed = vad.windows([(0, 7000)], level)
    assert 2490 <= packed[0][0][1] <= 2510
    flat = [clip for window in packed for clip in window]
    assert flat[0][0] == 0 and flat[-1][1] == 7000
    assert all(a[1] == b[0] for a, b in zip(flat, flat[1:]))
    assert all(sum(e - s for s, e in window) <= 3000 for window in packed)


@pytest.mark.parametrize("seed", range(5))
def test_windows_keep_every_frame_once_in_order(seed):
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.choice(50000, 40, replace=False)).tolist()
    clips = list(zip(edges[::2], edges[1::2]))
    packed = vad.windows(clips, rng.standard_normal(50000), 3000)
    frames = [f for window in packed for start, end in window for f in range(start, end)]
    assert frames == [f for start, end in clips for f in range(start, end)]
    assert all(0 < sum(e - s for s, e in window) <= 3000 for window in packed)


# --- back to the file ----------------------------------------------------------------------------


def test_a_timeline_condenses_and_maps_back():
    timeline = vad.Timeline([(100, 200), (500, 650), (900, 901)])
    mel = np.arange(2000, dtype=np.float32).reshape(2, 1000)
    condensed = timeline.condense(mel)
    assert condensed.shape == (2, 251)
    for i in range(251):  # a frame's beginning is where that frame was
        assert timeline.original(i / 100) == pytest.approx(condensed[0, i] / 100, abs=1e-9)
    assert timeline.original(1.0) == pytest.approx(5.0)
    assert timeline.original(1.0, end=True) == pytest.approx(2.0)
    assert timeline.original(0.0) == timeline.original(0.0, end=True) == pytest.approx(1.0)
    assert timeline.original(2.51, end=True) == pytest.approx(9.01)
    assert timeline.original(3.0) == pytest.approx(9.5)  # beyond the end: goes on from there


def test_a_timeline_without_clips_is_empty():
    empty = vad.Timeline([])
    assert empty.condense(np.ones((80, 100), np.float32)).shape == (80, 0)
    assert empty.original(0.0) == 0.0
