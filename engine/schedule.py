"""Cut a graph into kernels: which nodes get a buffer, in which order they run, where they live.

One sweep from the outputs down decides it. Every node learns from its consumers at which indices,
inside which loops, each kernel would evaluate it; from that it is plain whether computing it there
costs more than storing it. What is not stored becomes part of the kernels that read it.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from engine.graph import (
    ELEMENTWISE,
    MOVEMENT,
    TRANSCENDENTAL,
    Index,
    Node,
    Op,
    Storage,
    buffer,
    make,
    source_indices,
    toposort,
)
from engine.symbolic import Expr, Int, Var, product, upper, variables

ROW_LIMIT = 1 << 17  # longest row (elements) that one work-group reduces and then rewrites
DEPTH_LIMIT = 96  # longest chain of nodes in a kernel; also keeps its argument list short
INDEX_LIMIT = 6  # at how many different indices one kernel may recompute a node
ALIGNMENT = 256  # bytes, of each buffer in an arena

Box = tuple[tuple[Int, Int], ...]


@dataclass(frozen=True)
class Kernel:
    """One launch: the value `root`, over BUFFER leaves, is written to `target`.

    box limits the write to a part of target (from ASSIGN); its shape is root's.
    """

    root: Node
    target: Node
    box: Box | None = None

    @cached_property
    def reads(self) -> list[Node]:
        """The BUFFER leaves, each once, in a fixed order."""
        return [n for n in toposort([self.root]) if n.op is Op.BUFFER]


def cost(kernel: Kernel) -> tuple[Int, Int]:
    """(float operations, bytes read and written), every element of every node counted once."""
    flops: Int = 0
    nbytes: Int = kernel.root.numel * kernel.target.dtype.itemsize
    for n in toposort([kernel.root]):
        if n.op is Op.BUFFER:
            nbytes = nbytes + n.numel * n.dtype.itemsize
        elif n.dtype.is_float and n.op is Op.REDUCE:
            flops = flops + n.src[0].numel
        elif n.dtype.is_float and n.op in ELEMENTWISE - {Op.CAST, Op.BITCAST}:
            flops = flops + n.numel
    return flops, nbytes


@dataclass
class Schedule:
    """Kernels in running order, the BUFFER node of each sink, and who wrote which storage."""

    device: str
    kernels: list[Kernel]
    results: list[Node]
    temporaries: list[Storage] = field(default_factory=list)
    versions: dict[Storage, int] = field(default_factory=dict)
    assigned: dict[Node, Node] = field(default_factory=dict)  # ASSIGN -> its result's BUFFER

    def commit(self) -> None:
        """The kernels have run: buffers have new versions, and graphs that hold the ASSIGNs now
        mean their results."""
        for storage, version in self.versions.items():
            storage.version = version
        _executed.update(self.assigned)


_executed: weakref.WeakKeyDictionary[Node, Node] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Use:
    """A kernel would evaluate a node at `index`, once for each value of the loops in `space`."""

    index: Index
    space: frozenset[Expr]

    @property
    def free(self) -> frozenset[Expr]:
        return frozenset().union(*(variables(i) for i in self.index)) if self.index else frozenset()


class _Sweep:
    """Decides which nodes are stored. `stored` is the result."""

    def __init__(self, order: list[Node], sinks: Iterable[Node]) -> None:
        self.stored = set(sinks) | {n for n in order if n.op in (Op.ASSIGN, Op.CONTIGUOUS)}
        self.stored = {n for n in self.stored if n.op is not Op.BUFFER}
        self.consumers = Counter(s for n in order for s in n.src)
        self.uses: dict[Node, dict[Node, dict[Use, None]]] = defaultdict(lambda: defaultdict(dict))
        self.sizes: dict[Expr, Int] = {}  # loop variable -> extent
        self.loops: dict[Expr, frozenset[Expr]] = {}  # a gathered index -> the loops it varies with
        self.reduction_vars: set[Expr] = set()
        self.row: dict[Node, frozenset[Expr] | None] = {}  # root -> its rows; None: no row kernel
        self.axes: dict[Node, Index] = {}  # root -> the loop variables of its output
        self.depth: dict[Node, int] = defaultdict(int)
        self.weights = self._fed_by_weights(order)
        self.heavy = self._costly(order, reductions_only=False)
        self.reducing = self._costly(order, reductions_only=True)
        self.computes = self._computes(order)
        for number, node in reversed(list(enumerate(order))):
            if node.op not in (Op.BUFFER, Op.CONST, Op.IOTA) and 0 not in node.shape:
                self._visit(node, number)

    @staticmethod
    def _fed_by_weights(order: list[Node]) -> set[Node]:
        """Nodes that depend on nothing but constants: never stored, their readers may pack them."""
        out: set[Node] = set()
        for n in order:
            if n.op is Op.BUFFER:
                fixed = getattr(n.arg[0], "constant", False)
            else:
                fixed = n.op in (Op.CONST, Op.IOTA) or all(s in out for s in n.src)
            if fixed and n.op is not Op.REDUCE and n.op not in TRANSCENDENTAL:
                out.add(n)
        return out

    def _costly(self, order: list[Node], reductions_only: bool) -> set[Node]:
        """Nodes whose recomputation, from what is likely stored, meets a reduction or exp2, …"""
        out: set[Node] = set()
        for n in order:
            own = n.op is Op.REDUCE or (not reductions_only and n.op in TRANSCENDENTAL)
            fed = any(s in out and not (s in self.stored or self.consumers[s] > 1) for s in n.src)
            direct = any(s in out and s.op in MOVEMENT | {Op.REDUCE} for s in n.src)
            if own or (n.op in ELEMENTWISE | MOVEMENT and (fed or direct)):
                if n not in self.weights:
                    out.add(n)
        return out

    def _computes(self, order: list[Node]) -> set[Node]:
        """Nodes that do arithmetic, beyond casts and movement, on something that is no weight."""
        out: set[Node] = set()
        for n in order:
            own = n.op in ELEMENTWISE and n.op not in (Op.CAST, Op.BITCAST)
            if n not in self.weights and (own or any(s in out for s in n.src)):
                if n.op in ELEMENTWISE | MOVEMENT and n not in self.stored:
                    out.add(n)
        return out

    def _visit(self, node: Node, number: int) -> None:
        if node not in self.stored and not self.uses[node]:
            return  # only a zero-size node asked for it
        if node in self.stored or self._should_store(node):
            self.stored.add(node)
            below = node.src[1] if node.op is Op.ASSIGN else node
            axes = tuple(self._loop(f"a{i}", n) for i, n in enumerate(below.shape))
            self.axes[node] = axes
            whole = Use(axes, frozenset(v for a in axes for v in variables(a)))
            self.depth[node] = 0
            if node.op is Op.ASSIGN:  # nothing reads its base: the write is in place
                self.uses[below][node][whole] = None
                self.depth[below] = 0
                return
            self.uses[node] = defaultdict(dict, {node: {whole: None}})
        for root, uses in self.uses[node].items():
            for use in uses:
                for child, child_use in self._below(node, use, number):
                    self.uses[child][root][child_use] = None
        for child in node.src:
            self.depth[child] = max(self.depth[child], self.depth[node] + 1)

    def _loop(self, name: str, size: Int) -> Int:
        if size == 1:
            return 0
        if not isinstance(size, int):
            name = f"{name}_{size}"  # two symbolic sizes may have the same bounds
        var = Var(name, 0, max(upper(size) - 1, 0))
        self.sizes[var] = size
        return var

    def _below(self, node: Node, use: Use, number: int) -> list[tuple[Node, Use]]:
        """The uses of node's sources that one use of node makes."""
        made: list[Int] = []

        def fresh(name: str, size: Int) -> Int:
            if node.op is Op.GATHER:
                made.append(Var(f"{name}{number}", 0, max(upper(size) - 1, 0)))
            else:  # the same names in each kernel, so that equal layers ask equal questions
                made.append(self._loop(name, size))
            return made[-1]

        below = source_indices(node, use.index, fresh)
        if node.op is Op.REDUCE:
            inner = frozenset(v for n in made for v in variables(n))
            self.reduction_vars |= inner
            return [(below[0][0], Use(below[0][1], use.free | inner))]
        if node.op is Op.GATHER:
            self.loops[made[0]] = Use(below[1][1], use.space).free
        return [(child, Use(index, use.space)) for child, index in below]

    def _should_store(self, node: Node) -> bool:
        if node.op in MOVEMENT:
            return False
        if self.depth[node] > DEPTH_LIMIT:
            return True
        if node in self.weights:
            return False
        uses = self.uses[node]
        if node.op is Op.REDUCE:
            return not self._reduces_in_place(node)
        if len(uses) > 1 and node in self.heavy:
            return True
        ((root, indices),) = uses.items() if len(uses) == 1 else ((None, {}),)
        if len({u.index for u in indices}) > 1 and node in self.reducing:
            return True
        if any(len(u) > INDEX_LIMIT for u in uses.values()):
            return True
        return any(self._repeats(node, root, u) for root, us in uses.items() for u in us)

    def _free(self, use: Use) -> frozenset[Expr]:
        """The loops that the index varies with, gathered indices resolved."""
        out: set[Expr] = set()
        todo = list(use.free)
        while todo:
            var = todo.pop()
            if var in self.loops:
                todo += self.loops[var]
            elif var in self.sizes:
                out.add(var)
        return frozenset(out)

    def _repeats(self, node: Node, root: Node, use: Use) -> bool:
        """Whether this use computes the same element again and again at a cost worth a buffer."""
        times = upper(
            product(self.sizes[v] for v in use.space - self._free(use) if v in self.sizes)
        )
        if times <= 1:
            return False
        if not use.space.isdisjoint(self.reduction_vars):  # the operand of a contraction
            return node in self.computes
        return node in self.heavy and node not in self.reducing and times >= 4

    def _reduces_in_place(self, node: Node) -> bool:
        """Whether a reduction may live inside the kernel that reads it.

        Either each of its elements is needed once (the kernel is its epilogue), or each once per
        row, and the kernel has one work-group per row: norms and softmax.
        """
        uses = self.uses[node]
        if len(uses) != 1:
            return False
        ((root, indices),) = uses.items()
        if len({u.index for u in indices}) != 1:
            return False
        free = self._free(next(iter(indices)))
        if not free.isdisjoint(self.reduction_vars):
            return False
        space = frozenset(v for a in self.axes[root] for v in variables(a))
        outputs = product(self.sizes[v] for v in space)
        if free == space and upper(node.numel) >= upper(outputs):
            if self.row.get(root) is not None:
                return False
            self.row[root] = None
            return True
        rows = product(self.sizes[v] for v in free)
        length = product(self.sizes[v] for v in space - free)
        if rows != node.numel or upper(length) > ROW_LIMIT:
            return False
        return self.row.setdefault(root, free) == free


