"""The command `transcribe`, with a model that needs no weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import zoo.whisper
from zoo.whisper.__main__ import main, transcribe_main
from zoo.whisper.audio import load_audio
from zoo.whisper.transcript import Segment, Transcript, Word

DATA = Path(__file__).parent / "data"
JFK, AUSTEN, BAD = (str(DATA / name) for name in ("jfk.flac", "austen-0870.wav", "bad.wav"))


class Fake:
    """Writes down how long a file is, in two segments; keeps the options it was given."""

    def __init__(self, multilingual: bool = True) -> None:
        self.tokenizer = SimpleNamespace(multilingual=multilingual)
        self.loaded: tuple = ()
        self.calls: list[tuple[object, dict]] = []

    def load(self, *args, **flags) -> Fake:
        self.loaded = (*args, *flags.values())
        return self

    def transcribe(
        self, source, on_segment=None, progress=None, on_language=None, **options
    ) -> Transcript:
        if on_language and options["language"] is None and self.tokenizer.multilingual:
            on_language("en")
        self.calls.append((source, options))
        length = len(load_audio(source)) / 16000
        words = [Word(" so", 0.0, 1.0, 1.0)] if options["word_timestamps"] else None
        texts = (" It lasts", f" {length:.1f} seconds.")
        segments = [
            Segment(i, 0, i * 1.0, i + 1.0, text, [], 0.0, -0.1, 1.0, 0.0, words)
            for i, text in enumerate(texts)
        ]
        for segment in segments:
            on_segment(segment)
            progress(segment.end, length)
        return Transcript("".join(texts), options["language"] or "en", segments, length)


@pytest.fixture
def model(monkeypatch) -> Fake:
    fake = Fake()
    # not setattr, which would first look up the real one
    monkeypatch.setitem(vars(zoo.whisper), "load", fake.load)
    return fake


def usage(capsys, *args: str) -> str:
    """The one line of a wrong command line, without the name in front."""
    with pytest.raises(SystemExit) as caught:
        transcribe_main(list(args))
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("transcribe: ")
    assert err.endswith("; see transcribe --help\n")
    return err


# --- what goes where -----------------------------------------------------------------------------


def test_the_text_goes_to_stdout_and_nothing_else(model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert transcribe_main([JFK]) == 0
    out, err = capsys.readouterr()
    assert out == "It lasts\n11.0 seconds.\n"
    assert err == "(language: English, as it seems; --language sets it)\n"
    assert list(tmp_path.iterdir()) == []
    assert main(["transcribe", JFK, "--language", "English"]) == 0
    assert capsys.readouterr() == (out, "")


def test_verbose_prints_times_and_quiet_prints_nothing(model, capsys):
    for flags in (["--verbose"], ["--verbose", "True"], ["--verbose=true"]):
        assert transcribe_main([JFK, "--language", "en", *flags]) == 0
        assert capsys.readouterr() == (
            "[00:00.000 --> 00:01.000]  It lasts\n[00:01.000 --> 00:02.000]  11.0 seconds.\n",
            "",
        )
    assert transcribe_main(["--verbose", "False", JFK, "--language", "en"]) == 0
    assert capsys.readouterr() == ("", "")


def test_files_are_written_where_they_are_asked_for(model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert transcribe_main([JFK, "-f", "srt"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["jfk.srt"]
    assert Path("jfk.srt").read_text().startswith("1\n00:00:00,000 --> 00:00:01,000\nIt lasts\n\n")
    assert transcribe_main([JFK, AUSTEN, "--output_dir", "all of them"]) == 0
    names = sorted(p.name for p in Path("all of them").iterdir())
    formats = ("json", "srt", "tsv", "txt", "vtt")
    assert names == [f"{stem}.{f}" for stem in ("austen-0870", "jfk") for f in formats]
    assert json.loads(Path("all of them/jfk.json").read_text())["language"] == "en"


def test_word_options_reach_the_subtitles(model, capsys, tmp_path):
    flags = ["--word_timestamps", "True", "--highlight_words", "True", "-f", "vtt"]
    assert transcribe_main([JFK, *flags, "-o", str(tmp_path)]) == 0
    assert "<u>so</u>" in (tmp_path / "jfk.vtt").read_text()


# --- several and bad inputs ----------------------------------------------------------------------


def test_a_bad_file_among_good_ones_is_reported_and_the_rest_go_on(model, capsys, tmp_path):
    missing = str(tmp_path / "missing.wav")
    code = transcribe_main([AUSTEN, BAD, missing, JFK, "--language", "en", "-o", str(tmp_path)])
    assert code == 1
    out, err = capsys.readouterr()
    assert out == "It lasts\n7.1 seconds.\n\nIt lasts\n11.0 seconds.\n"
    lines = err.splitlines()
    assert lines[:3] == [
        f"transcribe: {missing}: No such file or directory",
        f"({AUSTEN})",
        f"({BAD})",
    ]
    assert lines[3].startswith(f"transcribe: {BAD}: no audio that can be read")
    assert lines[4:] == [f"({JFK})"]
    assert sorted(p.stem for p in tmp_path.glob("*.txt")) == ["austen-0870", "jfk"]


def test_a_missing_file_is_told_before_a_model_is_loaded(model, capsys):
    assert transcribe_main(["no such file.mp3"]) == 1
    assert capsys.readouterr() == ("", "transcribe: no such file.mp3: No such file or directory\n")
    assert transcribe_main(["zero\0byte"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert model.loaded == ()


def test_two_files_of_one_stem_are_refused_before_any_work(model, capsys, tmp_path):
    other = tmp_path / "jfk.mp3"
    other.touch()
    assert transcribe_main([JFK, str(other), "-o", str(tmp_path)]) == 2
    assert "would both be written to" in capsys.readouterr().err
    assert model.loaded == () and sorted(tmp_path.iterdir()) == [other]


def test_a_folder_that_takes_no_files_is_told_before_any_work(model, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert transcribe_main([JFK, "-o", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"transcribe: {tmp_path / 'file'}: File exists\n"
    assert model.loaded == ()


# --- options -------------------------------------------------------------------------------------


def test_options_and_defaults_are_openai_whispers(model):
    assert transcribe_main([JFK]) == 0
    assert model.loaded == ("base", None, "auto", False)
    assert model.calls == [
        (
            JFK,
            {
                "task": "transcribe",
                "language": None,
                "temperature": (0.0, 0.2, 0.4, pytest.approx(0.6), 0.8, 1.0),
                "beam_size": 5,
                "best_of": 5,
                "patience": None,
                "length_penalty": None,
                "suppress_tokens": "-1",
                "initial_prompt": None,
                "carry_initial_prompt": False,
                "condition_on_previous_text": True,
                "compression_ratio_threshold": 2.4,
                "logprob_threshold": -1.0,
                "no_speech_threshold": 0.6,
                "word_timestamps": False,
                "prepend_punctuations": "\"'“¿([{-",
                "append_punctuations": "\"'.。,，!！?？:：”)]}、",
                "clip_timestamps": "0",
                "hallucination_silence_threshold": None,
                "repetition_guard": True,
                "batch_size": 1,
                "vad": False,
                "seed": None,
            },
        )
    ]


@pytest.mark.parametrize(
    "flags, name, value",
    [
        ("--temperature 0.3 --temperature_increment_on_fallback None", "temperature", (0.3,)),
        ("--temperature 0.7", "temperature", (0.7, pytest.approx(0.9))),
        ("--temperature 1.5", "temperature", (1.5,)),
        ("--beam_size None", "beam_size", None),
        ("--logprob-threshold None", "logprob_threshold", None),
        ("--logprob-threshold -0.5", "logprob_threshold", -0.5),
        ("--language French", "language", "fr"),
        ("--language None", "language", None),
        ("--vad", "vad", True),
        ("--vad False", "vad", False),
        ("--condition_on_previous_text False", "condition_on_previous_text", False),
        ("--clip-timestamps 1.5,2,30", "clip_timestamps", "1.5,2,30"),
        ("--suppress-tokens -1", "suppress_tokens", "-1"),
        ("--suppress-tokens=-1,50", "suppress_tokens", "-1,50"),
        ("--suppress-tokens=", "suppress_tokens", ""),
        ("--task translate", "task", "translate"),
        ("--batch-size 8", "batch_size", 8),
        ("--seed 7", "seed", 7),
        ("--fp16 False --threads 4", "vad", False),
    ],
)
def test_flags_are_options_of_transcribe(model, flags, name, value):
    assert transcribe_main([*flags.split(), JFK]) == 0  # no switch takes the file for its value
    assert model.calls[0][0] == JFK and model.calls[0][1][name] == value


def test_model_flags_go_to_load(model):
    flags = ["--model", "tiny.en", "--dtype", "f32", "--device", "reference", "--tune"]
    assert transcribe_main([JFK, *flags]) == 0
    assert model.loaded == ("tiny.en", "reference", "f32", True)


def test_an_english_model_says_that_it_knows_no_other_language(model, capsys):
    model.tokenizer.multilingual = False
    assert transcribe_main([JFK, "--language", "fr", "--task", "translate"]) == 0
    assert "knows English only" in capsys.readouterr().err
    assert model.calls[0][1]["language"] == "en" and model.calls[0][1]["task"] == "transcribe"


@pytest.mark.parametrize(
    "args, named",
    [
        ([], "AUDIO"),
        ([JFK, "--mic"], "one of them"),
        (["--mic", "--stdin-pcm"], "one of them"),
        ([JFK, "--beam-size", "0"], "--beam-size"),
        ([JFK, "--beam-size", "many"], "--beam-size"),
        ([JFK, "--temperature", "nan"], "--temperature"),
        ([JFK, "--temperature-increment-on-fallback", "0"], "increment"),
        ([JFK, "--output-format", "doc"], "doc"),
        ([JFK, "--task", "sing"], "sing"),
        ([JFK, "--clip-timestamps", "3,x"], "--clip-timestamps"),
        ([JFK, "--clip-timestamps", "3,2"], "don't go up"),
        ([JFK, "--clip-timestamps", ""], "--clip-timestamps"),
        ([JFK, "--suppress-tokens", "a"], "--suppress-tokens"),
        ([JFK, "--vad=maybe"], "True or False"),
        ([JFK, "--language", "Klingon"], "--language"),
        ([JFK, "--highlight-words"], "--highlight-words needs --word-timestamps"),
        ([JFK, "--max_line_width", "20"], "--max-line-width needs --word-timestamps"),
        ([JFK, "--hallucination-silence-threshold", "2"], "needs --word-timestamps"),
        ([JFK, "--patience", "2", "--beam-size", "None"], "--patience needs --beam-size"),
        ([JFK, "--batch-size", "-1"], "--batch-size"),
        ([JFK, "--nonsense"], "--nonsense"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(model, capsys, args, named):
    assert named in usage(capsys, *args)
    assert model.loaded == ()


def test_help_starts_nothing():
    script = (
        "import sys\nfrom zoo.whisper.__main__ import main\n"
        "try:\n    main(['transcribe', '--help'])\n"
        "finally:\n    print(sorted({'numpy', 'engine', 'weights', 'av'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith("[]\n"), run.stderr
    assert "examples:" in run.stdout and "--word-timestamps" in run.stdout
    assert "Haitian Creole (ht)" in run.stdout and "Cantonese (yue)" in run.stdout


def test_model_and_language_have_short_flags(model):
    assert transcribe_main(["-m", "tiny", "-l", "fr", JFK]) == 0
    assert model.loaded[0] == "tiny" and model.calls[0][1]["language"] == "fr"


def test_the_version_is_printed(model, capsys):
    with pytest.raises(SystemExit) as caught:
        transcribe_main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr() == (f"menagerie {zoo.__version__}\n", "")


def test_language_auto_is_found_by_listening(model):
    for flags in (["--language", "auto"], ["--language=Auto"], ["--language", "None"], []):
        assert transcribe_main([JFK, *flags]) == 0
    assert [options["language"] for _, options in model.calls] == [None] * 4


# --- live ----------------------------------------------------------------------------------------


def test_a_live_stream_goes_the_same_ways(model, capsys, monkeypatch, tmp_path):
    from tests.zoo.whisper.test_live import pcm, sends, stream
    from zoo.whisper import live

    monkeypatch.setattr(live, "stdin_pcm", sends(pcm(stream())))
    original = model.transcribe
    monkeypatch.setattr(
        model, "transcribe", lambda x, **o: original(x, print_nothing, print_nothing, **o)
    )
    code = transcribe_main(["--stdin-pcm", "--verbose", "-f", "txt", "-o", str(tmp_path), "--vad"])
    assert code == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "(language: English, as it seems; --language sets it)\n"
    assert len(lines) == 4 and lines[0].startswith("[00:00.") and lines[2].startswith("[00:04.")
    assert (tmp_path / "stdin.txt").read_text().count("\n") == 4
    assert "vad" not in model.calls[0][1] and "clip_timestamps" not in model.calls[0][1]


def print_nothing(*_: object) -> None:
    pass


def test_without_a_microphone_it_is_one_line(model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert transcribe_main(["--mic"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install sounddevice" in err
