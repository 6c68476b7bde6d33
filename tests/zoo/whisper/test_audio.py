"""Files to samples, samples to log-mel."""

from __future__ import annotations

import io
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from zoo.whisper import audio
from zoo.whisper.audio import AudioError, load_audio, log_mel, mel_filters, read_audio, record

DATA = Path(__file__).parent / "data"
JFK, AUSTEN = DATA / "jfk.flac", DATA / "austen-0870.wav"
# Sums of 400 float32 products, beside bands at most 1e-8 of the loudest in power; a step of the
# result is 4 powers of ten. The reference's own distance from float64 on jfk.flac is 4.4e-5.
MEL_ATOL = 1e-4


@pytest.fixture(scope="module")
def jfk() -> np.ndarray:
    return load_audio(JFK)


def sine(seconds: float, rate: int = 16000, hertz: float = 440) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype("f4")


def encoded(samples: np.ndarray, container: str, codec: str, rate: int = 16000) -> io.BytesIO:
    """A file made by PyAV: mono float samples in any codec."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.layout = "mono"
        kind = stream.format.name if stream.codec_context.format else "fltp"
        resampler = av.AudioResampler(kind, "mono", rate)
        frame = av.AudioFrame.from_ndarray(samples[None], "fltp", "mono")
        frame.sample_rate = 16000
        for part in resampler.resample(frame) + resampler.resample(None):
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    file.seek(0)
    return file


def wav(path: Path, samples: np.ndarray, rate: int) -> Path:
    """A PCM file of (n,) or (n, channels): uint8 or int16."""
    with wave.open(str(path), "wb") as out:
        out.setparams((samples[0].size, samples.itemsize, rate, 0, "NONE", ""))
        out.writeframes(samples.tobytes())
    return path


def float64_mel(samples: np.ndarray, n_mels: int) -> np.ndarray:
    """The definition, by NumPy's FFT."""
    padded = np.pad(samples.astype(np.float64), 200, "reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, 400)[::160][:-1]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    log = np.log10(np.maximum(mel_filters(n_mels).astype(np.float64) @ power.T, 1e-10))
    return (np.maximum(log, log.max() - 8) + 4) / 4


# --- log-mel -------------------------------------------------------------------------------------


def test_silence_is_minus_one_and_a_half():
    assert (log_mel(np.zeros(16000, np.float32)) == -1.5).all()


@pytest.mark.parametrize(
    "n_mels, high, low, peak, mean",
    [(80, 1.438204, -0.561796, 11, -0.449421), (128, 1.485354, -0.514646, 18, -0.424144)],
)
def test_a_tone_has_its_known_figures(n_mels, high, low, peak, mean):
    mel = log_mel(sine(1), n_mels)
    assert mel.shape == (n_mels, 100) and mel.dtype == np.float32
    figures = [mel.max(), mel.min(), mel.mean()]
    np.testing.assert_allclose(figures, [high, low, mean], atol=1e-5)  # printed to 1e-6
    assert mel.mean(1).argmax() == peak


@pytest.mark.parametrize("n_mels", [80, 128])
def test_speech_equals_the_definition_in_float64(jfk, n_mels):
    np.testing.assert_allclose(log_mel(jfk, n_mels), float64_mel(jfk, n_mels), atol=MEL_ATOL)


# 79840 + 160 k: around the end of a block of 500 frames
@pytest.mark.parametrize("n", [201, 319, 320, 401, 79839, 79840, 80000, 80001, 80240, 80320])
def test_every_length_gives_n_over_160_frames_as_defined(n):
    noise = np.random.default_rng(n).standard_normal(n).astype(np.float32) * 0.1
    mel = log_mel(noise)
    assert mel.shape == (80, n // 160)
    np.testing.assert_allclose(mel, float64_mel(noise, 80), atol=MEL_ATOL)


@pytest.mark.parametrize("padding", [100, 400, 1000, 480000])
def test_padding_is_of_the_samples(padding):
    noise = np.random.default_rng(0).standard_normal(2345).astype(np.float32)
    expected = float64_mel(np.pad(noise, (0, padding)), 80)
    np.testing.assert_allclose(log_mel(noise, padding=padding), expected, atol=MEL_ATOL)


@pytest.mark.parametrize("n", [1, 159, 200])
def test_fewer_samples_than_half_a_window_are_one_frame(n):
    assert log_mel(sine(1)[:n]).shape == (80, 1)


def test_filters_have_area_one_and_cover_the_scale():
    for n_mels in (80, 128):
        bands = mel_filters(n_mels)
        assert bands.shape == (n_mels, 201) and (bands >= 0).all()
        assert (np.diff(bands.argmax(1)) >= 0).all()
    # a wide triangle's sum over bins of 40 Hz is its area, up to the corners
    np.testing.assert_allclose(mel_filters(80)[60:].sum(1) * 40, 1, atol=0.02)


def test_record_is_the_padded_mel_and_the_loudness_of_every_frame(jfk):
    recording = record(JFK, 80)
    assert recording.samples == 176000 and recording.frames == 1100
    assert recording.duration == 11.0
    np.testing.assert_array_equal(recording.mel, log_mel(jfk, padding=480000))
    power = np.square(jfk.reshape(-1, 160).astype(np.float64)).mean(1)
    np.testing.assert_allclose(recording.loudness, 10 * np.log10(power + 1e-10), atol=1e-3)


def test_a_long_recording_in_pieces_equals_the_whole(jfk):
    long = np.tile(jfk, 6)  # 66 s: three pieces
    pieces = list(read_audio(long))
    assert [len(p) for p in pieces] == [480000, 480000, 96000]
    np.testing.assert_array_equal(np.concatenate(pieces), long)
    recording = record(long[:-77], 80)
    assert recording.loudness.shape == (recording.frames,) == (6599,)
    np.testing.assert_allclose(
        recording.mel[:, :6598], float64_mel(long[:-77], 80)[:, :6598], atol=MEL_ATOL
    )


# --- files ---------------------------------------------------------------------------------------


def test_sixteen_bit_wav_is_read_as_it_is():
    with wave.open(str(AUSTEN)) as file:
        expected = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    samples = load_audio(AUSTEN)
    assert samples.dtype == np.float32
    np.testing.assert_array_equal(samples, expected / np.float32(32768))


def test_flac_at_44100_hz_stereo_is_resampled(jfk):
    assert jfk.shape == (176000,)
    steps = jfk * 32768
    # as the command `ffmpeg -ac 1 -ar 16000`, version 9.0, gives them
    assert (steps.sum(), steps.min(), steps.max(), steps.argmax()) == (79104, -23710, 25648, 11906)


@pytest.mark.parametrize(
    "container, codec, rate",
    [
        ("mp3", "libmp3lame", 16000),
        ("mp4", "aac", 48000),
        ("ogg", "libopus", 48000),
        ("webm", "libopus", 48000),
        ("wav", "adpcm_ima_wav", 22050),
        ("flac", "flac", 44100),
        ("matroska", "pcm_f32le", 11025),
    ],
)
def test_any_container_and_codec(container, codec, rate):
    tone = sine(1)
    samples = load_audio(encoded(tone, container, codec, rate))
    # Codecs add or drop up to two frames of about 1100 samples at the ends.
    assert abs(len(samples) - 16000) < 2400
    middle = samples[4000:12000]
    peak = np.abs(np.fft.rfft(middle)).argmax() * 16000 / len(middle)
    assert peak == pytest.approx(440, abs=2) and abs(middle).max() == pytest.approx(0.5, abs=0.05)


def test_eight_bit_11025_hz_stereo(tmp_path):
    both = np.stack([sine(1, 11025) * 254, np.zeros(11025)], 1)
    samples = load_audio(wav(tmp_path / "low.wav", (both + 128).astype(np.uint8), 11025))
    assert abs(len(samples) - 16000) <= 1
    # half of 254 / 256 of a tone of 0.5, beside silence: the mean of the channels, 8 bits exact
    np.testing.assert_allclose(samples[100:-100], sine(1)[100:-100] * 0.496 * 2, atol=0.02)


def test_arrays_of_floats_and_int16_and_their_channels_averaged():
    ramp = np.arange(-100, 100, dtype=np.int16)
    np.testing.assert_array_equal(load_audio(ramp), ramp / np.float32(32768))
    np.testing.assert_array_equal(load_audio(sine(1).astype(np.float64)), sine(1))
    both = np.stack([sine(1), np.zeros(16000, np.float32)])
    for stereo in (both, both.T):
        np.testing.assert_array_equal(load_audio(stereo), sine(1) / 2)


def test_an_open_file_and_a_name_that_looks_like_an_address(tmp_path, monkeypatch):
    with AUSTEN.open("rb") as file:
        assert len(load_audio(file)) == 113600
    monkeypatch.chdir(tmp_path)
    Path("data:x,y.wav").write_bytes(AUSTEN.read_bytes())
    assert len(load_audio("data:x,y.wav")) == 113600


@pytest.mark.parametrize(
    "content",
    [
        "ffconcat version 1.0\nfile beside.wav\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nbeside.wav\n#EXT-X-ENDLIST\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    ],
    ids=["concat", "hls", "sdp"],
)
def test_a_file_that_names_other_files_or_addresses_opens_none(tmp_path, monkeypatch, content):
    """Otherwise an uploaded file of a line would hand out any sound of the machine."""
    monkeypatch.chdir(tmp_path)
    wav(tmp_path / "beside.wav", (sine(1) * 32767).astype("<i2"), 16000)
    with pytest.raises(AudioError, match="no audio that can be read"):
        load_audio(io.BytesIO(content.encode()))


def test_stdin_may_be_a_pipe_even_for_mp4():
    script = "from zoo.whisper.audio import load_audio; print(len(load_audio('-')))"
    file = encoded(sine(1), "mp4", "aac", 16000)
    run = subprocess.run(
        [sys.executable, "-c", script], input=file.read(), capture_output=True, cwd=DATA.parents[3]
    )
    assert run.returncode == 0, run.stderr
    assert 15000 < int(run.stdout) < 18100


# --- what can't be read --------------------------------------------------------------------------


def failure(source) -> str:
    with pytest.raises(AudioError) as caught:
        load_audio(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name, problem",
    [
        ("bad.wav", "no audio that can be read"),
        ("null.wav", "holds no sound"),
    ],
)
def test_headers_without_samples_are_one_line_that_names_the_file(name, problem, capfd):
    assert failure(DATA / name).startswith(f"{DATA / name}: {problem}")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("content", [b"", b"RIFF", b"This is a text.\n" * 50, bytes(5000)])
def test_what_is_no_sound_at_all(tmp_path, content, capfd):
    file = tmp_path / "notes.wav"
    file.write_bytes(content)
    assert failure(file).startswith(f"{file}: no audio that can be read")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rate", [8000, 16000, 48000])
@pytest.mark.parametrize("count", [1, 5, 100])
def test_a_few_samples_are_sound_or_one_line(tmp_path, rate, count):
    file = wav(tmp_path / "few.wav", np.full(count, 1000, np.int16), rate)
    if rate != 16000 and count < 100:  # fewer than the resampler looks ahead
        assert failure(file) == f"{file}: holds no sound"
    else:
        assert len(load_audio(file)) == pytest.approx(count * 16000 / rate, abs=1)
        assert record(file, 80).mel.shape[0] == 80


@pytest.mark.parametrize("rate", [1, 999, 2**31 - 1])
def test_a_rate_that_no_sound_has_is_not_believed(tmp_path, rate):
    file = wav(tmp_path / "odd.wav", np.full(1000, 1000, np.int16), rate)
    assert failure(file) == f"{file}: holds no sound"  # rather than 16 million samples of it


def test_a_stream_may_change_its_rate_on_the_way():
    both = io.BytesIO()
    for seconds, rate in ((1, 44100), (2, 22050)):  # MP3 has no header that would forbid it
        both.write(encoded(sine(seconds), "mp3", "libmp3lame", rate).read())
    both.seek(0)
    samples = load_audio(both)
    assert 47000 < len(samples) < 50000
    peak = np.abs(np.fft.rfft(samples[24000:40000])).argmax()
    assert peak == pytest.approx(440, abs=2)


def test_a_missing_file_and_a_folder_are_the_systems_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_audio(tmp_path / "none.wav")
    with pytest.raises(OSError):
        load_audio(tmp_path)


def test_a_video_without_sound():
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    file.seek(0)
    assert failure(file) == "the stream: has no audio"


def test_a_file_broken_off_gives_what_there_is_and_a_note(tmp_path, jfk, capfd):
    file = tmp_path / "half.flac"
    content = JFK.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    samples = load_audio(file)
    assert 70000 < len(samples) < 100000
    np.testing.assert_array_equal(samples[:-100], jfk[: len(samples) - 100])
    assert capfd.readouterr() == ("", f"({file} is damaged; what could be decoded is used)\n")


def test_damage_in_the_middle_costs_only_its_packets(tmp_path, jfk):
    content = bytearray(JFK.read_bytes())
    content[500_000:501_000] = bytes(1000)
    file = tmp_path / "scratched.flac"
    file.write_bytes(content)
    samples = load_audio(file)
    assert 160000 < len(samples) <= 176000
    np.testing.assert_array_equal(samples[:70000], jfk[:70000])


@pytest.mark.parametrize("seed", range(20))
def test_scrambled_files_give_samples_or_one_line(seed, capfd):
    rng = np.random.default_rng(seed)
    container, codec = [("mp3", "libmp3lame"), ("mp4", "aac"), ("ogg", "libopus"), ("wav", None)][
        seed % 4
    ]
    content = AUSTEN.read_bytes()[:40000]
    if codec:
        content = encoded(sine(1), container, codec, 48000).read()
    scrambled = np.frombuffer(content, np.uint8).copy()
    at = rng.integers(0, [200, len(content)][seed % 2], 20)
    scrambled[at] = rng.integers(0, 256, 20)
    try:
        assert np.isfinite(load_audio(io.BytesIO(scrambled.tobytes()))).all()
    except AudioError as error:
        assert "\n" not in str(error)
    assert len(capfd.readouterr().err.splitlines()) <= 1


@pytest.mark.parametrize(
    "array, problem",
    [
        (np.array([0, np.nan], np.float32), "infinities or NaN"),
        (np.array([0, -np.inf]), "infinities or NaN"),
        (np.array([0, 1e30], np.float32), "beyond 1e+09"),
        (np.array([0, 1e300]), "beyond 1e+09"),
        (np.zeros(0, np.float32), "non-empty"),
        (np.zeros((2, 3, 4), np.float32), "1 or 2 axes"),
        (np.zeros(5, np.uint8), "float or int16"),
    ],
)
def test_arrays_that_are_no_sound(array, problem):
    assert problem in failure(array)


@pytest.mark.parametrize("source", [None, 5, [0.0] * 5, b"a.wav", "a\0b"])
def test_what_is_neither_path_nor_file_nor_array(source):
    assert "an array is expected" in failure(source)


# --- openai/whisper ------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("padding", [0, 480000])
def test_mel_equals_openai_whisper(jfk, n_mels, padding):
    from whisper.audio import log_mel_spectrogram
    from whisper.audio import mel_filters as their_filters

    theirs = log_mel_spectrogram(jfk, n_mels, padding).numpy()
    np.testing.assert_allclose(log_mel(jfk, n_mels, padding), theirs, atol=MEL_ATOL)
    filters = their_filters("cpu", n_mels).numpy()
    np.testing.assert_allclose(audio.mel_filters(n_mels), filters, atol=1e-6)
