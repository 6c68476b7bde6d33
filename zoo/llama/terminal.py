"""Lines that somebody types: with editing and history on a terminal, plain from anything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zoo.cli import note

MARK, MORE = ">>> ", "... "
FENCE = '"""'

# Asks for a line, with a mark; None at the end of input.
Reader = Callable[[str], "str | None"]


def reader(history: Path | None = None, words: Sequence[str] = ()) -> Reader:
    """What asks for the next line; `words` are completed by Tab, `history` is kept in a file.

    A line may hold newlines: pasted ones, or Alt-Enter. KeyboardInterrupt after Ctrl-C.
    """
    shown = next((s for s in (sys.stdout, sys.stderr) if s.isatty()), None)
    if shown is None or not sys.stdin.isatty():
        return plain
    session = _session(shown, history, words)

    def ask(mark: str) -> str | None:
        try:
            return session.prompt(mark)
        except EOFError:
            note("")
            return None

    return ask


def message(ask: Reader) -> str | None:
    '''The next message: a line, or what stands between two """; None at the end of input.'''
    line = ask(MARK)
    if line is None or not line.lstrip().startswith(FENCE):
        return line
    parts, rest = [], line.lstrip()[len(FENCE) :]
    while FENCE not in rest:
        parts.append(rest)
        rest = ask(MORE)
        if rest is None:
            break
    else:
        parts.append(rest.partition(FENCE)[0])
    return "\n".join(parts).strip("\n")


def plain(mark: str) -> str | None:
    """The next line of a pipe or a file: there is nobody to see a mark."""
    try:
        return input()
    except EOFError:
        return None


def _session(shown: Any, history: Path | None, words: Sequence[str]) -> Any:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    kept = history is not None and _private(history)
    return PromptSession(
        history=FileHistory(str(history)) if kept else InMemoryHistory(),
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        # Given an output, it would not see that a terminal is a dumb one.
        output=None if shown is sys.stdout else create_output(stdout=shown),
    )


def _private(file: Path) -> bool:
    """Whether the file is there, made for its owner's eyes only, and can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return False
    return True
