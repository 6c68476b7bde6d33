"""Convert a checkpoint of any format to safetensors, GGUF or PyTorch, tensor by tensor.

Bytes go through unchanged wherever the type stays; else they are decoded by the same expressions
that models read them with, on the reference device, and encoded again, a million values at a
time. What was read of mapped files is given back as it goes, so that memory stays small however
large the file is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from weights import config, gguf_metadata, gguf_write, names, pytorch_write, safetensors_write
from weights.checkpoint import Checkpoint, Entry, TensorInfo, WeightError
from weights.gguf_header import MAX_NAME
from weights.mapped import give_back, is_mapped
from weights.pickle_machine import MAX_KEY
from weights.quant import BY_NAME, FORMATS, READABLE
from weights.quantise import encode
from weights.stored import Stored
from weights.whole import whole_file

DTYPES = ("f16", "bf16", "f32")
QUANTISED = ("q8_0", "q4_0", "q4_1", "q4_k")
PIECE = 1 << 20  # values decoded, or eight times as many bytes copied, at a time
_ENCODED = 1 << 17  # values encoded at a time: what fits into a core's cache is twice as fast
_FLOATS = frozenset({"F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2"})
_FALLBACK = {"Q4_K": "Q5_0"}  # for rows that are not whole blocks, as llama.cpp chooses
_PLAIN = frozenset(f.name for f in FORMATS if f.block == 1)

_NAMES = {"gguf": (1, MAX_NAME), "PyTorch": (0, MAX_KEY)}  # bytes that can be read again

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Target:
    """A format to write: the types that it can hold, what it keeps beside the tensors, how.

    `metadata` is made from the renamed source and the model that it is; with it may come tensors
    that only this format needs.
    """

    name: str
    types: frozenset[str]
    metadata: Callable[[Checkpoint, str | None], tuple[dict[str, Any], dict[str, Entry]]]
    write: Callable[[Path, list[Stored], dict[str, Any]], None]


def write_as(
    source: Checkpoint,
    dst: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    layout: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint to `dst`, whose suffix chooses the format.

    `dtype` (f16, bf16, f32) is what floats become; without it they stay as they are, except that
    quantised ones become f16 where the format has no such type. `quantize` (q8_0, q4_0, q4_1,
    q4_k; GGUF only) is what matrices become. `layout` names the tensors otherwise than the format
    does by default. `progress` is told the bytes written and those in all. WeightError for a file
    that can't be read, written or held by the format; `dst` is then as it was.
    """
    dst = Path(dst)
    target = target_of(dst)
    check_options(dst, dtype, quantize)
    if is_mapped(dst):
        raise WeightError("it is what is being read", file=dst, remedy="write to another file")
    with whole_file(dst, force) as place:
        model, checkpoint = _named(source, target, layout)
        metadata, more = target.metadata(checkpoint, model)
        entries = dict(checkpoint.entries) | more
        types = {n: _new_type(n, e.info, target, dtype, quantize) for n, e in entries.items()}
        tensors = [_stored(name, entry, types[name]) for name, entry in entries.items()]
        if target.name == "gguf" and any(types[n] != e.info.type for n, e in entries.items()):
            metadata |= gguf_metadata.file_type([info for _, info, _ in tensors])
        _check_types(tensors, target, dst)
        _check_names(tensors, target, dst)
        try:
            target.write(place, _counted(tensors, progress), metadata)
        except WeightError as error:
            error.file = dst if error.file == place else error.file
            raise


def target_of(dst: Path) -> Target:
    """The format that a file name's suffix means; WeightError for any other."""
    if dst.suffix.lower() not in TARGETS:
        expected = ", ".join(TARGETS)
        raise WeightError("its suffix names no format", file=dst, expected=f"one of {expected}")
    return TARGETS[dst.suffix.lower()]


def check_options(dst: Path, dtype: str | None, quantize: str | None) -> None:
    """WeightError for options that don't go together."""
    if dtype not in (None, *DTYPES):
        raise WeightError("no such dtype", expected=", ".join(DTYPES), got=dtype)
    if quantize not in (None, *QUANTISED):
        raise WeightError("no such quantisation", expected=", ".join(QUANTISED), got=quantize)
    if dtype and quantize:
        raise WeightError("dtype and quantize exclude each other", got=f"{dtype}, {quantize}")
    if quantize and target_of(dst).name != "gguf":
        remedy = "write to a file that ends in .gguf"
        raise WeightError("only GGUF holds quantised tensors", file=dst, remedy=remedy)


def _named(source: Checkpoint, target: Target, layout: str | None) -> tuple[str | None, Checkpoint]:
    """Which model the source is, and it under the target's names; None keeps its own names."""
    found = names.recognise(source)
    if found is None:
        if layout:
            problem = f"its model is not recognised, so its names can't become '{layout}'"
            raise WeightError(problem, file=source.path)
        return None, source
    model, _ = found
    if layout is None and target.name == "gguf" and "gguf" in names.LAYOUTS[model]:
        layout = "gguf"
    return model, names.in_layout(source, layout) if layout else names.canonical(source)


