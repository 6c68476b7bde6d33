"""A server in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class Process:
    """`python -m zoo serve` with some flags, on a free port; ends with the `with` block."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        self._log = folder / "server.log"
        command = [sys.executable, "-m", "zoo", "serve", "--port", "0", *flags]
        with open(self._log, "wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env={**os.environ, **environment},
            )  # fmt: skip
        self.address = ""

    def __enter__(self) -> Process:
        end = time.monotonic() + 60
        while not (found := re.search(r"\((http://\S+) ", self.log())):
            assert self.process.poll() is None and time.monotonic() < end, self.log()
            time.sleep(0.02)
        self.address = found[1]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(40)
        finally:
            self.process.kill()

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text("utf-8", "replace")
