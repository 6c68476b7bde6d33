"""The shared command-line rules: one-line errors, exit codes, flag spelling."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zoo import cli
from zoo.errors import UsageError, UserError
from zoo.llama.__main__ import parser

ROOT = Path(__file__).resolve().parents[2]


def command(*args: str, module: str = "zoo.llama", **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=options.pop("stdin", subprocess.DEVNULL),
        **options,
    )


def one_line_error(result: subprocess.CompletedProcess) -> str:
    """The line on stderr, after checking that it is one and that stdout stayed empty."""
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "COMMAND"),
        (["sing"], "sing"),
        (["chat", "hi", "--temperature", "-1"], "--temperature"),
        (["chat", "hi", "--temperature", "nan"], "--temperature"),
        (["chat", "hi", "--temperature", "warm"], "--temperature"),
        (["chat", "hi", "--top-p", "1.5"], "--top-p"),
        (["chat", "hi", "--top_p=-0.5"], "--top-p"),
        (["chat", "hi", "--min-p", "2"], "--min-p"),
        (["chat", "hi", "--top-k", "-1"], "--top-k"),
        (["chat", "hi", "--top-k", "2.5"], "--top-k"),
        (["chat", "hi", "--repeat-penalty", "0"], "--repeat-penalty"),
        (["chat", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["chat", "hi", "--ctx", "0"], "--ctx"),
        (["chat", "hi", "--seed", "-3"], "--seed"),
        (["chat", "hi", "--dtype", "f8"], "--dtype"),
        (["chat", "hi", "--no-such-flag"], "--no-such-flag"),
        (["chat", "hi", "there"], "there"),
        (["chat", "  "], "empty"),
        (["chat"], "empty"),
        (["complete"], "PROMPT"),
        (["bench", "--prompt-tokens", "0"], "--prompt-tokens"),
        (["chat", "hi", "--model", ""], "the model name is empty"),
        (["bench", "--model", " "], "the model name is empty"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(args, named):
    result = command(*args)
    assert result.returncode == 2
    assert named in one_line_error(result)


@pytest.mark.parametrize(
    ("args", "command_name", "quotes"),
    [
        (["chat", "What", "is", "this?"], "chat", True),
        (["complete", "Once", "upon", "--stats"], "complete", True),
        (["chat", "hi", "--no-such-flag", "3"], "chat", False),
        (["bench", "fast"], "bench", False),
    ],
)
def test_left_over_arguments_name_the_commands_own_help(args, command_name, quotes, capsys):
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(args)
    err = capsys.readouterr().err
    prog = f"python -m zoo.llama {command_name}"
    assert caught.value.code == 2 and err.count("\n") == 1
    assert err.startswith(f"{prog}: unrecognized") and err.endswith(f"; see {prog} --help\n")
    assert ("quotes" in err) == quotes


@pytest.mark.parametrize(
    ("flag", "near"),
    [("--max-token", "--max-tokens"), ("--max-token=5", "--max-tokens"), ("--no-such-flag", None)],
)
def test_a_misspelt_flag_is_told_the_one_it_is_near_to(flag, near, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["chat", "hi", flag])
    err = capsys.readouterr().err
    assert (f"; did you mean {near}?;" in err) if near else "did you mean" not in err


def test_package_alone_points_to_the_models_commands():
    result = command(module="zoo")
    assert result.returncode == 2
    assert "python -m zoo.llama --help" in one_line_error(result)
    assert command("--help", module="zoo").returncode == 0


def test_replies_and_completions_have_a_default_limit():
    assert parser().parse_args(["chat", "hi"]).max_tokens == 1024
    assert parser().parse_args(["complete", "hi"]).max_tokens == 256


@pytest.mark.parametrize(
    ("command_name", "seed"),
    [("chat", "a new one each time"), ("complete", "a new one each time"), ("bench", "default: 0")],
)
def test_help_explains_every_flag_and_its_default(command_name, seed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # one line for each flag
    with pytest.raises(SystemExit):
        parser().parse_args([command_name, "--help"])
    entries = re.split(r"\n  (?=-)", capsys.readouterr().out)  # a long flag's text comes below it
    rows = [entry.split(maxsplit=2) for entry in entries]
    flags = {row[0]: row for row in rows if row and row[0].startswith("--")}
    assert all(len(row) == 3 for row in flags.values()), flags
    for flag in {"--max-tokens", "--ctx", "--top-k", "--prompt-tokens", "--seed"} & set(flags):
        assert flags[flag][1] in ("N", "N,")  # the comma: a short form follows
        assert "(default: " in flags[flag][2]
    assert seed in flags["--seed"][2]


@pytest.mark.parametrize("command_name", ["chat", "complete", "bench"])
def test_file_that_is_no_model_is_one_line_and_code_1(tmp_path, command_name):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\3\0\0\0")
    args = [] if command_name == "bench" else ["hi"]
    for path in (broken, tmp_path / "missing.gguf", tmp_path):
        result = command(command_name, *args, "--model", str(path))
        assert result.returncode == 1
        assert str(path) in one_line_error(result)


def test_unknown_model_name_is_one_line_and_code_1(monkeypatch):
    result = command("chat", "hi", "--model", "no-such-model")
    assert (result.returncode, "no-such-model" in one_line_error(result)) == (1, True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = command("chat", "hi", "--model", "some-org/some-model", "--device", "reference")
    line = one_line_error(result)
    assert result.returncode == 1
    assert "no such file or folder, and some-org/some-model can't be fetched: " in line


def test_unknown_device_is_one_line_and_code_2():
    result = command("chat", "hi", "--device", "abacus")
    assert (result.returncode, "abacus" in one_line_error(result)) == (2, True)


def test_help_is_quick_and_starts_no_engine():
    begun = time.perf_counter()
    result = command("chat", "--help")
    # A bare interpreter takes 20 ms; the engine's imports alone would take 200.
    assert time.perf_counter() - begun < 2
    assert result.returncode == 0 and "What is the capital of France?" in result.stdout
    script = "import sys, zoo.llama.__main__ as m; m.parser(); print('numpy' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert loaded.stdout.strip() == b"False"


def test_flags_may_be_spelt_with_either_sign():
    args = ["chat", "hi", "--max_tokens", "5", "--top_k=3", "--repeat-penalty=1.1"]
    parsed = parser().parse_args(args)
    assert (parsed.max_tokens, parsed.top_k, parsed.repeat_penalty) == (5, 3, 1.1)


def test_values_and_what_follows_two_dashes_keep_their_underscores():
    assert cli.dashed(["--a_b=c_d", "e_f", "--", "--g_h"]) == ["--a-b=c_d", "e_f", "--", "--g_h"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no"), 1),
        (UsageError("no"), 2),
        (FileNotFoundError(2, "No such file", "x"), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(error, code, capsys):
    def fails():
        raise error

    assert cli.run(fails, "prog") == code
    assert capsys.readouterr().err.count("\n") == 1


def test_a_bug_still_gives_its_traceback():
    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.run(fails, "prog")


def test_multi_line_error_is_told_in_one_line(capsys):
    def fails():
        raise UserError("a\nb")

    cli.run(fails, "prog")
    assert capsys.readouterr().err == "prog: a b\n"


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes and signals")
def test_reader_that_goes_away_is_no_error():
    script = "from zoo import cli\nraise SystemExit(cli.run(lambda: print('x' * 10**6), 'p'))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) == cli.EXIT_BROKEN_PIPE


@pytest.mark.skipif(os.name == "nt", reason="POSIX file descriptors")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_closed_stream_becomes_the_null_device(number):
    script = (
        "import os, sys\nfrom zoo import cli\n"
        "def check():\n"
        f"    assert os.fstat({number}).st_rdev == os.stat(os.devnull).st_rdev\n"
        "    sys.stdin.read(); print('x'); cli.note('y')\n"
        "raise SystemExit(cli.run(check, 'p'))"
    )
    shell = f'exec "$0" -c "$1" {number}>&-'
    result = subprocess.run(
        ["sh", "-c", shell, sys.executable, script],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    assert result.returncode == 0
    assert result.stdout == (b"" if number == 1 else b"x\n")
    assert result.stderr == (b"" if number == 2 else b"y\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_behind_stdout_is_one_line():
    script = "from zoo import cli\nraise SystemExit(cli.run(lambda: print('x'), 'p'))"
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=subprocess.PIPE
        )
    assert result.returncode != 0
    assert result.stderr.startswith(b"p: No space left on device\n")


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes and signals")
def test_ctrl_c_is_quiet():
    script = (
        "import time\nfrom zoo import cli\n"
        "def wait():\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "raise SystemExit(cli.run(wait, 'p'))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.stderr.read() == b"\n"
    assert process.wait(30) == cli.EXIT_INTERRUPTED
