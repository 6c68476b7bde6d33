"""The conversation: stdout, Ctrl-C and Ctrl-D, on a real terminal where the system has them."""

from __future__ import annotations

import io
import json
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
from zoo.llama.output import Events, Text, play

ROOT = Path(__file__).resolve().parents[3]
pty = pytest.importorskip("pty", reason="pseudo-terminals are a POSIX thing")

# A model that repeats the user's last message slowly, and tells how many messages it saw.
PROGRAM = """
import pathlib, sys, time
from zoo import cli
from zoo.llama import chat

class Echo:
    ctx = 100
    def chat(self, messages, **options):
        yield f"[{len(messages)}] "
        for letter in messages[-1]["content"]:
            time.sleep(0.02 if letter != "." else 0.5)
            yield letter

history = pathlib.Path(sys.argv[1]) if sys.argv[1:] else None
def talk():
    chat.converse(Echo(), None, {}, history=history)
raise SystemExit(cli.run(talk, "echo"))
"""


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and moves of the cursor


class Terminal:
    """A program on a pseudo-terminal: type into it, wait for what it shows."""

    def __init__(self, program: str, *args: str, kind: str = "dumb") -> None:
        self.main, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *args],
            cwd=ROOT,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=_own_terminal,
            env={**os.environ, "TERM": kind, "PROMPT_TOOLKIT_NO_CPR": "1"},
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
                self.seen = ESCAPES.sub("", self.seen + os.read(self.main, 4096).decode())
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
    time.sleep(0.2)  # a key between the mark and the wait for it would be lost on a dumb terminal
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
    time.sleep(0.2)  # a key between the mark and the wait for it would be lost on a dumb terminal
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
    time.sleep(0.2)
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait_for(">>> ")
    terminal.type("x\n")
    terminal.wait_for(r"\[1\] x\r\n>>> ")


def test_one_reply_goes_to_stdout_alone(capsys):
    chat.reply_once(scripted(["a", "b", "<|im_end|>"]), "hi", None, {}, Text(stats=True))
    out, err = capsys.readouterr()
    assert out == "ab\n"
    assert "tokens" in err


def test_reply_that_ends_a_line_gets_no_second_newline(capsys):
    chat.reply_once(scripted(["a", "\n", "<|im_end|>"]), "hi", None, {}, Text())
    assert capsys.readouterr() == ("a\n", "")


@pytest.mark.parametrize("max_context", [60, 100])
def test_full_context_is_told_on_stderr(max_context, capsys):
    model = scripted(["a"], size=60)
    model.config.max_context = max_context
    chat.reply_once(model, "hi", None, {}, Text())
    err = capsys.readouterr().err
    assert "context is full" in err
    assert ("--ctx" in err) == (max_context > 60)


@pytest.mark.parametrize(("limit", "told"), [(1, "1 token;"), (3, "3 tokens;")])
def test_reply_cut_at_max_tokens_is_told_on_stderr(limit, told, capsys):
    model = scripted(["a"])
    chat.reply_once(model, "hi", None, {"max_tokens": limit}, Text())
    out, err = capsys.readouterr()
    assert out == "a" * limit + "\n"
    assert err == f"(stopped after {told} --max-tokens allows more)\n"


def test_completion_may_end_at_max_tokens_without_a_note(capsys):
    play(scripted(["a"]).generate("a", max_tokens=3), Text(tell_limit=False))
    assert capsys.readouterr() == ("aaa\n", "")


def test_turn_cut_at_max_tokens_is_told_and_the_conversation_goes_on(monkeypatch, capsys):
    model = scripted(["a"])
    conversation(monkeypatch, model, "one", "two", options={"max_tokens": 2})
    out, err = capsys.readouterr()
    assert out == "aa\naa\n"
    assert err.count("(stopped after 2 tokens; --max-tokens allows more)") == 2


