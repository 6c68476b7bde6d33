"""Operands that are read where they lie: a buffer seen through movement without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.indexing import flat_index, move_index
from engine.symbolic import Var, linear_in, upper

STORED = (Op.BUFFER, Op.ASSIGN, Op.CONTIGUOUS)  # what lies in a buffer when a kernel reads it


@dataclass(frozen=True)
class View:
    """Movement ops over a stored node, and what they come to: element strides and an offset."""

    steps: tuple[tuple[Op, Any, tuple], ...]  # (op, arg, shape), the innermost first
    strides: tuple[int, ...]
    offset: int

    def of(self, base: Node) -> Node:
        """The view of another stored node of the same shape."""
        for op, arg, shape in self.steps:
            base = g.make(op, (base,), arg, base.dtype, shape)
        return base


class Operand(NamedTuple):
    """A stored node and how to read it."""

    base: Node
    view: View


def strided(x: Node) -> Operand | None:
    """x as a float32 buffer with constant strides; None where it must be computed."""
    steps = []
    base = x
    while base.op in g.MOVEMENT and base.op is not Op.PAD:
        steps.append((base.op, base.arg, base.shape))
        base = base.src[0]
    if base.op not in STORED or base.dtype is not dt.float32:
        return None
    axes = [Var(f"v{a}", 0, max(upper(n) - 1, 1)) for a, n in enumerate(x.shape)]
    index = tuple(axes)
    node = x
    while node is not base:
        index, _ = move_index(node, index)
        node = node.src[0]
    rest = flat_index(index, base.shape)
    strides = []
    for axis in axes:
        found = linear_in(rest, axis)
        if found is None:
            return None
        strides.append(found[0])
        rest = found[1]
    if not isinstance(rest, int):
        return None
    return Operand(base, View(tuple(reversed(steps)), tuple(strides), rest))


def view_of(x: Node, suits: Callable[[tuple[int, ...]], bool]) -> Operand:
    """x where it lies if its strides suit, else a packed copy of it."""
    found = strided(x)
    if found is not None and suits(found.view.strides):
        return found
    copy = strided(g.packed(x))
    assert copy is not None, "a packed copy has strides"
    return copy
