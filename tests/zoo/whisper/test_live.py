"""A stream is cut into utterances, and each is transcribed once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.zoo.whisper.test_vad import loudness, noise, silence, speechlike
from zoo.errors import UserError
from zoo.whisper import live
from zoo.whisper.audio import load_audio
from zoo.whisper.live import Utterances, transcribe_live
from zoo.whisper.transcript import Segment, Transcript, Word

DATA = Path(__file__).parent / "data"


def pcm(samples: np.ndarray) -> bytes:
    return np.round(samples * 32767).astype("<i2").tobytes()


def cut(samples: np.ndarray, chunk: int = 3201) -> list[tuple[float, np.ndarray]]:
    """All utterances of a stream that comes in chunks of so many bytes."""
    utterances, found, data = Utterances(), [], pcm(samples)
    for at in range(0, len(data), chunk):
        utterances.add(data[at : at + chunk])
        while part := utterances.take():
            found.append(part)
    while part := utterances.take(ended=True):
        found.append(part)
    assert len(utterances.samples) == 0
    return found


def energy(samples: np.ndarray) -> float:
    return float(np.square(samples.astype(np.float64)).sum())


def test_speech_between_pauses_is_cut_into_utterances_in_their_places():
    bursts = [speechlike(1.5), speechlike(3), speechlike(0.5)]
    samples = np.concatenate(
        [silence(2), bursts[0], silence(1.5), bursts[1], silence(2), bursts[2], silence(1)]
    )
    samples += noise(len(samples), -60)
    found = cut(samples)
    assert [second for second, _ in found] == pytest.approx([1.7, 4.7, 9.7], abs=0.1)
    for (_, part), burst in zip(found, bursts, strict=True):
        assert len(part) / 16000 == pytest.approx(len(burst) / 16000 + 0.6, abs=0.2)
        assert energy(part) == pytest.approx(energy(burst), rel=0.05)  # all of it, only it


@pytest.mark.parametrize("chunk", [320, 4097, 10_000_000])
def test_no_sample_comes_twice_and_no_speech_is_lost(chunk):
    first, second = (load_audio(DATA / f"austen-{n}.wav") for n in ("0870", "0890"))
    third = load_audio(DATA / "jfk.flac")
    samples = np.concatenate([first, silence(1), second, silence(3), third, third])
    samples += noise(len(samples), -65)
    found = cut(samples, chunk)
    ends = 0
    for second, part in found:
        begin = round(second * 16000)
        assert begin >= ends, "twice"
        assert np.abs(part - samples[begin : begin + len(part)]).max() < 1e-4  # 16 bits
        ends = begin + len(part)
    assert sum(energy(part) for _, part in found) > 0.999 * energy(samples)


def test_utterances_that_pile_up_come_together_in_windows_of_30_s():
    samples = np.concatenate([np.concatenate([speechlike(4), silence(2)]) for _ in range(12)])
    samples += noise(len(samples), -60)
    slow, fast = cut(samples, 10_000_000), cut(samples)
    assert len(fast) == 12 and len(slow) == 3
    assert all(len(part) <= 480000 for _, part in slow)


def test_speech_without_a_pause_is_cut_after_30_s_where_it_is_quietest():
    samples = speechlike(70)
    samples[24 * 16000 : 24 * 16000 + 4000] = 0  # a quarter of a second
    samples += noise(len(samples), -60)
    found = cut(samples)
    assert found[1][0] == pytest.approx(24.1, abs=0.2)
    assert all(len(part) <= 480000 for _, part in found)
    assert sum(len(part) for _, part in found) == pytest.approx(len(samples), abs=8000)


def test_silence_and_steady_noise_give_nothing_and_are_not_kept():
    for samples in (silence(100), noise(1_600_000, -40)):
        utterances = Utterances()
        for at in range(0, len(samples), 16000):
            utterances.add(pcm(samples[at : at + 16000]))
            assert utterances.take() is None
            assert len(utterances.samples) <= 32000
        assert utterances.take(ended=True) is None
        assert utterances.duration == pytest.approx(100)


def test_an_empty_stream_and_half_a_sample():
    assert cut(np.zeros(0, np.float32)) == []
    utterances = Utterances()
    utterances.add(b"\x01")
    assert utterances.take() is None and utterances.take(ended=True) is None


# --- with a model --------------------------------------------------------------------------------


class Echo:
    """Says how many seconds each piece of sound lasts."""

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def transcribe(self, samples: np.ndarray, **options) -> Transcript:
        self.calls.append(options)
        seconds = len(samples) / 16000
        words = [Word(" s", 0.25, 0.5, 1.0)]
        said = Segment(0, 0, 0.0, seconds, f" {seconds:.0f} s", [], 0.0, 0.0, 1.0, 0.0, words)
        return Transcript(said.text, "fr", [said], seconds)


def sends(data: bytes, chunk: int = 10_000, ends: bool = True):
    @contextlib.contextmanager
    def source(put):
        for at in range(0, len(data), chunk):
            put(data[at : at + chunk])
        if ends:
            put(None)
        yield

    return source


def stream() -> np.ndarray:
    """Two utterances that don't fit into one window of 30 s."""
    samples = np.concatenate([silence(1), speechlike(2), silence(2), speechlike(27), silence(1)])
    return samples + noise(len(samples), -60)


