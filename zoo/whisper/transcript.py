"""What a transcription is: text in segments, and words where they were asked for.

Field names are those of openai/whisper's JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Word:
    """One word with its leading space; start and end in seconds, probability from 0 to 1."""

    word: str
    start: float
    end: float
    probability: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass
class Segment:
    """A stretch of speech; times in seconds, `seek` (where its window begins) in 10 ms frames."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[Word] | None = None


@dataclass
class Transcript:
    """A whole recording: its text, its language's code, its segments, its length in seconds."""

    text: str
    language: str
    segments: list[Segment] = field(default_factory=list)
    duration: float = 0.0
