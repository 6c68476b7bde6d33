"""The real tiny.en and base on real speech: tokens, times and texts of openai/whisper in float32.

Pinned from openai-whisper 20250625 with torch 2.13 (greedy, and beam_size=5), fp16=False.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import zoo.whisper
from weights import FetchError, resolve
from zoo.errors import UsageError, UserError
from zoo.whisper import audio, transcribe
from zoo.whisper.decode import Decoder, decode
from zoo.whisper.options import DecodingOptions

DATA = Path(__file__).parent / "data"
FILES = ("jfk.flac", "austen-0870.wav", "austen-0890.wav")
TIME = 0.02  # seconds: one step of a timestamp
LOG = 5e-4  # of avg_logprob: logits within 0.01 of the reference's, averaged over 20 tokens
DASHWOOD = (
    " And Mr. John Dashwood had then leisure to consider how much there might be prudently in his"
    " power to do for them."
)
SELFISH = " Unless to be rather cold-hearted and rather selfish is to be ill-disposed."

# model, file, beam_size -> segments (start, end, text), avg_logprob, no_speech_prob
GREEDY: dict[tuple[str, str], tuple[list, float, float]] = {
    ("tiny.en", "jfk.flac"): (
        [
            (0.0, 7.74, " And so my fellow Americans ask not what your country can do for you"),
            (7.74, 10.74, " ask what you can do for your country"),
        ],
        -0.3775,
        0.0628,
    ),
    ("tiny.en", "austen-0870.wav"): ([(0.0, 7.0, DASHWOOD)], -0.2229, 0.051),
    ("tiny.en", "austen-0890.wav"): ([(0.0, 5.0, SELFISH)], -0.3396, 0.0191),
    ("base", "jfk.flac"): (
        [
            (0.0, 7.6, " And so my fellow Americans ask not what your country can do for you,"),
            (7.6, 10.6, " ask what you can do for your country."),
        ],
        -0.3966,
        0.0921,
    ),
    ("base", "austen-0870.wav"): ([(0.0, 7.0, DASHWOOD)], -0.142, 0.0072),
    ("base", "austen-0890.wav"): ([(0.0, 5.0, SELFISH)], -0.2875, 0.0182),
}
BEAM: dict[tuple[str, str], tuple[list, float, float]] = GREEDY | {
    ("tiny.en", "jfk.flac"): (
        [
            (0.0, 8.0, " And so, my fellow Americans ask not what your country can do for you"),
            (8.0, 11.0, " ask what you can do for your country."),
        ],
        -0.29,
        0.0628,
    ),
    ("base", "jfk.flac"): (
        [
            (0.0, 8.0, " And so, my fellow Americans, ask not what your country can do for you,"),
            (8.0, 11.0, " ask what you can do for your country."),
        ],
        -0.2864,
        0.0921,
    ),
}
IDS = [
    50363, 843, 523, 616, 5891, 3399, 1265, 407, 644, 534, 1499, 460, 466, 329, 345, 50750, 50750,
    1265, 644, 345, 460, 466, 329, 534, 1499, 50900,
]  # fmt: skip

WORDS = [
    (" And", 0.0, 0.76, 0.692),
    (" so", 0.76, 1.06, 0.973),
    (" my", 1.06, 1.46, 0.571),
    (" fellow", 1.46, 1.76, 0.999),
    (" Americans", 1.76, 2.26, 0.878),
    (" ask", 2.26, 3.88, 0.648),
    (" not", 3.88, 4.52, 0.844),
    (" what", 4.52, 5.7, 0.889),
    (" your", 5.7, 6.02, 0.986),
    (" country", 6.02, 6.36, 0.997),
    (" can", 6.36, 6.76, 0.995),
    (" do", 6.76, 7.02, 0.998),
    (" for", 7.02, 7.26, 0.99),
    (" you", 7.26, 8.06, 0.991),
    (" ask", 8.06, 8.66, 0.291),
    (" what", 8.66, 8.94, 0.988),
    (" you", 8.94, 9.28, 0.993),
    (" can", 9.28, 9.5, 0.996),
    (" do", 9.5, 9.72, 0.998),
    (" for", 9.72, 9.92, 0.998),
    (" your", 9.92, 10.22, 0.994),
    (" country", 10.22, 10.5, 0.999),
]

_loaded: dict[tuple[str, str], zoo.whisper.Whisper] = {}


def model(name: str, dtype: str = "auto") -> zoo.whisper.Whisper:
    """One model at a time is kept, loaded once."""
    if (name, dtype) not in _loaded:
        try:
            path = resolve(f"whisper-{name}")
        except FetchError as error:
            pytest.skip(f"needs whisper-{name}: {error}")
        _loaded.clear()
        _loaded[name, dtype] = zoo.whisper.load(path, dtype=dtype)
    return _loaded[name, dtype]


NAMES = ("tiny.en", pytest.param("base", marks=pytest.mark.slow))


@pytest.mark.parametrize("dtype", ["auto", "f32"])
@pytest.mark.parametrize("name", NAMES)
def test_texts_and_times_are_the_references(name: str, dtype: str) -> None:
    for beam_size, pinned in ((None, GREEDY), (5, BEAM)):
        for (of, file), (segments, avg_logprob, no_speech) in pinned.items():
            if of != name:
                continue
            got = model(name, dtype).transcribe(DATA / file, language="en", beam_size=beam_size)
            assert [s.text for s in got.segments] == [text for *_, text in segments]
            assert got.text == "".join(text for *_, text in segments)
            for segment, (start, end, _) in zip(got.segments, segments):
                assert segment.start == pytest.approx(start, abs=TIME)
                assert segment.end == pytest.approx(end, abs=TIME)
                assert segment.avg_logprob == pytest.approx(avg_logprob, abs=LOG)
                assert segment.no_speech_prob == pytest.approx(no_speech, abs=LOG)


@pytest.mark.parametrize("dtype", ["auto", "f32"])
def test_tokens_are_the_references(dtype: str) -> None:
    got = model("tiny.en", dtype).transcribe(DATA / "jfk.flac")
    assert [token for segment in got.segments for token in segment.tokens] == IDS
    assert got.language == "en"
    assert got.duration == pytest.approx(11.0)


@pytest.mark.parametrize("dtype", ["auto", "f32"])
def test_words_are_where_the_reference_finds_them(dtype: str) -> None:
    got = model("tiny.en", dtype).transcribe(DATA / "jfk.flac", word_timestamps=True)
    words = [word for segment in got.segments for word in segment.words]
    assert [word.word for word in words] == [text for text, *_ in WORDS]
    for word, (_, start, end, probability) in zip(words, WORDS):
        assert word.start == pytest.approx(start, abs=0.021)  # one step of the alignment
        assert word.end == pytest.approx(end, abs=0.021)
        assert word.probability == pytest.approx(probability, abs=3e-3)  # as logits within 0.01


@pytest.mark.parametrize("beam_size", [None, 2])
def test_a_window_says_the_same_beside_others_that_come_and_go(beam_size: int | None) -> None:
    whisper = model("tiny.en", "f32")
    options = DecodingOptions(language="en", beam_size=beam_size)
    random = np.random.default_rng(0)
    clips = [whisper.encode(audio.log_mel(audio.load_audio(DATA / f))) for f in FILES]
    alone = []
    for clip in clips:
        context = whisper.network.context(1)
        context.listen(clip)
        alone.append(decode(context, whisper.tokenizer, options, random).tokens)
    context = whisper.network.context(2)
    decoder = Decoder(context, whisper.tokenizer, options, random)
    waiting, said = [2, 0, 1, 0, 2, 1], []
    busy: dict[int, int] = {}
    for step in itertools.count():
        free = {0, 1} - busy.keys()
        if waiting and free and step % 7 == 0:  # the second begins where the first is under way
            window = free.pop()
            busy[window] = waiting.pop(0)
            context.listen(clips[busy[window]], window)
            decoder.begin(window)
        for window, result in decoder.step().items():
            clip = busy.pop(window)
            assert result.tokens == alone[clip]
            said.append(clip)
        if not busy and not waiting:
            break
    assert sorted(said) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"vad": True}])
def test_windows_cut_at_silences_say_the_same(options: dict) -> None:
    """Three recordings with 25 s of silence between: every sentence found where it is."""
    parts = [audio.load_audio(DATA / f) for f in FILES]
    gap = np.random.default_rng(0).normal(size=25 * 16000).astype(np.float32) * 1e-4
    starts = np.cumsum([0, *(len(part) + len(gap) for part in parts)])[:3] / 16000
    samples = np.concatenate([x for part in parts for x in (part, gap)])
    found: list = []
    got = model("tiny.en").transcribe(samples, on_segment=found.append, **options)
    assert got.segments == found
    for start, words in zip(starts, ("what you can do for your country", DASHWOOD, SELFISH)):
        segment = next(s for s in got.segments if words.strip(" .") in s.text)
        assert start - 0.5 <= segment.start <= start + 8.5
        assert segment.end <= start + 11.5


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"vad": True}, {"beam_size": 5}])
def test_silence_says_nothing(options: dict) -> None:
    for samples in (np.zeros(30 * 16000, np.float32), np.zeros(1600, np.float32)):
        got = model("tiny.en").transcribe(samples, **options)
        assert (got.text, got.segments) == ("", [])


def test_a_steady_sound_says_nothing() -> None:
    time = np.arange(20 * 16000) / 16000
    tone = np.sin(2 * np.pi * 440 * time) + np.sin(2 * np.pi * 554.4 * time)
    noise = np.random.default_rng(0).normal(size=len(time)) * 0.1
    for samples in (tone * 0.3, noise):
        assert model("tiny.en").transcribe(samples.astype(np.float32)).text == ""


def test_no_segment_ends_after_the_recording() -> None:
    samples = audio.load_audio(DATA / "jfk.flac")[: int(9.3 * 16000)]
    got = model("tiny.en").transcribe(samples)
    assert got.segments[-1].end <= 9.3
    assert "ask not what your country can do for you" in got.text


def test_clips_are_all_that_is_heard() -> None:
    got = model("tiny.en").transcribe(DATA / "jfk.flac", clip_timestamps="7.6,11")
    assert got.text.strip(" .").endswith("what you can do for your country")
    assert "fellow" not in got.text
    assert all(7.6 <= s.start < s.end <= 11.0 for s in got.segments)


def test_what_is_forgotten_in_one_clip_is_no_prompt_of_the_next(monkeypatch) -> None:
    prompts: list = []

    def noted(context, tokenizer, options, random):
        prompts.append(list(options.prompt))
        return decode(context, tokenizer, options, random)

    monkeypatch.setattr(transcribe, "decode", noted)
    for condition in (False, True):
        options = {"clip_timestamps": "0,7.6,7.6,11", "condition_on_previous_text": condition}
        assert model("tiny.en").transcribe(DATA / "jfk.flac", temperature=0.0, **options).text
    assert [bool(prompt) for prompt in prompts] == [False, False, False, True]


def test_a_prompt_changes_the_spelling() -> None:
    """A name is written as it was written before."""
    for name in ("Jon Dashwoode", "John Dashwood"):
        options = {"initial_prompt": f"A story of Mr. {name} and his family. Mr. {name} was rich."}
        got = model("tiny.en").transcribe(DATA / "austen-0870.wav", **options)
        assert f"Mr. {name} had then leisure" in got.text


def test_without_timestamps_the_text_is_one_segment() -> None:
    got = model("tiny.en").transcribe(DATA / "austen-0870.wav", without_timestamps=True)
    assert [(s.start, s.text) for s in got.segments] == [(0.0, DASHWOOD)]
    assert got.segments[0].end == pytest.approx(got.duration, abs=0.02)


def test_progress_goes_up_to_the_end() -> None:
    told: list[tuple[float, float]] = []
    model("tiny.en").transcribe(DATA / "jfk.flac", progress=lambda *each: told.append(each))
    assert told == sorted(told)
    assert told[-1] == (11.0, 11.0)


def test_progress_counts_the_clips_that_are_transcribed() -> None:
    told: list[tuple[float, float]] = []
    options = {"clip_timestamps": "0,1,7.5,11", "progress": lambda *each: told.append(each)}
    model("tiny.en").transcribe(DATA / "jfk.flac", **options)
    assert told == sorted(told)
    assert (told[0], told[-1]) == ((1.0, 4.5), (4.5, 4.5))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"beams": 5}, "beams"),
        ({"temperature": ()}, "temperature"),
        ({"temperature": ("a",)}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 10**9}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"initial_prompt": [1, 2]}, "initial_prompt"),
        ({"append_punctuations": None}, "append_punctuations"),
        ({"logprob_threshold": "a"}, "logprob_threshold"),
        ({"prefix": ["a"]}, "prefix"),
        ({"prefix": [-1]}, "prefix"),
        ({"temperature": (0.0, -1.0)}, "temperature"),
        ({"language": "klingon"}, "klingon"),
        ({"suppress_tokens": "a,b"}, "suppress_tokens"),
        ({"clip_timestamps": "5,1"}, "clip_timestamps"),
    ],
)
def test_wrong_options_are_refused(options: dict, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        model("tiny.en").transcribe(DATA / "austen-0890.wav", **options)


def test_options_may_be_numpy_arrays() -> None:
    given = {"temperature": np.array([0, 0.2]), "suppress_tokens": np.array([-1])}
    found = model("tiny.en").transcribe(DATA / "austen-0890.wav", beam_size=np.int64(2), **given)
    plain = model("tiny.en").transcribe(DATA / "austen-0890.wav", beam_size=2)
    assert found.text == plain.text


def test_where_no_token_may_come_the_text_ends() -> None:
    every = range(model("tiny.en").config.n_vocab)
    found = model("tiny.en").transcribe(DATA / "austen-0890.wav", suppress_tokens=every)
    assert found.text == ""


def test_the_longest_prompt_and_prefix_fit() -> None:
    given = {"prefix": "word " * 500, "initial_prompt": "word " * 500}
    model("tiny.en").transcribe(DATA / "austen-0890.wav", temperature=0.0, **given)


def test_damaged_weights_are_one_line(monkeypatch) -> None:
    damaged = model("tiny.en")
    sound = np.full((1500, damaged.config.n_audio_state), np.nan, np.float32)
    monkeypatch.setattr(damaged.network, "encode", lambda *_, **__: sound)
    with pytest.raises(UserError, match="damaged"):
        damaged.transcribe(DATA / "austen-0890.wav")


def test_a_sentence_said_again_and_again_is_heard_each_time() -> None:
    """Told what came before, the model alone goes round in circles and misses what is new."""
    files = ("jfk.flac", "austen-0870.wav", "austen-0890.wav")
    parts = [audio.load_audio(DATA / file) for file in files]
    gap = np.random.default_rng(0).normal(size=16000).astype(np.float32) * 1e-4
    samples = np.concatenate([x for _ in range(3) for part in parts for x in (part, gap)])
    got = model("tiny.en").transcribe(samples)
    for words in ("my fellow Americans", "John Dashwood", "rather selfish"):
        assert got.text.count(words) == 3
    missed = model("tiny.en").transcribe(samples, repetition_guard=False)
    assert any(missed.text.count(w) < 3 for w in ("my fellow Americans", "rather selfish"))
