"""Tensors spread over several files, as an index beside them says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from weights.checkpoint import Entry, WeightError, printable
from weights.jsonfile import read_object


def read_index(index: Path, open_file: Callable[[Path], Mapping[str, Entry]]) -> dict[str, Entry]:
    """The tensors that a `*.index.json` lists, each from the file of the same folder it names.

    WeightError for a file outside the folder, a missing file and a tensor that its file lacks.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError("it has no weight_map", file=index)
    shards: dict[str, Mapping[str, Entry]] = {}
    entries: dict[str, Entry] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not is_bare(name):
            problem = "the index points outside its folder"
            raise WeightError(problem, file=index, tensor=tensor, got=name)
        if name not in shards:
            shard = index.parent / name
            if not os.path.isfile(shard):  # unlike is_file, also of names that no system has
                remedy = f"fetch {printable(name)} again"
                raise WeightError("a shard is missing", file=shard, tensor=tensor, remedy=remedy)
            shards[name] = open_file(shard)
        if tensor not in shards[name]:
            problem = f"the index says it is in {printable(name)}, which has no such tensor"
            raise WeightError(problem, file=index, tensor=tensor)
        entries[tensor] = shards[name][tensor]
    return entries


def is_bare(name: str) -> bool:
    """Whether `name` is a plain file name on every system: no folder, no drive, no `..`."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    return name not in ("", ".", "..") and "\0" not in name and posix.name == windows.name == name
