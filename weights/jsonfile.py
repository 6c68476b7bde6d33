"""Read a JSON file that is not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weights.budget import Budget
from weights.checkpoint import WeightError
from weights.mapped import open_file

_MAX_DEPTH = 64  # lists in lists; what handles a value calls itself for each level
# Bytes of memory, rounded up, for the values that a character outside strings begins or ends.
_COSTS = {b"[": 72, b"{": 136, b":": 60, b",": 24}
_QUOTE = 26  # half of a short string
_CHUNK = 1 << 16
_DIGITS = 100  # int() is quadratic in them; transformers writes 10**30 for a length without end


def read_json(path: Path) -> Any:
    """The value of a JSON file; WeightError, naming the file, when there is none to be read."""
    try:
        with open_file(path) as file:
            raw = file.read()
    except OSError as error:
        reason = error.strerror or str(error)
        raise WeightError(f"can't be read: {reason}", file=path) from None
    return parse(path, raw)


def read_object(path: Path) -> dict[str, Any]:
    """The same of a file that must hold an object."""
    return as_object(path, read_json(path))


def as_object(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WeightError("its JSON is not an object", file=path)
    return value


def parse(path: Path, raw: bytes, budget: Budget | None = None) -> Any:
    """Parse JSON whose objects repeat no key; WeightError, naming the file, for all else.

    `budget` is that of the file that the JSON is a part of.
    """
    (budget or Budget(path, len(raw))).spend(_cost(raw))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a key appears twice")
        return table

    def number(digits: str) -> int:
        if len(digits) > _DIGITS:
            raise ValueError("a number is too long")
        return int(digits)

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique, parse_int=number)
    except RecursionError:
        raise WeightError("its JSON is nested too deep", file=path) from None
    except ValueError as error:
        raise WeightError(f"its JSON can't be read: {error}", file=path) from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for outer in level for item in _containers(outer)]
        if not level:
            return value
    raise WeightError("its JSON is nested too deep", file=path, expected=f"{_MAX_DEPTH} levels")


def _containers(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, (dict, list))]


def _cost(raw: bytes) -> int:
    """What the values of a JSON text take in memory beside its letters: `[],` is 3 bytes of it."""
    plain, cost, inside = raw.replace(b"\\\\", b"").replace(b'\\"', b""), 0, 0
    for at in range(0, len(plain), _CHUNK):
        pieces = plain[at : at + _CHUNK].split(b'"')  # every second one is a string
        outside, quotes = b" ".join(pieces[inside::2]), len(pieces) - 1
        cost += _QUOTE * quotes + sum(n * outside.count(c) for c, n in _COSTS.items())
        inside ^= quotes & 1
    return cost
