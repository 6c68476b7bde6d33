"""The stack, the memo and the cursor of `weights.pickled`, which check all that they are asked."""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from weights.budget import Budget

_MAX_NAME = 255  # bytes of a module or a class's name
MAX_KEY = 1000  # characters
SLOT = 12  # bytes of memory for a place in a list, with what lists keep in reserve


class Malformed(ValueError):
    """Raised by a Known's `call` and a Buildable's `build` for arguments that make no sense."""


@dataclass(frozen=True, eq=False)
class Known:
    """A global that pickles may name; `call(*args)` is what REDUCE and NEWOBJ do, None: nothing.

    `value` is for constants, such as a dtype: what GLOBAL itself puts on the stack.
    """

    name: str
    call: Callable[..., Any] | None = None
    value: Any = None


def utf8(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")  # as Python does
    except UnicodeDecodeError as error:
        raise Malformed(f"a string is not valid UTF-8 at byte {error.start}") from None


def checked_key(value: Any) -> Any:
    """A key of a dict or a member of a set, if finding it among others takes no hostile time.

    Tuples and long integers are easily made to share one hash, long strings take long to compare.
    """
    if isinstance(value, (float, bool, NoneType, Known)):
        return value
    if type(value) in (str, bytes) and len(value) <= MAX_KEY:
        return value
    if type(value) is int and -(2**63) <= value < 2**64:
        return value
    raise Malformed(f"a {type(value).__name__} is a key, or a key is too long")


class Machine:
    """The stack, the memo (a list: pickles number their entries from 0) and a cursor."""

    def __init__(
        self,
        data: bytes | mmap.mmap,
        start: int,
        end: int,
        known: Mapping[tuple[str, str], Known],
        persistent: Callable[[Any], Any],
        budget: Budget,
    ) -> None:
        self.data, self.pos, self.end = data, start, end
        self.known, self.persistent, self.budget = known, persistent, budget
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: list[Any] = []

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.end - self.pos:
            raise Malformed("a value runs past its end")
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def line(self) -> str:
        limit = min(self.end, self.pos + _MAX_NAME + 1)
        stop = self.data.find(b"\n", self.pos, limit)
        if stop < 0:
            raise Malformed("a name is too long or runs past its end")
        text = utf8(self.data[self.pos : stop])
        self.pos = stop + 1
        return text

    def push(self, value: Any) -> None:
        self.budget.spend(SLOT)
        self.stack.append(value)

    def push_new(self, value: Any) -> None:
        """Push a value that has memory of its own."""
        self.budget.spend(SLOT + sys.getsizeof(value))
        self.stack.append(value)

    def top(self) -> Any:
        """The value on top, which must lie above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Malformed("it takes a value from an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        """The values since the last mark, taken off the stack."""
        if not self.marks:
            raise Malformed("it takes a mark that was not set")
        height = self.marks.pop()
        values = self.stack[height:]
        self.budget.spend(SLOT * len(values))
        del self.stack[height:]
        return values
