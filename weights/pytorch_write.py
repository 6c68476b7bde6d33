"""Write PyTorch's zip format, one tensor after the other, so that torch reads or maps it safely.

The layout is that of `weights.pytorch`. Each tensor has a storage of its own, which begins at a
multiple of 64 bytes; checksums are put in after the data went by, so that it is read once. The
pickle names nothing that `torch.load(weights_only=True)` does not know.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from weights.checkpoint import TensorInfo, WeightError
from weights.quant import BY_NAME
from weights.stand_ins import TORCH_NAMES
from weights.stored import Stored

TYPES = frozenset(TORCH_NAMES)
MODEL = "model_state_dict"  # where the tensors lie when there is metadata beside them
_ROOT = "archive"
_ALIGN = 64  # bytes, as torch does
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF  # "see the zip64 field"
_VERSION_NEEDED, _UTF_8, _DATE = 45, 0x800, 0x21  # zip64; names are UTF-8; 1 January 1980
_WIDE, _PADDING = 1, 0x4246  # kinds of extra fields: 64-bit sizes, and torch's own for alignment
_CRC_AT = 14  # where a local header has its checksum

_Pieces = Callable[[], Iterable["bytes | np.ndarray"]]


def write(path: Path, tensors: Iterable[Stored], metadata: Mapping[str, Any]) -> None:
    """Write a flat state_dict; with metadata, a dict of `model_state_dict` and the metadata.

    WeightError for a type that torch lacks, or metadata that is not strings, numbers, lists and
    dicts. OSError when the disk is full.
    """
    tensors = list(tensors)
    for name, info, _ in tensors:
        if info.type not in TYPES:
            expected = f"one of {', '.join(TORCH_NAMES)}"
            problem = f"torch has no type {info.type}"
            raise WeightError(problem, file=path, tensor=name, expected=expected)
    if MODEL in metadata:
        raise WeightError(f"the metadata has a key {MODEL} of its own", file=path)
    with open(path, "wb") as file:
        archive = _Archive(file)
        archive.add_bytes("data.pkl", _pickle(path, tensors, metadata))
        archive.add_bytes("byteorder", b"little")
        for number, (_, info, pieces) in enumerate(tensors):
            archive.add(f"data/{number}", info.nbytes, pieces)
        archive.add_bytes("version", b"3\n")
        archive.finish()


class _Archive:
    """A zip archive of stored entries, written front to back but for the checksums."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.rows: list[tuple[bytes, int, int, int]] = []  # name, checksum, size, offset

    def add_bytes(self, name: str, data: bytes) -> None:
        self.add(name, len(data), lambda: [data])

    def add(self, name: str, size: int, pieces: _Pieces) -> None:
        """Write an entry of `size` bytes, the data aligned."""
        spelled, start = f"{_ROOT}/{name}".encode(), self.file.tell()
        wide = size >= _FULL_32
        extra = struct.pack("<2H2Q", _WIDE, 16, size, size) if wide else b""
        padding = -(start + 30 + len(spelled) + len(extra) + 4) % _ALIGN
        extra += struct.pack("<2H", _PADDING, padding) + bytes(padding)
        short = min(size, _FULL_32)
        self.file.write(
            struct.pack(
                "<4s5H3I2H", b"PK\x03\x04", _VERSION_NEEDED, _UTF_8, 0, 0, _DATE, 0, short, short,
                len(spelled), len(extra),
            )
        )  # fmt: skip
        self.file.write(spelled + extra)
        checksum = written = 0
        for piece in pieces():
            checksum = zlib.crc32(piece, checksum)
            written += self.file.write(piece)
        assert written == size, f"{name}: {written} bytes instead of {size}"
        self.file.seek(start + _CRC_AT)
        self.file.write(struct.pack("<I", checksum))
        self.file.seek(0, 2)
        self.rows.append((spelled, checksum, size, start))

    def finish(self) -> None:
        """Write the directory and its end, the zip64 one too: torch does so in every file."""
        start = self.file.tell()
        for name, checksum, size, offset in self.rows:
            wide = [n for n in (size, size, offset) if n >= _FULL_32]
            extra = struct.pack(f"<2H{len(wide)}Q", _WIDE, 8 * len(wide), *wide) if wide else b""
            short = min(size, _FULL_32)
            self.file.write(
                struct.pack(
                    "<4s6H3I5H2I", b"PK\x01\x02", _VERSION_NEEDED, _VERSION_NEEDED, _UTF_8, 0, 0,
                    _DATE, checksum, short, short, len(name), len(extra), 0, 0, 0, 0,
                    min(offset, _FULL_32),
                )
            )  # fmt: skip
            self.file.write(name + extra)
        end, count = self.file.tell(), len(self.rows)
        size = end - start
        facts = _VERSION_NEEDED, _VERSION_NEEDED, 0, 0, count, count, size, start
        wide = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, *facts)
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
        short, few = [min(n, _FULL_32) for n in (size, start)], min(count, _FULL_16)
        last = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, few, few, *short, 0)
        self.file.write(wide + locator + last)


