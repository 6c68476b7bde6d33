"""What a transcription is: text in segments, and words where they were asked for; and its files.

Names of fields, and txt, srt, vtt, tsv and json, are byte for byte openai/whisper's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from zoo.errors import UsageError

PAUSE = 3.0  # seconds between words after which a subtitle ends, where lines are filled up
ENDLESS = 1000  # characters or words: openai/whisper's idea of a line without limit


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


@dataclass(frozen=True)
class Layout:
    """How words are laid out in srt and vtt; it all needs word timestamps.

    With both max_line_width (characters) and max_line_count, lines are filled across segments;
    otherwise each segment begins a subtitle.
    """

    max_line_width: int | None = None
    max_line_count: int | None = None
    max_words_per_line: int | None = None
    highlight_words: bool = False


Cue = tuple[float, float, str]  # start and end in seconds, text


def txt(transcript: Transcript, layout: Layout = Layout()) -> str:
    """A segment a line."""
    return "".join(f"{segment.text.strip()}\n" for segment in transcript.segments)


def srt(transcript: Transcript, layout: Layout = Layout()) -> str:
    """SubRip subtitles."""
    return "".join(
        f"{i}\n{timestamp(start, True, ',')} --> {timestamp(end, True, ',')}\n{text}\n\n"
        for i, (start, end, text) in enumerate(_cues(transcript, layout), 1)
    )


def vtt(transcript: Transcript, layout: Layout = Layout()) -> str:
    """WebVTT subtitles."""
    return "WEBVTT\n\n" + "".join(
        f"{timestamp(start)} --> {timestamp(end)}\n{text}\n\n"
        for start, end, text in _cues(transcript, layout)
    )


def tsv(transcript: Transcript, layout: Layout = Layout()) -> str:
    """A table of start and end in whole milliseconds, and text."""
    rows = ["start\tend\ttext\n"]
    for segment in transcript.segments:
        text = segment.text.strip().replace("\t", " ")
        rows.append(f"{round(1000 * segment.start)}\t{round(1000 * segment.end)}\t{text}\n")
    return "".join(rows)


def as_json(transcript: Transcript, layout: Layout = Layout()) -> str:
    """openai/whisper's keys; `words` only where they were asked for."""
    segments = [asdict(segment) for segment in transcript.segments]
    segments = [{k: v for k, v in row.items() if v is not None} for row in segments]
    named = {"text": transcript.text, "segments": segments, "language": transcript.language}
    return json.dumps(named)


FORMATS = {"txt": txt, "vtt": vtt, "srt": srt, "tsv": tsv, "json": as_json}


def timestamp(seconds: float, hours: bool = False, point: str = ".") -> str:
    """[hh:]mm:ss.mmm; the hours where there are some, or always."""
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    hour, minute = divmod(minutes, 60)
    front = f"{hour:02d}:" if hours or hour else ""
    return f"{front}{minute:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def _cues(transcript: Transcript, layout: Layout) -> Iterator[Cue]:
    segments = transcript.segments
    if not segments or segments[0].words is None:
        for segment in segments:
            yield segment.start, segment.end, segment.text.strip().replace("-->", "->")
        return
    for subtitle in _subtitles(segments, layout):
        if layout.highlight_words:
            yield from _highlighted(subtitle)
        else:
            yield subtitle[0].start, subtitle[-1].end, "".join(word.word for word in subtitle)


def _subtitles(segments: Sequence[Segment], layout: Layout) -> Iterator[list[Word]]:
    """Words gathered to subtitles; a line break is put before a word that begins a new line."""
    width, most_lines = layout.max_line_width or ENDLESS, layout.max_line_count or None
    most_words = layout.max_words_per_line or ENDLESS
    fill = bool(layout.max_line_width and most_lines)
    subtitle: list[Word] = []
    used, lines = 0, 1  # characters of the line, lines of the subtitle
    before = float("inf")  # where the last word began
    for segment in segments:
        for i, word in enumerate(segment.words or ()):
            begins = bool(subtitle) and not fill and i % most_words == 0
            pause = fill and word.start - before > PAUSE
            before = word.start
            if 0 < used <= width - len(word.word) and not (begins or pause):
                used += len(word.word)
            else:
                if begins or (subtitle and most_lines and (pause or lines >= most_lines)):
                    yield subtitle
                    subtitle, used, lines = [], 0, 1
                text = word.word.strip()
                word = replace(word, word="\n" * (used > 0) + text)
                used, lines = len(text), lines + (used > 0)
            subtitle.append(word)
    if subtitle:
        yield subtitle


def _highlighted(subtitle: Sequence[Word]) -> Iterator[Cue]:
    """The subtitle once for each word, which is underlined, and once for each gap between."""
    texts = [word.word for word in subtitle]
    until = subtitle[0].start
    for i, word in enumerate(subtitle):
        if timestamp(until) != timestamp(word.start):  # as far as the file shows it
            yield until, word.start, "".join(texts)
        bare = texts[i].lstrip()
        marked = f"{texts[i].removesuffix(bare)}<u>{bare}</u>"
        yield word.start, word.end, "".join([*texts[:i], marked, *texts[i + 1 :]])
        until = word.end


def targets(sources: Sequence[str], folder: Path, formats: Sequence[str]) -> dict[str, list[Path]]:
    """Where each source's transcripts go: its stem and the format's name, in `folder`.

    The folder is made, and tried by making a file in it: OSError before any work is done rather
    than after. UsageError if two sources would write the same file.
    """
    written: dict[str, str] = {}
    for source in sources:
        stem = Path("stdin" if source == "-" else source).stem
        if stem in written:
            file = f"{folder / stem}.{formats[0]}"
            both = f"{written[stem]} and {source} would both be written to {file}"
            raise UsageError(f"{both}; transcribe them into two folders")
        written[stem] = source
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    return {
        source: [folder / f"{stem}.{name}" for name in formats] for stem, source in written.items()
    }


def write(transcript: Transcript, path: Path, layout: Layout = Layout()) -> None:
    """Write a transcript in the format that the file's name ends in, whole or not at all.

    What was there before is replaced. WeightError if it can't be written.
    """
    from weights.whole import whole_file

    content = FORMATS[path.suffix[1:]](transcript, layout)
    with whole_file(path, force=True) as partial:
        partial.write_text(content, encoding="utf-8", newline="\n")
