"""A cursor over a mapped binary header that checks each read against the bytes that are there."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NoReturn

from weights.budget import Budget
from weights.checkpoint import WeightError

_NUMBERS = {1: struct.Struct("<B"), 2: struct.Struct("<H"), 4: struct.Struct("<I")}


class Cursor:
    """The bytes of `data` from `pos` on; every error names the file at `path`."""

    def __init__(self, path: Path, data: mmap.mmap, pos: int = 0) -> None:
        self.path, self.data, self.size, self.pos = path, data, len(data), pos
        self.budget = Budget(path, self.size)

    @property
    def left(self) -> int:
        return self.size - self.pos

    def fail(self, problem: str, **facts: object) -> NoReturn:
        raise WeightError(problem, file=self.path, **facts)

    def need(self, count: int, what: str) -> None:
        """WeightError unless `count` more bytes are there."""
        if count > self.left:
            self.fail(
                f"{what} runs past the end of the file",
                expected=f"{self.pos + count} bytes",
                got=self.size,
                remedy="the file is cut short or damaged: fetch it again",
            )

    def unsigned(self, nbytes: int, what: str) -> int:
        """A little-endian number of 1, 2 or 4 bytes."""
        self.need(nbytes, what)
        self.pos += nbytes
        return _NUMBERS[nbytes].unpack_from(self.data, self.pos - nbytes)[0]

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        self.need(count, what)
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def text(self, count: int, what: str) -> str:
        """The next `count` bytes as UTF-8; none is an error, since only names are read so."""
        if not count:
            self.fail(f"{what} is empty")
        try:
            return self.take(count, what).decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not valid UTF-8 at byte {error.start}")
