"""The command `transcribe`: text on stdout as it is found, files where they are asked for."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zoo import cli, whisper
from zoo.errors import UserError
from zoo.whisper.languages import LANGUAGES, code_of
from zoo.whisper.transcript import FORMATS, Layout, targets, timestamp, write

_LAYOUT = tuple(Layout.__dataclass_fields__)
PROG = "python -m zoo.whisper"
_EXAMPLES = f"""examples:
  transcribe talk.mp3                         the text, on stdout
  transcribe talk.mp3 -f srt                  also as talk.srt
  transcribe *.m4a -f all -o texts            as files of every format
  transcribe film.mkv --task translate --language French
  transcribe talk.mp3 --word-timestamps --highlight-words -f vtt
  transcribe long.mp3 --batch-size 8          eight stretches at a time, silences left out
  transcribe --mic                            what is said now; Ctrl-C ends
  ffmpeg -i URL -f s16le -ac 1 -ar 16000 - | transcribe --stdin-pcm

(`transcribe` is the same as `{PROG} transcribe`)
"""


def _optional(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "None" else kind(text)


def _language(text: str) -> str | None:
    if text.lower() == "auto":  # as whisper.cpp spells it
        return None
    try:
        return code_of(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _clips(text: str) -> str:
    times = [cli.number(0)(part) for part in text.split(",")]
    if times != sorted(times):
        raise argparse.ArgumentTypeError(f"the times don't go up: {text}")
    return text


def _token_ids(text: str) -> str:
    for part in filter(None, text.split(",")):
        cli.integer(-1)(part)
    return text


_COUNT, _NUMBER = _optional(cli.integer(1)), _optional(cli.number(float("-inf")))
_POSITIVE, _TEXT = _optional(cli.number(1e-6)), _optional(str)
# By group: flag, type (None: a switch), metavar, default, help.
_FLAGS = {
    "output": (
        ("--verbose", None, None, None, "print times, too; False: print no text"),
        ("--highlight-words", None, None, False, "underline each word as it is spoken in srt, vtt"),
        ("--max-line-width", _COUNT, "N", None, "most characters in a line of srt and vtt"),
        ("--max-line-count", _COUNT, "N", None, "most lines in a subtitle; with --max-line-width"),
        ("--max-words-per-line", _COUNT, "N", None, "most words in a subtitle"),
    ),
    "what is said": (
        ("-l --language", _optional(_language), "L", None, "as en or English; auto: by listening"),
        ("--initial-prompt", _TEXT, "TEXT", None, "said before: gives names and style"),
        ("--carry-initial-prompt", None, None, False, "give that to every window of 30 s"),
        ("--condition-on-previous-text", None, None, True, "each window is told what came before"),
        ("--clip-timestamps", _clips, "S,E,…", "0", "starts and ends, in seconds, of what to do"),
        ("--suppress-tokens", _token_ids, "IDS", "-1", "never these; -1: no symbols"),
    ),
    "speed": (
        ("--batch-size", cli.integer(1), "N", 1, "windows at a time, each without the one before"),
        ("--vad", None, None, False, "leave out what is silent, as --batch-size does"),
    ),
    "search": (
        ("--temperature", cli.number(0), "T", 0.0, "0: the likeliest text; higher: more varied"),
        ("--beam-size", _COUNT, "N", 5, "beams at temperature 0; None: greedy"),
        ("--best-of", _COUNT, "N", 5, "tries above temperature 0"),
        ("--patience", _POSITIVE, "X", None, "beams are kept X times longer"),
        ("--length-penalty", _optional(cli.number(0, 1)), "X", None, "alpha of Wu et al. 2016"),
    ),
    "when a text is no good": (
        ("--compression-ratio-threshold", _NUMBER, "X", 2.4, "above: it repeats itself"),
        ("--logprob-threshold", _NUMBER, "X", -1.0, "below, on average: it is unlikely"),
        ("--no-speech-threshold", _NUMBER, "X", 0.6, "above, and unlikely: silence"),
        ("--repetition-guard", None, None, True, "not told what came before if it repeats that"),
        ("--temperature-increment-on-fallback", _POSITIVE, "T", 0.2, "of the next try; None: none"),
    ),
    "words": (
        ("--word-timestamps", None, None, False, "times of words; more exact ones of segments"),
        ("--prepend-punctuations", str, "C", "\"'“¿([{-", "part of the next word"),
        ("--append-punctuations", str, "C", "\"'.。,，!！?？:：”)]}、", "of the one before"),
        ("--hallucination-silence-threshold", _POSITIVE, "S", None, "silence around made-up words"),
    ),
    "taken from openai/whisper's command lines, and ignored": (
        ("--fp16", None, None, None, "see --dtype"),
        ("--model-dir", str, "PATH", None, "models are kept under ZOO_CACHE"),
        ("--threads", _optional(cli.integer(0)), "N", None, "all cores are used"),
    ),
}


def main(args: Sequence[str] | None = None) -> int:
    """`python -m zoo.whisper`; returns the exit code."""
    top = cli.Parser(prog=PROG, description="Whisper: speech to text.", epilog=_EXAMPLES)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = {"help": "write down what is said", **_about(f"{PROG} transcribe")}
    _add_flags(commands.add_parser("transcribe", **about))
    return cli.main(top, args, _transcribe)


def transcribe_main(args: Sequence[str] | None = None) -> int:
    """The command `transcribe`; returns the exit code."""
    return cli.main(_add_flags(cli.Parser(**_about("transcribe"))), args, _transcribe)


def _about(prog: str) -> dict[str, str]:
    names = sorted(f"{name.title()} ({code})".replace(" ", "_") for code, name in LANGUAGES.items())
    indent = {"initial_indent": "  ", "subsequent_indent": "  "}
    known = textwrap.fill(", ".join(names), 100, **indent).replace("_", " ")  # none broken in two
    return {
        "prog": prog,
        "usage": f"{prog} [options] AUDIO…",
        "description": "Write down what is said in recordings.",
        "epilog": f"{_EXAMPLES}\nlanguages:\n{known}\n",
    }


def _add_flags(parser: cli.Parser) -> cli.Parser:
    """All flags of `transcribe`; returns the parser."""
    add = parser.add_argument
    add("audio", nargs="*", metavar="AUDIO", help="files with sound, or - for one from stdin")
    add("--mic", action="store_true", help="listen to the microphone")
    text = "listen to raw sound from stdin: 16 kHz mono, signed 16 bits, little-endian"
    add("--stdin-pcm", action="store_true", help=text)
    text = "transcribe, or translate to English (default: %(default)s)"
    add("--task", choices=("transcribe", "translate"), default="transcribe", help=text)
    text = f"also write files: {', '.join(FORMATS)} or all (default with -o: all)"
    add("-f", "--output-format", metavar="FORMAT", choices=(*FORMATS, "all"), help=text)
    add("-o", "--output-dir", metavar="PATH", help="their folder (default with -f: .)")
    cli.add_flags(parser, _FLAGS)
    cli.add_model_flags(parser, "base", "of what is drawn above temperature 0 (default: 0)")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """Exit with 2 for flags that don't go together."""
    refuse = arguments.parser.error
    streams = bool(arguments.audio) + arguments.mic + arguments.stdin_pcm
    if streams != 1:
        refuse("give AUDIO, --mic or --stdin-pcm" + (", one of them" if streams else ""))
    if arguments.patience and not arguments.beam_size:
        refuse("--patience needs --beam-size")
    for name in (*_LAYOUT, "hallucination_silence_threshold"):
        if getattr(arguments, name) and not arguments.word_timestamps:
            refuse(f"--{name.replace('_', '-')} needs --word-timestamps")
    if arguments.max_line_count and not arguments.max_line_width:
        cli.note("(--max-line-count does nothing without --max-line-width)")


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What goes on to Whisper.transcribe, by its names there."""
    from zoo.options import names_of
    from zoo.whisper.options import TranscribeOptions

    names = names_of(TranscribeOptions)
    chosen = {name: value for name, value in vars(arguments).items() if name in names}
    first, step = arguments.temperature, arguments.temperature_increment_on_fallback
    tries = 1 + int(max(0.0, 1 + 1e-6 - first) / step) if step else 1  # up to temperature 1
    chosen["temperature"] = tuple(first + i * (step or 0) for i in range(tries))
    return chosen


def _transcribe(arguments: argparse.Namespace) -> int:
    """One source after another: what can't be read is said in a line, and the rest go on."""
    _check(arguments)
    sources = arguments.audio or ["mic" if arguments.mic else "-"]
    files = _files(arguments, sources)
    good = [s for s in sources if not arguments.audio or _is_there(s, arguments)]
    if not good:
        return 1
    options = _options(arguments)
    model = _load(arguments, options)
    from weights import WeightError
    from zoo.whisper.audio import AudioError

    layout = Layout(**{name: getattr(arguments, name) for name in _LAYOUT})
    failed, screen = len(sources) - len(good), _Screen(arguments.verbose)
    for source in good:
        if len(sources) > 1:
            cli.note(f"({source})")
        try:
            with contextlib.closing(screen):
                transcript = _one(model, source, arguments, options, screen)
            for path in files.get(source, ()):
                write(transcript, path, layout)
        except BrokenPipeError:
            raise
        except (AudioError, WeightError, OSError) as error:
            failed += 1
            cli.note(f"{arguments.parser.prog}: {cli.describe(error)}")
    return 1 if failed else 0