def conversation(monkeypatch, model, *lines: str, system=None, options=None, output=None) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    chat.converse(model, system, options or {}, output)


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


@pytest.fixture
def editor(tmp_path):
    terminal = Terminal(PROGRAM, str(tmp_path / "history"), kind="xterm")
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.main)


UP, LEFT, ALT_ENTER, TAB, DELETE = "\x1b[A", "\x1b[D", "\x1b\r", "\t", "\x7f"


def test_lines_can_be_edited_and_had_again(editor, tmp_path):
    editor.wait_for(">>>")
    editor.type(f"oxe{LEFT}{DELETE}n\r")
    editor.wait_for(r"\[1\] one\r\n")
    editor.wait_for(">>>")
    editor.type(UP)
    editor.wait_for("one")
    editor.type("s\r")
    editor.wait_for(r"\[3\] ones\r\n")
    editor.wait_for(">>>")
    editor.type("\x04")
    assert editor.exit_code() == 0
    assert (tmp_path / "history").read_text().count("+one") == 2
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600
    again = Terminal(PROGRAM, str(tmp_path / "history"), kind="xterm")
    again.wait_for(">>>")
    again.type(UP + UP)
    again.wait_for("one")
    again.type("\r")
    again.wait_for(r"\[1\] one\r\n")
    again.process.kill()
    os.close(again.main)


def test_messages_of_several_lines(editor):
    editor.wait_for(">>>")
    editor.type(f"a{ALT_ENTER}b\r")
    editor.wait_for(r"\[1\] a\r\nb\r\n")
    editor.wait_for(">>>")
    editor.type("\x1b[200~c\nd\x1b[201~")  # as terminals mark what is pasted
    editor.wait_for("d")
    editor.type("\r")
    editor.wait_for(r"\[3\] c\r\nd\r\n")
    editor.wait_for(">>>")
    editor.type('"""e\r')
    editor.wait_for(r"\.\.\.")
    editor.type("\r")
    editor.wait_for(r"\.\.\.")
    editor.type('f"""\r')
    editor.wait_for(r"\[5\] e\r\n\r\nf\r\n")


def test_tab_completes_commands(editor):
    editor.wait_for(">>>")
    editor.type(f"/ex{TAB}")
    editor.wait_for("/exit")
    editor.type("\r")
    assert editor.exit_code() == 0


def test_commands_change_what_the_model_is_asked(monkeypatch, capsys):
    model = scripted(["a", "<|im_end|>"])
    seen = []
    reply = model.chat
    monkeypatch.setattr(
        model, "chat", lambda m, **o: seen.append((json.dumps(m), o)) or reply(m, **o)
    )
    conversation(
        *(monkeypatch, model, "/system S", "one", "/set temperature 0.5", "/set top-k 3", "two"),
        *("/clear", "//exit is a word", "/regen", "/system", "/exit", "never"),
        options={"temperature": 0.0, "seed": 5},
    )
    asked = [[message["content"] for message in json.loads(messages)] for messages, _ in seen]
    assert asked == [
        ["S", "one"], ["S", "one", "a", "two"], ["S", "/exit is a word"], ["S", "/exit is a word"],
    ]  # fmt: skip
    assert seen[0][1] == {"temperature": 0.0, "seed": 5}
    assert seen[1][1] == {"temperature": 0.5, "seed": 5, "top_k": 3}
    assert seen[3][1]["seed"] == 6  # the same seed would give the same reply
    out, err = capsys.readouterr()
    assert out == "a\n" * 4
    assert "(system: S)" in err and "0.5" in err


def test_every_command_is_listed_and_a_misspelt_one_is_told(monkeypatch, capsys):
    conversation(monkeypatch, scripted(["a"]), "/help", "/regne", "/nothing", "/stats", "/regen")
    out, err = capsys.readouterr()
    assert out == ""
    assert all(f"/{name} " in err for name in chat.COMMANDS)
    assert "did you mean /regen?" in err and "no command /nothing" in err
    assert err.count("there is no reply yet") == 2


