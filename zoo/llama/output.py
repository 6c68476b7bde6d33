"""How a reply is shown as it is made: as text for people, or as JSON events for scripts.

stdout carries replies only, notes go to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from zoo.cli import note


class Output(Protocol):
    """Somebody who is told of a reply's beginning, of its pieces, and of its end."""

    def start(self, generation: Any) -> None: ...

    def piece(self, text: str) -> None: ...

    def end(self, generation: Any, text: str) -> None: ...


class Text:
    """The reply and a final newline on stdout; on stderr why it ended early, and its speed.

    `tell_limit` False: nothing is said when --max-tokens is what ended it.
    """

    def __init__(self, stats: bool = False, tell_limit: bool = True) -> None:
        self._stats, self._tell_limit = stats, tell_limit

    def start(self, generation: Any) -> None:
        pass

    def piece(self, text: str) -> None:
        write(text)

    def end(self, generation: Any, text: str) -> None:
        if not text.endswith("\n"):
            write("\n")
        done = getattr(generation, "stats", None)
        if done is None:
            return
        if done.finish == "context":
            grow = "; --ctx makes it longer" if done.ctx_can_grow else ", at the model's own limit"
            note(f"(stopped: the context is full{grow}; --context-shift goes on)")
        if done.finish == "length" and self._tell_limit:
            count = len(done.ids)
            tokens = f"{count} token{'' if count == 1 else 's'}"
            note(f"(stopped after {tokens}; --max-tokens allows more)")
        if self._stats:
            note(f"({done})")


class Events:
    """A JSON object a line on stdout: one `start`, a `piece` per piece of text, one `end`.

    `finish` of the end is as in Stats, or "interrupted"; times in seconds.
    """

    def start(self, generation: Any) -> None:
        _event("start", prompt_tokens=generation.stats.prompt_tokens)

    def piece(self, text: str) -> None:
        _event("piece", text=text)

    def end(self, generation: Any, text: str) -> None:
        done = generation.stats
        _event(
            "end",
            finish=done.finish or "interrupted",
            prompt_tokens=done.prompt_tokens,
            reused_tokens=done.reused_tokens,
            reply_tokens=len(done.ids),
            guessed_tokens=done.guessed_tokens,
            right_guesses=done.right_guesses,
            dropped_tokens=done.dropped_tokens,
            prefill_s=round(done.prefill_s, 4),
            decode_s=round(done.decode_s, 4),
        )


def play(generation: Iterator[str], output: Output, interruptible: bool = False) -> str:
    """Show a reply to its end; return its text.

    `interruptible`: Ctrl-C ends the reply and nothing else.
    """
    said = []
    output.start(generation)
    try:
        for piece in generation:
            said.append(piece)
            output.piece(piece)
    except KeyboardInterrupt:
        if not interruptible:
            raise
        generation.close()
    text = "".join(said)
    output.end(generation, text)
    return text


def write(text: str) -> None:
    """Onto stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _event(name: str, **fields: Any) -> None:
    write(json.dumps({"event": name, **fields}, ensure_ascii=False) + "\n")
