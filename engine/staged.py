"""Kernels around products on a GPU: a team stages parts of both factors in memory that it shares.

Each work-item keeps some of a tile's sums in registers while the team goes through the depth a step
at a time: all fetch the next step of both factors, then all multiply. The factors are ordinary
values, computed as they are staged: blocks of a quantised weight, windows of a convolution. What
surrounds the product reads the tile, as in `tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine import dtype as dt
from engine.dtype import DType
from engine.graph import Node
from engine.ir import Address, Barrier, Call, Function, Scratch, Store
from engine.schedule import Kernel
from engine.symbolic import Int, less
from engine.tiles import Intrinsic, Tiled, TilePlan


class StagedProduct(Intrinsic, Protocol):
    """An Intrinsic whose operands (batch, rows, depth) and (batch, columns, depth) are any values.

    source defines `NAME_clear(sums, item)`, `NAME_step(sums, left, right, item)` and `NAME_keep(
    tile, sums, item)`. sums are `sums` floats of each item's own, or so many of what `kind` names
    in the language. left and right hold `step` numbers of the depth, of type `staged`, in rows of
    `pitch`; tile is as for every Intrinsic.
    """

    step: int
    sums: int
    kind: str
    staged: DType
    deep: bool  # a row of staged numbers goes along the depth, else across it

    def pitch(self, rows: int) -> int: ...


@dataclass(frozen=True)
class StagedPlan(TilePlan):
    """A TilePlan for a team.

    across  of each INTRINSIC: whether neighbouring items fetch neighbours across the depth, for
            (left, right); else along it
    """

    across: tuple[tuple[bool, bool], ...] = ()


def lower_staged(kernel: Kernel, plan: StagedPlan) -> Function:
    """The loops of one canonical kernel (its buffers are numbered) under a plan for a team."""
    return _Staged(kernel, plan).function()


class _Staged(Tiled):
    def _make_tile(self, node: Node, number: int, tile: Scratch) -> None:
        spec: StagedProduct = node.arg
        batch, row, column = self._corner(node)
        sums = self._scratch("sums", dt.float32, spec.sums, kind=spec.kind)
        parts = []
        for name, rows in (("left", spec.strip), ("right", spec.columns)):
            size = spec.pitch(rows) * (rows if spec.deep else spec.step)
            parts.append(self._scratch(name, spec.staged, size, shared=True))
        self._run(node, "clear", sums)
        depth = node.src[0].shape[2]
        turn, block = self._open(-(-depth // spec.step))
        sides = (row, spec.strip), (column, spec.columns)
        for part, factor, across, (first, rows) in zip(
            parts, node.src, self.plan.across[number], sides
        ):
            self._stage(spec, part, factor, (batch, first, turn * spec.step), rows, across)
        self._emit(Barrier())
        self._run(node, "step", sums, *parts)
        self._emit(Barrier())
        self._close(block)
        self._run(node, "keep", tile, sums)
        self._emit(Barrier())

    def _stage(
        self,
        spec: StagedProduct,
        part: Scratch,
        factor: Node,
        corner: tuple[Int, Int, Int],
        rows: int,
        across: bool,
    ) -> None:
        """Work-items fetch `rows` rows of a factor, from a corner on; none of those behind it."""
        batch, first, depth = corner
        turn, block = self._open(rows * spec.step, dealt=True)
        row, deep = (turn % rows, turn // rows) if across else (turn // spec.step, turn % spec.step)
        inside = less(first + row, factor.shape[1]), less(depth + deep, factor.shape[2])
        guard = tuple(g for g in inside if not (isinstance(g, int) and g == 1))
        value = self._masked(factor, (batch, first + row, depth + deep), guard)
        pitch = spec.pitch(rows)
        at = row * pitch + deep if spec.deep else deep * pitch + row
        self._emit(Store(Address(part, at, None), spec.staged, value))
        self._close(block)

    def _run(self, node: Node, what: str, *scratch: Scratch) -> None:
        self._emit(Call(f"{node.arg.name}_{what}", scratch, (), ()))
