"""Sound as Whisper hears it: files to 16 kHz samples, samples to log-mel frames of 10 ms."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, BinaryIO

import av
import numpy as np

from engine import Tensor, default_device, program
from zoo.cli import note, one_line
from zoo.errors import UserError

SAMPLE_RATE = 16000
N_FFT = 400
HOP = 160
WINDOW_S = 30  # what the network hears at once
N_SAMPLES = WINDOW_S * SAMPLE_RATE
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
N_FRAMES = N_SAMPLES // HOP
BLOCK = 500  # frames per run of the mel program
REACH = N_FFT // 2  # samples that a frame sees on either side of its middle
BINS = N_FFT // 2 + 1
RATES = range(1000, 1_000_000)  # Hz; others are a damaged header's, and might never end
QUIET = 1e-10  # the power that counts as silence
LOUDEST = 1e9  # samples are from -1 to 1, but any scale will do whose power float32 can hold
_KIND = attrgetter("sample_rate", "layout.name", "format.name")  # of a frame
Source = Any  # a path, "-" for stdin, an open binary file, or an array of samples at 16 kHz


class AudioError(UserError):
    """A recording that can't be read; names the file."""


def load_audio(source: Source) -> np.ndarray:
    """All samples of a recording, (n,) float32 from -1 to 1, 16 kHz mono; raises AudioError."""
    return np.concatenate(list(read_audio(source)))


def read_audio(source: Source) -> Iterator[np.ndarray]:
    """Samples (n,) float32 at 16 kHz, mono, in pieces of 30 s; the last may be shorter.

    A file is decoded and resampled by FFmpeg (through PyAV) to 16 bits, as openai/whisper does,
    whose samples these are. Arrays: float, or int16 which is divided by 32768; the channels of a
    2-D one, its shorter axis, are averaged. Raises AudioError, or OSError for a file that can't
    be opened.
    """
    if hasattr(source, "__array__"):
        yield from _pieces([_from_array(np.asarray(source))], N_SAMPLES)
        return
    path = getattr(source, "name", "the stream") if hasattr(source, "read") else source
    name, empty = "stdin" if source == "-" else str(path), True
    with ExitStack() as stack:
        for piece in _pieces(_decoded(_opened(source, stack), name), N_SAMPLES):
            yield piece.astype(np.float32) / 32768
            empty = False
    if empty:
        raise AudioError(f"{name}: holds no sound")


def _pieces(parts: Iterable[np.ndarray], size: int, overlap: int = 0) -> Iterator[np.ndarray]:
    """The samples of all parts in pieces of `size`, the last one shorter; neighbours overlap."""
    held, count, step = [], 0, size - overlap
    for part in parts:
        held.append(part)
        count += len(part)
        if count >= size:
            joined = np.concatenate(held)
            whole = (count - overlap) // step * step
            yield from (joined[i : i + size] for i in range(0, whole, step))
            held, count = [joined[whole:]], count - whole
    if count:
        yield np.concatenate(held)


