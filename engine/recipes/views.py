"""Operands that are read where they lie: a buffer seen through movement without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine import dtype as dt
from engine import graph as g
from engine.dtype import DType
from engine.graph import Node, Op
from engine.indexing import Index, flat_index, move_index
from engine.symbolic import Int, Var, linear_in, upper

MOVING = (g.MOVEMENT | {Op.CAST}) - {Op.PAD}
STORED = (Op.BUFFER, Op.ASSIGN, Op.CONTIGUOUS)  # what lies in a buffer when a kernel reads it


@dataclass(frozen=True)
class View:
    """Movement ops over a stored node, and what they come to: element strides and an offset.

    half says that the node holds halves, which are read as float32.
    """

    steps: tuple[tuple[Op, Any, tuple], ...]  # (op, arg, shape), the innermost first
    strides: tuple[int, ...]
    offset: int
    half: bool

    def of(self, base: Node) -> Node:
        """The view, in float32, of another stored node of the same shape and type."""
        for op, arg, shape in self.steps:
            base = g.make(op, (base,), arg, base.dtype, shape)
        return g.cast(base, dt.float32)

    def shape(self, base: Node) -> tuple[Int, ...]:
        """The shape that the view has."""
        return self.steps[-1][2] if self.steps else base.shape


class Operand(NamedTuple):
    """A stored node and how to read it."""

    base: Node
    view: View


def beneath(x: Node) -> tuple[list[Node], Node, Index, Index]:
    """What x is a view of: the views from x inwards, the node below them, a variable for each of
    x's axes, and where in that node x's element there lies."""
    axes = tuple(Var(f"v{a}", 0, max(upper(n) - 1, 1)) for a, n in enumerate(x.shape))
    chain, index = [], axes
    while x.op in MOVING:
        chain.append(x)
        index = index if x.op is Op.CAST else move_index(x, index)[0]
        x = x.src[0]
    return chain, x, axes, index


def strided(x: Node, halves: tuple[DType, ...] = (dt.float16,)) -> Operand | None:
    """x, of float32, as a buffer with constant strides; None where it must be computed.

    The buffer may hold float32 or one of `halves`.
    """
    chain, base, axes, index = beneath(x)
    if base.op not in STORED or base.dtype not in (dt.float32, *halves):
        return None
    casts = [(n.src[0].dtype, n.dtype) for n in chain if n.op is Op.CAST]
    if casts != [(base.dtype, dt.float32)] * (base.dtype is not dt.float32):
        return None  # another one would round
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
    steps = [(n.op, n.arg, n.shape) for n in reversed(chain) if n.op is not Op.CAST]
    return Operand(base, View(tuple(steps), tuple(strides), rest, base.dtype is not dt.float32))


def view_of(x: Node, suits: Callable[[tuple[int, ...]], bool]) -> Operand:
    """x where it lies if its strides suit, else a packed copy of it, a symbolic axis outermost."""
    found = strided(x)
    if found is not None and suits(found.view.strides):
        return found
    order = sorted(range(len(x.shape)), key=lambda a: isinstance(x.shape[a], int))
    back = tuple(order.index(a) for a in range(len(order)))
    copy = strided(g.permute(g.packed(g.permute(x, tuple(order))), back))
    assert copy is not None, "a packed copy has strides"
    return copy
