"""Write GGUF files (version 3), one tensor after the other.

Source: the GGUF specification, ggml `docs/gguf.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weights.checkpoint import TensorInfo, WeightError, printable
from weights.gguf_header import ARRAY, MAGIC, MAX_DIMS, MAX_NAME, SCALARS, STRING
from weights.quant import BY_NAME
from weights.stored import Stored, write_all

_NUMBER_OF = {dtype: number for number, dtype in SCALARS.items()}
_VERSION = 3


def write(path: Path, tensors: Iterable[Stored], metadata: Mapping[str, Any]) -> None:
    """Write a file. OSError when the disk is full; WeightError for what GGUF can't hold.

    NumPy scalars and arrays keep their type; of Python's own, whole numbers become uint32 (or the
    first of int32, uint64, int64 that holds them), floats float32, and a list what its items are.
    """
    tensors = list(tensors)
    alignment = int(metadata.get("general.alignment", 32))
    head = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, raw = _value(path, key, value)
        if not 0 < len(key.encode("utf-8", "replace")) <= MAX_NAME:
            problem = f"the name of metadata '{printable(key)}' doesn't fit into GGUF"
            raise WeightError(problem, file=path, expected=f"1 to {MAX_NAME} bytes")
        head += [_text(key), struct.pack("<I", kind), raw]
    end = 0
    for name, info, _ in tensors:
        head.append(_header(path, name, info, end))
        end += -(-info.nbytes // alignment) * alignment
    raw = b"".join(head)
    with open(path, "wb") as file:
        file.write(raw + bytes(-len(raw) % alignment))
        for tensor in tensors:
            write_all(file, tensor)
            file.write(bytes(-tensor[1].nbytes % alignment))


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def _header(path: Path, name: str, info: TensorInfo, offset: int) -> bytes:
    number = BY_NAME[info.type].ggml
    if number is None or len(info.shape) > MAX_DIMS or 0 in info.shape:
        problem = f"a tensor of {info.type} {info.shape} doesn't fit into GGUF"
        raise WeightError(problem, file=path, tensor=name)
    axes = struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *info.shape[::-1])
    return _text(name) + axes + struct.pack("<IQ", number, offset)


def _value(path: Path, key: str, value: Any) -> tuple[int, bytes]:
    """The number of a value's type, and its bytes."""
    if isinstance(value, str):
        return STRING, _text(value)
    if isinstance(value, list) and (not value or isinstance(value[0], (str, list, np.ndarray))):
        parts = [_value(path, key, item) for item in value]
        kinds = {kind for kind, _ in parts} or {STRING}
        if len(kinds) > 1:
            raise WeightError(f"metadata '{printable(key)}' mixes types in a list", file=path)
        body = b"".join(raw for _, raw in parts)
        return ARRAY, struct.pack("<IQ", kinds.pop(), len(parts)) + body
    try:
        array = _numbers(value)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    if array.dtype not in _NUMBER_OF or array.ndim > 1:
        problem = f"metadata '{printable(key)}' doesn't fit into GGUF"
        raise WeightError(problem, file=path, got=type(value).__name__)
    number = _NUMBER_OF[array.dtype]
    if array.ndim == 0:
        return number, array.tobytes()
    return ARRAY, struct.pack("<IQ", number, len(array)) + array.tobytes()


def _numbers(value: Any) -> np.ndarray:
    """A number or a list of them as NumPy has it, in a type of GGUF's where there is one."""
    array = np.asarray(value)
    if not isinstance(value, (np.ndarray, np.generic)):
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                array = array.astype(np.float32)
        elif array.dtype.kind in "iu":
            low, high = array.min(), array.max()
            fits = (t for t in ("u4", "i4", "u8", "i8") if _holds(np.iinfo(t), low, high))
            array = array.astype(next(fits))
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _holds(limits: np.iinfo, low: int, high: int) -> bool:
    return limits.min <= low and high <= limits.max
