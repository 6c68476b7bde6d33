"""Transcripts are written as openai/whisper writes them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from weights import WeightError
from zoo.errors import UsageError
from zoo.whisper.transcript import (
    FORMATS,
    Layout,
    Segment,
    Transcript,
    Word,
    targets,
    timestamp,
    write,
)

LAYOUTS = [
    Layout(),
    Layout(highlight_words=True),
    Layout(max_line_width=20),
    Layout(max_line_width=20, max_line_count=2),
    Layout(max_line_width=12, max_line_count=1, highlight_words=True),
    Layout(max_line_count=2),
    Layout(max_words_per_line=3),
    Layout(max_words_per_line=2, highlight_words=True),
    Layout(max_words_per_line=2, max_line_width=15, max_line_count=3),
]


def segment(number: int, start: float, end: float, text: str, words=None) -> Segment:
    return Segment(number, 0, start, end, text, [50364, 440, 50414], 0.0, -0.25, 1.5, 0.01, words)


def plain() -> Transcript:
    segments = [
        segment(0, 0.0, 7.6, " And so my fellow Americans,\task not"),
        segment(1, 3661.0, 3662.5, " what --> é 語 \u2028"),
        segment(2, 3700.0004, 3700.9996, ""),
    ]
    return Transcript("".join(s.text for s in segments), "en", segments, 4000.0)


def spoken(seed: int = 0) -> Transcript:
    """Random words, with gaps, pauses over three seconds, words that touch, a silent segment."""
    rng = random.Random(seed)
    now, segments = 0.2, []
    for number in range(12):
        words, first = [], now
        for i in range(0 if number == 5 else rng.randrange(1, 9)):
            name = "".join(rng.choices("abcdeé", k=rng.choice([1, 3, 6, 13]))) + rng.choice(",.  ")
            name = (" " if i or rng.random() < 0.8 else "") + name.rstrip()
            length = rng.choice([0.0, 0.12, 0.4])
            words.append(Word(name, now, round(now + length, 2), 0.5))
            now = round(now + length + rng.choice([0, 0, 0.0004, 0.3, 3.1, 4]), 4)
        text = "".join(word.word for word in words)
        segments.append(segment(number, first, now, text, words))
    return Transcript("".join(s.text for s in segments), "en", segments, now)


def test_txt_is_a_segment_a_line():
    assert FORMATS["txt"](plain(), Layout()) == (
        "And so my fellow Americans,\task not\nwhat --> é 語\n\n"
    )


def test_srt_and_vtt_have_their_timestamps():
    assert FORMATS["srt"](plain(), Layout()) == (
        "1\n00:00:00,000 --> 00:00:07,600\nAnd so my fellow Americans,\task not\n\n"
        "2\n01:01:01,000 --> 01:01:02,500\nwhat -> é 語\n\n"
        "3\n01:01:40,000 --> 01:01:41,000\n\n\n"
    )
    assert FORMATS["vtt"](plain(), Layout()).startswith(
        "WEBVTT\n\n00:00.000 --> 00:07.600\nAnd so my fellow Americans,\task not\n\n"
        "01:01:01.000 --> 01:01:02.500\nwhat -> é 語\n\n"
    )
    assert timestamp(59.9996) == "01:00.000" and timestamp(0, True, ",") == "00:00:00,000"


def test_tsv_is_in_whole_milliseconds_and_has_no_other_tabs():
    assert FORMATS["tsv"](plain(), Layout()) == (
        "start\tend\ttext\n0\t7600\tAnd so my fellow Americans, ask not\n"
        "3661000\t3662500\twhat --> é 語\n3700000\t3701000\t\n"
    )


def test_json_has_openais_keys_in_their_order():
    made = json.loads(FORMATS["json"](plain(), Layout()))
    assert list(made) == ["text", "segments", "language"]
    assert list(made["segments"][0]) == [
        "id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob",
        "compression_ratio", "no_speech_prob",
    ]  # fmt: skip
    worded = json.loads(FORMATS["json"](spoken(), Layout()))["segments"]
    assert list(worded[0]["words"][0]) == ["word", "start", "end", "probability"]
    assert worded[5]["words"] == []
    assert FORMATS["json"](plain(), Layout()).isascii()


def sentence(*words: str) -> Transcript:
    """One segment, a word every half a second, each 0.4 s long."""
    timed = [Word(word, i / 2, i / 2 + 0.4, 1.0) for i, word in enumerate(words)]
    return Transcript("".join(words), "en", [segment(0, 0.0, 9.0, "".join(words), timed)], 9.0)


def texts(transcript: Transcript, **layout) -> list[str]:
    blocks = FORMATS["vtt"](transcript, Layout(**layout)).split("\n\n")[1:-1]
    return [block.split("\n", 1)[1] for block in blocks]


def test_lines_are_broken_and_subtitles_filled():
    said = sentence(" one", " two", " three", " four", " five")
    assert texts(said) == ["one two three four five"]
    assert texts(said, max_words_per_line=2) == ["one two", "three four", "five"]
    assert texts(said, max_line_width=8) == ["one two\nthree\nfour\nfive"]
    assert texts(said, max_line_width=8, max_line_count=2) == ["one two\nthree", "four\nfive"]
    assert texts(said, max_line_count=1) == ["one two three four five"]


def test_highlighted_words_take_their_turns():
    vtt = FORMATS["vtt"](sentence(" Go", " on."), Layout(highlight_words=True))
    assert vtt == (
        "WEBVTT\n\n"
        "00:00.000 --> 00:00.400\n<u>Go</u> on.\n\n"
        "00:00.400 --> 00:00.500\nGo on.\n\n"
        "00:00.500 --> 00:00.900\nGo <u>on.</u>\n\n"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_every_word_appears_once_in_order(layout, seed):
    said = spoken(seed)
    shown = " ".join(texts(said, **{**vars(layout), "highlight_words": False}))
    assert "".join(shown.split()) == "".join(said.text.split())


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_said_is_a_file_all_the_same(name, tmp_path):
    write(Transcript("", "en"), tmp_path / f"silence.{name}")
    expected = {
        "txt": "",
        "srt": "",
        "vtt": "WEBVTT\n\n",
        "tsv": "start\tend\ttext\n",
        "json": '{"text": "", "segments": [], "language": "en"}',
    }
    assert (tmp_path / f"silence.{name}").read_bytes().decode() == expected[name]


# --- files ---------------------------------------------------------------------------------------


def test_files_have_the_stem_of_their_source(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert targets(["a/talk.one.wav", "-", "b"], folder, ["txt", "srt"]) == {
        "a/talk.one.wav": [folder / "talk.one.txt", folder / "talk.one.srt"],
        "-": [folder / "stdin.txt", folder / "stdin.srt"],
        "b": [folder / "b.txt", folder / "b.srt"],
    }
    assert list(folder.iterdir()) == []


def test_two_sources_of_one_stem_are_refused_before_any_work(tmp_path):
    with pytest.raises(UsageError, match=r"a/x\.wav and b/x\.mp3 would both be written to .*x\.t"):
        targets(["a/x.wav", "b/x.mp3"], tmp_path / "out", ["txt"])
    assert not (tmp_path / "out").exists()


def test_a_folder_that_takes_no_files_is_told_first(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        targets(["x.wav"], tmp_path / "file", ["txt"])
    with pytest.raises(OSError):
        targets(["x.wav"], Path("/proc/self/fdinfo"), ["txt"])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    path.write_text("old")
    write(plain(), path)
    assert path.read_text(encoding="utf-8") == FORMATS["txt"](plain(), Layout())

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    before = path.read_bytes()
    with pytest.raises(WeightError):
        write(spoken(), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# --- openai/whisper ------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_files_equal_openai_whispers(tmp_path, layout, name):
    from whisper.utils import get_writer

    for i, said in enumerate([plain(), Transcript("", "en"), *map(spoken, range(20))]):
        write(said, tmp_path / f"ours{i}.{name}", layout)
        result = json.loads(FORMATS["json"](said, layout))
        get_writer(name, str(tmp_path))(result, f"theirs{i}.wav", vars(layout))
        ours, theirs = (tmp_path / f"{who}{i}.{name}" for who in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()
