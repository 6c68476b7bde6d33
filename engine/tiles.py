"""Kernels around INTRINSICs: a work-group makes a tile at a time in scratch memory, then outputs.

An Intrinsic computes sums (batch, row, column) by instructions of its own, `columns` of them beside
each other and some rows at a time. What surrounds it in the kernel (bias, activation, rotation,
residual, the way the result lies in memory) is ordinary code that reads the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine import dtype as dt
from engine.dtype import DType
from engine.evaluate import Block, Value
from engine.graph import Node
from engine.indexing import Index
from engine.ir import Address, Call, Function, Kind, Scratch
from engine.lower import Lowering, Plan
from engine.schedule import Kernel
from engine.symbolic import Expr, Int, maximum, minimum, substitute


class Intrinsic(Protocol):
    """How a recipe computes `meaning`, a node of shape (batch, rows, columns) in float32.

    source is C, one definition or more. `NAME_tile(float* tile, [uchar* work,] operands…,
    int batch, int row, int column, int place, int tiles, int rows, ints…)` makes `rows` <= strip
    rows of `columns` sums each, row-major, from a multiple of `strip` and a multiple of `columns`
    on. A work-group makes some `tiles` <= beside of a strip, the one at `place` 0 first and each
    the neighbour of the last, before it goes on to the next strip. If `work` > 0, work-groups
    first call `NAME_begin(work, operands…, batch, row, column, place, tiles, ints…)` for the first
    tile, and `NAME_end()` at last.
    A tile may read past the end of an operand by less than memory.SLACK bytes.
    """

    name: str  # equal names: equal code
    columns: int
    strip: int  # rows per tile
    block: int  # rows per work-group, a multiple of strip
    beside: int  # tiles that a work-group makes of a strip, at most
    work: int  # bytes of scratch that the tiles of one work-group share, 0 for none

    def shape(self, *operands: Node) -> tuple[Int, Int, Int]: ...
    def meaning(self, *operands: Node) -> Node: ...
    def ints(self, *operands: Node) -> tuple[Int, ...]: ...
    def source(self) -> tuple[str, ...]: ...
    def flops(self, *operands: Node) -> Int: ...


ROOM = 16  # floats that may be read, never used, behind a tile: whole vectors at its end


Rows = tuple[tuple[int, int], ...]


def rows_in_all(shape: Sequence[Int], rows: Rows) -> Int:
    """How many rows there are up to the last that an output of this shape needs."""
    return 1 + sum((shape[axis] - 1) * step for axis, step in rows)


@dataclass(frozen=True)
class TilePlan(Plan):
    """A Plan for a kernel around INTRINSICs.

    rows    (axis, rows that a step of it stands for), from the largest step down to 1: together
            they count a tile's rows, maybe leaving some out; empty: there is a single row.
            The block of the first of them is in rows, not in steps
    grid    the axes from the one along which groups differ last to the one where they do first
    axes    one variable per output axis (None for size 1)
    where   each INTRINSIC and its index (batch, row, column) as a function of those
    beside  (axis, tiles that a work-group makes of a strip, along the axis)
    """

    rows: Rows = ()
    grid: tuple[int, ...] = ()
    axes: tuple[Expr | None, ...] = ()
    where: tuple[tuple[Node, Index], ...] = ()
    beside: tuple[int, int] = (0, 1)


def lower_tiles(kernel: Kernel, plan: TilePlan) -> Function:
    """The loops of one canonical kernel (its buffers are numbered) under a plan for tiles."""
    return Tiled(kernel, plan).function()


class Tiled(Lowering):
    def __init__(self, kernel: Kernel, plan: TilePlan) -> None:
        super().__init__(kernel, plan)
        self.tiles: dict[Node, tuple[Scratch, Index]] = {}  # where it lies, and its first index
        self.turn: Int = 0  # of the strip that is being made
        self.first: Int = 0  # its first row
        self.count: Int = 1  # how many it has
        self.place: Int = 0  # of the tile in its strip
        self.tiles_beside: Int = 1  # how many this group makes of a strip
        self.work: dict[Node, tuple[Scratch, ...]] = {}  # what the tiles of a group share

    def _grid(self) -> tuple[int, ...]:
        return self.plan.grid

    def _blocks(self, axis: int) -> Int:
        if not self.plan.rows or axis != self.plan.rows[0][0]:
            blocks, (beside, tiles) = super()._blocks(axis), self.plan.beside
            return (blocks + tiles - 1) // tiles if axis == beside else blocks
        total, block = rows_in_all(self.root.shape, self.plan.rows), self.plan.block[axis]
        return 1 if block is total or block == total else (total + block - 1) // block

    def _coordinates(self, group: Expr) -> None:
        super()._coordinates(group)
        axis, tiles = self.plan.beside
        if tiles > 1:
            first = self.starts[axis] // self.plan.block[axis]
            self.starts[axis] = self.starts[axis] * tiles
            self.tiles_beside = minimum(tiles, super()._blocks(axis) - first * tiles)

    def _body(self) -> None:
        nodes = [node for node, _ in self.plan.where]
        self.support = tuple(dict.fromkeys(part for n in nodes for part in n.arg.source()))
        strip = min(n.arg.strip for n in nodes)
        self.work = {n: self._begin(n, i) for i, n in enumerate(nodes)}
        block = self._next_strip(strip) if self.plan.rows else None
        beside = self._next_tile()
        for i, node in enumerate(nodes):
            size = strip * node.arg.columns + ROOM
            tile = self._scratch(f"tile{i}", dt.float32, size, shared=self.plan.team > 1)
            self.tiles[node] = tile, self._corner(node)
            self._make_tile(node, i, tile)
        self._nest(0, [[] for _ in self.root.shape])
        self._close(beside)
        self._close(block)
        for node in nodes:
            if self.work[node]:
                self._emit(Call(f"{node.arg.name}_end", (), (), ()))

    def _make_tile(self, node: Node, number: int, tile: Scratch) -> None:
        """Fill the tile of an INTRINSIC."""
        self._call(node, "tile", (tile, *self.work[node]), (self.count,))

    def _next_strip(self, strip: int) -> Block | None:
        """Open the loop over the strips of this group's rows."""
        axis = self.plan.rows[0][0]
        total, first = rows_in_all(self.root.shape, self.plan.rows), self.starts[axis]
        inside = minimum(self.plan.block[axis], total - first)
        self.turn, block = self._open((inside + strip - 1) // strip)
        self.first = first + self.turn * strip
        is_whole = isinstance(total, int) and total % strip == 0
        self.count = strip if is_whole else minimum(strip, total - self.first)
        return block

    def _next_tile(self) -> Block | None:
        """Open the loop over the tiles of a strip."""
        self.place, block = self._open(self.tiles_beside)
        axis, tiles = self.plan.beside
        if tiles > 1:
            size = self.plan.block[axis]
            self.starts[axis] = self.starts[axis] + self.place * size
            self.counts[axis] = minimum(size, self.root.shape[axis] - self.starts[axis])
        return block

    def _nest(self, position: int, points: list[list[Int]]) -> None:
        """As ever; but axes that count rows keep to the strip, given where the outer ones are."""
        rows, axis = self.plan.rows, None
        if position < len(self.plan.order):
            axis = self.plan.order[position]
        for i, (counted, step) in enumerate(rows):
            if counted == axis:
                outer = sum((points[a][0] * n for a, n in rows[:i]), start=0)
                low = (self.first - outer) if i == 0 else maximum(0, self.first - outer)
                high = (self.first + self.count - 1 - outer) // step
                high = high if i == 0 else minimum(high, self.root.shape[axis] - 1)
                self.starts[axis] = low // step
                self.counts[axis] = maximum(0, high - low // step + 1)
        super()._nest(position, points)

    def _begin(self, node: Node, number: int) -> tuple[Scratch, ...]:
        """The scratch that the tiles of a group share, made ready; none if they need none."""
        if not node.arg.work:
            return ()
        work = self._scratch(f"work{number}", dt.uint8, node.arg.work)
        self._call(node, "begin", (work,), ())
        return (work,)

    def _scratch(
        self, name: str, dtype: DType, size: int, shared: bool = False, kind: str = ""
    ) -> Scratch:
        part = Scratch(name, dtype, size, shared, kind)
        if part not in self.scratch:
            self.scratch.append(part)
        return part

    def _call(
        self, node: Node, what: str, scratch: tuple[Scratch, ...], more: tuple[Int, ...]
    ) -> None:
        slots = tuple(s.arg[0] for s in node.src)
        places = self.place, self.tiles_beside
        ints = (*self._corner(node), *places, *more, *node.arg.ints(*node.src))
        self._emit(Call(f"{node.arg.name}_{what}", scratch, slots, ints))

    def _corner(self, node: Node) -> Index:
        """The index at which this group's next tile begins."""
        starts = {v: s for v, s in zip(self.plan.axes, self.starts) if v is not None}
        batch, _, column = dict(self.plan.where)[node]
        return substitute(batch, starts), self.first, substitute(column, starts)

    def _from_tile(self, node: Node, index: Index) -> Value:
        place, (_, row, column) = self.tiles[node]
        flat = (index[1] - row) * node.arg.columns + index[2] - column
        address = Address(place, flat, self._lane_of(flat))
        # Turn and place keep the load inside their loops, after the call that fills the tile.
        turns = self.turn, self.place
        return self._put(Kind.LOAD, dt.float32, arg=address, exprs=(flat, *turns))
