"""The options of a transcription: openai/whisper's names and defaults, and a few of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from zoo.errors import UsageError
from zoo.options import check, names_of, refuse_unknown
from zoo.whisper.audio import FRAMES_PER_SECOND
from zoo.whisper.decode import MOST, OPTIONS, DecodingOptions

Clip = tuple[int, int]  # first frame, frame behind the last
_RANGES = {"batch_size": (1, MOST), "seed": (0, float("inf"))}


@dataclass(frozen=True)
class TranscribeOptions:
    """How windows follow each other, beside `DecodingOptions`; names and defaults are openai's.

    `temperature`: the next is tried when a text repeats itself (compression_ratio_threshold) or
    is unlikely (logprob_threshold). `clip_timestamps`: start, end, … in seconds. `vad`: leave out
    what is silent. `batch_size`: work on so many stretches of speech at once, cut at silences, each
    without what was said before it as a prompt. `repetition_guard`: a text that says again what its
    prompt said is found again without it (openai/whisper has no such guard). `seed` is of the draws
    above temperature 0.
    """

    temperature: float | Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True
    initial_prompt: str | None = None
    carry_initial_prompt: bool = False
    word_timestamps: bool = False
    prepend_punctuations: str = "\"'“¿([{-"
    append_punctuations: str = "\"'.。,，!！?？:：”)]}、"
    clip_timestamps: str | Sequence[float] = "0"
    hallucination_silence_threshold: float | None = None
    repetition_guard: bool = True
    batch_size: int = 1
    vad: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        check(self, _RANGES)

    @property
    def temperatures(self) -> tuple[float, ...]:
        given = self.temperature
        return (given,) if isinstance(given, Real) else tuple(given)

    def clips(self, frames: int) -> list[Clip]:
        """The clips of a recording of so many frames; UsageError for times that are none."""
        given = self.clip_timestamps
        try:
            parts = filter(str.strip, given.split(",")) if isinstance(given, str) else given
            points = [round(float(part) * FRAMES_PER_SECOND) for part in parts] or [0]
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"clip_timestamps are seconds with commas, got {given!r}") from None
        if points != sorted(points) or points[0] < 0:
            raise UsageError(f"clip_timestamps go up from 0, got {given!r}")
        points += [frames] * (len(points) % 2)
        points = [min(point, frames) for point in points]
        return list(zip(points[::2], points[1::2]))


NAMES = names_of(TranscribeOptions)


def parsed(options: dict[str, Any]) -> tuple[TranscribeOptions, dict[str, Any]]:
    """The two kinds apart; UsageError for options that are unknown or contradict each other."""
    refuse_unknown(options, NAMES + OPTIONS, "transcribe")
    given = TranscribeOptions(**{k: v for k, v in options.items() if k in NAMES})
    decoding = {k: v for k, v in options.items() if k not in NAMES}
    if not given.temperatures:
        raise UsageError("temperature is a number or several, got none")
    for temperature in given.temperatures:
        at_temperature(decoding, temperature)
    return given, decoding


def at_temperature(given: dict[str, Any], temperature: float) -> DecodingOptions:
    """The options at a temperature: beams are for 0, several draws for what is above it."""
    unfit = ("best_of",) if temperature == 0 else ("beam_size", "patience")
    fit = {key: value for key, value in given.items() if key not in unfit}
    return DecodingOptions(**fit, temperature=temperature)
