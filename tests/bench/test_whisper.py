"""`bench whisper` says which texts differ, what each side took, and whom it leaves out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import whisper
from bench.__main__ import main
from bench.measure import SideError, Worker, start_peers

HEARING = "tests.bench.fake_side:Hearing"


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    heard = {
        whisper.OURS: "Two cats.",
        "openai/whisper f32": " 2 cats",
        "faster-whisper int8": "Two cat",
    }
    started = [Worker(name, HEARING, 1, heard=text) for name, text in heard.items()]
    yield started
    for worker in started:
        worker.close()


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr("bench.measure.SETTLE_S", 0)
    parser = argparse.ArgumentParser()
    whisper.add_arguments(parser)
    return parser.parse_args(["--rounds", "2", "--batch", "4"])


def saved(folder: Path, seconds: float) -> str:
    np.save(folder / "samples.npy", np.zeros(int(seconds * whisper.RATE), np.float32))
    return str(folder / "samples.npy")


def test_report_has_times_ratios_and_what_differs(
    workers: list[Worker], arguments: argparse.Namespace, tmp_path: Path
) -> None:
    skipped = {"faster-whisper f32": "not installed: faster_whisper"}
    report = whisper._measure(workers, skipped, saved(tmp_path, 2), arguments)
    assert report["duration_s"] == 2 and report["batch"] == 4
    differ = {name: side["words_that_differ"] for name, side in report["sides"].items()}
    assert list(differ.values()) == [0, 0, 0.5]  # "2 cats" is the same text
    assert set(report["ratios"]) == set(differ) - {whisper.OURS}
    for side in report["sides"].values():
        seconds = side["seconds"]
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
        assert side["times_real_time"]["high"] == pytest.approx(2 / seconds["low"], rel=1e-2)
    assert "\n" not in whisper.to_json(report)
    assert json.loads(whisper.to_json(report))["skipped"] == skipped
    text = whisper.text(report)
    assert "4 windows at once" in text and "50.0%" in text
    assert "faster-whisper f32: skipped, not installed: faster_whisper" in text


def test_a_peer_that_differs_in_float32_is_told(
    workers: list[Worker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers[2].name = "openai/whisper f32"
    whisper._texts(workers, {}, saved(tmp_path, 1))
    assert "openai/whisper f32: 50.0% of the words differ from ours" in capsys.readouterr().err


def test_a_peer_that_fails_is_skipped_and_ours_is_not(tmp_path: Path) -> None:
    ours = Worker(whisper.OURS, HEARING, 1)
    peer = Worker("faster-whisper int8", "tests.bench.fake_side:Counting", 1, path="x")  # is deaf
    sides, skipped = [ours, peer], {}
    try:
        whisper._texts(sides, skipped, saved(tmp_path, 1))
        assert sides == [ours] and list(skipped) == ["faster-whisper int8"]
        with pytest.raises(SideError, match="nothing to hear"):
            whisper._texts([ours], {}, saved(tmp_path, 0))
    finally:
        ours.close()


def test_a_recording_without_words_is_no_comparison(tmp_path: Path) -> None:
    deaf = Worker(whisper.OURS, HEARING, 1, heard=" ")
    try:
        with pytest.raises(SideError, match="no words"):
            whisper._texts([deaf], {}, saved(tmp_path, 1))
    finally:
        deaf.close()


def test_missing_peers_are_named_with_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    skipped = start_peers([], whisper.PEERS, 1)
    assert skipped["openai/whisper f32"] == "not installed: torch, whisper"
    assert set(skipped) == {peer.name for peer in whisper.PEERS}


def test_a_long_recording_is_whole_sentences_with_silence_between() -> None:
    sentences = [np.full(3 * whisper.RATE, 1, np.float32), np.full(whisper.RATE, 2, np.float32)]
    long = whisper.speech_and_silence(sentences, 60 * whisper.RATE)
    assert len(long) == 60 * whisper.RATE and long.dtype == np.float32
    edges = np.flatnonzero(np.diff(long, prepend=0, append=0))
    starts, ends = edges[::2], edges[1::2]
    assert set((ends - starts) / whisper.RATE) == {3.0, 1.0}
    pauses = (starts[1:] - ends[:-1]) / whisper.RATE
    assert len(pauses) > 5
    assert pauses.min() >= whisper.PAUSES_S[0] and pauses.max() <= whisper.PAUSES_S[1]
    np.testing.assert_array_equal(long, whisper.speech_and_silence(sentences, 60 * whisper.RATE))


def test_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whisper", "--model", "no-such-model"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no-such-model" in err and err.count("\n") == 1