# --- types -----------------------------------------------------------------------------------


def _new_type(
    name: str, info: TensorInfo, target: Target, dtype: str | None, quantize: str | None
) -> str:
    """What a tensor of the source is stored as."""
    if info.type not in _FLOATS and info.type in _PLAIN:
        return info.type
    if target.name == "gguf" and len(info.shape) < 2:
        return "F32"  # llama.cpp adds and multiplies vectors in float32 only
    matrices = len(info.shape) == 2 or (len(info.shape) == 3 and "_exps" in name)
    if quantize and matrices and name.endswith("weight"):
        wanted = quantize.upper()
        return next(
            (k for k in (wanted, _FALLBACK.get(wanted)) if k and BY_NAME[k].size(info.shape)), "F16"
        )
    if dtype:
        return dtype.upper()
    return info.type if info.type in target.types else "F16"


def _check_types(tensors: list[Stored], target: Target, dst: Path) -> None:
    for name, info, _ in tensors:
        if info.type not in target.types:
            problem = f"{target.name} has no type {info.type}"
            raise WeightError(problem, file=dst, tensor=name)


def _check_names(tensors: list[Stored], target: Target, dst: Path) -> None:
    """Refuse names that the written file could not be read with."""
    least, most = _NAMES.get(target.name, (0, math.inf))
    for name, _, _ in tensors:
        try:
            length = len(name.encode())
        except UnicodeEncodeError:
            raise WeightError("its name is no text", file=dst, tensor=name) from None
        if not least <= length <= most:
            expected = f"{least} to {most} bytes"
            problem = f"its name doesn't fit into {target.name}"
            raise WeightError(problem, file=dst, tensor=name, expected=expected, got=length)


# --- bytes -----------------------------------------------------------------------------------


def _stored(name: str, entry: Entry, kind: str) -> Stored:
    info = TensorInfo(entry.info.shape, kind, BY_NAME[kind].size(entry.info.shape))
    pieces = _copied if kind == entry.info.type else partial(_recoded, name=name, kind=kind)
    return name, info, partial(pieces, entry)


def _copied(entry: Entry) -> Iterator[np.ndarray]:
    raw = entry.raw()
    for at in range(0, len(raw), 8 * PIECE):
        yield raw[at : at + 8 * PIECE]


def _recoded(entry: Entry, name: str, kind: str) -> Iterator[np.ndarray]:
    """The bytes of an entry as another type; WeightError for values that it can't hold."""
    old, raw = BY_NAME[entry.info.type], entry.raw()
    if old.decode is None:
        problem = f"its type {old.name} can't be read yet"
        remedy = f"types that can be read: {', '.join(READABLE)}"
        raise WeightError(problem, tensor=name, remedy=remedy)
    step = PIECE // old.block * old.nbytes
    for at in range(0, len(raw), step):
        piece = raw[at : at + step]
        count = len(piece) // old.nbytes * old.block
        values = old.decode(piece, (count,), "reference").numpy().astype(np.float32, copy=False)
        for start in range(0, count, _ENCODED):
            try:
                yield encode(values[start : start + _ENCODED], kind)
            except ValueError as error:
                raise WeightError(f"it can't become {kind}: {error}", tensor=name) from None


def _counted(tensors: list[Stored], progress: Progress | None) -> list[Stored]:
    """The same tensors, their bytes counted for `progress`; memory is given back as they go."""
    total, done = sum(info.nbytes for _, info, _ in tensors), 0

    def count(pieces: Callable[[], Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
        nonlocal done
        kept = 0
        for piece in pieces():
            yield piece
            done, kept = done + piece.nbytes, kept + piece.nbytes
            if progress:
                progress(done, total)
            if kept >= 8 * PIECE:
                give_back()
                kept = 0
        give_back()

    return [(name, info, partial(count, pieces)) for name, info, pieces in tensors]


def _beside(checkpoint: Checkpoint, model: str | None) -> dict[str, Any]:
    """What lies beside the tensors of a PyTorch file; OpenAI's loader of Whisper needs `dims`."""
    beside = config.gathered(checkpoint)
    if model == "whisper" and "dims" not in beside:
        dims = config.whisper_dims(checkpoint)
        beside |= {"dims": dims} if dims else {}
    return beside


_PYTORCH = Target(
    "PyTorch",
    pytorch_write.TYPES,
    lambda checkpoint, model: (_beside(checkpoint, model), {}),
    pytorch_write.write,
)
TARGETS = {
    ".safetensors": Target(
        "safetensors",
        _PLAIN,
        lambda checkpoint, model: (config.carried(checkpoint), {}),
        safetensors_write.write,
    ),
    ".gguf": Target(
        "gguf",
        frozenset(f.name for f in FORMATS if f.ggml is not None),
        gguf_metadata.for_gguf,
        gguf_write.write,
    ),
    ".pt": _PYTORCH,
    ".pth": _PYTORCH,
}
