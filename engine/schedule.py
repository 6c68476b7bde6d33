"""A graph -> kernels in running order: what each computes, what it reads, where it writes."""

from __future__ import annotations

import heapq
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from engine.fusion import Fusion, bordered
from engine.graph import (
    ELEMENTWISE,
    MOVEMENT,
    Node,
    Op,
    Storage,
    buffer,
    const,
    make,
    rebuild,
    toposort,
)
from engine.symbolic import Int, product, upper

Box = tuple[tuple[Int, Int], ...]


@dataclass(frozen=True)
class Kernel:
    """One launch: the value `root`, over BUFFER leaves, is written to `target`.

    box limits the write to a part of target (from ASSIGN); its shape is root's. `rows`, a BUFFER of
    ints, says instead which row of target each row of root is written to.
    """

    root: Node
    target: Node
    box: Box | None = None
    rows: Node | None = None

    @cached_property
    def reads(self) -> list[Node]:
        """The BUFFER leaves, each once, in a fixed order."""
        sinks = [self.root] if self.rows is None else [self.root, self.rows]
        return [n for n in toposort(sinks) if n.op is Op.BUFFER]

    @property
    def writes_zeros(self) -> bool:
        """Whether it fills the whole target with a plain 0."""
        return (
            self.box is None
            and self.rows is None
            and all(
                n.op in MOVEMENT or (n.op is Op.CONST and repr(n.arg) in ("0", "0.0", "False"))
                for n in toposort([self.root])
            )
        )


def cost(kernel: Kernel) -> tuple[Int, Int]:
    """(float operations, bytes read and written), every element of every node counted once."""
    flops: Int = 0
    nbytes: Int = kernel.root.numel * kernel.target.dtype.itemsize
    for n in toposort([kernel.root]):
        if n.op is Op.BUFFER:
            nbytes = nbytes + n.numel * n.dtype.itemsize
        elif n.op is Op.INTRINSIC:
            flops = flops + n.arg.flops(*n.src)
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


class Specialise(Protocol):
    """What a device's recipes have to say on how a graph is cut; `realize.Recipes` is the one."""

    passes: Sequence[Callable[[Node], Node | None]]
    """Each gives the same value by an INTRINSIC over packed operands; None: leave it as it is."""

    def takes(self, kernel: Kernel) -> bool:
        """Whether a kernel around INTRINSICs can be generated; else they are stored apart."""


def schedule(sinks: Sequence[Node], device: str, recipes: Specialise | None = None) -> Schedule:
    """The kernels that compute `sinks` on a device, in order.

    Raises ValueError for a buffer that was overwritten after the graph had been built on it.
    """
    sinks, origins = _resolve(sinks)
    if recipes is not None:
        for rewrite in recipes.passes:
            sinks = _rewritten(sinks, origins, rewrite)
    apart: set[Node] = set()
    while True:
        plan, origin = _cut(sinks, device, origins, apart)
        refused = [
            origin[n]
            for k in plan.kernels
            for n in _inside(k)
            if recipes is None or not recipes.takes(k)
        ]
        if not refused:
            return plan
        apart |= set(refused)


def _inside(kernel: Kernel) -> list[Node]:
    """The INTRINSICs that a kernel computes on the way to its output."""
    return [n for n in toposort([kernel.root]) if n.op is Op.INTRINSIC and n is not kernel.root]


def _rewritten(
    sinks: Sequence[Node], origins: dict[Node, Node], rewrite: Callable[[Node], Node | None]
) -> Sequence[Node]:
    """The sinks with every node that a recipe knows better replaced by what it makes of it."""
    order = toposort(sinks)
    new: dict[Node, Node] = {}
    for n in order:
        built = rebuild(n, new)
        new[n] = rewrite(built) or built
        if n.op is Op.ASSIGN and new[n] is not n:
            origins[new[n]] = origins.get(n, n)
    return [new[s] for s in sinks]


