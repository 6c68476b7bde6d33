"""Read safetensors files.

Layout: an 8-byte little-endian header length, that many bytes of JSON, then the data, which the
tensors must cover without holes or overlaps. Read here and not with the `safetensors` package
because that one copies each tensor into NumPy and has no bfloat16 there, whereas a mapped file
costs no memory until a tensor is used; the package is the oracle in the tests.
Source: the format's specification, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weights import config
from weights.budget import TENSOR, Budget
from weights.checkpoint import Checkpoint, Entry, TensorInfo, WeightError
from weights.jsonfile import as_object, parse
from weights.mapped import entry, open_mapped
from weights.quant import BY_NAME, countable

MAX_HEADER = 100_000_000  # bytes; the specification's own limit
MAX_DIMS = 16


def load(path: Path, device: str | None = None) -> Checkpoint:
    """Open one safetensors file; WeightError, naming the file, for anything malformed.

    `.metadata` is the file's `__metadata__`, or in a file of ours the configuration in it.
    """
    entries, metadata = _read_file(path)
    return Checkpoint(path, "safetensors", metadata, entries, device)


def looks_like(head: bytes, size: int) -> bool:
    """Whether a file of `size` bytes that begins with `head` (9 bytes) may be safetensors."""
    return len(head) >= 9 and int.from_bytes(head[:8], "little") + 8 <= size and head[8:9] == b"{"


def _read_file(path: Path) -> tuple[dict[str, Entry], dict[str, Any]]:
    data = open_mapped(path)
    budget = Budget(path, len(data))
    header = _header(path, data, budget)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise WeightError("__metadata__ is not an object", file=path)
    if metadata.get("format") == config.FORMAT and isinstance(metadata.get("config"), str):
        text = metadata["config"].encode("utf-8", "surrogatepass")
        metadata = as_object(path, parse(path, text, budget))
    start = 8 + int.from_bytes(data[:8], "little")
    budget.spend(TENSOR * len(header))
    headers = {name: _tensor_header(path, name, row) for name, row in header.items()}
    _check_layout(path, headers, len(data) - start)
    entries = {
        name: entry(path, data, name, info, start + begin)
        for name, (info, begin) in headers.items()
    }
    return entries, metadata


def _header(path: Path, data: mmap.mmap, budget: Budget) -> dict[str, Any]:
    if len(data) < 10:
        raise WeightError("too short for a safetensors file", file=path, got=f"{len(data)} bytes")
    length = int.from_bytes(data[:8], "little")
    limit = min(len(data) - 8, MAX_HEADER)
    if length > limit:
        problem = "the header length is wrong"
        expected = f"at most {limit} bytes"
        remedy = "the file is cut short or not safetensors"
        raise WeightError(problem, file=path, expected=expected, got=length, remedy=remedy)
    return as_object(path, parse(path, data[8 : 8 + length], budget))


def _tensor_header(path: Path, name: str, row: Any) -> tuple[TensorInfo, int]:
    """Check one tensor's header; return it with its offset from the start of the data."""
    kind, shape, offsets = (
        (row.get("dtype"), row.get("shape"), row.get("data_offsets"))
        if isinstance(row, Mapping)
        else (None, None, None)
    )
    if not isinstance(kind, str) or not _is_counts(shape) or not _is_counts(offsets):
        problem = "its header is malformed"
        expected = "dtype, shape and data_offsets"
        raise WeightError(problem, file=path, tensor=name, expected=expected)
    if kind not in BY_NAME or BY_NAME[kind].block != 1:
        known = ", ".join(f.name for f in BY_NAME.values() if f.block == 1)
        problem = "unknown tensor type"
        raise WeightError(problem, file=path, tensor=name, expected=f"one of {known}", got=kind)
    nbytes = BY_NAME[kind].size(tuple(shape))
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        problem = f"its data does not fit {kind} {tuple(shape)}"
        expected = f"{nbytes} bytes"
        raise WeightError(problem, file=path, tensor=name, expected=expected, got=offsets)
    if not countable(tuple(shape)):
        problem = "its shape is larger than any array"
        raise WeightError(problem, file=path, tensor=name, got=shape)
    return TensorInfo(tuple(shape), kind, nbytes), offsets[0]


def _is_counts(value: Any) -> bool:
    whole = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    return whole and len(value) <= MAX_DIMS


def _check_layout(path: Path, headers: dict[str, tuple[TensorInfo, int]], room: int) -> None:
    """Check that the tensors cover the data exactly, as the specification demands."""
    end = 0
    for name, (info, begin) in sorted(headers.items(), key=lambda i: (i[1][1], i[1][0].nbytes)):
        if begin != end:
            problem = "its data overlaps another tensor's" if begin < end else "a hole before it"
            raise WeightError(problem, file=path, tensor=name, expected=f"offset {end}", got=begin)
        end += info.nbytes
        if end > room:
            problem = "its data runs past the end of the file"
            remedy = "the file is cut short or damaged: fetch it again"
            got = f"{room} bytes of data"
            raise WeightError(problem, file=path, tensor=name, expected=end, got=got, remedy=remedy)
    if end != room:
        problem = "bytes after the last tensor"
        raise WeightError(problem, file=path, expected=f"{end} bytes of data", got=room)
