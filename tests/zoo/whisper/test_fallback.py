"""When a window's text is tried again, and when it counts as silence; decoding is scripted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from zoo.whisper import transcribe as module
from zoo.whisper.decode import DecodingResult
from zoo.whisper.options import TranscribeOptions
from zoo.whisper.vad import Timeline

GOOD = DecodingResult("en", [1, 2], "good", -0.3, 0.1, 0.0, 1.2)
LOOP = replace(GOOD, text="Thanks for watching! " * 20, compression_ratio=12.353)
UNLIKELY = replace(GOOD, avg_logprob=-1.5)
SILENCE = replace(GOOD, avg_logprob=-1.5, no_speech_prob=0.9)


def run(**options) -> module.Run:
    tokenizer = SimpleNamespace(eot=100, timestamp_begin=200, multilingual=False)
    config = SimpleNamespace(n_audio_ctx=1500, n_text_ctx=448, n_mels=80)
    recording = SimpleNamespace(mel=None, loudness=None, frames=3000, duration=30.0)
    return module.Run(
        SimpleNamespace(config=config), tokenizer, recording, TranscribeOptions(**options)
    )


def tried(monkeypatch, script: dict[float, DecodingResult], **options) -> tuple[float, list[float]]:
    """The temperature whose text is taken, and all that were tried."""
    temperatures: list[float] = []

    def decode(context, tokenizer, given, random):
        temperatures.append(given.temperature)
        found = script.get(given.temperature, GOOD)
        return replace(found, temperature=given.temperature)

    monkeypatch.setattr(module, "decode", decode)
    strand = module.Strand(np.zeros((80, 3000)), Timeline([(0, 3000)]), 0, 3000, [])
    return run(**options)._decoded(None, strand).temperature, temperatures


@pytest.mark.parametrize("bad", [LOOP, UNLIKELY])
def test_a_bad_text_is_tried_at_the_next_temperature(monkeypatch, bad) -> None:
    assert tried(monkeypatch, {0.0: bad}) == (0.2, [0.0, 0.2])
    assert tried(monkeypatch, {0.0: bad, 0.2: bad, 0.4: bad}) == (0.6, [0.0, 0.2, 0.4, 0.6])


def test_the_last_temperature_is_taken_whatever_it_gives(monkeypatch) -> None:
    script = dict.fromkeys((0.0, 0.5), LOOP)
    assert tried(monkeypatch, script, temperature=(0.0, 0.5)) == (0.5, [0.0, 0.5])


def test_silence_is_not_tried_again(monkeypatch) -> None:
    assert tried(monkeypatch, {0.0: SILENCE}) == (0.0, [0.0])


def test_without_thresholds_the_first_text_is_taken(monkeypatch) -> None:
    none = {"compression_ratio_threshold": None, "logprob_threshold": None}
    assert tried(monkeypatch, {0.0: LOOP}, **none) == (0.0, [0.0])


@pytest.mark.parametrize(
    ("result", "silent"),
    [
        (SILENCE, True),
        (replace(SILENCE, avg_logprob=-1.0), True),  # at the threshold
        (replace(SILENCE, avg_logprob=-0.9), False),  # likely enough, whatever no_speech says
        (replace(SILENCE, no_speech_prob=0.6), False),
        (UNLIKELY, False),
    ],
)
def test_a_window_is_silent_if_that_is_likely_and_its_text_is_not(result, silent: bool) -> None:
    assert run()._is_silent(result) is silent


def test_what_was_drawn_at_a_high_temperature_is_no_prompt(monkeypatch) -> None:
    strand = module.Strand(np.zeros((80, 3000)), Timeline([(0, 3000)]), 0, 3000, [5, 6])
    assert run()._prompt(strand) == [5, 6]
    strand.said.clear()
    assert run()._prompt(strand) == []


def test_a_clip_goes_on_where_the_clip_before_it_ended() -> None:
    whole = run(initial_prompt=None, clip_timestamps="0,1,2,3")
    whole.recording.mel = np.zeros((80, 6000), np.float32)
    strands = whole.strands()
    first = next(strands)
    first.said += [5, 6]
    first.said.clear()
    first.last_speech, first.seek = 0.7, first.end
    second = next(strands)
    assert (second.seek, second.end, second.last_speech) == (200, 300, 0.7)
    assert whole._prompt(second) == []  # nothing that was forgotten comes back
    second.said += [7]
    assert whole._prompt(second) == [7]
