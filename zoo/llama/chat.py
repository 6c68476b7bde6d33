"""The conversation: turns, and the commands between them that begin with a slash."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from zoo.cli import note, one_line
from zoo.errors import UsageError, UserError
from zoo.llama import settings, terminal
from zoo.llama.messages import read_messages
from zoo.llama.output import Output, Text, play

_HINT = "(Ctrl-D leaves, Ctrl-C stops a reply, /help lists the commands)"


class Model(Protocol):
    """What a conversation needs of a model; `zoo.llama.generate.Llama` is one."""

    ctx: int

    def chat(self, messages: Any, **options: Any) -> Iterator[str]: ...


def reply_once(
    model: Model,
    prompt: str,
    system: str | None,
    options: dict,
    output: Output,
    before: Sequence[dict[str, str]] = (),
) -> list[dict[str, str]]:
    """Answer one prompt, after the messages `before`; return all messages."""
    messages = [*resumed(before, system), {"role": "user", "content": prompt}]
    said = play(model.chat(messages, **options), output)
    return [*messages, {"role": "assistant", "content": said}] if said else list(before)


def resumed(messages: Sequence[dict[str, str]], system: str | None) -> list[dict[str, str]]:
    """The messages of a conversation that goes on; `system`, if given, replaces its own."""
    if system is None:
        return list(messages)
    return opening(system) + list(messages[_system(messages) is not None :])


def _system(messages: Sequence[dict[str, str]]) -> str | None:
    first = messages[:1]
    return first[0]["content"] if first and first[0]["role"] == "system" else None


def opening(system: str | None, prompt: str | None = None) -> list[dict[str, str]]:
    """The first messages of a conversation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + ([] if prompt is None else [{"role": "user", "content": prompt}])


def converse(
    model: Model,
    system: str | None,
    options: dict,
    output: Output | None = None,
    history: Path | None = None,
    before: Sequence[dict[str, str]] = (),
) -> list[dict[str, str]]:
    """Talk until Ctrl-D or /exit. Ctrl-C stops a reply, which then stays as far as it got.

    Goes on after the messages `before`; returns all messages.
    """
    ask = terminal.reader(history, [f"/{name}" for name in COMMANDS])
    conversation = Conversation(model, system, options, output or Text())
    conversation.messages = resumed(before, system)
    if ask is not terminal.plain:
        note(_HINT)
    while not conversation.over:
        try:
            text = terminal.message(ask)
        except KeyboardInterrupt:
            note(_HINT)
            continue
        if text is None:
            break
        conversation.take(text)
    return conversation.messages


