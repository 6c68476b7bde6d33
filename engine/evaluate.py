"""Nodes at indices -> values in blocks: what a kernel computes, wherever its loops are.

Each value is put into the outermost loop in which its index is known, so whatever doesn't vary with
an inner loop (a row's sum, a block's scale) is computed outside of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from engine import dtype as dt
from engine.dtype import DType
from engine.graph import ELEMENTWISE, MOVEMENT, Node, Op
from engine.indexing import Guard, Index, flat_index, move_index
from engine.ir import Address, Define, Kind, Let, Statement, Value
from engine.symbolic import Expr, Int, Var, upper, variables


@dataclass
class Block:
    """A loop body being written, with the values already in it."""

    depth: int
    var: Expr | None = None
    extent: Int = 1
    dealt: bool = False  # its turns, to the work-items of a team
    body: list[Statement] = field(default_factory=list)
    values: dict[tuple, Value] = field(default_factory=dict)  # by content: no value twice
    nodes: dict[tuple, Value] = field(default_factory=dict)  # (node, index, guard) -> Value
    rows: dict[tuple, Expr] = field(default_factory=dict)  # gathered index -> its variable


class Evaluator(ABC):
    """Writes values into the loops on `path`; a subclass opens and closes those."""

    def __init__(self, lanes: int, reduce_lanes: int) -> None:
        self.path = [Block(0)]
        self.level: dict[Expr, int] = {}  # loop variable -> depth of the block it starts
        self.lane = Var("lane", 0, max(lanes - 1, 0))
        self.reduce_lane = Var("rlane", 0, max(reduce_lanes - 1, 0))
        self.counter = 0

    @abstractmethod
    def _reduce(self, node: Node, index: Index) -> Value:
        """The value of a REDUCE: needs loops of its own."""

    @abstractmethod
    def _from_tile(self, node: Node, index: Index) -> Value:
        """The value of an INTRINSIC: needs a tile made before."""

    def _put(
        self,
        kind: Kind,
        dtype: DType,
        args: tuple[Value, ...] = (),
        arg: Any = None,
        lanes: int | None = None,
        exprs: tuple[Int, ...] = (),
    ) -> Value:
        """A value in the outermost block where its arguments and index variables are known."""
        depth = max((a.depth for a in args), default=0)
        for e in exprs:
            for v in variables(e):
                depth = max(depth, self.level.get(v, 0))
        if lanes is None:
            lanes = max((a.lanes for a in args), default=1)
            for e in exprs:
                lanes = max(lanes, self._lanes(e))
        block = self.path[depth]
        key = (kind, dtype, lanes, args, arg if kind is not Kind.CONST else repr(arg))
        found = block.values.get(key)
        if found is None:
            found = Value(kind, dtype, lanes, args, arg, depth)
            block.values[key] = found
            block.body.append(Let(found))
        return found

    def _lanes(self, e: Int) -> int:
        if self.lane in variables(e):
            return self.lane.max + 1
        return self.reduce_lane.max + 1 if self.reduce_lane in variables(e) else 1

    def _lane_of(self, e: Int) -> Expr | None:
        found = variables(e) & {self.lane, self.reduce_lane}
        return next(iter(found), None)

    def _value(self, node: Node, index: Index, guard: Guard) -> Value:
        key = (node, index, guard)
        for block in reversed(self.path):
            if key in block.nodes:
                return block.nodes[key]
        value = self._compute(node, index, guard)
        self.path[value.depth].nodes[key] = value
        return value

    def _compute(self, node: Node, index: Index, guard: Guard) -> Value:
        if node.op in MOVEMENT:
            moved, more = move_index(node, index)
            if not more:
                return self._value(node.src[0], moved, guard)
            return self._padded(node, moved, guard, more)
        if node.op in ELEMENTWISE and node.op not in (Op.CAST, Op.BITCAST):
            args = tuple(self._value(s, index, guard) for s in node.src)
            return self._put(Kind.ALU, node.dtype, args, node.op)
        match node.op:
            case Op.BUFFER:
                return self._load(node, index, guard)
            case Op.CONST:
                if isinstance(node.arg, Expr):
                    number = self._put(
                        Kind.INDEX, dt.int32, arg=(node.arg, None), exprs=(node.arg,)
                    )
                    return self._put(Kind.CAST, node.dtype, (number,))
                return self._put(Kind.CONST, node.dtype, arg=node.arg)
            case Op.IOTA:
                at = (index[0], self._lane_of(index[0]))
                return self._put(Kind.INDEX, dt.int32, arg=at, exprs=(index[0],))
            case Op.CAST:
                return self._put(Kind.CAST, node.dtype, (self._value(node.src[0], index, guard),))
            case Op.BITCAST:
                return self._bitcast(node, index, guard)
            case Op.GATHER:
                return self._gather(node, index, guard)
            case Op.REDUCE:
                return self._reduce(node, index)
            case Op.INTRINSIC:
                return self._from_tile(node, index)
        raise AssertionError(f"{node.op.name} can't be inside a kernel")

    def _load(self, node: Node, index: Index, guard: Guard) -> Value:
        flat = flat_index(index, node.shape)
        return self._load_flat(node, flat, node.dtype, 0, guard)

    def _load_flat(self, node: Node, flat: Int, dtype: DType, itemsize: int, guard: Guard) -> Value:
        lane = self._lane_of(flat) or next((x for g in guard if (x := self._lane_of(g))), None)
        address = Address(node.arg[0], flat, lane, guard, itemsize)
        return self._put(Kind.LOAD, dtype, arg=address, exprs=(flat, *guard))

    def _padded(self, node: Node, moved: Index, guard: Guard, more: Guard) -> Value:
        return self._masked(node.src[0], moved, more, guard)

    def _masked(self, node: Node, index: Index, more: Guard, guard: Guard = ()) -> Value:
        """The node's value where all of `more` hold, else 0; nothing is read where one fails."""
        zero = self._put(Kind.CONST, node.dtype, arg=False if node.dtype is dt.bool_ else 0)
        if any(isinstance(g, int) for g in more):  # never inside
            return zero
        inner = self._value(node, index, (*guard, *(g for g in more if g not in guard)))
        if not more:
            return inner
        inside = None
        for g in more:
            at = (g, self._lane_of(g))
            number = self._put(Kind.INDEX, dt.int32, arg=at, exprs=(g,))
            test = self._put(Kind.CAST, dt.bool_, (number,))
            both = () if inside is None else (inside, test)
            inside = self._put(Kind.ALU, dt.bool_, both, Op.AND) if both else test
        return self._put(Kind.ALU, node.dtype, (inside, inner, zero), Op.WHERE)

    def _bitcast(self, node: Node, index: Index, guard: Guard) -> Value:
        source = node.src[0]
        wide, narrow = node.dtype.itemsize, source.dtype.itemsize
        if wide == narrow:
            return self._put(Kind.BITCAST, node.dtype, (self._value(source, index, guard),))
        if wide < narrow:
            return self._narrow(node, index, guard)
        step = wide // narrow
        first = (*index[:-1], index[-1] * step)
        if place := _straight(source, first):
            buffer, flat = place
            lane = self._lane_of(flat)
            # lanes that each read several bytes: only neighbouring ones make a vector load
            if lane is None or flat - lane * step == _without(flat, lane, step):
                return self._load_flat(buffer, flat, node.dtype, narrow, guard)
        bits = dt.BY_NAME[f"uint{node.dtype.bits}"]
        small = dt.BY_NAME[f"uint{source.dtype.bits}"]
        total: Value | None = None
        for part in range(step):
            piece = self._value(source, (*index[:-1], index[-1] * step + part), guard)
            if source.dtype is not small:
                piece = self._put(Kind.BITCAST, small, (piece,))
            piece = self._put(Kind.CAST, bits, (piece,))
            shift = self._put(Kind.CONST, bits, arg=part * source.dtype.bits)
            piece = self._put(Kind.ALU, bits, (piece, shift), Op.SHL)
            both = () if total is None else (total, piece)
            total = self._put(Kind.ALU, bits, both, Op.OR) if both else piece
        return self._put(Kind.BITCAST, node.dtype, (total,))

    def _narrow(self, node: Node, index: Index, guard: Guard) -> Value:
        source = node.src[0]
        parts = source.dtype.itemsize // node.dtype.itemsize
        whole = self._value(source, (*index[:-1], index[-1] // parts), guard)
        bits = dt.BY_NAME[f"uint{source.dtype.bits}"]
        whole = self._put(Kind.BITCAST, bits, (whole,)) if source.dtype is not bits else whole
        part = index[-1] % parts * node.dtype.bits
        at = (part, self._lane_of(part)) if isinstance(part, Expr) else None
        if at is None:
            shift = self._put(Kind.CONST, bits, arg=part)
        else:
            number = self._put(Kind.INDEX, dt.int32, arg=at, exprs=(part,))
            shift = self._put(Kind.CAST, bits, (number,))
        shifted = self._put(Kind.ALU, bits, (whole, shift), Op.SHR)
        small = dt.BY_NAME[f"uint{node.dtype.bits}"]
        out = self._put(Kind.CAST, small, (shifted,))
        return out if node.dtype is small else self._put(Kind.BITCAST, node.dtype, (out,))

    def _gather(self, node: Node, index: Index, guard: Guard) -> Value:
        source, chosen = node.src
        at, end = node.arg, node.arg + len(chosen.shape)
        place = frozenset().union(*(variables(i) for i in index[at:end]))
        # A guard of other axes, along which lanes may lie, says nothing of where the choice is.
        own = tuple(g for g in guard if not place.isdisjoint(variables(g)))
        row = self._row(chosen, index[at:end], own, source.shape[at])
        return self._value(source, (*index[:at], row, *index[end:]), guard)

    def _row(self, chosen: Node, index: Index, guard: Guard, size: Int) -> Expr:
        """A variable for the int that `chosen` holds at `index`, clamped to 0 … size - 1."""
        which = self._value(chosen, index, guard)
        assert which.lanes == 1, "a recipe laid lanes along a gathered axis"
        block = self.path[which.depth]
        row = block.rows.get((which, size))
        if row is None:
            row = Var(f"i{self.counter}", 0, max(upper(size) - 1, 0))
            self.counter += 1
            self.level[row] = which.depth
            block.rows[which, size] = row
            block.body.append(Define(row, which))
        return row


def _straight(node: Node, index: Index) -> tuple[Node, Int] | None:
    """(BUFFER, flat index) when nothing but movement without guards lies between."""
    while node.op in MOVEMENT:
        index, guard = move_index(node, index)
        if guard:
            return None
        node = node.src[0]
    return (node, flat_index(index, node.shape)) if node.op is Op.BUFFER else None


def _without(flat: Int, lane: Expr, step: int) -> Int | None:
    """flat without its `lane * step`, or None when the lane isn't there in just that way."""
    rest = flat - lane * step
    return None if lane in variables(rest) else rest
