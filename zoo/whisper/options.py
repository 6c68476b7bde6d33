"""The options of a transcription: openai/whisper's names and defaults, and a few of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from zoo.errors import UsageError
from zoo.options import check, names_of
from zoo.whisper.audio import FRAMES_PER_SECOND
from zoo.whisper.vad import Clip

MOST = 128  # candidates, windows: more than make sense, and than fit into memory
RANGES = {"temperature": (0, 1e6), "beam_size": (1, MOST), "best_of": (1, MOST),
          "patience": (1e-6, 1e3), "length_penalty": (0, 1), "sample_len": (1, 1e6),
          "max_initial_timestamp": (0, 1e6), "batch_size": (1, MOST),
          "seed": (0, float("inf"))}  # fmt: skip


@dataclass(frozen=True)
class DecodingOptions:
    """How the text of a window is found; UsageError for options that contradict each other.

    `best_of` candidates are drawn above temperature 0, `beam_size` are searched at 0. `sample_len`
    is the most tokens, half the context if None; `prompt` text or ids said before the window,
    `prefix` those it begins with; suppress_tokens "-1" means the symbols that aren't spoken.
    """

    task: str = "transcribe"
    language: str | None = None
    temperature: float = 0.0
    sample_len: int | None = None
    best_of: int | None = None
    beam_size: int | None = None
    patience: float | None = None
    length_penalty: float | None = None
    prompt: str | Sequence[int] | None = None
    prefix: str | Sequence[int] | None = None
    suppress_tokens: str | Sequence[int] | None = "-1"
    suppress_blank: bool = True
    without_timestamps: bool = False
    max_initial_timestamp: float | None = 1.0

    def __post_init__(self) -> None:
        check(self, RANGES)
        wrong = (
            (self.task not in ("transcribe", "translate"), "task is transcribe or translate"),
            (self.beam_size and self.best_of, "beam_size and best_of exclude each other"),
            (self.beam_size and self.temperature, "beam_size is for temperature 0"),
            (self.best_of and not self.temperature, "best_of is for a temperature above 0"),
            (self.patience and not self.beam_size, "patience needs beam_size"),
        )
        for is_wrong, rule in wrong:
            if is_wrong:
                raise UsageError(rule)


_OF_A_WINDOW = names_of(DecodingOptions)


@dataclass(frozen=True)
class TranscribeOptions(DecodingOptions):
    """How windows follow each other, and how each is decoded; names and defaults are openai's.

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
        check(self, RANGES)
        if not self.temperatures:
            raise UsageError("temperature is a number or several, got none")
        for temperature in self.temperatures:
            self.at(temperature)

    def at(self, temperature: float, **others: Any) -> DecodingOptions:
        """Of a window at a temperature: beams are for 0, several draws for what is above it."""
        unfit = ("best_of",) if temperature == 0 else ("beam_size", "patience")
        fit = {name: getattr(self, name) for name in _OF_A_WINDOW if name not in unfit}
        return DecodingOptions(**fit | {"temperature": temperature} | others)

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