class Conversation:
    """Messages so far, and the options of the replies to come; `over` once /exit was said."""

    def __init__(self, model: Model, system: str | None, options: dict, output: Output) -> None:
        self.model, self.options, self.output = model, options, output
        self.messages = opening(system)
        self.over, self.last = False, None

    def take(self, text: str) -> None:
        """A message of the user's: a command if it begins with one slash, else a turn."""
        if not text.strip():
            return
        if not text.startswith("/") or text.startswith("//"):
            self.turn(text[1:] if text.startswith("//") else text)
            return
        name, _, rest = text[1:].partition(" ")
        command, _ = COMMANDS.get(name, (None, ""))
        try:
            if command is None:
                near = difflib.get_close_matches(name, COMMANDS, n=1)
                hint = f"did you mean /{near[0]}?" if near else "/help lists them"
                raise UsageError(f"no command /{name}; {hint} (// begins a message with a slash)")
            command(self, rest.strip())
        except (UserError, OSError) as error:
            note(f"({one_line(error)})")

    def turn(self, text: str) -> None:
        """Add a user's turn and the reply, or neither when there is no reply."""
        self.messages.append({"role": "user", "content": text})
        try:
            self._reply()
        except UserError as error:
            note(f"({one_line(error)})")
        if self.messages[-1]["role"] == "user":
            self.messages.pop()

    def _reply(self) -> None:
        generation = self._start()
        self.last = getattr(generation, "stats", None)
        said = play(generation, self.output, interruptible=True)
        if said:
            self.messages.append({"role": "assistant", "content": said})

    def _start(self) -> Any:
        """Begin the reply, forgetting the oldest turns as far as the context demands."""
        from zoo.llama.generate import PromptTooLong

        first, dropped = len(opening(self.system)), 0
        while True:
            try:
                generation = self.model.chat(self.messages, **self.options)
            except PromptTooLong:
                if len(self.messages) - first < 3:
                    raise
                del self.messages[first : first + 2]
                dropped += 2
                continue
            if dropped:
                note(f"(the context is full: the oldest {dropped} messages are forgotten)")
            return generation

    @property
    def system(self) -> str | None:
        return _system(self.messages)

    def help(self, _: str) -> None:
        """The commands."""
        for name, (_command, text) in COMMANDS.items():
            note(f"  /{name:12}{text}")
        note(f"  {terminal.FENCE:13}begins and ends a message of several lines; Alt-Enter adds one")

    def clear(self, _: str) -> None:
        """Forget the turns; the system message stays."""
        self.messages = opening(self.system)
        note("(forgotten)")

    def set_system(self, text: str) -> None:
        """Show or replace the system message; the turns stay."""
        if text:
            self.messages = resumed(self.messages, text)
        note(f"(system: {self.system or 'none'})")

    def save(self, name: str) -> None:
        """Write the messages to a file; one that holds anything else is left alone."""
        file = _named(name)
        if file.exists():
            read_messages(file)
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        part.write_text(
            json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1), "utf-8"
        )
        part.replace(file)
        note(f"({len(self.messages)} messages saved in {file})")

    def load(self, name: str) -> None:
        """Go on with a saved conversation."""
        self.messages = read_messages(_named(name))
        note(f"({len(self.messages)} messages, system: {self.system or 'none'})")

    def regenerate(self, _: str) -> None:
        """The last reply once more; a given seed is counted up, or it would be the same again."""
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise UserError("there is no reply yet")
        if self.options.get("seed") is not None:
            self.options["seed"] += 1
        elif not self.options.get("temperature"):
            note("(at temperature 0 it is the same again: /set temperature 0.8)")
        old = self.messages.pop()
        try:
            self._reply()
        finally:
            if self.messages[-1]["role"] == "user":
                self.messages.append(old)

    def set(self, text: str) -> None:
        """Show or change an option of the replies to come."""
        self.options |= settings.parsed(text, self.options)
        for name, value in settings.shown(self.options, text.partition(" ")[0]).items():
            note(f"  {name:20}{value}")

    def stats(self, _: str) -> None:
        """What the last reply took, and how full the context is."""
        if self.last is None:
            raise UserError("there is no reply yet")
        used = self.last.prompt_tokens + len(self.last.ids)
        note(f"({self.last}; {used} of {self.model.ctx} tokens of the context used)")

    def exit(self, _: str) -> None:
        """Leave."""
        self.over = True


COMMANDS = {
    "help": (Conversation.help, "this list"),
    "clear": (Conversation.clear, "forget the conversation, except for the system message"),
    "system": (Conversation.set_system, "TEXT: replace the system message; alone: show it"),
    "save": (Conversation.save, "FILE: write the conversation to a file"),
    "load": (Conversation.load, "FILE: go on with a saved conversation"),
    "regen": (Conversation.regenerate, "make the last reply once more"),
    "set": (Conversation.set, "NAME VALUE: change an option, such as temperature; alone: show all"),
    "stats": (Conversation.stats, "speed of the last reply, and how full the context is"),
    "exit": (Conversation.exit, "leave, as Ctrl-D does"),
}


def _named(name: str) -> Path:
    if not name:
        raise UsageError("the name of a file is missing")
    return Path(name).expanduser()
