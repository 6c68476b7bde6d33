"""The header of a GGUF file: key/value pairs and tensor headers, checked before they are used.

A file is not trusted: every count is checked against the bytes that are left before anything is
allocated. Source: the GGUF specification, ggml `docs/gguf.md`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from weights.budget import TENSOR, Budget
from weights.checkpoint import TensorInfo, WeightError, printable
from weights.quant import BY_GGML

MAGIC = b"GGUF"
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
SCALARS = {number: np.dtype(name) for number, name in SCALARS.items()}
STRING, ARRAY = 8, 9
_MAX_NESTING = 4  # arrays within arrays; no known file nests at all
MAX_DIMS = 4  # ggml's own limit
MAX_NAME = 65535  # bytes of a key; the specification's own limit
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Metadata(Mapping[str, Any]):
    """The file's key/value pairs; a value is decoded, and its text checked, on first access."""

    def __init__(self, reader: Reader, slots: dict[str, tuple[int, int]]) -> None:
        self._reader, self._slots = reader, slots  # slots: key -> (type, offset)
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = self._reader.value(key, *self._slots[key])
        return self._values[key]

    def typed(self, key: str) -> Any:
        """The value with its type: numbers as NumPy has them, for a file to be written."""
        return self._reader.value(key, *self._slots[key], typed=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots


class Reader:
    """A cursor over the mapped header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.pos = path, data, len(data), 0
        self.pair_count = 0
        self.budget = Budget(path, self.size)

    def fail(self, problem: str, **facts: object) -> NoReturn:
        raise WeightError(problem, file=self.path, **facts)

    def need(self, nbytes: int, what: str) -> None:
        """Check that `nbytes` more bytes exist at the cursor."""
        if nbytes > self.size - self.pos:
            left = max(0, self.size - self.pos)
            self.fail(f"{what} runs past the end of the file", expected=f"{nbytes} bytes", got=left)

    def u32(self, what: str) -> int:
        self.need(4, what)
        self.pos += 4
        return _U32.unpack_from(self.data, self.pos - 4)[0]

    def u64(self, what: str) -> int:
        self.need(8, what)
        self.pos += 8
        return _U64.unpack_from(self.data, self.pos - 8)[0]

    def string(self, what: str) -> str:
        length = self.u64(what)
        self.need(length, what)
        return self.text(length, what)

    def name(self, what: str) -> str:
        """A key or tensor name: a short string that is not empty."""
        length = self.u64(what)
        if not 0 < length <= MAX_NAME:
            expected = f"1 to {MAX_NAME} bytes"
            self.fail(f"{what} has a bad length", expected=expected, got=length)
        self.need(length, what)
        return self.text(length, what)

    def text(self, length: int, what: str) -> str:
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not valid UTF-8 at byte {error.start}")

    def header(self) -> int:
        """Check magic and version; return the tensor count."""
        if self.data[:4] != MAGIC:
            self.fail("not a GGUF file", expected=MAGIC, got=self.data[:4])
        self.pos = 4
        version = self.u32("the version")
        if version & 0xFFFF == 0:
            self.fail("big-endian GGUF", remedy="convert it to little-endian first")
        if version not in (2, 3):
            remedy = "convert the model again with a current converter"
            self.fail("unsupported GGUF version", expected="2 or 3", got=version, remedy=remedy)
        n_tensors = self.u64("the tensor count")
        self.pair_count = self.u64("the key/value count")
        # The least that a header takes: name length, one letter, axes, type, offset; and a pair.
        self.need(25 * n_tensors + 14 * self.pair_count, "the header")
        return n_tensors

    def pairs(self) -> Metadata:
        """Walk the key/value pairs, noting where each value lies."""
        slots: dict[str, tuple[int, int]] = {}
        for _ in range(self.pair_count):
            key = self.name("a metadata key")
            if key in slots:
                self.fail(f"metadata key '{printable(key)}' appears twice")
            kind = self.u32(f"'{printable(key)}'")
            slots[key] = kind, self.pos
            self.skip(key, kind)
        return Metadata(self, slots)

    def skip(self, key: str, kind: int, depth: int = 0) -> None:
        """Move the cursor past one value, checking its structure but decoding nothing."""
        what = f"metadata '{printable(key)}'"
        if kind in SCALARS:
            self.need(SCALARS[kind].itemsize, what)
            self.pos += SCALARS[kind].itemsize
        elif kind == STRING:
            self.skip_strings(1, what)
        elif kind != ARRAY:
            self.fail(f"{what} has an unknown value type", expected="0 to 12", got=kind)
        elif depth == _MAX_NESTING:
            self.fail(f"{what} nests arrays deeper than {_MAX_NESTING}")
        else:
            inner, count = self.u32(what), self.u64(what)
            if inner in SCALARS:
                self.need(count * SCALARS[inner].itemsize, what)
                self.pos += count * SCALARS[inner].itemsize
            elif inner == STRING:
                self.skip_strings(count, what)
            else:
                self.need(count * 12, what)
                for _ in range(count):
                    self.skip(key, inner, depth + 1)

    def skip_strings(self, count: int, what: str) -> None:
        # A vocabulary has some 100,000 strings, so this loop is the cost of opening a file.
        self.need(count * 8, what)
        data, pos, unpack = self.data, self.pos, _U64.unpack_from
        try:
            for _ in range(count):
                pos += 8 + unpack(data, pos)[0]
        except (struct.error, OverflowError):
            pos = self.size + 1
        if pos > self.size:
            self.fail(f"a string of {what} runs past the end of the file")
        self.pos = pos

    def value(self, key: str, kind: int, pos: int, typed: bool = False) -> Any:
        """Decode the value at `pos`, which `skip` has checked; arrays become lists.

        `typed` leaves numbers as NumPy scalars and arrays.
        """
        self.pos = pos
        return self.decode(kind, f"metadata '{printable(key)}'", typed)

    def decode(self, kind: int, what: str, typed: bool) -> Any:
        if kind in SCALARS:
            return self.numbers(kind, 1, typed)[0]
        if kind == STRING:
            return self.string(what)
        inner, count = self.u32(what), self.u64(what)
        if inner in SCALARS:
            return self.numbers(inner, count, typed)
        if inner == STRING:
            return self.strings(count, what)
        return [self.decode(inner, what, typed) for _ in range(count)]

    def numbers(self, kind: int, count: int, typed: bool) -> list | np.ndarray:
        values = np.frombuffer(self.data, SCALARS[kind], count, self.pos)
        self.pos += values.nbytes
        return values if typed else values.tolist()

    def strings(self, count: int, what: str) -> list[str]:
        data, pos, unpack, out = self.data, self.pos, _U64.unpack_from, []
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                out.append(data[start:pos].decode())
        except UnicodeDecodeError as error:
            self.fail(f"string {len(out)} of {what} is not valid UTF-8 at byte {error.start}")
        self.pos = pos
        return out

    def tensor_headers(self, count: int) -> dict[str, tuple[TensorInfo, int]]:
        """Name -> (header, offset from the start of the data)."""
        headers: dict[str, tuple[TensorInfo, int]] = {}
        for _ in range(count):
            self.budget.spend(TENSOR)
            name = self.name("a tensor name")
            if name in headers:
                self.fail("the name appears twice", tensor=name)
            headers[name] = self.tensor_header(name)
        return headers

    def tensor_header(self, name: str) -> tuple[TensorInfo, int]:
        n_dims = self.u32("a tensor header")
        if n_dims > MAX_DIMS:
            self.fail("too many axes", tensor=name, expected=f"at most {MAX_DIMS}", got=n_dims)
        shape = tuple(self.u64("a tensor header") for _ in range(n_dims))[::-1]
        if 0 in shape:
            self.fail("an axis has length 0", tensor=name, got=shape)
        number, offset = self.u32("a tensor header"), self.u64("a tensor header")
        if number not in BY_GGML:
            known = ", ".join(f.name for f in BY_GGML.values())
            self.fail("unknown tensor type", tensor=name, expected=f"one of {known}", got=number)
        kind = BY_GGML[number]
        nbytes = kind.size(shape)
        if nbytes is None:
            rows = f"rows of {kind.name} in multiples of {kind.block}"
            self.fail("its rows are not whole blocks", tensor=name, expected=rows, got=shape)
        return TensorInfo(shape, kind.name, nbytes), offset