def test_segments_are_moved_to_their_place_in_the_stream():
    model, seen = Echo(), []
    whole = transcribe_live(model, sends(pcm(stream())), seen.append, beam_size=2)
    assert whole.segments == seen and whole.duration == pytest.approx(33)
    assert whole.text == " 3 s 28 s"
    assert [s.id for s in seen] == [0, 1]
    assert [s.start for s in seen] == pytest.approx([0.7, 4.7], abs=0.1)
    assert seen[1].words[0].start == seen[1].start + 0.25
    assert seen[1].seek == round(100 * seen[1].start)
    # the language of the first words is kept
    assert model.calls == [{"beam_size": 2}, {"beam_size": 2, "language": "fr"}]
    assert whole.language == "fr"


def test_a_stream_without_speech_is_an_empty_transcript():
    whole = transcribe_live(Echo(), sends(pcm(silence(3))), pytest.fail)
    assert (whole.text, whole.segments, whole.duration) == ("", [], 3.0)


def test_ctrl_c_ends_the_stream_and_what_was_heard_is_transcribed():
    usual = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    whole = transcribe_live(Echo(), sends(pcm(stream()), ends=False), lambda _: None)
    assert len(whole.segments) == 2
    assert signal.getsignal(signal.SIGINT) is usual


def test_a_pipe_is_read_while_it_lasts():
    script = (
        "from tests.zoo.whisper.test_live import Echo, live\n"
        "show = lambda segment: print(segment.text, flush=True)\n"
        "live.transcribe_live(Echo(), live.stdin_pcm, show)\n"
    )
    command = [sys.executable, "-c", script]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": DATA.parents[3]}
    with subprocess.Popen(command, **options) as process:
        half = pcm(stream())[: 2 * 16000 * 5]
        process.stdin.write(half)
        process.stdin.flush()
        assert process.stdout.readline() == b" 3 s\n"  # before the stream has ended
        process.stdin.write(pcm(stream())[len(half) :])
        process.stdin.close()
        assert process.stdout.read() == b" 28 s\n"
    assert process.returncode == 0


def test_without_sounddevice_a_line_tells_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(UserError, match="pip install sounddevice"):
        with live.microphone(lambda _: None):
            pass


def test_the_microphone_delivers_what_it_hears(monkeypatch, capsys):
    class Stream:
        def __init__(self, samplerate, channels, dtype, callback):
            assert (samplerate, channels, dtype) == (16000, 1, "int16")
            self.callback = callback

        def __enter__(self):
            self.callback(memoryview(b"\1\0\2\0"), 2, None, None)

        def __exit__(self, *_):
            pass

    fake = type(sys)("sounddevice")
    fake.RawInputStream, fake.PortAudioError = Stream, type("PortAudioError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "sounddevice", fake)
    got = []
    with live.microphone(got.append):
        pass
    assert got == [b"\1\0\2\0"]

    def broken(**_):
        raise fake.PortAudioError("no default input device")

    fake.RawInputStream = broken
    with pytest.raises(UserError, match="no default input device"):
        with live.microphone(got.append):
            pass


def test_loudness_is_shared_with_recordings():
    from zoo.whisper.audio import loudness as ours

    np.testing.assert_allclose(ours(stream()), loudness(stream()), atol=1e-3)
