"""A whole recording: window after window, each decoded with what was said before in mind.

Source: Radford et al. 2022, sections 3.4 and 4.5; options, defaults and the rules by which windows
move on are openai/whisper's (transcribe.py). Frames are of 10 ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.errors import UsageError
from zoo.whisper import audio, timing, vad
from zoo.whisper.context import Context
from zoo.whisper.decode import OPTIONS, DecodingOptions, DecodingResult, decode
from zoo.whisper.languages import code_of
from zoo.whisper.transcript import Segment, Transcript

if TYPE_CHECKING:
    from zoo.whisper.whisper import Whisper

N_FRAMES, FRAMES_PER_SECOND = audio.N_FRAMES, audio.FRAMES_PER_SECOND
HOT = 0.5  # text drawn at a higher temperature is no prompt for what follows

Clip = tuple[int, int]  # first frame, frame behind the last


@dataclass(frozen=True)
class TranscribeOptions:
    """How windows follow each other, beside `DecodingOptions`; names and defaults are openai's.

    `temperature`: the next is tried when a text repeats itself (compression_ratio_threshold) or
    is unlikely (logprob_threshold). `clip_timestamps`: start, end, … in seconds. `batch_size`: so
    many windows at once, cut at silences, without earlier text as a prompt. `vad`: leave out what
    is silent. `seed` is of the draws above temperature 0.
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
    batch_size: int = 1
    vad: bool = False
    seed: int | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        given = self.temperature
        return tuple(map(float, given)) if isinstance(given, Sequence) else (float(given),)

    def clips(self, frames: int) -> list[Clip]:
        """The clips of a recording of so many frames; UsageError for times that are none."""
        given = self.clip_timestamps
        try:
            parts = (
                [part for part in given.split(",") if part.strip()]
                if isinstance(given, str)
                else given
            )
            points = [round(float(part) * FRAMES_PER_SECOND) for part in parts] or [0]
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"clip_timestamps are seconds with commas, got {given!r}") from None
        if points != sorted(points) or points[0] < 0:
            raise UsageError(f"clip_timestamps go up from 0, got {given!r}")
        points += [frames] * (len(points) % 2)
        points = [min(point, frames) for point in points]
        return list(zip(points[::2], points[1::2]))


NAMES = tuple(field.name for field in fields(TranscribeOptions))


def transcribe(
    model: Whisper,
    source: Any,
    on_segment: Callable[[Segment], None] | None = None,
    progress: Callable[[float, float], None] | None = None,
    **options: Any,
) -> Transcript:
    """The text of a recording: a path, "-" for stdin, or samples (1-D float32, 16 kHz).

    `on_segment` is called with each segment as it is found, `progress` with the seconds done and
    the seconds in all. UsageError for options that are unknown or contradict each other,
    AudioError for what can't be read as audio.
    """
    run = _Run(model, *_parsed(options), on_segment, progress)
    run.recording = audio.record(source, model.config.n_mels, model.network.device)
    return run.transcribe()


def _parsed(options: dict[str, Any]) -> tuple[TranscribeOptions, dict[str, Any]]:
    known = {*NAMES, *OPTIONS}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"unknown option of transcribe: {', '.join(unknown)}")
    given = TranscribeOptions(**{k: v for k, v in options.items() if k in NAMES})
    decoding = {k: v for k, v in options.items() if k not in NAMES}
    if not given.temperatures:
        raise UsageError("temperature is a number or several, got none")
    if given.batch_size < 1:
        raise UsageError(f"batch_size must be 1 or more, got {given.batch_size}")
    for temperature in given.temperatures:
        _decoding(decoding, temperature)
    return given, decoding


def _decoding(given: dict[str, Any], temperature: float) -> DecodingOptions:
    """The options at a temperature: beams are for 0, several draws for what is above it."""
    unfit = ("beam_size", "patience") if temperature > 0 else ("best_of",)
    fit = {key: value for key, value in given.items() if key not in unfit}
    return DecodingOptions(**fit, temperature=temperature)