def schedule(sinks: Sequence[Node], device: str) -> Schedule:
    """The kernels that compute `sinks` on a device, in order.

    Raises ValueError for a buffer that was overwritten after the graph had been built on it.
    """
    sinks = _resolve(sinks)
    order = toposort(sinks)
    for n in order:
        if n.op is Op.BUFFER and n.arg[1] != n.arg[0].version:
            raise ValueError(
                "a tensor is read after its buffer was overwritten; realize() it before the write"
            )
    plan = Schedule(device, [], [])
    stored = _Sweep(order, [s for s in sinks if not _is_view(s)]).stored
    new: dict[Node, Node] = {}
    for n in order:
        built = (
            n if not n.src else make(n.op, tuple(new[s] for s in n.src), n.arg, n.dtype, n.shape)
        )
        new[n] = _store(built, plan) if n in stored else built
        if n.op is Op.ASSIGN:
            plan.assigned[n] = new[n]
    plan.results = [_view(new[s]) if s not in stored else new[s] for s in sinks]
    plan.kernels = _order(plan)
    return plan


def _resolve(sinks: Sequence[Node]) -> Sequence[Node]:
    """The sinks with every ASSIGN that has run replaced by the buffer it wrote."""
    order = toposort(sinks, leaves=_executed.keys())
    if not any(n in _executed for n in order):
        return sinks
    new: dict[Node, Node] = {}
    for n in order:
        src = () if n in _executed else tuple(new[s] for s in n.src)
        new[n] = _executed.get(n) or (make(n.op, src, n.arg, n.dtype, n.shape) if src else n)
    return [new[s] for s in sinks]


