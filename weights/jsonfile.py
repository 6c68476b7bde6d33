"""Read a JSON file that is not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weights.checkpoint import WeightError


def read_json(path: Path) -> Any:
    """The value of a JSON file; WeightError, naming the file, when there is none to be read."""
    try:
        raw = path.read_bytes()
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


def parse(path: Path, raw: bytes) -> Any:
    """Parse JSON whose objects repeat no key; WeightError, naming the file, for all else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a key appears twice")
        return table

    def number(digits: str) -> int:
        if len(digits) > 20:  # more than 64 bits hold; int() is quadratic in the digits
            raise ValueError("a number is too long")
        return int(digits)

    try:
        return json.loads(raw.decode(), object_pairs_hook=unique, parse_int=number)
    except RecursionError:
        raise WeightError("its JSON is nested too deep", file=path) from None
    except ValueError as error:
        raise WeightError(f"its JSON can't be read: {error}", file=path) from None
