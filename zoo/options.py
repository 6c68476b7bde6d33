"""Options of a model's functions: dataclasses, whose fields are checked before any work is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import numpy as np

from zoo.errors import UsageError

_KINDS = {"None": type(None), "str": str, "int": Integral, "float": Real, "bool": object,
          "Sequence[int]": (Sequence, np.ndarray),
          "Sequence[float]": (Sequence, np.ndarray)}  # fmt: skip
_WORDS = {"str": "a text", "int": "a whole number", "float": "a number",
          "Sequence[int]": "whole numbers", "Sequence[float]": "numbers"}  # fmt: skip


def names_of(kind: type) -> tuple[str, ...]:
    """The names of a dataclass's fields."""
    return tuple(field.name for field in fields(kind))


def refuse_unknown(options: Iterable[str], known: Iterable[str], where: str) -> None:
    """UsageError for names of options that are none of the `known` ones of `where`."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(f"unknown option of {where}: {', '.join(unknown)}")


def check(options: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """UsageError for a field of a dataclass that isn't what its annotation says, or out of range.

    Any value will do as a bool, and no bool as a number. NaN is in no range, and infinity only
    where no range is given.
    """
    for item in fields(options):
        name, value = item.name, getattr(options, item.name)
        kinds = item.type.split(" | ")
        fits = isinstance(value, tuple(_KINDS[kind] for kind in kinds))
        if not fits or (isinstance(value, bool) and "bool" not in kinds):
            what = " or ".join(_WORDS.get(kind, kind) for kind in kinds)
            raise UsageError(f"{name} must be {what}, got {value!r}")
        if name in ranges and isinstance(value, Real):
            low, high = ranges[name]
            if not low <= value <= high or value == np.inf:
                span = f"{low} or more" if high == np.inf else f"from {low} to {high}"
                raise UsageError(f"{name} must be {span}, got {value!r}")
