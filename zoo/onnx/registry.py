"""The table of operators, and how a function's signature says what a node may have.

A positional parameter is an input, optional if it has a default; `*xs` takes any number. A
keyword-only parameter is an attribute of that name; `call` is the node itself (see `Call`). An
attribute named like an input stands for it, since in older opsets many inputs were attributes.
Annotations say how an input comes: Value, Known or Weight (see `values.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

REQUIRED = inspect.Parameter.empty  # the default of what has none
ML = "ai.onnx.ml"


@dataclass(frozen=True)
class Operator:
    """One row: `since` is the first opset that it serves; `heavy` runs on the device always.

    `pointwise`: one result, each element of which is of those at its place in the broadcast inputs.

    `inputs` are (name, how it comes, whether it may be missing). `random` rows are never folded.
    `kinds` are the attributes' annotations.
    """

    name: str
    domain: str
    since: int
    function: Callable[..., Any]
    heavy: bool
    random: bool
    pointwise: bool
    inputs: tuple[tuple[str, str, bool], ...] = ()
    variadic: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    wants_call: bool = False

    def comes(self, position: int) -> str:
        """How the input at a position comes: Value, Known or Weight."""
        if position < len(self.inputs):
            return self.inputs[position][1]
        return self.variadic or "Value"

    @property
    def on_host(self) -> bool:
        """Whether NumPy computes it, since it must see the numbers of all inputs."""
        kinds = {how for _, how, _ in self.inputs} | ({self.variadic} - {None})
        return kinds == {"Known"}


OPERATORS: dict[tuple[str, str], list[Operator]] = {}


def operator(*names: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table under each name, with the options of `_read`."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            add(name, function, **options)
        return function

    return enter


pointwise = partial(operator, pointwise=True)


def add(name: str, function: Callable[..., Any], **options: Any) -> None:
    """Enter one row."""
    row = _read(name, function, **options)
    rows = OPERATORS.setdefault((row.domain, name), [])
    assert all(other.since != row.since for other in rows), f"{name} is there twice"
    rows.append(row)
    rows.sort(key=lambda each: -each.since)


def _read(
    name: str,
    function: Callable[..., Any],
    since: int = 1,
    domain: str = "",
    heavy: bool = False,
    random: bool = False,
    pointwise: bool = False,
) -> Operator:
    """The row of a function, from opset `since` on."""
    inputs, variadic, attributes, kinds, wants_call = [], None, {}, {}, False
    for each in inspect.signature(function).parameters.values():
        how = str(each.annotation).split(" ")[0].split(".")[-1].strip("'>")
        how = how if how in ("Known", "Weight") else "Value"
        if each.kind is each.VAR_POSITIONAL:
            variadic = how
        elif each.kind is not each.KEYWORD_ONLY:
            inputs.append((each.name, how, each.default is not REQUIRED))
        elif each.name == "call":
            wants_call = True
        else:
            attributes[each.name] = each.default
            kinds[each.name] = str(each.annotation)
    return Operator(
        name, domain, since, function, heavy, random, pointwise, tuple(inputs), variadic,
        attributes, kinds, wants_call,
    )  # fmt: skip


def find(domain: str, name: str, opset: int) -> Operator | None:
    """The row that serves an operator at an opset."""
    for row in OPERATORS.get((domain, name), ()):
        if row.since <= opset:
            return row
    return None
