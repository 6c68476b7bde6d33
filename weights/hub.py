"""Files of a Hugging Face hub repository, with the user's token, endpoint and cache.

Listing and metadata come from `huggingface_hub`; the bytes are received here, because its own
download forgets what an earlier process had received and waits for a minute on a silent server. A
file that the user already has in the hub's cache is linked, not downloaded again. Each file is
checked against the hash that the hub states: SHA-256 for large files, git's SHA-1 for the others.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from weights import pip
from weights.cache import CHUNK, Fetched, FetchError, check_space, sha256, size_text
from weights.checkpoint import WeightError, printable
from weights.hub_files import choose, shards_of
from weights.hub_transfer import asking, first_answer, receive
from weights.registry import Hub, Model

_SHA256, _SHA1 = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class _Listing:
    names: list[str]
    revision: str  # the commit, or what was asked for where the hub doesn't say
    licence: str


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    etag: str  # the hash that the hub states; empty where the cache doesn't tell
    cached: Path | None = None

    @property
    def key(self) -> str:
        """A name for its unfinished part; another version of the file has another one."""
        return hashlib.sha256(f"{self.name}\n{self.etag}".encode()).hexdigest()[:24]


def get(source: Hub, scratch: Path, model: Model) -> Fetched:
    """Fetch the files of `source`, going on from an earlier try; FetchError when that fails."""
    from huggingface_hub.utils import logging  # slow to import, so only when it is needed

    logging.set_verbosity_error()  # its warning per retry would bury the one line that helps
    listing = _list(source)
    names = choose(listing.names, source)
    files = [_describe(source, listing.revision, name) for name in names]
    _announce(source, model, listing, files)
    check_space(scratch, sum(_missing(file, scratch) for file in files))
    with pip.progress("downloading", sum(file.size for file in files)) as bar:
        hashes = {file.name: _get(source, listing.revision, file, scratch, bar) for file in files}
    whole = scratch / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    for file in files:
        (whole / file.name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / file.key, whole / file.name)
    for name in shards_of(whole):
        if name not in hashes:
            raise FetchError(f"its index names {printable(name)}, which it doesn't have")
    return Fetched(whole, hashes, listing.revision)


def _announce(source: Hub, model: Model, listing: _Listing, files: list[_File]) -> None:
    size = size_text(sum(file.size for file in files))
    licence = model.licence or listing.licence or "not stated"
    count = f"{len(files)} file{'s'[: len(files) - 1]}"
    facts = f"{size} in {count}, licence {printable(licence)}"
    print(f"fetching {model.name} ({facts}) from {source}", file=sys.stderr)


def _list(source: Hub) -> _Listing:
    """The repository's files; those in the hub's cache when the hub can't be asked."""
    from huggingface_hub import HfApi

    try:
        with asking(source):
            info = HfApi().model_info(source.repo, revision=source.revision, timeout=first_answer())
    except FetchError:
        if cached := _list_cache(source):
            return cached
        raise
    licence = next((t[8:] for t in info.tags or () if t.startswith("license:")), "")
    names = [s.rfilename for s in info.siblings or () if isinstance(s.rfilename, str)]
    return _Listing(names, info.sha or source.revision, licence)


def _list_cache(source: Hub) -> _Listing | None:
    """What the cache has of the revision, if that is all that the source wants."""
    for probe in ("config.json", "model_index.json", *source.files):
        if "*" not in probe and (found := _cached(source, source.revision, probe)):
            folder = found.parents[probe.count("/")]
            names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
            try:
                chosen = choose(names, source)
            except WeightError:
                return None
            whole = set(shards_of(folder)) <= set(chosen)
            return _Listing(names, folder.name, "") if whole else None
    return None


def _cached(source: Hub, revision: str, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repo, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _describe(source: Hub, revision: str, name: str) -> _File:
    """Size and hash of a file, from the cache where it is there and else from the hub."""
    if cached := _cached(source, revision, name):
        blob = cached.resolve()  # the cache names a file by its hash, and links to it
        etag = blob.name if blob.parent.name == "blobs" else ""
        return _File(name, cached.stat().st_size, etag, cached)
    return _ask(source, revision, name)


def _ask(source: Hub, revision: str, name: str) -> _File:
    from huggingface_hub import get_hf_file_metadata

    with asking(source, name):
        said = get_hf_file_metadata(_url(source, revision, name), timeout=first_answer())
    if said.size is None or not said.etag:
        raise FetchError(f"the hub states no size or hash of {printable(name)}")
    return _File(name, said.size, said.etag)


def _url(source: Hub, revision: str, name: str) -> str:
    from huggingface_hub import constants, hf_hub_url

    return hf_hub_url(source.repo, name, revision=revision, endpoint=constants.ENDPOINT)


def _missing(file: _File, scratch: Path) -> int:
    """Bytes of the file that aren't on this disk yet."""
    if file.cached and file.cached.stat().st_dev == scratch.stat().st_dev:
        return 0
    have = (scratch / file.key, scratch / f"{file.key}.part")
    return max(0, file.size - sum(path.stat().st_size for path in have if path.exists()))


def _get(source: Hub, revision: str, file: _File, scratch: Path, bar) -> str:
    """Put the checked file at `scratch / file.key`; returns its SHA-256."""
    target, part = scratch / file.key, scratch / f"{file.key}.part"
    if target.exists() and target.stat().st_size == file.size:  # an earlier try checked it
        bar.update(file.size)
        return file.etag if _SHA256.fullmatch(file.etag) else sha256(target)
    if file.cached:
        part = scratch / f"{file.key}.link"  # never written to: it may be the cache's own file
        _link(file.cached, part)
        try:
            digest = _check(part, file)
        except FetchError:
            file = _ask(source, revision, file.name)  # what the cache has is damaged
            return _get(source, revision, file, scratch, bar)
        bar.update(file.size)
    else:
        receive(_url(source, revision, file.name), part, file.size, source, bar)
        digest = _check(part, file)
    os.replace(part, target)
    return digest


def _link(cached: Path, part: Path) -> None:
    part.unlink(missing_ok=True)
    try:
        os.link(cached.resolve(), part)
    except OSError:  # another disk, or one without links
        shutil.copyfile(cached, part)


def _check(part: Path, file: _File) -> str:
    """The file's SHA-256; FetchError, and no file, when its hash isn't what the hub stated."""
    whole, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with open(part, "rb") as read:
        while chunk := read.read(CHUNK):
            whole.update(chunk)
            if not _SHA256.fullmatch(file.etag):
                git.update(chunk)
    for kind, pattern, got in (("SHA-256", _SHA256, whole), ("git SHA-1", _SHA1, git)):
        if pattern.fullmatch(file.etag) and got.hexdigest() != file.etag:
            part.unlink()
            facts = f"expected {file.etag}, got {got.hexdigest()}"
            raise FetchError(f"{printable(file.name)}: wrong {kind}: {facts}")
    return whole.hexdigest()
