"""3x3 convolutions in float32 with 4 times fewer multiplications (Lavin & Gray 2016, F(4x4, 3x3)).

The output is cut into tiles of 4x4. Each comes from a window of 6x6 of the input, whose transform
has 36 elements; so has the transform of each 3x3 kernel, and their products, summed over channels,
are the transform of the tile: 36 matrix products (tiles, C) @ (C, O). The transforms are sums with
small constant factors, along rows and then along columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op, toposort
from engine.recipes.convolution import Convolution, find
from engine.recipes.product import multiplied
from engine.recipes.settings import Settings
from engine.symbolic import Int, bounds, product
from engine.windows import windows

TILE, WINDOW, PLANES = 4, 6, 36
INPUTS, OUTPUTS = 32, 16  # channels from which on the products outweigh the transforms
TILES = 64  # from which on it pays that the transforms of the kernels are 4 times their size

# Where the polynomials are evaluated whose product a tile is, infinity besides. 0, 1, -1, 2, -2 are
# the usual ones; numbers whose powers are nearer to 1 lose less: a third of the error (of the mean
# square, 320 channels), for as many operations.
POINTS = (Fraction(0), Fraction(2, 3), Fraction(-2, 3), Fraction(3, 2), Fraction(-3, 2))

Matrix = tuple[tuple[float, ...], ...]


def _matrices(points: Sequence[Fraction], taps: int) -> tuple[Matrix, Matrix, Matrix]:
    """How inputs, kernels of `taps` and outputs are transformed (Toom & Cook)."""
    last = len(points)  # infinity
    inputs, kernels = [], []
    for p in points:
        others = [q for q in points if q is not p]
        inputs.append((*_expanded(others), Fraction(0)))
        scale = prod(p - q for q in others)
        kernels.append(tuple(p**k / scale for k in range(taps)))
    inputs.append(_expanded(points))
    kernels.append((*(0,) * (taps - 1), 1))
    outputs = [[p**k for p in points] + [0] for k in range(last + 2 - taps)]
    outputs[-1][last] = 1
    return tuple(tuple(tuple(map(float, row)) for row in m) for m in (inputs, kernels, outputs))


def _expanded(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """The coefficients of a polynomial with these roots, of the constant first."""
    out = [Fraction(1)]
    for r in roots:
        out = [low - r * high for low, high in zip([Fraction(0), *out], [*out, Fraction(0)])]
    return tuple(out)


INPUT, KERNEL, OUTPUT = _matrices(POINTS, 3)


def rewrite(node: Node, settings: Settings) -> Node | None:
    """The convolution in another way, on devices that have a recipe for its products."""
    return by_products(node) if settings.target.is_cpu else None


def by_products(node: Node) -> Node | None:
    """The same sums by way of 36 products; None where a node isn't such a convolution.

    Its weight has to be a constant: its transform is then another, packed by whoever multiplies.
    """
    found = find(node)
    if found is None or not _suits(found):
        return None
    left, right = _input(found), _kernel(found.weight)  # (36, T, C), (36, O, C)
    return _output(g.packed(multiplied(left, right)), found)


def _suits(found: Convolution) -> bool:
    fixed = {n.arg[0].constant for n in toposort([found.weight]) if n.op is Op.BUFFER}
    return (
        found.weight.shape[2:] == (3, 3)
        and found.stride == found.dilation == (1, 1)
        and found.groups == 1
        and fixed == {True}
        and found.weight.shape[0] >= OUTPUTS
        and found.weight.shape[1] >= INPUTS
        and all(isinstance(n, int) for n in found.out)
        and bounds(product(_tiles(found)))[0] >= TILES
    )


def _tiles(found: Convolution) -> tuple[Int, Int, Int]:
    """Tiles in the batch: (B, high, wide)."""
    high, wide = (-(-n // TILE) for n in found.out)
    return found.x.shape[0], high, wide


def _input(found: Convolution) -> Node:
    """The transforms of all windows (36, T, C)."""
    missing = (n * TILE + 2 - m for n, m in zip(_tiles(found)[1:], found.x.shape[2:]))
    padded = g.pad(found.x, ((0, 0), (0, 0), *((0, n) for n in missing)))
    padded = g.packed(g.permute(padded, (0, 2, 3, 1)))  # channels last: they are the lanes
    view = windows(padded, (1, 2), (WINDOW, WINDOW), (TILE, TILE), (1, 1))
    view = g.permute(view, (4, 5, 0, 1, 2, 3))  # (6, 6, B, high, wide, C)
    channels, tiles = view.shape[5], product(view.shape[2:5])
    made = _transformed(g.reshape(view, (WINDOW, WINDOW, tiles, channels)), INPUT)
    return g.packed(g.reshape(made, (PLANES, tiles, channels)))


def _kernel(weight: Node) -> Node:
    """The transforms of all kernels (36, O, C)."""
    made = _transformed(g.permute(weight, (2, 3, 0, 1)), KERNEL)
    return g.reshape(made, (PLANES, *weight.shape[:2]))


def _output(sums: Node, found: Convolution) -> Node:
    """The tiles whose transforms are (36, T, O), side by side in the shape of the node."""
    tiles, outputs = sums.shape[1:]
    made = _transformed(g.reshape(sums, (WINDOW, WINDOW, tiles, outputs)), OUTPUT)
    batch, high, wide = _tiles(found)
    made = g.reshape(made, (TILE, TILE, batch, high, wide, outputs))
    made = g.packed(g.permute(made, (2, 3, 0, 4, 1, 5)))  # (B, high, 4, wide, 4, O)
    made = g.reshape(made, (batch, high * TILE, wide * TILE, outputs))
    made = g.permute(made, (0, 3, 1, 2))
    ends = (batch, outputs, *found.out)
    return g.reshape(g.shrink(made, tuple((0, end) for end in ends)), found.node.shape)


def _transformed(x: Node, matrix: Sequence[Sequence[float]]) -> Node:
    """matrix @ x @ matrix.T over the first two axes."""
    for axis in (0, 1):
        lines = [_line(x, axis, i) for i in range(x.shape[axis])]
        x = _chosen([_weighted(lines, row) for row in matrix], axis)
    return x


def _line(x: Node, axis: int, i: int) -> Node:
    ranges = [(0, n) for n in x.shape]
    ranges[axis] = (i, i + 1)
    return g.shrink(x, tuple(ranges))


def _weighted(lines: Sequence[Node], factors: Sequence[float]) -> Node:
    """The sum of lines times factors."""
    total: Node | None = None
    for line, factor in zip(lines, factors):
        if factor == 0:
            continue
        term = line
        if factor != 1:
            term = g.binary(Op.MUL, line, g.const(factor, dt.float32, line.shape))
        total = term if total is None else g.binary(Op.ADD, total, term)
    assert total is not None, "a row of zeros"
    return total


def _chosen(lines: Sequence[Node], axis: int) -> Node:
    """The lines, each of size 1 along axis, one after the other."""
    shape = list(lines[0].shape)
    shape[axis] = len(lines)
    along = [len(lines) if a == axis else 1 for a in range(len(shape))]
    at = g.expand(g.reshape(g.iota(len(lines)), tuple(along)), tuple(shape))
    *rest, last = (g.expand(line, tuple(shape)) for line in lines)
    for i, line in reversed([*enumerate(rest, 1)]):
        before = g.binary(Op.CMPLT, at, g.const(i, dt.int32, tuple(shape)))
        last = g.where(before, line, last)
    return last
