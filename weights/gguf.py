"""Read GGUF files: a mapped header parsed once, tensors and long arrays decoded on access.

Layout (little-endian, versions 2 and 3): magic, version, tensor count, pair count, the key/value
pairs, the tensor headers, then the data at a multiple of `general.alignment`. A model in several
files has `split.*` pairs in each and all else in the first; their names end in `-00001-of-00003`.
Source: the GGUF specification, ggml `docs/gguf.md`; llama.cpp's `gguf-split` for several files.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weights.checkpoint import Checkpoint, Entry, TensorInfo, WeightError, printable
from weights.gguf_header import MAGIC, Metadata, Reader
from weights.mapped import entry, open_mapped

__all__ = ["MAGIC", "load"]

_MAX_BLOCKS = 1024  # layers that a file with fewer tensors may still claim (vocabulary-only files)
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.\w+)?", re.DOTALL)


def load(path: Path, device: str | None = None) -> Checkpoint:
    """Open a GGUF file; tensors keep NumPy's axis order (GGUF stores it reversed).

    Any part of a model in several files opens all of them. Raises WeightError, naming the file,
    for anything that breaks the format.
    """
    metadata, entries = _read(path)
    count = _integer(path, metadata, "split.count", 1)
    if count > 1:
        metadata, entries = _join(path, _integer(path, metadata, "split.no", 0), count)
    _check_counts(path, metadata, len(entries))
    return Checkpoint(path, "gguf", metadata, entries, device)


def _read(path: Path) -> tuple[Metadata, dict[str, Entry]]:
    data = open_mapped(path)
    reader = Reader(path, data)
    n_tensors = reader.header()
    metadata = reader.pairs()
    headers = reader.tensor_headers(n_tensors)
    return metadata, _place(path, data, headers, reader.pos, _alignment(path, metadata))


# --- several files ---------------------------------------------------------------------------


def _join(path: Path, number: int, count: int) -> tuple[Metadata, dict[str, Entry]]:
    """The pairs of the first of `count` files, of which `path` is the one after `number` others.

    The others' names follow from this one's and from nothing that the file says.
    """
    found = _PART.fullmatch(path.name)
    if found is None or (int(found[2]), int(found[3])) != (number + 1, count):
        expected = f"a name that ends in -{number + 1:05}-of-{count:05}.gguf"
        remedy = "give each part the name that it came with"
        problem = f"part {number + 1} of {count} of a model, but its name doesn't say so"
        raise WeightError(problem, file=path, expected=expected, remedy=remedy)
    first, entries = None, {}
    for n in range(count):
        part = path.with_name(f"{found[1]}-{n + 1:05}-of-{count:05}{found[4] or ''}")
        if not part.is_file():
            problem = f"part {n + 1} of {count} of the model is missing"
            raise WeightError(problem, file=part, remedy="fetch it into the same folder")
        metadata, more = _read(part)
        claims = _integer(part, metadata, "split.no", 0), _integer(part, metadata, "split.count", 1)
        if claims != (n, count):
            got = f"{claims[0] + 1} of {claims[1]}"
            problem = "it is another part than its name says"
            raise WeightError(problem, file=part, expected=f"{n + 1} of {count}", got=got)
        both = entries.keys() & more.keys()
        if both:
            raise WeightError("another part has it too", file=part, tensor=min(both))
        entries |= more
        first = first or metadata
    total = _integer(path, first, "split.tensors.count", len(entries))
    if total != len(entries):
        problem = "the parts don't have all tensors"
        raise WeightError(problem, file=path, expected=total, got=len(entries))
    return first, entries


def _integer(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise WeightError(f"{key} is wrong", file=path, expected="a whole number", got=value)
    return value


# --- one file --------------------------------------------------------------------------------


def _alignment(path: Path, metadata: Metadata) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value < 1 or value & (value - 1):
        problem = "general.alignment is wrong"
        raise WeightError(problem, file=path, expected="a power of two", got=value)
    return value


def _place(
    path: Path,
    data: mmap.mmap,
    headers: dict[str, tuple[TensorInfo, int]],
    header_end: int,
    alignment: int,
) -> dict[str, Entry]:
    """Check that the tensors lie in the file, aligned and apart, and make their entries."""
    start = -(-header_end // alignment) * alignment
    room, end, previous = len(data) - start, 0, ""
    for name, (info, offset) in sorted(headers.items(), key=lambda item: item[1][1]):
        if offset + info.nbytes > room:
            raise WeightError(
                "its data runs past the end of the file",
                file=path,
                tensor=name,
                expected=f"{start + offset + info.nbytes} bytes",
                got=len(data),
                remedy="the file is cut short or damaged: fetch it again",
            )
        if offset % alignment:
            expected = f"a multiple of {alignment}"
            problem = "its data is not aligned"
            raise WeightError(problem, file=path, tensor=name, expected=expected, got=offset)
        if offset < end:
            problem = f"its data overlaps that of '{printable(previous)}'"
            raise WeightError(problem, file=path, tensor=name)
        end, previous = offset + info.nbytes, name
    return {
        name: entry(path, data, name, info, start + offset)
        for name, (info, offset) in headers.items()
    }


def _check_counts(path: Path, metadata: Metadata, n_tensors: int) -> None:
    # Readers loop over the blocks, so a made-up count must not get past the door.
    architecture = metadata.get("general.architecture")
    key = f"{architecture}.block_count" if isinstance(architecture, str) else ""
    count, limit = metadata.get(key, 0), max(n_tensors, _MAX_BLOCKS)
    if type(count) is not int or not 0 <= count <= limit:
        problem = f"{printable(key)} can't be right for {n_tensors} tensors"
        raise WeightError(problem, file=path, expected=f"0 to {limit}", got=count)
