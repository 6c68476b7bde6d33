"""Read protobuf messages by a table of their fields, without a compiler or a library.

A message is a row of fields: a tag (number * 8 + wire type), then a varint (0), 8 bytes (1), a
length and as many bytes (2), or 4 bytes (5). Source: protobuf's "Encoding" page.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from weights.budget import Budget
from weights.checkpoint import WeightError

# What a field holds: a number, text, bytes, packed numbers left as they are, or another message.
INT, FLOAT, TEXT, BYTES, PACKED = "int", "float", "text", "bytes", "packed"
Field = tuple[str, str, bool]  # name, one of these or a message's name, whether it repeats
Schema = Mapping[str, Mapping[int, Field]]

_DEPTH = 64  # messages in messages: 20 graphs in graphs
_MESSAGE, _TEXT, _VIEW, _NUMBER = 120, 60, 200, 16  # bytes of memory
_SCALE = 2  # names that repeat are one object, so a file may hold more of them than a checkpoint
_FIELDS = 1_000_000  # read in half a second; a graph of 10,000 nodes has 200,000
_SLICE = 1 << 16  # bytes of packed numbers decoded at a time


class Reader:
    """The messages of one mapped file, read by `schema` into dicts from field names to values.

    Repeated fields are lists (of numbers: arrays), fields of bytes are views of the file.
    Unknown fields are passed over. Raises WeightError for anything that breaks the format.
    """

    def __init__(self, path: Path, data: mmap.mmap, schema: Schema) -> None:
        self.path, self.data, self.schema = path, data, schema
        self.view = memoryview(data)
        self.budget = Budget(path, _SCALE * len(data))
        self.texts: dict[bytes, str] = {}
        self.fields = 0

    def fail(self, problem: str, **facts: object) -> NoReturn:
        raise WeightError(problem, file=self.path, **facts)

    def message(self, kind: str, start: int, end: int, depth: int = 0) -> dict[str, Any]:
        """The message of that kind between two offsets."""
        if depth > _DEPTH:
            self.fail("its graphs are nested too deep", expected=f"at most {_DEPTH} levels")
        self.budget.spend(_MESSAGE)
        fields, out = self.schema[kind], {}
        for number, wire, at, stop in self._fields(start, end):
            field = fields.get(number)
            if field is None:
                continue
            name, holds, many = field
            if holds in (INT, FLOAT) and many and wire == 2:
                numbers = self._numbers(out, name, holds)
                self._unpack(numbers, holds, at, stop)
                continue
            value = self._value(name, holds, wire, at, stop, depth)
            if not many:
                out[name] = value
            elif holds in (INT, FLOAT):
                self.budget.spend(_NUMBER)
                self._numbers(out, name, holds).append(value)
            else:
                out.setdefault(name, []).append(value)
        return out

    def _fields(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(number, wire type, where the value lies) of each field; varints lie in `at` itself."""
        data, at = self.data, start
        while at < end:
            self.fields += 1
            if self.fields > _FIELDS:
                self.fail("it has more fields than a model has", expected=f"at most {_FIELDS}")
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = self._varint(at - 1, end)
            wire = tag & 7
            if wire == 2:
                length, at = self._varint(at, end)
                stop = at + length
                value = at
            elif wire == 0:
                value, stop = self._varint(at, end)
            elif wire == 5 or wire == 1:
                value, stop = at, at + (4 if wire == 5 else 8)
            else:
                self.fail("not an ONNX model, or damaged", got=f"wire type {wire}")
            if stop > end:
                remedy = "the file is cut short or damaged: fetch it again"
                self.fail("a field runs past its end", expected=stop, got=end, remedy=remedy)
            yield tag >> 3, wire, value, stop
            at = stop

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self.data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & (1 << 64) - 1, at
            shift += 7
        self.fail("a number runs past its end", remedy="it is damaged: fetch it again")

    def _value(self, name: str, holds: str, wire: int, at: int, stop: int, depth: int) -> Any:
        """One value; its wire type must be the one that such a field is written with."""
        if wire != {INT: 0, FLOAT: 5}.get(holds, 2):
            if holds == PACKED:
                self.fail(f"{name} isn't packed", remedy="save it anew with the onnx package")
            self.fail(f"{name} is written in a way that no {holds} is", got=f"wire type {wire}")
        if holds == INT:
            return at - (1 << 64) if at >> 63 else at
        if holds == FLOAT:
            return struct.unpack_from("<f", self.data, at)[0]
        if holds == TEXT:
            return self._text(name, at, stop)
        if holds in (BYTES, PACKED):
            self.budget.spend(_VIEW)
            return self.view[at:stop]
        return self.message(holds, at, stop, depth + 1)

    def _text(self, name: str, at: int, stop: int) -> str:
        raw = self.data[at:stop]
        known = self.texts.get(raw)
        if known is None:
            self.budget.spend(_TEXT + 2 * len(raw))
            try:
                known = self.texts[raw] = raw.decode()
            except UnicodeDecodeError as error:
                self.fail(f"{name} is not valid UTF-8 at byte {error.start}")
        return known

    def _numbers(self, out: dict[str, Any], name: str, holds: str) -> array:
        if name not in out:
            self.budget.spend(_VIEW)
            out[name] = array("q" if holds == INT else "f")
        return out[name]

    def _unpack(self, numbers: array, holds: str, at: int, stop: int) -> None:
        self.budget.spend(_NUMBER * (stop - at) // (1 if holds == INT else 4))
        if holds == INT:
            while at < stop:
                value, at = self._varint(at, stop)
                numbers.append(value - (1 << 64) if value >> 63 else value)
        elif (stop - at) % 4:
            self.fail("packed floats are no whole number of floats")
        else:
            numbers.frombytes(np.frombuffer(self.view[at:stop], "<f4").tobytes())


def varints(raw: memoryview, count: int) -> np.ndarray | None:
    """The `count` packed varints in `raw` as int64 (count,); None if there aren't as many."""
    data, out, done = np.frombuffer(raw, np.uint8), np.zeros(count, np.uint64), 0
    at = 0
    while at < len(data):
        part = data[at : at + _SLICE]
        ends = np.flatnonzero(part < 128) + 1
        if not len(ends) or done + len(ends) > count:
            return None
        starts = np.concatenate([[0], ends[:-1]])
        lengths = ends - starts
        if lengths.max() > 10:
            return None
        values = out[done : done + len(ends)]
        for k in range(int(lengths.max())):
            has = lengths > k
            values[has] |= (part[starts[has] + k] & 127).astype(np.uint64) << np.uint64(7 * k)
        done += len(ends)
        at += int(ends[-1])
    return out.view(np.int64) if done == count else None