def _is_view(n: Node) -> bool:
    return n.op is Op.BUFFER or (n.op is Op.RESHAPE and n.src[0].op is Op.BUFFER)


def _view(n: Node) -> Node:
    """A BUFFER, or a reshaped one, as a BUFFER of that shape."""
    source = n.src[0] if n.op is Op.RESHAPE else n
    return make(Op.BUFFER, (), source.arg, n.dtype, n.shape)


def _store(built: Node, plan: Schedule) -> Node:
    """Add the kernel(s) that put `built` into a buffer; return its BUFFER node."""
    if built.op is Op.ASSIGN:
        base, value = built.src
        storage, version = base.arg
        written = make(Op.BUFFER, (), (storage, version + 1), base.dtype, base.shape)
        plan.versions[storage] = version + 1
        if 0 in value.shape:
            return written
        if any(n.op is Op.BUFFER and n.arg[0] is storage for n in toposort([value])):
            value = _store(value, plan)  # it reads what the write destroys
        plan.kernels.append(Kernel(value, written, built.arg))
        return written
    value = built.src[0] if built.op is Op.CONTIGUOUS else built
    storage = Storage(plan.device, value.dtype, upper(product(upper(n) for n in value.shape)))
    plan.temporaries.append(storage)
    target = buffer(storage, value.shape)
    if 0 not in value.shape:
        plan.kernels.append(Kernel(value, target))
    return target


