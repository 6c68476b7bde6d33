"""A sum of products seen as a matrix product, whatever shapes its factors come in.

An axis along which only one factor varies is that factor's row; one along which both do is a batch;
the summed ones are the depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.indexing import move_index
from engine.symbolic import Int, Var, product, upper, variables


@dataclass(frozen=True)
class Product:
    """node[b, i, j] = sum over k of left[b, i, k] * right[b, j, k], both float32 in value.

    axes: node's axes that make up (batch, rows, columns), in this order; size-1 axes are in none.
    """

    node: Node
    left: Node
    right: Node
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @property
    def depth(self) -> Int:
        return self.left.shape[2]

    def swapped(self) -> Product:
        """The same sums with the factors' places exchanged."""
        batch, rows, columns = self.axes
        return Product(self.node, self.right, self.left, (batch, columns, rows))

    def restored(self, result: Node) -> Node:
        """A (batch, rows, columns) result in the node's own shape and type."""
        flat = [a for group in self.axes for a in group]
        shape = self.node.shape
        x = g.reshape(result, tuple(shape[a] for a in flat))
        x = g.permute(x, tuple(flat.index(a) for a in sorted(flat)))
        return g.cast(g.reshape(x, shape), self.node.dtype)


def find(node: Node) -> Product | None:
    """The Product that a node is, or None."""
    if node.op is not Op.REDUCE or node.arg[0] != "add" or node.dtype is not dt.float32:
        return None
    times = node.src[0]
    if times.op is not Op.MUL or 0 in times.shape:
        return None
    summed = node.arg[1]
    factors = [_narrow(s) for s in times.src]
    varies = [[n != 1 for n in f.shape] for f in factors]
    if any(not v[a] for v in varies for a in summed):
        return None  # a factor that could be taken out of the sum
    kept = [a for a, n in enumerate(node.shape) if n != 1]
    batch = tuple(a for a in kept if varies[0][a] and varies[1][a])
    rows = tuple(a for a in kept if varies[0][a] and not varies[1][a])
    columns = tuple(a for a in kept if varies[1][a] and not varies[0][a])
    left = _matrix(factors[0], batch, rows, summed)
    right = _matrix(factors[1], batch, columns, summed)
    return Product(node, left, right, (batch, rows, columns))


def _narrow(x: Node) -> Node:
    """x before it was repeated along axes."""
    return x.src[0] if x.op is Op.EXPAND else x


def _matrix(x: Node, *groups: tuple[int, ...]) -> Node:
    """x with its axes gathered into one per group."""
    order = [a for group in groups for a in group]
    rest = [a for a in range(len(x.shape)) if a not in order]
    moved = g.permute(x, (*rest, *order))
    return g.reshape(moved, tuple(product(x.shape[a] for a in group) for group in groups))


@dataclass(frozen=True)
class Quantised:
    """A (rows, depth) matrix in blocks of 32 along its depth: scale * (q - zero) + least.

    q (rows, depth) uint8 below 2**bits; scale and least (rows, depth / 32) float16, least None for
    formats without one.
    """

    q: Node
    scale: Node
    least: Node | None
    bits: int
    zero: int


BLOCK = 32


def quantised(matrix: Node) -> Quantised | None:
    """How a float32 matrix (rows, depth) is made from small ints in blocks; None if it isn't."""
    rows, depth = matrix.shape
    if not isinstance(depth, int) or depth % BLOCK:
        return None
    chain: list[Node] = []
    base = matrix
    while base.op in g.MOVEMENT:
        chain.append(base)
        base = base.src[0]
    least = None
    scaled = base
    if base.op is Op.ADD:
        parts = sorted(base.src, key=lambda s: s.op is not Op.MUL)
        scaled, least = parts
    if scaled.op is not Op.MUL:
        return None
    ints = [s for s in scaled.src if s.op is Op.CAST and s.src[0].dtype.is_int]
    if len(ints) != 1:
        return None
    scale = next(s for s in scaled.src if s is not ints[0])
    q = ints[0].src[0]
    low, high = extent(q)
    if high - low > 255 or (least is not None and low != 0):
        return None
    halves = [_half_per_block(n) for n in (scale, least) if n is not None]
    if None in halves or not _keeps_blocks(chain, rows, depth):
        return None
    u = g.cast(q, dt.uint8)
    if low:
        u = g.binary(Op.ADD, u, g.const(-low, dt.uint8, u.shape))
    per_block = [_first_of_blocks(again(chain, h)) for h in halves]
    bits = 4 if high - low < 16 else 8
    return Quantised(again(chain, u), per_block[0], (per_block + [None])[1], bits, -low)


