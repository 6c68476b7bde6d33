"""Where there is speech, judged by loudness alone; windows of it, and the way back to the file.

Speech rises well above the noise of its recording, for syllables at a time; noise keeps its level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from zoo.whisper.transcript import Segment

Clip = tuple[int, int]  # first frame and the one after the last, of 10 ms each
FRAME_MS = 10
DIGITAL_SILENCE = -80.0  # dB; quieter frames were cut or faded, and don't show the room's noise
STEADY = 6.0  # dB; what stays within that is noise: syllables vary by 15 and more
SYLLABLE, PHONE = 21, 5  # frames
ACROSS = 0.8  # seconds, twice what clips are padded with
ROOM = 60  # frames: what clips are padded with, and a bit of the last sound


def speech(
    loudness: np.ndarray,
    threshold_db: float = 10,
    min_speech_duration_ms: int = 100,
    min_silence_duration_ms: int = 2000,
    speech_pad_ms: int = 400,
) -> list[Clip]:
    """The clips with speech of a recording whose frames are so loud (dB, 10 ms each).

    The noise floor is the level that a tenth of the frames stay below. A clip begins where the
    sound is threshold_db above it (or a third of the way to the loudest syllable, in noisy
    recordings) and lasts until it has been below half of that for min_silence_duration_ms.
    What is loud for less than min_speech_duration_ms is a click. The rest gets speech_pad_ms on
    either side, but no more than half of what is between two. Names as faster-whisper's VadOptions;
    the durations are chosen so that speech is never cut for a short pause or a faint consonant.
    """
    sounding = loudness[loudness > DIGITAL_SILENCE]
    if not len(sounding):
        return []
    level = _smooth(loudness, PHONE)
    floor = float(np.percentile(sounding, 10))
    above = float(_smooth(loudness, SYLLABLE).max()) - floor
    if above < STEADY:
        return []
    margin = min(threshold_db, above / 3)
    rising = np.pad(level > floor + margin / 2, 1).astype(np.int8)
    loud = level > floor + margin
    clips: list[Clip] = []
    for start, end in np.flatnonzero(np.diff(rising)).reshape(-1, 2).tolist():
        if not loud[start:end].any():
            continue
        if clips and (start - clips[-1][1]) * FRAME_MS < min_silence_duration_ms:
            clips[-1] = (clips[-1][0], end)
        else:
            clips.append((start, end))
    spoken = [(a, b) for a, b in clips if loud[a:b].sum() * FRAME_MS >= min_speech_duration_ms]
    pad, between = speech_pad_ms // FRAME_MS, pairwise(spoken)
    middles = [0, *((before[1] + after[0] + 1) // 2 for before, after in between), len(loudness)]
    return [
        (max(start - pad, low), min(end + pad, high))
        for (start, end), (low, high) in zip(spoken, pairwise(middles))
    ]


def is_steady(loudness: np.ndarray) -> bool:
    """Whether frames are digital silence, or two seconds and more of one unvarying sound."""
    if (loudness <= DIGITAL_SILENCE).all():
        return True
    level = _smooth(loudness, PHONE)[PHONE:-PHONE]
    return len(level) > 200 and bool(level.max() - level.min() < STEADY)


def windows(clips: Sequence[Clip], loudness: np.ndarray, limit: int = 3000) -> list[list[Clip]]:
    """Clips packed, in order, into windows of at most `limit` frames together.

    A longer clip is cut where it is quietest in the last third of a window.
    """
    quiet = _smooth(loudness, SYLLABLE)
    packed: list[list[Clip]] = []
    room = 0
    for start, end in clips:
        while start < end:
            at = end
            if end - start > limit:
                late = start + max(1, limit * 2 // 3)
                at = late + int(np.argmin(quiet[late : start + limit + 1]))
            if at - start > room:
                packed.append([])
                room = limit
            packed[-1].append((start, at))
            room -= at - start
            start = at
    return packed


class Timeline:
    """Clips put one after another, and the way back from their common time to the file's."""

    def __init__(self, clips: Sequence[Clip]) -> None:
        self.clips = list(clips)
        # Of each clip, in condensed frames.
        self._begins = np.cumsum([0, *(end - start for start, end in self.clips)])

    def condense(self, mel: np.ndarray) -> np.ndarray:
        """The clips' frames of mel (n_mels, frames): (n_mels, frames of all clips)."""
        parts = [mel[:, :0], *(mel[:, start:end] for start, end in self.clips)]
        return np.concatenate(parts, axis=1)

    def original(self, seconds: float, end: bool = False) -> float:
        """Condensed seconds as seconds of the file.

        Where two clips meet it is the beginning of the second one, or with `end` (when something
        ends there) the end of the first.
        """
        if not self.clips:
            return seconds
        frame = seconds * 1000 / FRAME_MS
        place = np.searchsorted(self._begins, frame - 1e-6 if end else frame + 1e-6) - 1
        i = int(np.clip(place, 0, len(self.clips) - 1))
        return seconds + float(self.clips[i][0] - self._begins[i]) * FRAME_MS / 1000

    def placed(self, start: float, end: float) -> tuple[float, float]:
        """What lasts from start to end, in seconds of the file.

        Where it reaches a little way into one clip more, that is an error at a cut: it is left out.
        """
        inner = self._begins[1:-1] * FRAME_MS / 1000  # where clips meet
        for cut in inner:
            if start < cut < end and cut - start <= min(ACROSS, (end - start) / 2):
                start = float(cut)
        for cut in inner[::-1]:
            if start < cut < end and end - cut <= min(ACROSS, (end - start) / 2):
                end = float(cut)
        return self.original(start), self.original(end, True)

    def segment(self, segment: Segment, number: int, duration: float = np.inf) -> Segment:
        """A segment and its words in the file's time, of which nothing ends after `duration`."""

        def placed(item: Any) -> Any:
            start, end = self.placed(item.start, item.end)
            return replace(item, start=min(start, end, duration), end=min(end, duration))

        seek = round(self.original(segment.seek * FRAME_MS / 1000) * 1000 / FRAME_MS)
        words = segment.words and [placed(word) for word in segment.words]
        return replace(placed(segment), id=number, seek=seek, words=words)


def _smooth(loudness: np.ndarray, width: int) -> np.ndarray:
    """dB of the power averaged over `width` frames around each."""
    power = 10 ** (np.asarray(loudness, np.float64) / 10)
    total = np.cumsum(np.pad(power, (width // 2 + 1, width // 2), "edge"))
    return 10 * np.log10(np.maximum((total[width:] - total[:-width]) / width, 1e-12))
