"""The command `transcribe`: text on stdout as it is found, files where they are asked for."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo import cli, whisper
from zoo.whisper import flags
from zoo.whisper.languages import LANGUAGES
from zoo.whisper.transcript import FORMATS, Layout, targets, timestamp, write

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


def main(args: Sequence[str] | None = None) -> int:
    """`python -m zoo.whisper`; returns the exit code."""
    top = cli.Parser(prog=PROG, description="Whisper: speech to text.", epilog=_EXAMPLES)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = {"help": "write down what is said", **_about(f"{PROG} transcribe")}
    flags.add_flags(commands.add_parser("transcribe", **about))
    return cli.main(top, args, _transcribe)


def transcribe_main(args: Sequence[str] | None = None) -> int:
    """The command `transcribe`; returns the exit code."""
    return cli.main(flags.add_flags(cli.Parser(**_about("transcribe"))), args, _transcribe)


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


def _transcribe(arguments: argparse.Namespace) -> int:
    """One source after another: what can't be read is said in a line, and the rest go on."""
    flags.check(arguments)
    sources = arguments.audio or ["mic" if arguments.mic else "-"]
    files = _files(arguments, sources)
    good = [s for s in sources if not arguments.audio or _is_there(s, arguments)]
    if not good:
        return 1
    options = flags.options(arguments)
    model = _load(arguments, options)
    from weights import WeightError
    from zoo.whisper.audio import AudioError

    layout = Layout(**{name: getattr(arguments, name) for name in flags.LAYOUT})
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
