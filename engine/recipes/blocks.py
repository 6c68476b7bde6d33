"""Quantised weights laid out for vector instructions: 32 outputs by 32 summed values to a block.

A block holds what a core needs next, in the order in which it needs it, so that a matrix is one
stream: the halves of the 32 scales (and of the 32 least values), then the small ints. Lane j of a
vector is output j or 16 + j, and its four bytes are four neighbours along the sum:

    8 bits  byte [4 * (16 * (2 * u + g) + lane) + i] is q of output 16 g + lane at 4 u + i, u < 8
    4 bits  the same for u < 4 in the low nibble, and for 16 + 4 u + i in the high one

Packing is a graph expression, computed once per weight; `values` is the way back.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.recipes.product import BLOCK, quantised
from engine.symbolic import Int

PANEL = 32  # outputs


@dataclass(frozen=True)
class Layout:
    """How one kind of quantised matrix is packed: see the module. zero is subtracted from q."""

    bits: int
    zero: int
    has_least: bool

    @property
    def name(self) -> str:
        return f"{self.bits}_" + ("least" if self.has_least else f"zero{self.zero}")

    @property
    def halves(self) -> int:
        """float16 numbers at the start of a block."""
        return PANEL * (1 + self.has_least)

    @property
    def words(self) -> int:
        """16-bit words of a block."""
        return self.halves + PANEL * BLOCK * self.bits // 16

    @property
    def nbytes(self) -> int:
        return 2 * self.words

    @property
    def _split(self) -> tuple[int, ...]:
        """Index within a block's depth: nibble, u, h, b, from the outermost on; i = 2 h + b."""
        return (8 // self.bits, self.bits, 2, 2)


def layout(factor: Node) -> Layout | None:
    """The Layout for a (1, rows, depth) factor, None if it isn't made from small ints."""
    matrix = quantised(g.reshape(factor, factor.shape[1:])) if factor.shape[0] == 1 else None
    return matrix and Layout(matrix.bits, matrix.zero, matrix.least is not None)


def pack(factor: Node) -> Node:
    """The blocks, uint16 (panels, depth / 32, words), as writes into a buffer of zeros."""
    matrix = quantised(g.reshape(factor, factor.shape[1:]))
    kind = layout(factor)
    panels = (matrix.q.shape[0] + PANEL - 1) // PANEL
    depth_blocks = matrix.q.shape[1] // BLOCK
    shape = (panels, depth_blocks, kind.words)
    out = g.packed(g.const(0, dt.uint16, shape))
    parts = [_by_panel(matrix.scale)]
    parts += [_by_panel(matrix.least)] if matrix.least is not None else []
    at = 0
    for part in (*parts, _words(matrix.q, kind)):
        end = at + part.shape[2]
        out = g.assign(out, part, ((0, panels), (0, depth_blocks), (at, end)))
        at = end
    return out


def _padded(x: Node) -> Node:
    """x with whole panels of rows."""
    return g.pad(x, ((0, -x.shape[0] % PANEL), (0, 0)))


def _by_panel(halves: Node) -> Node:
    """float16 (rows, depth / 32) -> uint16 (panels, depth / 32, 32)."""
    x = _padded(g.bitcast(halves, dt.uint16))
    rows, blocks = x.shape
    return g.permute(g.reshape(x, (rows // PANEL, PANEL, blocks)), (0, 2, 1))


def _words(q: Node, kind: Layout) -> Node:
    """uint8 (rows, depth) -> uint16 (panels, depth / 32, words): neighbours share a word."""
    x = _padded(q)
    rows, depth = x.shape
    nibbles, u, h, b = kind._split
    shape = (rows // PANEL, 2, 16, depth // BLOCK, nibbles, u, h, b)
    x = g.permute(g.reshape(x, shape), (0, 3, 5, 1, 2, 6, 4, 7))  # …, nibble, b
    word = None
    for nibble in range(nibbles):
        for i in range(b):
            part = g.cast(_pick(x, nibble, i), dt.uint16)
            shift = g.const(8 * i + kind.bits * nibble, dt.uint16, part.shape)
            part = g.binary(Op.SHL, part, shift)
            word = part if word is None else g.binary(Op.OR, word, part)
    return g.reshape(word, (rows // PANEL, depth // BLOCK, kind.words - kind.halves))


def _pick(x: Node, i: int, j: int) -> Node:
    """x[..., i, j]."""
    ranges = (*((0, n) for n in x.shape[:-2]), (i, i + 1), (j, j + 1))
    return g.reshape(g.shrink(x, ranges), x.shape[:-2])


def values(blocks: Node, kind: Layout, rows: Int) -> tuple[Node, Node]:
    """(scale * q, least - zero * scale), both float32 (rows, depth), of packed blocks."""
    panels, count, _ = blocks.shape
    scale = _spread(_halves(blocks, 0), rows)
    offset = g.binary(Op.MUL, scale, g.const(-kind.zero, dt.float32, scale.shape))
    if kind.has_least:
        offset = g.binary(Op.ADD, offset, _spread(_halves(blocks, PANEL), rows))
    nibbles, u, h, b = kind._split
    words = g.shrink(blocks, ((0, panels), (0, count), (kind.halves, kind.words)))
    words = g.reshape(words, (panels, count, u, 2, 16, h, 1, 1))
    shape = (panels, count, u, 2, 16, h, nibbles, b)
    shifts = _grid((nibbles, b), kind.bits, 8)
    shifts = g.expand(g.reshape(shifts, (1, 1, 1, 1, 1, 1, nibbles, b)), shape)
    q = g.binary(Op.SHR, g.expand(words, shape), shifts)
    q = g.binary(Op.AND, q, g.const((1 << kind.bits) - 1, dt.uint16, shape))
    q = g.permute(q, (0, 3, 4, 1, 6, 2, 5, 7))
    q = g.cast(g.reshape(q, (panels * PANEL, count * BLOCK)), dt.float32)
    q = g.shrink(q, ((0, rows), (0, count * BLOCK)))
    return g.binary(Op.MUL, scale, q), offset


def _grid(shape: tuple[int, int], step: int, other: int) -> Node:
    """uint16 [i, j] -> i * step + j * other."""
    first = g.binary(Op.MUL, g.iota(shape[0]), g.const(step, dt.int32, (shape[0],)))
    second = g.binary(Op.MUL, g.iota(shape[1]), g.const(other, dt.int32, (shape[1],)))
    first = g.expand(g.reshape(first, (shape[0], 1)), shape)
    second = g.expand(g.reshape(second, (1, shape[1])), shape)
    return g.cast(g.binary(Op.ADD, first, second), dt.uint16)


def _halves(blocks: Node, at: int) -> Node:
    panels, count, _ = blocks.shape
    words = g.shrink(blocks, ((0, panels), (0, count), (at, at + PANEL)))
    return g.cast(g.bitcast(words, dt.float16), dt.float32)


def _spread(x: Node, rows: Int) -> Node:
    """(panels, blocks, 32) -> (rows, blocks * 32), each number for its whole block."""
    panels, count, _ = x.shape
    x = g.reshape(g.permute(x, (0, 2, 1)), (panels * PANEL, count, 1))
    x = g.reshape(g.expand(x, (panels * PANEL, count, BLOCK)), (panels * PANEL, count * BLOCK))
    return g.shrink(x, ((0, rows), (0, count * BLOCK)))
