"""Which files of a hub repository make a model, told by their names."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath

from weights.cache import FetchError
from weights.checkpoint import printable
from weights.registry import Hub

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.(\w+)")
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")  # configuration and tokenizer
# The first pattern that matches: many repositories have the same weights in several forms.
_SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors", "*.safetensors")
_PYTORCH = ("pytorch_model.bin", "pytorch_model-*-of-*.bin", "consolidated.*.pth")
_UNUSED_PARTS = {"safety_checker", "feature_extractor"}
_LISTED = 12  # GGUF files that a message names


def choose(names: list[str], source: Hub) -> list[str]:
    """The files to fetch, sorted; FetchError when some are missing, or the choice is the user's."""
    names = [name for name in names if not name.startswith(".")]
    if source.files:
        chosen = _matching(names, source.files)
    elif "model_index.json" in names:
        chosen = _diffusers(names)
    else:
        chosen = _plain(names, source)
    for name in chosen:
        if not _is_inside(name):
            raise FetchError(f"a file name points outside its folder: {printable(name)}")
    return sorted(chosen)


def shards_of(folder: Path) -> list[str]:
    """The files that the safetensors index in `folder` names; none without an index."""
    try:
        weight_map = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # a damaged index is for `weights.load` to tell


def _matching(names: list[str], patterns: tuple[str, ...]) -> set[str]:
    chosen = set()
    for pattern in patterns:
        found = _match(names, pattern)
        if not found:
            raise FetchError(f"the repository has no file {printable(pattern)}")
        for name in found:
            chosen |= _all_parts(names, name) if name == pattern else {name}
    return chosen


def _match(names: list[str], pattern: str) -> set[str]:
    """The names that fit; `*` stays within a folder."""
    parts = pattern.split("/")
    split = ((name, name.split("/")) for name in names)
    return {n for n, p in split if len(p) == len(parts) and all(map(fnmatchcase, p, parts))}


def _all_parts(names: list[str], name: str) -> set[str]:
    """A part of a split GGUF stands for all of its parts."""
    this = _SHARD.fullmatch(name)
    if not this or this[3].lower() != "gguf":
        return {name}
    shards = ((other, _SHARD.fullmatch(other)) for other in names)
    return {other for other, shard in shards if shard and shard.groups() == this.groups()}


def _diffusers(names: list[str]) -> set[str]:
    """Each part's configuration and weights, in float16 where the repository has them so."""
    chosen = {"model_index.json"}
    for part in {name.split("/")[0] for name in names if name.count("/") == 1} - _UNUSED_PARTS:
        weights = {n for n in _match(names, f"{part}/*.safetensors") if "non_ema" not in n}
        half = {name for name in weights if ".fp16" in name}
        if not weights and not part.startswith(("scheduler", "tokenizer")):
            continue
        for name in set().union(*(_match(names, f"{part}/{kind}") for kind in _BESIDE)):
            if ".index." not in name or (".fp16" in name) == bool(half):
                chosen.add(name)
        chosen |= half or weights
    return chosen


def _plain(names: list[str], source: Hub) -> set[str]:
    beside = set().union(*(_match(names, kind) for kind in _BESIDE))
    for pattern in _SAFETENSORS:
        if found := _match(names, pattern):
            return found | beside
    if found := {name for name in names if name.lower().endswith(".gguf")}:
        return _only_gguf(names, found, source)
    for pattern in _PYTORCH:
        if found := _match(names, pattern):
            return found | beside
    raise FetchError("the repository has no safetensors, GGUF or PyTorch file")


def _only_gguf(names: list[str], found: set[str], source: Hub) -> set[str]:
    sets = {frozenset(_all_parts(names, name)) for name in found}
    if len(sets) == 1:
        return set(next(iter(sets)))
    first = sorted(min(each) for each in sets)
    more = f" and {len(first) - _LISTED} more" if len(first) > _LISTED else ""
    raise FetchError(
        f"the repository has {len(first)} GGUF files: "
        f"{', '.join(map(printable, first[:_LISTED]))}{more}",
        remedy=f"name the one you want, such as {source.repo}/{printable(first[0])}",
    )


def _is_inside(name: str) -> bool:
    """Whether `name` stays inside its folder on every system."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    plain = not (posix.is_absolute() or windows.drive or windows.root or set(name) & set("\\\0"))
    return plain and not set(name.split("/")) & {"", ".", ".."}