def _order(plan: Schedule) -> list[Kernel]:
    """The kernels with every reader of a buffer's old contents before its writer.

    A reader that itself needs the new contents gets a copy of the old ones.
    """
    if not plan.versions:
        return plan.kernels
    kernels = plan.kernels
    reads = [k.reads for k in kernels]
    readers: dict[tuple, list[int]] = defaultdict(list)
    for i, nodes in enumerate(reads):
        for key in {n.arg for n in nodes}:
            readers[key].append(i)
    after: dict[int, set[int]] = {i: set() for i in range(len(kernels))}  # who must wait for i
    for i, k in enumerate(kernels):
        after[i].update(readers.get(k.target.arg, ()))
    copies: list[Kernel] = []
    for i, k in enumerate(kernels):
        storage, version = k.target.arg
        if plan.versions.get(storage) is None:
            continue
        for j in readers.get((storage, version - 1), ()):
            if j in _reachable(i, after):
                kernels[j] = _read_copy(kernels[j], (storage, version - 1), plan, copies)
            elif j != i:
                after[j].add(i)
    return copies + [kernels[i] for i in _topological(after)]


def _reachable(start: int, after: dict[int, set[int]]) -> set[int]:
    seen: set[int] = set()
    todo = list(after[start])
    while todo:
        i = todo.pop()
        if i not in seen:
            seen.add(i)
            todo += after[i]
    return seen


def _read_copy(kernel: Kernel, key: tuple, plan: Schedule, copies: list[Kernel]) -> Kernel:
    new: dict[Node, Node] = {}
    for n in toposort([kernel.root]):
        if n.op is Op.BUFFER and n.arg == key:
            storage = Storage(key[0].device, key[0].dtype, key[0].size)
            plan.temporaries.append(storage)
            flat = make(Op.BUFFER, (), key, n.dtype, (key[0].size,))
            copies.append(Kernel(flat, buffer(storage, flat.shape)))
            new[n] = make(Op.BUFFER, (), (storage, 0), n.dtype, n.shape)
        else:
            src = tuple(new[s] for s in n.src)
            new[n] = n if src == n.src else make(n.op, src, n.arg, n.dtype, n.shape)
    return Kernel(new[kernel.root], kernel.target, kernel.box)


def _topological(after: dict[int, set[int]]) -> list[int]:
    """Kahn's algorithm, the lowest number first, so that the order stays close to the given one."""
    import heapq

    waiting = Counter(j for js in after.values() for j in js)
    ready = [i for i in after if not waiting[i]]
    heapq.heapify(ready)
    out: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        out.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, j)
    assert len(out) == len(after), "the kernels depend on each other in a circle"
    return out


def plan_memory(kernels: Sequence[Kernel], sharable: set[Storage]) -> tuple[dict, int]:
    """Offsets (bytes) of `sharable` storages in one arena, and the arena's size.

    Storages whose lives don't overlap share bytes: each takes the lowest gap that is free from its
    first kernel to its last.
    """
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for i, k in enumerate(kernels):
        for node in (*k.reads, k.target):
            storage = node.arg[0]
            if storage in sharable:
                first.setdefault(storage, i)
                last[storage] = i
    placed: dict[Storage, int] = {}
    ends: list[Storage] = []  # placed storages whose life goes on
    size = 0
    for storage in sorted(first, key=lambda s: first[s]):
        ends = [s for s in ends if last[s] >= first[storage]]
        offset = 0
        for other in sorted(ends, key=lambda s: placed[s]):
            if offset + storage.nbytes <= placed[other]:
                break
            offset = max(offset, _align(placed[other] + other.nbytes))
        placed[storage] = offset
        ends.append(storage)
        size = max(size, offset + storage.nbytes)
    return placed, _align(size)


def _align(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
