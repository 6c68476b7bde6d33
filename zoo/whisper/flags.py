"""The flags of `transcribe`: openai/whisper's names and defaults, and what goes beyond them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from zoo import cli
from zoo.errors import UserError
from zoo.whisper.languages import code_of
from zoo.whisper.transcript import FORMATS, Layout

DEFAULT_MODEL = "base"
LAYOUT = tuple(Layout.__dataclass_fields__)


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


def add_flags(parser: cli.Parser) -> cli.Parser:
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
    cli.add_model_flags(parser, DEFAULT_MODEL, "of what is drawn above temperature 0 (default: 0)")
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Exit with 2 for flags that don't go together."""
    refuse = arguments.parser.error
    streams = bool(arguments.audio) + arguments.mic + arguments.stdin_pcm
    if streams != 1:
        refuse("give AUDIO, --mic or --stdin-pcm" + (", one of them" if streams else ""))
    if arguments.patience and not arguments.beam_size:
        refuse("--patience needs --beam-size")
    for name in (*LAYOUT, "hallucination_silence_threshold"):
        if getattr(arguments, name) and not arguments.word_timestamps:
            refuse(f"--{name.replace('_', '-')} needs --word-timestamps")
    if arguments.max_line_count and not arguments.max_line_width:
        cli.note("(--max-line-count does nothing without --max-line-width)")


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What goes on to Whisper.transcribe, by its names there."""
    from zoo.options import names_of
    from zoo.whisper.options import TranscribeOptions

    names = names_of(TranscribeOptions)
    chosen = {name: value for name, value in vars(arguments).items() if name in names}
    first, step = arguments.temperature, arguments.temperature_increment_on_fallback
    tries = 1 + int(max(0.0, 1 + 1e-6 - first) / step) if step else 1  # up to temperature 1
    chosen["temperature"] = tuple(first + i * (step or 0) for i in range(tries))
    return chosen