def _is_there(source: str, arguments: argparse.Namespace) -> bool:
    """Whether there is such a file; said before a model is fetched for it."""
    try:
        return source == "-" or bool(os.stat(source))  # not opened: a pipe opens only once
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        cli.note(f"{arguments.parser.prog}: {cli.describe(error)}")
        return False


def _files(arguments: argparse.Namespace, sources: Sequence[str]) -> dict[str, list[Path]]:
    if arguments.output_format is None and arguments.output_dir is None:
        return {}
    chosen = arguments.output_format or "all"
    formats = tuple(FORMATS) if chosen == "all" else (chosen,)
    return targets(sources, Path(arguments.output_dir or "."), formats)


def _load(arguments: argparse.Namespace, options: dict[str, Any]) -> whisper.Whisper:
    model = cli.load(whisper.load, arguments)
    if not model.tokenizer.multilingual:
        if options["language"] not in (None, "en") or options["task"] == "translate":
            cli.note(f"({arguments.model} knows English only: it writes down what it hears)")
        options.update(language="en", task="transcribe")
    return model


def _one(model, source, arguments, options, screen) -> whisper.Transcript:
    told = {"on_segment": screen.on_segment, "on_language": screen.on_language}
    if arguments.audio:
        return model.transcribe(source, progress=screen.progress, **told, **options)
    from zoo.whisper import live

    stream = live.microphone if arguments.mic else live.stdin_pcm
    options = {k: v for k, v in options.items() if k not in ("vad", "clip_timestamps")}
    return live.transcribe_live(model, stream, **told, **options)


class _Screen:
    """Text on stdout as it is found; on a terminal, how far it is, on stderr below it."""

    def __init__(self, verbose: bool | None) -> None:
        self.verbose, self.bar, self.said = verbose, None, False

    def close(self) -> None:
        """The end of a source; another one may follow."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None

    def on_language(self, code: str) -> None:
        cli.note(f"(language: {LANGUAGES[code].title()}, as it seems; --language sets it)")

    def on_segment(self, segment: whisper.Segment) -> None:
        if self.verbose is False:
            return
        line = segment.text.strip()
        if self.verbose:
            line = f"[{timestamp(segment.start)} --> {timestamp(segment.end)}] {segment.text}"
        if self.said and segment.id == 0:
            line = f"\n{line}"  # sets the texts of two sources apart, as whisper.cpp does
        self.said = True
        cli.say(line)

    def progress(self, done: float, total: float) -> None:
        from tqdm import tqdm

        if self.bar is None:
            form = "{percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s [{elapsed}<{remaining}]"
            self.bar = tqdm(
                total=total, bar_format=form, file=sys.stderr, leave=False, disable=None
            )
        self.bar.update(done - self.bar.n)


if __name__ == "__main__":
    raise SystemExit(main())
