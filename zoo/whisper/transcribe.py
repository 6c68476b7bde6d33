"""A whole recording: window after window, each decoded with what was said before in mind.

Source: Radford et al. 2022, sections 3.4 and 4.5; the rules by which windows move on are
openai/whisper's (transcribe.py). Frames are of 10 ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from zoo.whisper import timing, vad
from zoo.whisper.audio import FRAMES_PER_SECOND, N_FRAMES, WINDOW_S, Recording
from zoo.whisper.context import Context, Network
from zoo.whisper.decode import Decoder, DecodingResult, decode
from zoo.whisper.options import Clip, DecodingOptions, TranscribeOptions
from zoo.whisper.tokenizer import Tokenizer
from zoo.whisper.transcript import Segment

LONGEST = 4 * N_FRAMES  # of what is worked through side by side: text comes in order, so not late
REPEATED = 8  # tokens, some six words: more than a turn of phrase
FACTS = ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob")  # of a window
HOT = 0.5  # text drawn at a higher temperature is no prompt for what follows


@dataclass(eq=False)
class Strand:
    """A stretch of sound that is worked through from `seek` to `end`, frames of its own `mel`."""

    mel: np.ndarray  # (n_mels, frames)
    timeline: vad.Timeline  # from its time to the recording's
    seek: int
    end: int
    said: list[int]  # tokens of its text so far that may be a prompt
    nothing: int = 0  # fewer frames at its end hold no speech
    last_speech: float = 0.0  # seconds
    found: list[Segment] = field(default_factory=list)  # not handed out yet

    @property
    def done(self) -> bool:
        return self.seek >= self.end

    @property
    def size(self) -> int:
        """Frames of the window from `seek` on."""
        return min(N_FRAMES, self.end - self.seek)

    @property
    def begin(self) -> float:
        """Where that window begins, in seconds."""
        return self.seek / FRAMES_PER_SECOND


@dataclass
class Run:
    """One recording on its way to a transcript."""

    network: Network
    tokenizer: Tokenizer
    recording: Recording
    options: TranscribeOptions
    on_segment: Callable[[Segment], None] | None = None
    progress: Callable[[float, float], None] | None = None
    language: str = "en"

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.options.seed or 0)
        self.segments: list[Segment] = []
        prompt = self.options.initial_prompt
        self.prompt = self.tokenizer.encode(" " + prompt.strip()) if prompt else []
        self.as_if_said = [] if self.options.carry_initial_prompt else self.prompt
        # Seconds of audio in a position of the encoder's output, which timestamps count in.
        self.position_s = N_FRAMES / self.network.config.n_audio_ctx / FRAMES_PER_SECOND
        self.opened: list[Strand] = []  # begun, and not all of it handed out
        self.asked = self.clips = self.options.clips(self.recording.frames)
        batch = self.options.batch_size
        if self.options.vad or batch > 1:
            self.clips = _common(self.asked, vad.speech(self.recording.loudness))
        self.together = [self.clips]  # what is said in each is one text
        if batch > 1:
            share = -(-sum(end - start for start, end in self.clips) // batch)
            length = min(max(share, N_FRAMES), LONGEST)
            self.together = vad.windows(self.clips, self.recording.loudness, length)

    def strands(self) -> Iterator[Strand]:
        """What is worked through: clips as they are, all that is spoken, or windows of that."""
        if not self.options.vad and self.options.batch_size == 1:
            frames = self.recording.frames
            timeline = vad.Timeline([(0, frames)])
            strand = Strand(self.recording.mel[:, :frames], timeline, 0, 0, [*self.as_if_said])
            for seek, end in self.clips:  # each goes on with the text of the one before
                strand = replace(strand, seek=seek, end=end, found=[])
                yield strand
            return
        for clips in self.together:
            timeline = vad.Timeline(clips)
            mel = timeline.condense(self.recording.mel)
            yield Strand(mel, timeline, 0, mel.shape[1], [*self.as_if_said], vad.ROOM)

    def work(self) -> None:
        """Work through all strands, several side by side; what they say is handed out in order."""
        strands, alone = self.strands(), self.network.context(1)
        if len(self.together) > 1:
            self._work_side_by_side(strands, alone)
        else:
            for strand in self._turns(strands):
                alone.listen(self._features(strand))
                self._take(alone, strand, self._decoded(alone, strand))
                self._hand_out()
        self._hand_out()

    def _work_side_by_side(self, strands: Iterator[Strand], alone: Context) -> None:
        """Keep a context's windows busy; what isn't good at once is decoded again, alone."""
        count = self.options.batch_size
        context = self.network.context(count)
        options = self._options(self.options.temperatures[0], self.prompt)
        decoder = Decoder(context, self.tokenizer, options, self.random)
        turns = [self._turns(strands) for _ in range(count)]
        busy: dict[int, tuple[Strand, np.ndarray]] = {}
        while True:
            for window in set(range(count)) - busy.keys():
                if strand := next(turns[window], None):
                    busy[window] = strand, self._features(strand)
                    context.listen(busy[window][1], window)
                    decoder.begin(window)
            if not busy:
                return
            for window, result in decoder.step().items():
                strand, features = busy.pop(window)
                is_good = self._is_good(result)
                if not is_good or self.options.word_timestamps:
                    alone.listen(features)
                if not is_good:
                    result = self._decoded(alone, strand, result)
                self._take(alone, strand, result)
            self._hand_out()

    def _turns(self, strands: Iterator[Strand]) -> Iterator[Strand]:
        """One strand after another, each until it is done; windows that are mute are passed over.

        What it gives has to be moved on before the next is asked for.
        """
        for strand in strands:
            self.opened.append(strand)
            while not strand.done:
                if self._is_mute(strand):
                    strand.seek += strand.size
                else:
                    yield strand

    def _features(self, strand: Strand) -> np.ndarray:
        """What the encoder hears in a strand's window."""
        mel = strand.mel[:, strand.seek : strand.seek + strand.size]
        return self.network.encode(mel, quick=self.options.batch_size > 1)

    def _is_mute(self, strand: Strand) -> bool:
        """Whether nothing is said in the window for certain: the model hears things (" you", with a
        good probability) in digital silence, and stories in a steady tone."""
        end = strand.timeline.original(strand.begin + strand.size / FRAMES_PER_SECOND, True)
        ends = (strand.timeline.original(strand.begin), end)
        first, last = (round(seconds * FRAMES_PER_SECOND) for seconds in ends)
        return vad.is_steady(self.recording.loudness[first:last])

    def _take(self, context: Context, strand: Strand, result: DecodingResult) -> None:
        """Take in what a window says, and move on to the next."""
        seek, size = strand.seek, strand.size
        if self._is_silent(result):
            strand.seek += size
            return
        pieces, ahead = cut(result.tokens, self.tokenizer.timestamp_begin, size, self.position_s)
        after, segments, facts = seek + ahead, [], [getattr(result, name) for name in FACTS]
        for start, end, tokens in pieces:
            text = self.tokenizer.decode([t for t in tokens if t < self.tokenizer.eot])
            times = strand.begin + start, strand.begin + end
            segments.append(Segment(0, seek, *times, text, tokens, *facts))
        if self.options.word_timestamps:
            self._add_words(context, segments, strand)
            after = self._after_words(segments, result.tokens, strand, after)
        segments = [s for s in segments if s.start != s.end and s.text.strip()]
        strand.seek = strand.end if strand.end - after < strand.nothing else after
        strand.found += segments
        strand.said += [token for segment in segments for token in segment.tokens]
        if not self.options.condition_on_previous_text or result.temperature > HOT:
            strand.said.clear()

    def _options(self, temperature: float, prompt: list[int]) -> DecodingOptions:
        return self.options.at(temperature, language=self.language, prompt=prompt)

    def _decoded(
        self, context: Context, strand: Strand, tried: DecodingResult | None = None
    ) -> DecodingResult:
        """The text of the context's one window, at the first temperature that gives a good one.

        `tried` is what the first of them gave, if it has been tried.
        """
        result, prompt = tried, self._prompt(strand)
        for temperature in self.options.temperatures[tried is not None :]:
            options = self._options(temperature, prompt)
            result = decode(context, self.tokenizer, options, self.random)
            if self._repeats(result.tokens, prompt):
                options = self._options(temperature, self.prompt)
                result = decode(context, self.tokenizer, options, self.random)
            if self._is_good(result):
                break
        return result

    def _repeats(self, tokens: Sequence[int], prompt: Sequence[int]) -> bool:
        """Whether a text says at length what the prompt said: told what came before, the model may
        go round in circles, and miss what is new."""
        if not self.options.repetition_guard or len(prompt) == len(self.prompt):
            return False
        eot = self.tokenizer.eot
        new, old = ([token for token in some if token < eot] for some in (tokens, prompt))
        said = {tuple(old[n : n + REPEATED]) for n in range(len(old) - REPEATED + 1)}
        return any(tuple(new[n : n + REPEATED]) in said for n in range(len(new)))

    def _prompt(self, strand: Strand) -> list[int]:
        """What was said before, as far as it may be a prompt."""
        if not self.options.carry_initial_prompt:
            return list(strand.said)
        room = self.network.config.n_text_ctx // 2 - 1 - len(self.prompt)
        return self.prompt + (strand.said[-room:] if room > 0 else [])

    def _is_good(self, result: DecodingResult) -> bool:
        least, most = self.options.logprob_threshold, self.options.compression_ratio_threshold
        likely = least is None or result.avg_logprob >= least
        fresh = most is None or result.compression_ratio <= most
        return (likely and fresh) or self._is_silent(result)

    def _is_silent(self, result: DecodingResult) -> bool:
        most, least = self.options.no_speech_threshold, self.options.logprob_threshold
        unlikely = least is None or result.avg_logprob <= least
        return most is not None and result.no_speech_prob > most and unlikely

    def _add_words(self, context: Context, segments: list[Segment], strand: Strand) -> None:
        begin = self.tokenizer.sequence(self.language, self.options.task, timestamps=False)
        frames = max(1, strand.size * self.network.config.n_audio_ctx // N_FRAMES)
        attend = partial(context.rows(1).align, begin, eot=self.tokenizer.eot, frames=frames)
        marks = self.options.prepend_punctuations, self.options.append_punctuations
        last = strand.last_speech
        timing.add_words(segments, attend, self.tokenizer, self.language, *marks, last)

    def _after_words(
        self, segments: list[Segment], tokens: list[int], strand: Strand, after: int
    ) -> int:
        """Where the next window begins, now that the words' times are known.

        Takes out of `segments` what is probably made up: odd words between silences.
        """
        seek, begin, size = strand.seek, strand.begin, strand.size
        threshold = self.options.hallucination_silence_threshold
        end = timing.end_of(segments)
        if not ends_whole(tokens, self.tokenizer.timestamp_begin) and end and end > begin:
            after = round(end * FRAMES_PER_SECOND)
            if threshold is not None and begin + WINDOW_S - end <= threshold:
                after = seek + size
        if threshold is not None:
            first = timing.next_with_words(segments)
            if timing.is_anomaly(first) and first.start - begin > threshold:
                segments.clear()  # once more, from where the doubtful words begin
                return seek + round((first.start - begin) * FRAMES_PER_SECOND)
            ends = begin + size / FRAMES_PER_SECOND
            at = timing.first_made_up(segments, strand.last_speech, begin, ends, threshold)
            if at is not None:
                made_up = segments[at]
                after = round(max(begin + 1, made_up.start) * FRAMES_PER_SECOND)
                if strand.mel.shape[1] / FRAMES_PER_SECOND - made_up.end < threshold:
                    after = strand.end
                del segments[at:]
        end = timing.end_of(segments)
        strand.last_speech = strand.last_speech if end is None else end
        return max(after, seek + 1)

    def _hand_out(self) -> None:
        """Give out what strands have found, in order, in the recording's own time."""
        while self.opened:
            strand = self.opened[0]
            for segment in strand.found:
                number, duration = len(self.segments), self.recording.duration
                self.segments.append(strand.timeline.segment(segment, number, duration))
                if self.on_segment:
                    self.on_segment(self.segments[-1])
            strand.found = []
            if self.progress:
                seconds = min(strand.seek, strand.end) / FRAMES_PER_SECOND
                reached = strand.timeline.original(seconds, True) * FRAMES_PER_SECOND
                done = sum(max(0, min(end, reached) - start) for start, end in self.asked)
                total = sum(end - start for start, end in self.asked)
                self.progress(done / FRAMES_PER_SECOND, total / FRAMES_PER_SECOND)
            if not strand.done:
                return
            self.opened.pop(0)


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


def _common(a: Sequence[Clip], b: Sequence[Clip]) -> list[Clip]:
    """The frames that are in both lists of clips."""
    both = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return sorted(clip for clip in both if clip[0] < clip[1])