def _from_array(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind != "f" and array.dtype != np.int16:
        raise AudioError(f"samples are float or int16 (at 16 kHz), not {array.dtype}")
    if array.ndim not in (1, 2) or not array.size:
        raise AudioError(f"samples are a non-empty array of 1 or 2 axes, not {[*array.shape]}")
    scale = np.float32(32768 if array.dtype == np.int16 else 1)
    if array.ndim == 2:
        array = array.mean(int(np.argmin(array.shape)), dtype=np.float64)
    with np.errstate(over="ignore"):  # to infinity
        array = np.ascontiguousarray(array, np.float32) / scale
    if not max(array.max(), -array.min()) <= LOUDEST:
        raise AudioError(f"samples hold infinities or NaN, or numbers beyond {LOUDEST:.0e}")
    return array


def _opened(source: Source, stack: ExitStack) -> BinaryIO:
    """A file that can seek: MP4 keeps its table of contents at the end, pipes are copied."""
    if source == "-":
        source = sys.stdin.buffer
    elif not hasattr(source, "read"):
        if not isinstance(source, (str, os.PathLike)) or "\0" in str(source):
            raise AudioError(f"a path, an open file or an array is expected, got {source!r:.99}")
        # Opened here: FFmpeg would take "http:…" and the like for an address.
        source = stack.enter_context(open(source, "rb"))
    if source.seekable():
        return source
    copy = stack.enter_context(tempfile.TemporaryFile())
    while part := source.read(1 << 20):
        copy.write(part)
    copy.seek(0)
    return copy


def _decoded(file: BinaryIO, name: str) -> Iterator[np.ndarray]:
    """A file's sound as int16 samples, 16 kHz mono; its format may change on the way."""
    av.logging.set_level(None)  # what FFmpeg has to say is said here, in one line
    try:
        # A list of files (ffconcat, m3u8, sdp) could name any file or address: none is opened.
        alone = {"protocol_whitelist": "none"}
        with av.open(file, "r", metadata_errors="ignore", options=alone) as container:
            for _, alike in groupby(_frames(container, name), _KIND):
                resampler = av.AudioResampler("s16", "mono", SAMPLE_RATE)
                for frame in chain(alike, [None]):  # None: what is on its way
                    yield from (x.to_ndarray().reshape(-1) for x in resampler.resample(frame))
    except av.error.FFmpegError as error:
        text = one_line(error.strerror or error)
        raise AudioError(f"{name}: no audio that can be read ({text})") from None


def _frames(container: Any, name: str) -> Iterator[Any]:
    """Frames of the best audio stream; damaged packets are left out."""
    stream = container.streams.best("audio")
    if stream is None:
        raise AudioError(f"{name}: has no audio")
    stream.thread_type = "NONE"  # errors then belong to their packets
    packets, good, bad = container.demux(stream), 0, 0
    while True:
        try:
            frames = next(packets).decode()  # also after an error of its own
        except StopIteration:
            break
        except av.error.FFmpegError:
            frames, bad = [], bad + 1
        sound = [frame for frame in frames if frame.sample_rate in RATES]
        good, bad = good + len(sound), bad + len(frames) - len(sound)
        yield from sound
    if good and bad:
        note(f"({name} is damaged; what could be decoded is used)")


@dataclass
class Recording:
    """A recording's log-mel frames of 10 ms with 30 s of silence behind them, and its loudness."""

    mel: np.ndarray  # (n_mels, frames + 3000) float32
    loudness: np.ndarray  # (frames,) float32, dB below full scale
    samples: int

    @property
    def frames(self) -> int:
        """Whole frames of sound."""
        return self.samples // HOP

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.samples / SAMPLE_RATE


def record(source: Source, n_mels: int, device: str | None = None) -> Recording:
    """Read a recording in one pass that keeps no samples, only what is computed from them.

    Raises as read_audio.
    """
    counts, levels = [], []

    def heard() -> Iterator[np.ndarray]:
        for piece in read_audio(source):
            if not counts:  # mirrored at the begin, so that frames centre; the end is silence
                yield np.pad(piece, (0, REACH))[REACH:0:-1]
            counts.append(len(piece))
            levels.append(loudness(piece))
            yield piece
        yield np.zeros(REACH + N_FFT, np.float32)

    powers = list(_powers(heard(), n_mels, device))
    mel = _normalised(powers, (sum(counts) + N_SAMPLES) // HOP)
    return Recording(mel, np.concatenate(levels), sum(counts))


def loudness(samples: np.ndarray) -> np.ndarray:
    """dB below full scale of each whole frame of 10 ms: (n,) -> (n // 160,) float32."""
    frames = samples[: len(samples) // HOP * HOP].reshape(-1, HOP)
    return 10 * np.log10(np.square(frames).mean(1) + np.float32(QUIET))


def log_mel(
    audio: np.ndarray, n_mels: int = 80, padding: int = 0, device: str | None = None
) -> np.ndarray:
    """Log-mel of samples (n,) at 16 kHz with `padding` zeros behind: (n_mels, frames) float32.

    frames = (n + padding) // 160, and at least 1: fewer than 201 samples get zeros behind them.
    As openai/whisper's log_mel_spectrogram: log10 of the power in triangular bands, at most 8
    below the loudest, plus 4, divided by 4.
    """
    samples = _from_array(np.asarray(audio))
    frames = max(1, (len(samples) + padding) // HOP)
    zeros = max(min(padding, N_FFT), REACH + 1 - len(samples))  # no frame sees more of them
    centred = np.pad(np.pad(samples, (0, zeros)), REACH, mode="reflect")
    return _normalised(list(_powers([centred], n_mels, device)), frames)


def _powers(parts: Iterable[np.ndarray], n_mels: int, device: str | None) -> Iterator[np.ndarray]:
    """log10 of mel power, (n_mels, 500) at a time, of samples with 200 more at either end."""
    device = device or default_device()
    run, size = _program(n_mels, device), (BLOCK + 2) * HOP
    for piece in _pieces(parts, size, 2 * HOP):
        rows = np.pad(piece, (0, size - len(piece))).reshape(-1, HOP)
        yield np.array(run(Tensor(rows, device=device)).numpy())


def _normalised(blocks: list[np.ndarray], frames: int) -> np.ndarray:
    """So many frames of log-mel, silent behind the blocks, as the network takes them."""
    mel = np.full((len(blocks[0]), frames), np.log10(np.float32(QUIET)))
    for i, block in enumerate(blocks):
        at = slice(i * BLOCK, (i + 1) * BLOCK)
        mel[:, at] = block[:, : mel[:, at].shape[1]]
    np.maximum(mel, mel.max() - 8, out=mel)
    mel += 4
    mel /= 4
    return mel


@cache
def _program(n_mels: int, device: str) -> Callable:
    """Samples in rows, (BLOCK + 2, 160) -> log10 of mel power, (n_mels, BLOCK).

    Frame i is row i, row i + 1 and half of row i + 2: its spectrum is a sum of three products,
    with the rows of one windowed Fourier basis.
    """
    angle = 2 * np.pi * (np.arange(N_FFT)[:, None] * np.arange(BINS) % N_FFT) / N_FFT
    window = np.sin(np.pi * np.arange(N_FFT) / N_FFT)[:, None] ** 2  # periodic Hann
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1) * window
    basis = Tensor.from_numpy(table.astype(np.float32), device)  # (400, 2 * 201)
    bands = Tensor.from_numpy(mel_filters(n_mels), device)  # (n_mels, 201)

    def frames(rows: Tensor) -> Tensor:
        spectrum = rows[:BLOCK] @ basis[:HOP]
        spectrum = spectrum + rows[1 : BLOCK + 1] @ basis[HOP : 2 * HOP]
        spectrum = spectrum + rows[2:, : N_FFT - 2 * HOP] @ basis[2 * HOP :]
        power = spectrum[:, :BINS].square() + spectrum[:, BINS:].square()
        mel = bands @ power.transpose()
        return mel.maximum(QUIET).log2() * float(np.log10(2))

    return program(frames, precision="f32")


@cache
def mel_filters(n_mels: int) -> np.ndarray:
    """Triangular bands over the 201 frequencies, (n_mels, 201) float32, each of area 1 per Hz.

    Slaney's mel scale (Auditory Toolbox, 1998), as librosa.filters.mel: linear to 1 kHz at
    15 mel, then a factor of 6.4 every 27.
    """
    top = 15 + 27 * np.log(SAMPLE_RATE / 2 / 1000) / np.log(6.4)
    mel = np.linspace(0, top, n_mels + 2)
    edges = np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))  # Hz
    low, middle, high = (edges[i : i + n_mels, None] for i in range(3))
    hertz = np.arange(BINS) * SAMPLE_RATE / N_FFT
    rising, falling = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
    bands = np.maximum(0, np.minimum(rising, falling)) * (2 / (high - low))
    return bands.astype(np.float32)
