"""The conversation on a terminal: one reply to a prompt, or turn by turn.

stdout carries replies only; notes and, where stdout is not the terminal, the prompt mark go to
stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

from zoo.cli import note, one_line
from zoo.errors import UserError

MARK = ">>> "
_HINT = "(Ctrl-D leaves, Ctrl-C stops a reply)"


class Model(Protocol):
    """What a conversation needs of a model; `zoo.llama.generate.Llama` is one."""

    ctx: int

    def chat(self, messages: Any, **options: Any) -> Iterator[str]: ...


def stream(pieces: Iterator[str]) -> str:
    """Write pieces to stdout as they come; return them joined."""
    said = []
    for piece in pieces:
        said.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    return "".join(said)


def reply_once(model: Model, prompt: str, system: str | None, options: dict, stats: bool) -> None:
    """Answer one prompt; stdout gets the reply and a final newline."""
    finish(model.chat(opening(system, prompt), **options), stats)


def finish(generation: Any, stats: bool, tell_limit: bool = True) -> None:
    """Stream a generation to its end, with the notes that belong to it.

    `tell_limit` False: nothing is said when --max-tokens is what ended it.
    """
    said = stream(generation)
    if not said.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    _report(generation, stats, tell_limit)


def opening(system: str | None, prompt: str | None = None) -> list[dict[str, str]]:
    """The first messages of a conversation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + ([] if prompt is None else [{"role": "user", "content": prompt}])


def converse(model: Model, system: str | None, options: dict, stats: bool) -> None:
    """Talk until Ctrl-D. Ctrl-C stops a reply, which then stays in the conversation as it is."""
    if sys.stdin.isatty():
        note(_HINT)
        _enable_editing()
    messages = opening(system)
    while True:
        try:
            line = _ask()
        except KeyboardInterrupt:
            note("\n" + _HINT)
            continue
        if line is None:
            break
        if line.strip():
            _turn(model, messages, line, options, stats)


def _turn(model: Model, messages: list, line: str, options: dict, stats: bool) -> None:
    """Add a user's turn and the reply to `messages`, or neither when there is no reply."""
    first = 1 if messages and messages[0]["role"] == "system" else 0
    messages.append({"role": "user", "content": line})
    try:
        generation = _start(model, messages, first, options)
    except UserError as error:
        note(one_line(error))
        messages.pop()
        return
    said: list[str] = []
    try:
        for piece in generation:
            said.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        generation.close()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if said:
        messages.append({"role": "assistant", "content": "".join(said)})
    else:
        messages.pop()
    _report(generation, stats)


def _start(model: Model, messages: list, first: int, options: dict) -> Any:
    """Begin the reply, forgetting the oldest turns as far as the context demands."""
    from zoo.llama.generate import PromptTooLong

    dropped = 0
    while True:
        try:
            generation = model.chat(messages, **options)
        except PromptTooLong:
            if len(messages) - first < 3:
                raise
            del messages[first : first + 2]
            dropped += 2
            continue
        if dropped:
            note(f"(the context is full: the oldest {dropped} messages are forgotten)")
        return generation


def _ask() -> str | None:
    """The next line of the user, None at the end of input."""
    interactive = sys.stdin.isatty()
    if interactive and not sys.stdout.isatty():
        sys.stderr.write(MARK)
        sys.stderr.flush()
    try:
        return input(MARK if interactive and sys.stdout.isatty() else "")
    except EOFError:
        if interactive:
            note("")
        return None


def _enable_editing() -> None:
    try:
        import readline  # noqa: F401  importing it gives `input` editing and history
    except ImportError:
        pass


def _report(generation: Any, stats: bool, tell_limit: bool = True) -> None:
    done = getattr(generation, "stats", None)
    if done is None:
        return
    if done.finish == "context":
        remedy = "; --ctx makes it longer" if done.ctx_can_grow else ", at the model's own limit"
        note(f"(stopped: the context is full{remedy})")
    if done.finish == "length" and tell_limit:
        count = len(done.ids)
        tokens = f"{count} token{'' if count == 1 else 's'}"
        note(f"(stopped after {tokens}; --max-tokens allows more)")
    if stats:
        note(f"({done})")