def _cut(
    sinks: Sequence[Node], device: str, origins: dict[Node, Node], apart: set[Node]
) -> tuple[Schedule, dict[Node, Node]]:
    """Kernels for `sinks`; the nodes in `apart` get a buffer whatever it costs.

    Also which node of the graph each INTRINSIC in a kernel stands for.
    """
    order = toposort(sinks)
    for n in order:
        if n.op is Op.BUFFER and n.arg[1] != n.arg[0].version:
            raise ValueError(
                "a tensor is read after its buffer was overwritten; realize() it before the write"
            )
    plan = Schedule(device, [], [])
    stored = Fusion(order, [*(s for s in sinks if not _is_view(s)), *apart]).stored
    new: dict[Node, Node] = {}
    origin: dict[Node, Node] = {}
    for n in order:
        built = rebuild(n, new)
        new[n] = _store(built, plan) if n in stored else built
        if n.op is Op.INTRINSIC:
            origin[built] = n
        if n.op is Op.ASSIGN:
            plan.assigned[n] = plan.assigned[origins.get(n, n)] = new[n]
    plan.results = [_view(new[s]) if s not in stored else new[s] for s in sinks]
    plan.kernels = _order(plan)
    return plan, origin


def _resolve(sinks: Sequence[Node]) -> tuple[Sequence[Node], dict[Node, Node]]:
    """The sinks with every ASSIGN that has run replaced by the buffer it wrote.

    Also which node each rebuilt ASSIGN stood for: when that runs, both are done.
    """
    order = toposort(sinks, leaves=_executed.keys())
    origins: dict[Node, Node] = {}
    if not any(n in _executed for n in order):
        return sinks, origins
    new: dict[Node, Node] = {}
    for n in order:
        if n in _executed:
            new[n] = _executed[n]
            continue
        new[n] = rebuild(n, new)
        if n.op is Op.ASSIGN:
            origins[new[n]] = n
    return [new[s] for s in sinks], origins


def _is_view(n: Node) -> bool:
    return n.op is Op.BUFFER or (n.op is Op.RESHAPE and n.src[0].op is Op.BUFFER)


def _view(n: Node) -> Node:
    """A BUFFER, or a reshaped one, as a BUFFER of that shape."""
    source = n.src[0] if n.op is Op.RESHAPE else n
    return make(Op.BUFFER, (), source.arg, n.dtype, n.shape)


def _store(built: Node, plan: Schedule) -> Node:
    """Add the kernel(s) that put `built` into a buffer; return its BUFFER node."""
    if built.op is Op.ASSIGN:
        base, value, *index = built.src
        storage, version = base.arg
        written = make(Op.BUFFER, (), (storage, version + 1), base.dtype, base.shape)
        plan.versions[storage] = version + 1
        if 0 in value.shape:
            return written
        if any(n.op is Op.BUFFER and n.arg[0] is storage for n in toposort([value])):
            value = _store(value, plan)  # it reads what the write destroys
        if index:
            slices = (product(base.shape[:-1]), base.shape[-1])
            flat = make(Op.BUFFER, (), written.arg, base.dtype, slices)
            plan.kernels.append(Kernel(value, flat, None, *index))
        else:
            plan.kernels.append(Kernel(value, written, built.arg))
        return written
    value = built.src[0] if built.op is Op.CONTIGUOUS else built
    storage = Storage(plan.device, value.dtype, upper(product(upper(n) for n in value.shape)))
    plan.temporaries.append(storage)
    target = buffer(storage, value.shape)
    if 0 in value.shape:
        return target
    inner = bordered(built)
    if inner is not None and any(n.op is Op.INTRINSIC for n in toposort([inner])):
        plan.kernels += _within_zeros(inner, value.arg, target)
    else:
        plan.kernels.append(Kernel(value, target))
    return target


def _within_zeros(inner: Node, amounts: Box, target: Node) -> list[Kernel]:
    """Kernels for a padded value: `inner` without a test for the border, and each of its sides."""
    box = tuple((before, before + n) for n, (before, _) in zip(inner.shape, amounts))
    kernels = []
    for axis, (start, end) in enumerate(box):
        for side in ((0, start), (end, target.shape[axis])):
            around = (*box[:axis], side, *((0, n) for n in target.shape[axis + 1 :]))
            shape = tuple(end - start for start, end in around)
            if 0 not in shape:
                kernels.append(Kernel(const(0, target.dtype, shape), target, around))
    return [*kernels, Kernel(inner, target, box)]


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
            new[n] = rebuild(n, new)
    return Kernel(new[kernel.root], kernel.target, kernel.box)


def _topological(after: dict[int, set[int]]) -> list[int]:
    """Kahn's algorithm, the lowest number first, so that the order stays close to the given one."""
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
