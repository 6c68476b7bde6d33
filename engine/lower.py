"""Kernel + Plan -> loops over the output, and the loops of its reductions.

A Plan says how the output is cut into work-groups, lanes and unrolled copies, and nothing else; the
values follow from the graph. Reductions over the same range that don't need each other share one
loop, and run in the outermost place where their index is known: a row's sum before the loop that
writes the row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product as cartesian

from engine import dtype as dt
from engine.evaluate import Block, Evaluator
from engine.graph import Node, Op, toposort
from engine.indexing import Index, flat_index, source_indices
from engine.ir import (
    Accumulator,
    Address,
    Call,
    Define,
    Fetch,
    Function,
    Kind,
    Let,
    Loop,
    Parameter,
    Scratch,
    Start,
    Statement,
    Store,
    Update,
    Value,
)
from engine.schedule import Kernel
from engine.symbolic import Expr, Int, Var, minimum, product, substitute, upper, variables

CHAINS = 8  # sums under way at once that hide the latency of an addition


@dataclass(frozen=True)
class Plan:
    """How a kernel's loops are cut. One entry per output axis in block and unroll.

    block   elements of the axis that one work-group makes (the whole axis: no grid over it)
    unroll  copies of the innermost loop's body along the axis
    order   the axes from the outermost loop to the innermost
    vector  the axis that lies across `lanes`, or None
    reduce_lanes   reductions that don't vary along `vector` take lanes along their own last axis
    reduce_unroll  steps of a reduction per turn of its loop
    ahead   outputs are made in order: what lies so many elements ahead of them, and of what is
            read beside them, is fetched meanwhile
    around  outputs don't go through the caches: they wouldn't stay there, and a cache reads a line
            before it is written
    team    work-items that make a group's outputs together: they take turns along `vector`, and
            along the last axis of reductions that don't vary with it (the first of them alone
            stores an output if `vector` is None)
    """

    recipe: str
    block: tuple[Int, ...]
    unroll: tuple[int, ...]
    order: tuple[int, ...]
    vector: int | None = None
    lanes: int = 1
    reduce_lanes: int = 1
    reduce_unroll: int = 1
    ahead: int = 0
    around: bool = False
    team: int = 1


def plain(kernel: Kernel) -> Plan:
    """The plan without any cleverness: one work-group per output, scalars only."""
    rank = len(kernel.root.shape)
    return Plan("plain", (1,) * rank, (1,) * rank, tuple(range(rank)))


def lower(kernel: Kernel, plan: Plan) -> Function:
    """The loops of one canonical kernel (its buffers are numbered) under a plan."""
    return Lowering(kernel, plan).function()


@dataclass(eq=False)
class _Group:
    """Reductions that share one loop, and the indices at which each is wanted."""

    extents: tuple[Int, ...]
    instances: dict[tuple[Node, Index], None] = field(default_factory=dict)


class Lowering(Evaluator):
    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        super().__init__(plan.lanes, plan.reduce_lanes)
        self.kernel = kernel
        self.plan = plan
        self.root = kernel.root
        self.stage = _stages(kernel.root)
        self.groups: dict[Node, _Group] = {}
        self.starts: list[Int] = [0] * len(self.root.shape)  # of this work-group, along each axis
        self.counts: list[Int] = list(self.root.shape)  # how many outputs it makes along each
        self.scratch: list[Scratch] = []
        self.support: tuple[str, ...] = ()

    def function(self) -> Function:
        group = Var("group", 0, max(upper(self._groups()) - 1, 0))
        self._coordinates(group)
        self._body()
        reads = sorted(self.kernel.reads, key=lambda n: n.arg[0])  # recipes may reorder them
        parameters = [Parameter(0, self.kernel.target.dtype)]
        parameters += [Parameter(n.arg[0], n.dtype) for n in reads]
        known = set(self.level) | {self.lane, self.reduce_lane, group}
        free = _variables(self.path[0].body) | variables(self._groups())
        symbolic = tuple(sorted((v for v in free if v not in known), key=lambda v: v.text))
        label = f"{self.plan.recipe} {_label(self.root)}"
        made = Function(label, tuple(parameters), symbolic, self._groups(), self.path[0].body)
        return replace(made, scratch=tuple(self.scratch), support=self.support, team=self.plan.team)

    def _body(self) -> None:
        """What a work-group does."""
        self._nest(0, [[] for _ in self.root.shape])

    # --- the output's loops ------------------------------------------------------------------

    def _blocks(self, axis: int) -> Int:
        size, block = self.root.shape[axis], self.plan.block[axis]
        return 1 if block is size or block == size else (size + block - 1) // block

    def _groups(self) -> Int:
        return product(self._blocks(a) for a in range(len(self.root.shape)))

    def _grid(self) -> tuple[int, ...]:
        """The axes from the one along which groups differ last to the one where they do first."""
        return self.plan.order

    def _coordinates(self, group: Expr) -> None:
        """Where this work-group starts along each axis, and how far it goes."""
        rest: Int = group
        self.level[group] = 0
        wide = [a for a in self._grid() if self._blocks(a) != 1]
        for axis in reversed(wide):
            count = self._blocks(axis)
            var = Var(f"g{axis}", 0, max(upper(count) - 1, 0))
            self.level[var] = 0
            self._emit(Define(var, rest if axis is wide[0] else rest % count))
            rest = rest // count
            start = self.starts[axis] = var * self.plan.block[axis]
            self.counts[axis] = minimum(self.plan.block[axis], self.root.shape[axis] - start)

    def _nest(self, position: int, points: list[list[Int]]) -> None:
        """The loops from plan.order[position] inwards. points: the indices chosen on each axis.

        Every axis has whole steps of unroll x lanes, then of lanes, then single elements.
        """
        if position == len(self.plan.order):
            alone = self._open(1, self.plan.team > 1 and self.plan.vector is None)
            self._outputs(points)
            self._close(alone[1])
            return
        axis = self.plan.order[position]
        start, count = self.starts[axis], self.counts[axis]
        unroll = self.plan.unroll[axis]
        wide = axis == self.plan.vector and self.plan.lanes > 1
        lanes, lane = (self.plan.lanes, self.lane) if wide else (1, 0)
        dealt = axis == self.plan.vector and self.plan.team > 1
        for first, turns, copies, width in _cuts(count, unroll, lanes):
            opened = self._open(turns, dealt)
            if opened is not None:
                turn, body = opened
                at = start + first + turn * (copies * width)
                points[axis] = [at + u * width + (lane if width > 1 else 0) for u in range(copies)]
                self._nest(position + 1, points)
                self._close(body)

    def _open(self, extent: Int, dealt: bool = False) -> tuple[Int, Block | None] | None:
        """Begin a loop; its variable (0 where it turns once), or None where it never turns."""
        if extent == 0:
            return None
        if extent == 1 and not dealt:
            return 0, None
        var = Var(f"i{self.counter}", 0, max(upper(extent) - 1, 0))
        self.counter += 1
        block = Block(len(self.path), var, extent, dealt)
        self.level[var] = len(self.path)
        self.path.append(block)
        return var, block

    def _close(self, block: Block | None) -> None:
        """End the innermost loop and put it into the one around it."""
        if block is None:
            return
        assert self.path[-1] is block, "loops close in the order in which they opened"
        self.path.pop()
        self._emit(Loop(block.var, block.extent, block.body, block.dealt))

    def _emit(self, statement: Statement) -> None:
        self.path[-1].body.append(statement)

    def _outputs(self, points: list[list[Int]]) -> None:
        """Compute and store every unrolled copy of the innermost body."""
        chosen = list(cartesian(*points))
        self._find_reductions(chosen)
        target = self.kernel.target
        for index in chosen:
            value = self._value(self.root, index, ())
            at = index
            if self.kernel.box is not None:
                at = tuple(i + start for i, (start, _) in zip(index, self.kernel.box))
            if self.kernel.rows is not None:
                row = self._row(self.kernel.rows, index[:1], (), target.shape[0])
                at = (row, *index[1:])
            flat = flat_index(at, target.shape)
            lane = self.lane if self.lane in variables(flat) else None
            if self.plan.ahead and lane is not None:
                self._fetch(flat, lane)
            around = self.plan.around and lane is not None and self._is_whole(flat, lane)
            self._emit(Store(Address(0, flat, lane), target.dtype, value, around))

    def _is_whole(self, flat: Int, lane: Expr) -> bool:
        """Whether a vector across lanes always lies at a multiple of its size."""
        first = substitute(flat, {lane: 0})
        return first % self.plan.lanes == 0 and substitute(flat, {lane: 1}) - first == 1

    def _fetch(self, flat: Int, lane: Expr) -> None:
        """Fetch what is written and read `ahead` elements on."""
        first = substitute(flat, {lane: 0}) + self.plan.ahead
        self._emit(Fetch(0, first))
        for value in list(self.path[-1].values.values()):
            if value.kind is Kind.LOAD and value.arg.lane is lane and not value.arg.guard:
                apart = value.arg.index - flat
                if isinstance(apart, int) and not value.arg.itemsize:
                    self._emit(Fetch(value.arg.slot, first + apart))

    # --- reductions --------------------------------------------------------------------------

    def _find_reductions(self, indices: list[Index]) -> None:
        """Group the reductions below the root and note every index at which each is wanted."""
        groups: dict[tuple, _Group] = {}
        seen: set[tuple[Node, Index]] = set()
        todo = [(self.root, i) for i in reversed(indices)]
        while todo:
            node, index = todo.pop()
            if (node, index) in seen:
                continue
            seen.add((node, index))
            if node.op is Op.REDUCE:
                extents = tuple(node.src[0].shape[a] for a in node.arg[1])
                key = (self.stage[node], extents)
                group = groups.setdefault(key, _Group(extents))
                group.instances[node, index] = None
                self.groups[node] = group

            def fresh(name: str, size: Int, node: Node = node) -> Int:
                return Var(f"{name}_{self.stage.get(node, 0)}", 0, max(upper(size) - 1, 0))

            todo += reversed(source_indices(node, index, fresh))

    def _reduce(self, node: Node, index: Index) -> Value:
        """The value of one reduction: runs the loop of its whole group when first asked."""
        self._run_group(self.groups[node])
        for block in reversed(self.path):
            if (node, index, "sum") in block.nodes:
                return block.nodes[node, index, "sum"]
        raise AssertionError("a reduction is wanted at an index that wasn't found beforehand")

    def _run_group(self, group: _Group) -> None:
        wanted = [key for key in group.instances if not self._known((*key, "sum"))]
        if not wanted:
            return
        free = frozenset().union(*(variables(i) for _, index in wanted for i in index))
        depth = max((self.level.get(v, 0) for v in free), default=0)
        outer = self.path
        self.path = outer[: depth + 1]
        shared = self.plan.team > 1 and not any(block.dealt for block in self.path)
        lanes = 1 if self.lane in free else self.plan.reduce_lanes
        copies = self.plan.reduce_unroll if len(wanted) * self.plan.reduce_unroll <= CHAINS else 1
        sums: dict[tuple, list[Accumulator]] = defaultdict(list)
        vectors: dict[tuple, list[Accumulator]] = defaultdict(list)
        *around, last = group.extents
        opened = []
        place: list[Int] = []
        here = self.path[-1]
        for key in wanted:
            width = self.plan.lanes if any(self.lane in variables(i) for i in key[1]) else lanes
            vectors[key] = [self._start(key[0], width) for _ in range(copies)]
            if lanes > 1 and last % lanes != 0:
                sums[key] = [self._start(key[0], 1)]
        for extent in around:
            var, block = self._open(extent)  # never None: an empty reduction isn't made
            opened.append(block)
            place.append(var)
        self._run_last(wanted, place, last, lanes, vectors, sums, shared)
        for block in reversed(opened):
            self._close(block)
        for key in wanted:
            total = self._total(key[0], vectors[key])
            if lanes > 1:  # they are partial sums; otherwise each lane is an output
                total = self._put(Kind.FOLD, total.dtype, (total,), key[0].arg[0], lanes=1)
            if shared:
                self._use_room()
                total = self._put(Kind.TEAM, total.dtype, (total,), key[0].arg[0])
            here.nodes[(*key, "sum")] = self._total(key[0], sums[key], total)
        self.path = outer

    def _run_last(
        self,
        wanted: list[tuple[Node, Index]],
        place: list[Int],
        extent: Int,
        lanes: int,
        vectors: dict,
        sums: dict,
        shared: bool,
    ) -> None:
        """The innermost reduction loop: whole steps of unroll x lanes, then of lanes, then one."""
        for first, turns, unroll, width in _cuts(extent, self.plan.reduce_unroll, lanes):
            opened = self._open(turns, shared)
            if opened is None:
                continue
            turn, block = opened
            for u in range(unroll):
                lane = self.reduce_lane if width > 1 else 0
                at = first + turn * (unroll * width) + u * width + lane
                for key in wanted:
                    into = vectors[key] if width == lanes else sums[key]
                    value = self._operand(key, [*place, at])
                    self._emit(Update(into[u % len(into)], value))
            self._close(block)

    def _operand(self, key: tuple[Node, Index], place: list[Int]) -> Value:
        node, index = key
        inner = list(index)
        for a, at in zip(node.arg[1], place):
            inner[a] = at
        return self._value(node.src[0], tuple(inner), ())

    def _from_tile(self, node: Node, index: Index) -> Value:
        raise AssertionError(f"{node.arg.name} is made tile by tile, by a plan for that")

    def _known(self, key: tuple) -> bool:
        return any(key in block.nodes for block in self.path)

    def _start(self, node: Node, lanes: int) -> Accumulator:
        accumulator = Accumulator(node.arg[0], node.dtype, lanes)
        self._emit(Start(accumulator))
        return accumulator

    def _use_room(self) -> None:
        """The team needs memory to add up what its work-items have."""
        room = Scratch("room", dt.int64, self.plan.team, shared=True)
        if room not in self.scratch:
            self.scratch.append(room)

    def _total(
        self, node: Node, accumulators: list[Accumulator], total: Value | None = None
    ) -> Value:
        """The accumulators of one reduction, and what is there already, as one value."""
        combine = Op.ADD if node.arg[0] == "add" else Op.MAX
        for a in accumulators:
            part = Value(Kind.READ, node.dtype, a.lanes, (), a, len(self.path) - 1)
            self._emit(Let(part))
            both = () if total is None else (total, part)
            total = self._put(Kind.ALU, node.dtype, both, combine) if both else part
        return total


def _cuts(count: Int, unroll: int, lanes: int) -> Iterator[tuple[Int, Int, int, int]]:
    """An axis of `count` elements in steps of unroll x lanes, of lanes, and of one.

    Yields where the steps of a size begin, how many they are, and of how many copies and lanes.
    """
    first, left = 0, count
    for copies, width in dict.fromkeys(((unroll, lanes), (1, lanes), (1, 1))):
        step = copies * width
        yield first, left // step, copies, width
        first, left = count // step * step, left % step


def _stages(root: Node) -> dict[Node, int]:
    """How many reductions lie one inside the other below each REDUCE: 0 for the innermost."""
    level: dict[Node, int] = {}
    for n in toposort([root]):
        below = max((level[s] for s in n.src), default=0)
        level[n] = below + (n.op is Op.REDUCE)
    return {n: s for n, s in level.items() if n.op is Op.REDUCE}


def _label(root: Node) -> str:
    ops = [
        n.arg.name if n.op is Op.INTRINSIC else n.op.name.lower()
        for n in toposort([root])
        if n.op in (Op.REDUCE, Op.GATHER, Op.INTRINSIC)
    ]
    shape = "x".join(str(n) for n in root.shape)
    return f"{'+'.join(ops) or root.op.name.lower()} {shape or 'scalar'}"


def _variables(body: list[Statement]) -> set[Expr]:
    """Every Var that statements mention."""
    found: set[Expr] = set()
    for s in body:
        match s:
            case Let(value):
                if value.kind is Kind.LOAD:
                    found |= _address_variables(value.arg)
                elif value.kind is Kind.INDEX:
                    found |= variables(value.arg[0])
            case Define(_, value) if not isinstance(value, Value):
                found |= variables(value)
            case Fetch(_, index):
                found |= variables(index)
            case Store(address):
                found |= _address_variables(address)
            case Loop(_, extent, inner, _):
                found |= variables(extent) | _variables(inner)
            case Call():
                found = found.union(*(variables(i) for i in s.ints))
    return found


def _address_variables(address: Address) -> frozenset[Expr]:
    return variables(address.index).union(*(variables(g) for g in address.guard))