def _half_per_block(x: Node) -> Node | None:
    """The float16 node behind a float32 factor that is one number per block of the last axis."""
    if x.op is not Op.EXPAND or x.shape[-1] != BLOCK or x.src[0].shape[-1] != 1:
        return None
    inner = x.src[0]
    if inner.op is not Op.CAST or inner.src[0].dtype is not dt.float16:
        return None
    return g.expand(inner.src[0], x.shape)


def _keeps_blocks(chain: list[Node], rows: Int, depth: int) -> bool:
    """Whether each block of 32 along the matrix's depth lies in one block of what it is made of."""
    row, block, inside = (
        Var(name, 0, max(n - 1, 1))
        for name, n in (("row", upper(rows)), ("block", depth // BLOCK), ("inside", BLOCK))
    )
    index = row, block * BLOCK + inside
    for n in chain:
        index, guard = move_index(n, index)
        if any(inside in variables(g) for g in guard):
            return False
    return not any(inside in variables(i) for i in index[:-1])


def again(chain: list[Node], x: Node) -> Node:
    """The movement ops of `chain` (outermost first) applied to another node of the same shape."""
    for n in reversed(chain):
        x = g.make(n.op, (x,), n.arg, x.dtype, n.shape)
    return x


def _first_of_blocks(x: Node) -> Node:
    rows, depth = x.shape
    blocks = g.reshape(x, (rows, depth // BLOCK, BLOCK))
    return g.reshape(g.shrink(blocks, ((0, rows), (0, depth // BLOCK), (0, 1))), blocks.shape[:2])


def extent(x: Node) -> tuple[int, int]:
    """The smallest and the largest value that an int node can have, as far as is easily seen."""
    low, high = x.dtype.min, (1 << (x.dtype.bits - (x.dtype.kind == "i"))) - 1
    match x.op:
        case Op.CONST if isinstance(x.arg, int):
            return x.arg, x.arg
        case Op.IOTA if isinstance(x.shape[0], int):
            return 0, x.shape[0] - 1
        case _ if x.op in g.MOVEMENT and x.op is not Op.PAD:
            return extent(x.src[0])
    if not x.src or any(not s.dtype.is_int for s in x.src):
        return low, high
    ranges = [extent(s) for s in x.src]
    match x.op:
        case Op.CAST:
            found = ranges[0]
        case Op.ADD:
            found = tuple(map(sum, zip(*ranges)))
        case Op.MUL:
            ends = [math.prod(p) for p in ((a, b) for a in ranges[0] for b in ranges[1])]
            found = min(ends), max(ends)
        case Op.AND if min(r[0] for r in ranges) >= 0:
            found = 0, min(r[1] for r in ranges)
        case Op.OR if min(r[0] for r in ranges) >= 0:
            found = 0, (1 << max(r[1] for r in ranges).bit_length()) - 1
        case Op.SHR if ranges[0][0] >= 0:
            found = 0, ranges[0][1]
        case Op.SHL if ranges[0][0] >= 0 and 0 <= ranges[1][0] and ranges[1][1] < 32:
            found = 0, ranges[0][1] << ranges[1][1]
        case _:
            return low, high
    return found if low <= found[0] and found[1] <= high else (low, high)


def multiplied(x: Node, w: Node) -> Node:
    """(batch, M, depth) and (batch, N, depth) -> the sums (batch, M, N), as plain ops."""
    batch, m, k = x.shape
    n = w.shape[1]
    shape = (batch, m, n, k)
    x = g.expand(g.reshape(x, (batch, m, 1, k)), shape)
    w = g.expand(g.reshape(w, (batch, 1, n, k)), shape)
    return g.reshape(g.reduce(g.binary(Op.MUL, x, w), "add", (3,)), (batch, m, n))