class _Run:
    """One recording on its way to a transcript."""

    recording: audio.Recording

    def __init__(
        self,
        model: Whisper,
        options: TranscribeOptions,
        decoding: dict[str, Any],
        on_segment: Callable[[Segment], None] | None,
        progress: Callable[[float, float], None] | None,
    ) -> None:
        self.model, self.options, self.decoding = model, options, dict(decoding)
        self.on_segment, self.progress = on_segment, progress
        self.tokenizer = model.tokenizer
        self.random = np.random.default_rng(options.seed or 0)
        self.segments: list[Segment] = []
        prompt = options.initial_prompt
        self.prompt = self.tokenizer.encode(" " + prompt.strip()) if prompt else []
        self.said = list(self.prompt)  # tokens of the text so far
        self.forgotten = 0  # how many of them are no prompt any more
        self.last_speech = 0.0  # seconds
        # Seconds of audio in a token of the encoder's output, which is what timestamps count in.
        self.token_s = N_FRAMES / model.config.n_audio_ctx / FRAMES_PER_SECOND

    def transcribe(self) -> Transcript:
        frames = self.recording.frames
        clips = self.options.clips(frames)
        if self.options.vad:
            clips = _common(clips, vad.speech(self.recording.loudness))
        code = self.language = self._language(clips)
        if self.options.batch_size > 1:
            self._batches(vad.windows(clips, self.recording.loudness, N_FRAMES))
        elif self.options.vad:
            timeline = vad.Timeline(clips)
            mel = timeline.condense(self.recording.mel)
            self._windows(mel, [(0, mel.shape[1])], timeline)
        else:
            mel = self.recording.mel[:, :frames]
            self._windows(mel, clips, vad.Timeline([(0, frames)]))
        text = "".join(segment.text for segment in self.segments)
        return Transcript(text, code, self.segments, self.recording.duration)

    def _language(self, clips: list[Clip]) -> str:
        given = self.decoding.pop("language", None)
        if not self.tokenizer.multilingual:
            return "en"
        if given is not None:
            return code_of(given)
        begin = clips[0][0] if self.options.vad and clips else 0  # where speech is
        chances = self.model.detect_language(self.recording.mel[:, begin : begin + N_FRAMES])
        return max(chances, key=chances.get)

    # One window after another.

    def _windows(self, mel: np.ndarray, clips: list[Clip], timeline: vad.Timeline) -> None:
        context, seek = self.model.network.context(1), 0
        for start, end in clips:
            seek = max(seek, start)
            while seek < end:
                size = min(N_FRAMES, end - seek)
                self._listen(context, mel[:, seek : seek + size])
                found, seek = self._window(context, seek, size, mel.shape[1])
                self._keep(found, timeline)
                self._tell(timeline.original(min(seek, end) / FRAMES_PER_SECOND))

    def _listen(self, context: Context, mel: np.ndarray) -> None:
        context.listen(self.model.network.encode(_window(mel)[None]))

    def _window(
        self, context: Context, seek: int, size: int, frames: int
    ) -> tuple[list[Segment], int]:
        """The segments of the window from `seek` on, and where the next one begins."""
        result = self._decode(context, self._prompt(), self.options.temperatures)
        if self._silent(result):
            return [], seek + size
        pieces, ahead = cut(result.tokens, self.tokenizer.timestamp_begin, size, self.token_s)
        segments = [self._segment(piece, result, seek) for piece in pieces]
        after = seek + ahead
        if self.options.word_timestamps:
            self._add_words(context, segments, seek, size)
            after = self._after_words(segments, result.tokens, seek, size, after, frames)
        self._remember(segments, result)
        return segments, after

    def _prompt(self) -> list[int]:
        """What was said before, as far as it may be a prompt."""
        if not self.options.carry_initial_prompt:
            return self.said[self.forgotten :]
        room = self.model.config.n_text_ctx // 2 - 1 - len(self.prompt)
        said = self.said[max(len(self.prompt), self.forgotten) :]
        return self.prompt + (said[-room:] if room > 0 else [])

    def _remember(self, segments: Sequence[Segment], result: DecodingResult) -> None:
        for segment in segments:
            if says_something(segment):
                self.said += segment.tokens
        if not self.options.condition_on_previous_text or result.temperature > HOT:
            self.forgotten = len(self.said)

    def _after_words(
        self,
        segments: list[Segment],
        tokens: list[int],
        seek: int,
        size: int,
        after: int,
        frames: int,
    ) -> int:
        """Where the next window begins, now that the words' times are known.

        Takes out of `segments` what is probably made up: odd words between silences.
        """
        threshold, last_speech = self.options.hallucination_silence_threshold, self.last_speech
        begin, whole = seek / FRAMES_PER_SECOND, ends_whole(tokens, self.tokenizer.timestamp_begin)
        window_end = begin + N_FRAMES / FRAMES_PER_SECOND
        end = timing.end_of(segments)
        if not whole and end is not None and end > begin:
            after = round(end * FRAMES_PER_SECOND)
            if threshold is not None and window_end - end <= threshold:
                after = seek + size
        if threshold is not None:
            first = timing.next_with_words(segments)
            if first is not None and timing.is_anomaly(first) and first.start - begin > threshold:
                gap = round((first.start - begin) * FRAMES_PER_SECOND)
                segments.clear()
                return seek + gap  # once more, from where the doubtful words begin
            ends = begin + size / FRAMES_PER_SECOND
            at = timing.first_made_up(segments, last_speech, begin, ends, window_end, threshold)
            if at is not None:
                made_up = segments[at]
                after = round(max(begin + 1, made_up.start) * FRAMES_PER_SECOND)
                if frames / FRAMES_PER_SECOND - made_up.end < threshold:
                    after = frames
                del segments[at:]
        end = timing.end_of(segments)
        self.last_speech = last_speech if end is None else end
        return after

    # Several windows at once.

    def _batches(self, windows: list[list[Clip]]) -> None:
        size = self.options.batch_size
        for first in range(0, len(windows), size):
            batch = windows[first : first + size]
            network = self.model.network
            context = network.context(size if len(batch) > 1 else 1)
            timelines = [vad.Timeline(clips) for clips in batch]
            mels = [timeline.condense(self.recording.mel) for timeline in timelines]
            padded = np.zeros((context.windows, self.model.config.n_mels, N_FRAMES), np.float32)
            for row, mel in zip(padded, mels):
                row[:, : mel.shape[1]] = mel
            features = network.encode(padded)
            context.listen(features)
            first_try = _decoding(self.decoding, self.options.temperatures[0])
            first_try = replace(first_try, prompt=self.prompt)
            results = decode(context, self.tokenizer, first_try, self.language, self.random)
            for n, (timeline, mel, result) in enumerate(zip(timelines, mels, results)):
                alone = network.context(1)
                alone.listen(features[n : n + 1])
                if not self._good(result) and len(self.options.temperatures) > 1:
                    result = self._decode(alone, self.prompt, self.options.temperatures[1:])
                if not self._silent(result):
                    self._keep(self._whole(alone, result, mel.shape[1]), timeline)
                self._tell(timeline.original(mel.shape[1] / FRAMES_PER_SECOND))

    def _whole(self, context: Context, result: DecodingResult, size: int) -> list[Segment]:
        """All segments of a window that is not looked at again, its last words included."""
        begin = self.tokenizer.timestamp_begin
        pieces, ahead = cut(result.tokens, begin, size, self.token_s)
        rest = result.tokens[sum(len(tokens) for _, _, tokens in pieces) :]
        if rest:
            pieces.append((ahead / FRAMES_PER_SECOND, size / FRAMES_PER_SECOND, rest))
        segments = [self._segment(piece, result, 0) for piece in pieces]
        if self.options.word_timestamps:
            self.last_speech = 0.0
            self._add_words(context, segments, 0, size)
        return segments

    # What both have in common.

    def _decode(
        self, context: Context, prompt: list[int], temperatures: Sequence[float]
    ) -> DecodingResult:
        """The text of the context's one window, at the first temperature that gives a good one."""
        for temperature in temperatures:
            options = replace(_decoding(self.decoding, temperature), prompt=prompt)
            result = decode(context, self.tokenizer, options, self.language, self.random)[0]
            if self._good(result):
                break
        return result

    def _good(self, result: DecodingResult) -> bool:
        o = self.options
        repetitive, unlikely = o.compression_ratio_threshold, o.logprob_threshold
        poor = unlikely is not None and result.avg_logprob < unlikely
        if poor and o.no_speech_threshold is not None:
            if result.no_speech_prob > o.no_speech_threshold:
                return True  # silence
        return not poor and (repetitive is None or result.compression_ratio <= repetitive)

    def _silent(self, result: DecodingResult) -> bool:
        o = self.options
        if o.no_speech_threshold is None or result.no_speech_prob <= o.no_speech_threshold:
            return False
        return o.logprob_threshold is None or result.avg_logprob <= o.logprob_threshold

    def _segment(
        self, piece: tuple[float, float, list[int]], result: DecodingResult, seek: int
    ) -> Segment:
        start, end, tokens = piece
        begin = seek / FRAMES_PER_SECOND
        return Segment(
            id=0,
            seek=seek,
            start=begin + start,
            end=begin + end,
            text=self.tokenizer.decode([t for t in tokens if t < self.tokenizer.eot]),
            tokens=tokens,
            temperature=result.temperature,
            avg_logprob=result.avg_logprob,
            compression_ratio=result.compression_ratio,
            no_speech_prob=result.no_speech_prob,
        )

    def _add_words(self, context: Context, segments: list[Segment], seek: int, size: int) -> None:
        sequence = self.tokenizer.sequence(self.language, self.decoding.get("task", "transcribe"))

        def attend(text: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
            frames = size * self.model.config.n_audio_ctx // N_FRAMES
            begin = [*sequence, self.tokenizer.no_timestamps]
            return context.rows(1).align(begin, text, self.tokenizer.eot, frames)

        o = self.options
        timing.add_words(
            segments, attend, self.tokenizer, self.language,
            o.prepend_punctuations, o.append_punctuations, self.last_speech,
        )  # fmt: skip

    def _keep(self, segments: Sequence[Segment], timeline: vad.Timeline) -> None:
        """Take in segments that say something, in the recording's own time."""
        for segment in segments:
            if not says_something(segment):
                continue
            kept = replace(segment, id=len(self.segments), **self._placed(segment, timeline))
            kept.seek = round(timeline.original(segment.seek / FRAMES_PER_SECOND) * 100)
            if segment.words is not None:
                kept.words = [
                    replace(word, **self._placed(word, timeline)) for word in segment.words
                ]
            self.segments.append(kept)
            if self.on_segment:
                self.on_segment(kept)

    def _placed(self, item: Any, timeline: vad.Timeline) -> dict[str, float]:
        """Start and end in the recording's time; nothing ends after the audio does."""
        times = {"start": timeline.original(item.start), "end": timeline.original(item.end, True)}
        return {key: min(time, self.recording.duration) for key, time in times.items()}

    def _tell(self, seconds: float) -> None:
        if self.progress:
            self.progress(min(seconds, self.recording.duration), self.recording.duration)


def cut(
    tokens: Sequence[int], begin: int, size: int, token_s: float
) -> tuple[list[tuple[float, float, list[int]]], int]:
    """Cut a window's tokens at its timestamps; return the pieces and how many frames are done.

    A piece is (start, end, tokens), in seconds of the window. Two timestamps in a row end one piece
    and begin the next; what comes after the last such pair is left to the next window, unless the
    text ends with a single timestamp: then, as without any pair, the window of `size` frames is
    done. `begin` is the id of timestamp 0, `token_s` the seconds between two timestamps.
    """
    stamps = [token >= begin for token in tokens]
    cuts = [n for n in range(1, len(tokens)) if stamps[n - 1] and stamps[n]]
    whole = ends_whole(tokens, begin)
    if not cuts:
        last = next((t - begin for t in reversed(tokens) if t >= begin), 0)
        end = last * token_s if last else size / FRAMES_PER_SECOND
        return [(0.0, end, list(tokens))], size
    cuts += [len(tokens)] * whole
    pieces = [
        ((tokens[a] - begin) * token_s, (tokens[b - 1] - begin) * token_s, list(tokens[a:b]))
        for a, b in itertools.pairwise([0, *cuts])
    ]
    done = round((tokens[cuts[-1] - 1] - begin) * token_s * FRAMES_PER_SECOND)
    return pieces, size if whole else done


def ends_whole(tokens: Sequence[int], begin: int) -> bool:
    """Whether a single timestamp ends the text, which says that the window holds no more."""
    return len(tokens) > 1 and tokens[-1] >= begin > tokens[-2]


def says_something(segment: Segment) -> bool:
    """Whether a segment has text and lasts for a time."""
    return segment.start != segment.end and bool(segment.text.strip())


def _window(mel: np.ndarray) -> np.ndarray:
    """Frames (n_mels, up to 3000) with zeros behind them, as the model was trained."""
    return np.pad(mel, ((0, 0), (0, N_FRAMES - mel.shape[1])))


def _common(a: Sequence[Clip], b: Sequence[Clip]) -> list[Clip]:
    """The frames that are in both lists of clips."""
    both = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return sorted(clip for clip in both if clip[0] < clip[1])
