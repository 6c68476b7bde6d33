"""A product of float32 numbers as products of bfloat16 ones, as exact as the caller asks for.

A number is the sum of two bfloat16 terms but for 2**-17 of it. (a + a') (b + b') without a' b' is
one product that is three times as deep: (a, a', a) by (b, b, b').
Source: Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations" (2019).
"""

from __future__ import annotations

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op


def left(x: Node, terms: int, axis: int) -> Node:
    """A left factor that is summed along `axis`, to be rounded to so many bfloat16 terms."""
    if terms == 1:
        return x
    a, b = parts(g.packed(x))  # made once, not once for each of the three
    return join((a, b, _finite(a)), axis)  # infinity meets one term of each right factor only


def right(x: Node, terms: int, axis: int) -> Node:
    """The right factor for it."""
    if terms == 1:
        return x
    a, b = parts(x)
    return g.packed(join((a, a, b), axis))


def parts(x: Node) -> tuple[Node, Node]:
    """The bfloat16 number next to each, and what it lacks (of infinity nothing); both float32."""
    near = g.cast(g.cast(x, dt.bfloat16), dt.float32)
    minus = g.binary(Op.MUL, near, g.const(-1.0, dt.float32, near.shape))
    return near, _finite(g.binary(Op.ADD, x, minus))


def _finite(x: Node) -> Node:
    """x, but 0 for what is no finite number."""
    zero = g.const(0.0, dt.float32, x.shape)
    times_zero = g.binary(Op.MUL, x, zero)  # NaN for those
    return g.where(g.binary(Op.CMPNE, times_zero, zero), zero, x)


def join(nodes: tuple[Node, ...], axis: int) -> Node:
    """Nodes of one shape, one after another along an axis."""
    size = nodes[0].shape[axis]
    total = None
    for n, node in enumerate(nodes):
        sides = [(0, 0)] * len(node.shape)
        sides[axis] = (n * size, (len(nodes) - 1 - n) * size)
        padded = g.pad(node, tuple(sides))
        total = padded if total is None else g.binary(Op.ADD, total, padded)
    return total
