"""Live transcription: a stream of samples is cut at silences, each part transcribed as it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from zoo.cli import note, one_line
from zoo.errors import UserError
from zoo.whisper import vad
from zoo.whisper.audio import FRAMES_PER_SECOND, HOP, N_FRAMES, SAMPLE_RATE, loudness
from zoo.whisper.transcript import Segment, Transcript
from zoo.whisper.whisper import Whisper

PAUSE, PAD = 600, 300  # ms: a pause that ends an utterance, and how much of it goes along
UNSURE = 100  # frames of silence that are kept: a word may just have begun in them

Put = Callable[["bytes | None"], None]  # takes 16-bit samples, or None at the end
Source = Callable[[Put], AbstractContextManager[None]]


class Utterances:
    """Cuts a growing stream into utterances; no sample is given out twice, no speech is lost.

    Utterances that pile up, because transcribing takes longer than speaking, come together as far
    as they fit into one window of 30 s.
    """

    def __init__(self) -> None:
        self.pcm = bytearray()
        self.begin = 0  # the frame of the stream where it begins
        self._past = np.zeros(0, np.float32)  # the loudness of what lies before

    @property
    def samples(self) -> np.ndarray:
        """What came and was neither given out nor dropped; half a sample waits for the rest."""
        return np.frombuffer(self.pcm, "<i2", len(self.pcm) // 2).astype(np.float32) / 32768

    @property
    def duration(self) -> float:
        """Seconds of the whole stream so far."""
        return self.begin / FRAMES_PER_SECOND + len(self.pcm) // 2 / SAMPLE_RATE

    def add(self, pcm: bytes) -> None:
        """More of the stream: 16 kHz mono, 16 bits a sample, little-endian."""
        self.pcm += pcm

    def take(self, ended: bool = False) -> tuple[float, np.ndarray] | None:
        """The next utterance that is over: its beginning in seconds, and its samples.

        None if there is none yet; once the stream has `ended`, none any more.
        """
        if ended:
            self.add(bytes(-len(self.pcm) % (2 * HOP)))
        samples = self.samples
        level, past = loudness(samples), len(self._past)
        heard = np.concatenate([self._past, level])
        found = vad.speech(heard, min_silence_duration_ms=PAUSE, speech_pad_ms=PAD)
        clips = [(max(start - past, 0), end - past) for start, end in found if end > past]
        if not clips:
            self._drop(len(level) if ended else max(0, len(level) - UNSURE), level)
            return None
        start, latest = clips[0][0], len(level) - (PAUSE - PAD) // vad.FRAME_MS
        over = [end for _, end in clips if ended or end <= latest]
        fit = [end for end in over if end - start <= N_FRAMES]
        if not fit and clips[0][1] - start <= N_FRAMES:
            return None
        end = fit[-1] if fit else vad.windows(clips[:1], level)[0][0][1]
        second = (self.begin + start) / FRAMES_PER_SECOND
        self._drop(end, level)
        return second, samples[start * HOP : end * HOP]

    def _drop(self, frames: int, level: np.ndarray) -> None:
        self._past = np.concatenate([self._past, level[:frames]])[-N_FRAMES:]
        del self.pcm[: 2 * frames * HOP]
        self.begin += frames


def _utterances(came: SimpleQueue, stream: Utterances) -> Iterator[tuple[float, np.ndarray]]:
    """Utterances as they end, up to the end of what comes; all there is of it is taken in first."""
    for pcm in iter(came.get, None):
        stream.add(pcm)
        if came.empty():
            yield from iter(stream.take, None)
    yield from iter(partial(stream.take, ended=True), None)


def transcribe_live(
    model: Whisper,
    source: Source,
    on_segment: Callable[[Segment], None],
    on_language: Callable[[str], None] | None = None,
    **options: Any,
) -> Transcript:
    """Transcribe a stream as it comes, in the main thread; on_segment gets what was just said.

    It ends with the stream, or with Ctrl-C; what was heard by then is transcribed (a second Ctrl-C
    prevents it). Without a language in the options the first words tell it, and on_language gets
    its code. Options as those of Whisper.transcribe.
    """
    whole, stream = Transcript("", options.get("language") or "en"), Utterances()
    came: SimpleQueue[bytes | None] = SimpleQueue()
    with _interrupt(lambda: came.put(None)), source(came.put):
        for second, samples in _utterances(came, stream):
            part = model.transcribe(samples, **options)
            if part.segments:
                if on_language and options.get("language") is None:
                    on_language(part.language)
                options["language"] = whole.language = part.language
            begin = round(second * FRAMES_PER_SECOND)
            timeline = vad.Timeline([(begin, begin + N_FRAMES)])
            for segment in part.segments:
                whole.segments.append(timeline.segment(segment, len(whole.segments)))
                on_segment(whole.segments[-1])
    whole.text = "".join(segment.text for segment in whole.segments)
    whole.duration = stream.duration
    return whole


@contextlib.contextmanager
def _interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`, a second one is as usual."""
    usual = signal.getsignal(signal.SIGINT)

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        stop()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


@contextlib.contextmanager
def stdin_pcm(put: Put) -> Iterator[None]:
    """What a pipe sends: 16 kHz mono, 16 bits a sample, little-endian."""

    def read() -> None:
        try:
            # Not by sys.stdin: at exit, Python would wait for a thread that reads from it.
            while data := os.read(0, 1 << 16):
                put(data)
        finally:
            put(None)

    # Reading goes on while an utterance is transcribed, so that the sender need not wait.
    threading.Thread(target=read, daemon=True).start()
    yield


@contextlib.contextmanager
def microphone(put: Put) -> Iterator[None]:
    """What the default microphone hears. UserError without one, or without sounddevice."""
    try:
        import sounddevice
    except (ImportError, OSError) as error:  # OSError: it found no PortAudio
        raise UserError(
            f"--mic needs sounddevice and PortAudio ({one_line(error)}): pip install sounddevice"
        ) from None
    try:
        form = {"samplerate": SAMPLE_RATE, "channels": 1, "dtype": "int16"}
        with sounddevice.RawInputStream(**form, callback=lambda data, *_: put(bytes(data))):
            note("(listening; Ctrl-C ends)")
            yield
    except sounddevice.PortAudioError as error:
        raise UserError(f"the microphone can't be used: {one_line(error)}") from None