# --- the pickle, protocol 2 ------------------------------------------------------------------

_MARK, _TUPLE, _REDUCE, _STOP = b"(", b"t", b"R", b"."
_EMPTY_DICT, _SET_ITEMS, _EMPTY_LIST, _APPENDS = b"}", b"u", b"]", b"e"
_PROTOCOL, _PERSISTENT = b"\x80\x02", b"Q"
_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}


def _pickle(path: Path, tensors: list[Stored], metadata: Mapping[str, Any]) -> bytes:
    out = bytearray(_PROTOCOL)
    if metadata:
        out += _EMPTY_DICT + _MARK + _text(MODEL)
    out += _EMPTY_DICT + _MARK
    for number, (name, info, _) in enumerate(tensors):
        out += _text(name) + _tensor(number, info)
    out += _SET_ITEMS
    for key, value in metadata.items():
        try:
            out += _text(key) + _value(value)
        except (TypeError, RecursionError) as error:
            problem = f"metadata '{key}' can't be written: {error}"
            raise WeightError(problem, file=path) from None
    return bytes(out + (_SET_ITEMS if metadata else b"") + _STOP)


def _tensor(number: int, info: TensorInfo) -> bytes:
    """A call of torch's `_rebuild_tensor_v2`, or of `_v3` for types without a storage class."""
    kind, storage = TORCH_NAMES[info.type]
    untyped = storage is None
    count = info.nbytes // (1 if untyped else BY_NAME[info.type].nbytes)
    strides = [1]
    for n in info.shape[:0:-1]:
        strides.insert(0, strides[0] * n)
    holder = ("torch.storage", "UntypedStorage") if untyped else ("torch", storage)
    where = [_text("storage"), _name(*holder), _text(str(number)), _text("cpu"), _integer(count)]
    args = [_tuple(where) + _PERSISTENT, _integer(0)]
    args += [_tuple(map(_integer, dims)) for dims in (info.shape, strides[: len(info.shape)])]
    args += [_CONSTANTS[False], _name("collections", "OrderedDict") + _tuple([]) + _REDUCE]
    if untyped:
        args.append(_name("torch", kind))
    rebuild = "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2"
    return _name("torch._utils", rebuild) + _tuple(args) + _REDUCE


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _tuple(items: Iterable[bytes]) -> bytes:
    return _MARK + b"".join(items) + _TUPLE


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")  # what Python's pickles do
    return b"X" + struct.pack("<I", len(raw)) + raw


def _integer(number: int) -> bytes:
    if 0 <= number < 256:
        return b"K" + struct.pack("<B", number)
    if -(2**31) <= number < 2**31:
        return b"J" + struct.pack("<i", number)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) > 255:
        raise TypeError("an integer of more than 255 bytes")
    return b"\x8a" + struct.pack("<B", len(raw)) + raw


def _value(value: Any) -> bytes:
    match value:
        case None | bool():
            return _CONSTANTS[value]
        case int():
            return _integer(value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return _text(value)
        case list() | tuple():
            return _EMPTY_LIST + _MARK + b"".join(map(_value, value)) + _APPENDS
        case Mapping():
            pairs = (_value(key) + _value(item) for key, item in value.items())
            return _EMPTY_DICT + _MARK + b"".join(pairs) + _SET_ITEMS
    raise TypeError(f"a {type(value).__name__}")
