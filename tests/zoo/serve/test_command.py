"""`python -m zoo serve` as a command: its flags, its one-line errors, its beginning and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.zoo.llama import tiny
from tests.zoo.serve.process import Process
from tests.zoo.test_cli import command, one_line_error
from zoo.errors import UsageError
from zoo.serve import command as serve
from zoo.serve.fields import Fields
from zoo.serve.metrics import Metrics
from zoo.serve.models import Models, Options, name_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--slots", "0"], "--slots"),
        (["--queue", "-1"], "--queue"),
        (["--ctx", "0"], "--ctx"),
        (["--max-body-mb", "0"], "--max-body-mb"),
        (["--grce", "3"], "did you mean --grace?"),
        (["there"], "there"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(args, named):
    result = command("serve", *args, module="zoo")
    assert result.returncode == 2 and named in one_line_error(result)


@pytest.mark.parametrize(
    ("args", "named", "code"),
    [
        (["--model", "none", "--whisper-model", "none", "--sd-model", "none"], "no model", 2),
        (["--model", "a", "--model", "a"], "two models", 2),
        (["--model", " "], "empty", 2),
        (["--port", "0", "--api-key", ""], "--api-key", 2),
        (["--port", "0", "--api-key-file", "no such file"], "no such file", 1),
        (["--host", "203.0.113.1", "--port", "0"], "can't listen at 203.0.113.1", 1),
        (["--load-at-start", "--port", "0", "--model", "./nothing.gguf"], "nothing.gguf", 1),
    ],
)
def test_what_cannot_be_served_is_one_line(args, named, code):
    result = command("serve", *args, module="zoo")
    assert result.returncode == code and named in one_line_error(result)


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = command("serve", "--port", port, module="zoo")
    assert result.returncode == 1 and f"127.0.0.1:{port}" in one_line_error(result)


def test_without_its_packages_the_command_says_what_to_install():
    script = (
        "import sys; sys.modules['starlette'] = None\n"
        "from zoo.__main__ import main; sys.exit(main(['serve', '--port', '0']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1 and "pip install 'menagerie[serve]'" in one_line_error(result)


def test_help_has_examples_and_needs_no_package():
    result = command("serve", "--help", module="zoo")
    assert result.returncode == 0 and result.stderr == ""
    for word in ("examples:", "--host", "--api-key", "--cors", "curl ", "base_url"):
        assert word in result.stdout
    assert "serve" in command("--help", module="zoo").stdout


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("smollm2", "smollm2"),
        ("ORG/REPO", "ORG/REPO"),
        ("ORG/REPO/FILE.gguf", "FILE"),
        ("/models/mine.gguf", "mine"),
        ("./mine", "mine"),
        ("mine.gguf", "mine"),
    ],
)
def test_requests_call_a_model_by_a_name_that_tells_no_path(path, name):
    assert name_of(path) == name


def test_keys_come_from_flags_a_file_or_the_environment(tmp_path, monkeypatch):
    def keys(*args: str) -> tuple[str, ...]:
        return serve._keys(serve.parser().parse_args(args))

    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert keys() == ()
    assert keys("--api-key", "a", "--api-key", "b") == ("a", "b")
    assert keys("--api-key-file", str(file)) == ("one", "two")
    monkeypatch.setenv("ZOO_API_KEY", "env")
    assert keys() == ("env",) and keys("--api-key", "a") == ("a",)
    file.write_text("\n")
    monkeypatch.delenv("ZOO_API_KEY")
    with pytest.raises(ValueError, match="holds no key"):
        keys("--api-key-file", str(file))
    with pytest.raises(UsageError):
        keys("--api-key", " ")


@pytest.mark.skipif(os.name == "nt", reason="signals as on POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_when_what_was_asked_is_answered(tmp_path, number):
    model = tiny.write_gguf(tmp_path / "tiny.gguf")
    flags = ("--model", str(model), "--whisper-model", "none", "--sd-model", "none")
    with Process(tmp_path, *flags, "--slots", "2", "--device", "reference") as server:
        body = b'{"prompt": "the fox", "max_tokens": 40, "stream": true}'
        json = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.address}/v1/completions", body, json)
        with urllib.request.urlopen(request, timeout=60) as answer:
            first = answer.readline()
            server.process.send_signal(number)
            rest = answer.read()
        assert first.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")
        assert server.process.wait(30) == 0
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{server.address}/health", timeout=5)
        assert "Traceback" not in server.log()


def test_a_model_is_found_by_any_of_its_names():
    metrics = Metrics()
    loaders = {"chat": lambda *_: None}
    models = Models(Options(chat=["smollm2-135m-instruct", "tiny"]), metrics, loaders)
    try:
        for name, served in (("smollm2", "smollm2-135m-instruct"), ("tiny", "tiny")):
            assert models.find("chat", Fields({"model": name}, ("model",))).name == served
    finally:
        models.close(1)
