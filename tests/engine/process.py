"""Scripts in a process of their own, for what may hang, abort or depend on the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def script(
    code: str, env: Mapping[str, str | None] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess:
    """Run Python code from the repository's root; a None in env removes the variable.

    Raises subprocess.TimeoutExpired where it hangs.
    """
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    for name, value in (env or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def output(
    code: str, env: Mapping[str, str | None] | None = None, timeout: float = 60
) -> list[str]:
    """The lines that a script prints; the test fails if it doesn't end well."""
    done = script(code, env, timeout)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
    return done.stdout.splitlines()
