"""The conversation: stdout, Ctrl-C and Ctrl-D, on a real terminal where the system has them."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.zoo.llama.fake import scripted
from zoo.llama import chat

ROOT = Path(__file__).resolve().parents[3]
pty = pytest.importorskip("pty", reason="pseudo-terminals are a POSIX thing")

# A model that repeats the user's last message slowly, and tells how many messages it saw.
PROGRAM = """
import sys, time
from zoo import cli
from zoo.llama import chat

class Echo:
    ctx = 100
    def chat(self, messages, **options):
        yield f"[{len(messages)}] "
        for letter in messages[-1]["content"]:
            time.sleep(0.02 if letter != "." else 0.5)
            yield letter

raise SystemExit(cli.run(lambda: chat.converse(Echo(), None, {}, False), "echo"))
"""


class Terminal:
    """A program on a pseudo-terminal: type into it, wait for what it shows."""

    def __init__(self, program: str) -> None:
        self.main, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=_own_terminal,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(other)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until `pattern` shows; forget what came up to there."""
        until = time.monotonic() + 20
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.seen!r}"
            if not select.select([self.main], [], [], 1)[0]:
                continue
            try:
                self.seen += os.read(self.main, 4096).decode()
            except OSError:
                pytest.fail(f"the program ended; no {pattern!r} in {self.seen!r}")
        self.seen = self.seen[match.end() :]
        return match.group()

    def exit_code(self) -> int:
        try:
            while select.select([self.main], [], [], 20)[0] and os.read(self.main, 4096):
                pass
        except OSError:  # Linux's way of saying that the other side has closed
            pass
        return self.process.wait(20)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal():
    terminal = Terminal(PROGRAM)
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.main)


def test_turns_follow_one_another_until_ctrl_d(terminal):
    terminal.wait_for(">>> ")
    terminal.type("one\n")
    terminal.wait_for(r"\[1\] one\r\n>>> ")
    terminal.type("\n")  # an empty line is no turn
    terminal.wait_for(">>> ")
    terminal.type("two\n")
    terminal.wait_for(r"\[3\] two\r\n>>> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_ctrl_c_stops_the_reply_and_keeps_it_in_the_conversation(terminal):
    terminal.wait_for(">>> ")
    terminal.type("ab.......................cd\n")
    terminal.wait_for(r"\[1\] ab")
    terminal.type("\x03")
    rest = terminal.wait_for(r"[^>]*>>> ")
    assert "cd" not in rest
    terminal.type("next\n")
    terminal.wait_for(r"\[3\] next\r\n>>> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_complete_without_a_prompt_on_a_terminal_is_wrong_usage():
    terminal = Terminal("from zoo.llama.__main__ import main\nraise SystemExit(main(['complete']))")
    terminal.wait_for(r"no PROMPT.*; see python -m zoo\.llama complete --help\r\n")
    assert terminal.exit_code() == 2
    os.close(terminal.main)


def test_ctrl_c_at_the_mark_tells_how_to_leave(terminal):
    terminal.wait_for(">>> ")
    terminal.type("half")
    terminal.wait_for("half")
    time.sleep(0.2)  # a Ctrl-C between the echo and the wait for the next key would be lost
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait_for(">>> ")
    terminal.type("x\n")
    terminal.wait_for(r"\[1\] x\r\n>>> ")


def test_one_reply_goes_to_stdout_alone(capsys):
    chat.reply_once(scripted(["a", "b", "<|im_end|>"]), "hi", None, {}, stats=True)
    out, err = capsys.readouterr()
    assert out == "ab\n"
    assert "tokens" in err


def test_reply_that_ends_a_line_gets_no_second_newline(capsys):
    chat.reply_once(scripted(["a", "\n", "<|im_end|>"]), "hi", None, {}, stats=False)
    assert capsys.readouterr() == ("a\n", "")


@pytest.mark.parametrize("max_context", [60, 100])
def test_full_context_is_told_on_stderr(max_context, capsys):
    model = scripted(["a"], size=60)
    model.config.max_context = max_context
    chat.reply_once(model, "hi", None, {}, stats=False)
    err = capsys.readouterr().err
    assert "context is full" in err
    assert ("--ctx" in err) == (max_context > 60)


@pytest.mark.parametrize(("limit", "told"), [(1, "1 token;"), (3, "3 tokens;")])
def test_reply_cut_at_max_tokens_is_told_on_stderr(limit, told, capsys):
    model = scripted(["a"])
    chat.reply_once(model, "hi", None, {"max_tokens": limit}, stats=False)
    out, err = capsys.readouterr()
    assert out == "a" * limit + "\n"
    assert err == f"(stopped after {told} --max-tokens allows more)\n"


def test_completion_may_end_at_max_tokens_without_a_note(capsys):
    chat.finish(scripted(["a"]).generate("a", max_tokens=3), stats=False, tell_limit=False)
    assert capsys.readouterr() == ("aaa\n", "")


def test_turn_cut_at_max_tokens_is_told_and_the_conversation_goes_on(monkeypatch, capsys):
    model = scripted(["a"])
    conversation(monkeypatch, model, "one", "two", options={"max_tokens": 2})
    out, err = capsys.readouterr()
    assert out == "aa\naa\n"
    assert err.count("(stopped after 2 tokens; --max-tokens allows more)") == 2


def conversation(monkeypatch, model, *lines: str, system=None, options=None) -> None:
    waiting = iter(lines)

    def answer(mark: str) -> str:
        for line in waiting:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin", open(os.devnull))
    chat.converse(model, system, options or {}, stats=False)


def test_oldest_turns_are_forgotten_when_the_context_is_full(monkeypatch, capsys):
    model = scripted(["a", "<|im_end|>"], size=100)
    seen = []
    ids = model.template.ids
    monkeypatch.setattr(model.template, "ids", lambda m: seen.append(list(m)) or ids(m))
    conversation(monkeypatch, model, "one", "two", "three", "four", system="S")
    out, err = capsys.readouterr()
    assert out == "a\n" * 4
    assert "oldest 2 messages are forgotten" in err
    assert seen[-1][0]["content"] == "S" and seen[-1][-1]["content"] == "four"


def test_turn_that_does_not_fit_is_refused_and_the_conversation_goes_on(monkeypatch, capsys):
    model = scripted(["a", "<|im_end|>"], size=60)
    model.config.max_context = 10_000
    conversation(monkeypatch, model, "hi", "long " * 100, "hi")
    out, err = capsys.readouterr()
    assert out == "a\na\n"
    assert "the context holds 60" in err
