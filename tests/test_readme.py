"""README.md starts with the two lines that a new user types, and the continuous check runs them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.weights.build import small_gguf

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
CHECK = ROOT / ".ci" / "run"
LINES = (
    'pip install -e . && python -m zoo.llama chat "What is the capital of France?"',
    "pip install -e '.[test]' && python -m pytest",
)


def test_first_code_block_is_the_two_lines() -> None:
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)
    assert first is not None
    assert tuple(first.group(1).splitlines()) == LINES


def test_links_and_files_named_exist() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    targets += re.findall(r"`((?:zoo|weights|engine|docs|bench|\.ci)/[\w./]*)`", README)
    missing = [t for t in targets if not (ROOT / t).exists()]
    assert not missing, missing


def test_python_examples(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that need a model are only compiled; those of checkpoints and the engine run."""
    *models, checkpoint, engine = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(models) == 2
    for model in models:
        compile(model, "README.md", "exec")
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_bytes(small_gguf())
    exec(compile(checkpoint, "README.md", "exec"), {})
    assert capsys.readouterr().out == "x (2, 3) F32\ny (3,) F16\n"
    assert Path("model.safetensors").is_file()
    exec(compile(engine, "README.md", "exec"), {})
    assert capsys.readouterr().out == "[25. 34.]\n"


@pytest.mark.skipif(os.name == "nt", reason="the check is a bash script")
def test_check_runs_the_lines_of_the_readme(tmp_path: Path) -> None:
    """Run with stand-ins for python and pip that only note what they were asked."""
    log = tmp_path / "log"
    venv_bin = tmp_path / "bin"
    venv_bin.mkdir()
    note = f'#!/bin/sh\necho "$(basename "$0") $*" >> "{log}"\n'
    make_venv = f'[ "$2" = venv ] && mkdir -p "$3/bin" && cp "{venv_bin}"/* "$3/bin/"\nexit 0\n'
    for name in ("python", "pip", "ruff"):
        (venv_bin / name).write_text(note)
        (venv_bin / name).chmod(0o755)
    (tmp_path / "python3").write_text("#!/bin/sh\n" + make_venv)
    (tmp_path / "python3").chmod(0o755)
    tools = tmp_path / "tools"  # so that the check has no reason to install them
    tools.mkdir()
    for name in ("ld", "chromium-headless-shell"):
        (tools / name).symlink_to(venv_bin / "ruff")
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHON": str(tmp_path / "python3"), "PATH": path}
    subprocess.run([str(CHECK)], check=True, env=environment, stdin=subprocess.DEVNULL, timeout=60)
    assert log.read_text().splitlines() == [
        "pip install -e .",
        "python -m zoo.llama chat What is the capital of France?",
        "pip install -e .[test]",
        "python -m pytest",
        "ruff check .",
        "ruff format --check .",
        "pip install -e .[peers]",
        "python -m pytest -m peers and not slow",
    ]


@pytest.mark.skipif(os.name == "nt", reason="the check is a bash script")
def test_check_stops_at_the_first_failure() -> None:
    text = CHECK.read_text("utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert os.access(CHECK, os.X_OK)