def test_stats_tell_speed_and_room(monkeypatch, capsys):
    conversation(monkeypatch, scripted(["a", "<|im_end|>"], size=77), "hi", "/stats")
    assert re.search(r"\(prompt .*tokens/s; \d+ of 77 tokens of the context used\)|-; ",
                     capsys.readouterr().err)  # fmt: skip


def test_saved_conversation_goes_on_elsewhere(monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.json"
    conversation(
        monkeypatch, scripted(["a", "<|im_end|>"]), "one", f"/save {file}", "two", f"/save {file}",
        system="Ü",
    )  # fmt: skip
    assert [m["content"] for m in json.loads(file.read_text("utf-8"))["messages"]] == [
        "Ü", "one", "a", "two", "a",
    ]  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["talk.json"]
    model = scripted(["b", "<|im_end|>"])
    seen = []
    ids = model.template.ids
    monkeypatch.setattr(model.template, "ids", lambda m: seen.append(list(m)) or ids(m))
    conversation(monkeypatch, model, f"/load {file}", "three")
    assert [m["content"] for m in seen[0]] == ["Ü", "one", "a", "two", "a", "three"]
    assert "(5 messages, system: Ü)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1]", '{"messages": 3}', '[{"role": "user"}]', '[{"role": "me", "content": "x"}]',
        '[{"role": "user", "content": ["x"]}]', "[" * 100_000, '"messages"', "null", "\x00",
        '[{"role": "user", "content": "x", "more": 1}]', '{"role": "user", "content": "x"}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_conversation_is_refused_and_left_alone(
    text, monkeypatch, capsys, tmp_path
):
    file = tmp_path / "file"
    file.write_text(text)
    lines = (f"/load {file}", f"/save {file}", "/load", f"/load {file}x", f"/load {tmp_path}", "hi")
    conversation(monkeypatch, scripted(["a", "<|im_end|>"]), *lines)
    out, err = capsys.readouterr()
    assert out == "a\n" and file.read_text() == text
    assert err.count("no saved conversation") == 2
    assert err.count("\n") == 5 and "name of a file is missing" in err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set", "temperature         0.0"),
        ("/set warmth 3", "no option warmth; there are"),
        ("/set temperature -1", "temperature: must be 0 or more"),
        ("/set top_k many", "top_k: 'many' is not a whole number"),
        ("/set mirostat 1", "mirostat must be 0 or 2"),
        ("/set seed none", "seed                none"),
        ("/set stop END of it", 'stop                ["END of it"]'),
        ('/set stop ["a", "\\n"]', r'stop                ["a", "\n"]'),
        ("/set logit-bias 5-inf 7+2", "logit_bias          5-inf 7+2"),
        ("/set json_schema /no/file", "No such file"),
        ("/set regex (a|b)+", "regex               (a|b)+"),
        ("/set max-tokens 5", "max_tokens          5"),
    ],
)
def test_set_shows_what_it_has_set_or_why_it_has_not(line, told, monkeypatch, capsys):
    conversation(monkeypatch, scripted(["a"]), line, options={"temperature": 0.0})
    out, err = capsys.readouterr()
    assert out == "" and told in err


def test_events_are_json_lines(monkeypatch, capsys):
    model = scripted(["ü", "b", "<|im_end|>"])
    conversation(monkeypatch, model, "hi", "/stats", "ho", output=Events())
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["event"] for each in events] == ["start", "piece", "piece", "end"] * 2
    assert "".join(each.get("text", "") for each in events) == "übüb"
    assert events[0]["prompt_tokens"] == events[3]["prompt_tokens"] > 0
    assert (events[3]["finish"], events[3]["reply_tokens"]) == ("stop", 4)
    play(scripted(["a"]).generate("x", max_tokens=2), Events())
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["finish"] == "length" and last["decode_s"] >= 0
