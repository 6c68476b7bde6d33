"""What a kernel reads, at which address, inside which loops: the facts that recipes decide by."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.graph import Node, Op
from engine.indexing import flat_index, source_indices
from engine.schedule import Kernel
from engine.symbolic import Expr, Int, Var, linear_in, substitute, upper, variables

STRETCH = 16  # elements of the widest vector


@dataclass(frozen=True)
class Load:
    """One read: a BUFFER leaf and the flat position in it, as an expression of the loops."""

    buffer: Node
    index: Int
    reduced: bool  # inside a reduction

    def stride(self, var: Expr) -> int | None:
        """By how many elements a step of `var` moves; None where it isn't a constant."""
        found = linear_in(self.index, var)
        return None if found is None else found[0]


@dataclass
class Facts:
    """axes: one variable per output axis (None for size 1), sizes: the extent of every variable.

    reductions: (node, its index, the variables of its own loops).
    tiles: (INTRINSIC, the index at which it is read).
    gathered: loop variables that decide a gathered index, and so can't lie across lanes.
    counted: those whose number is itself a value, which others may be chosen by.
    """

    axes: list[Expr | None]
    sizes: dict[Expr, Int] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    reductions: list[tuple[Node, tuple[Int, ...], tuple[Expr, ...]]] = field(default_factory=list)
    gathered: set[Expr] = field(default_factory=set)
    counted: set[Expr] = field(default_factory=set)
    tiles: list[tuple[Node, tuple[Int, ...]]] = field(default_factory=list)
    store: Int = 0

    def extent(self, axis: int) -> int:
        """The largest size of an output axis."""
        var = self.axes[axis]
        return 1 if var is None else upper(self.sizes[var])


def analyse(kernel: Kernel) -> Facts:
    """Walk the kernel once from its output down."""
    facts = Facts([])
    index: list[Int] = []
    for axis, size in enumerate(kernel.root.shape):
        var = None if size == 1 else Var(f"a{axis}", 0, max(upper(size) - 1, 0))
        facts.axes.append(var)
        index.append(0 if var is None else var)
        if var is not None:
            facts.sizes[var] = size
    box = kernel.box or [(0, n) for n in kernel.root.shape]
    at = tuple(i + start for i, (start, _) in zip(index, box))
    facts.store = flat_index(at, kernel.target.shape)
    seen: set[tuple] = set()
    todo: list[tuple[Node, tuple[Int, ...], bool]] = [(kernel.root, tuple(index), False)]
    while todo:
        node, where, reduced = todo.pop()
        if (node, where) in seen:
            continue
        seen.add((node, where))
        if node.op is Op.BUFFER:
            facts.loads.append(Load(node, flat_index(where, node.shape), reduced))
            continue
        if node.op is Op.INTRINSIC:
            facts.tiles.append((node, where))
            continue
        if node.op is Op.IOTA:
            facts.counted |= variables(where[0])
            continue
        made: list[Expr] = []

        def fresh(name: str, size: Int, node: Node = node, made: list[Expr] = made) -> Int:
            var = Var(f"{name}_{len(facts.sizes)}", 0, max(upper(size) - 1, 0))
            facts.sizes[var] = size
            made.append(var)
            return var

        below = source_indices(node, where, fresh)
        if node.op is Op.REDUCE:
            facts.reductions.append((node, where, tuple(made)))
        if node.op is Op.GATHER:
            facts.gathered |= frozenset().union(*(variables(i) for i in below[1][1]), ())
        inside = reduced or node.op is Op.REDUCE
        todo += [(child, i, inside) for child, i in reversed(below)]
    return facts


def contiguous_score(facts: Facts, loads: list[Load], var: Expr) -> int | None:
    """How well lanes along `var` suit the loads: +1 for each that lies in a row, -4 for each that
    would have to be picked apart; None where lanes are impossible or help nothing."""
    if var in facts.gathered:
        return None
    score = 0
    for load in loads:
        stride = load.stride(var)
        if stride == 1 or _bytes_in_blocks(load, var):
            score += 1
        elif stride != 0 and not _in_short_stretch(load, var):
            score -= 4
    return score


def _in_short_stretch(load: Load, var: Expr) -> bool:
    """Whether neighbours along `var` lie in a stretch that one vector holds: a shuffle away."""
    step = Var(f"{var.text}_", 0, max(var.max // STRETCH, 1)) * STRETCH
    at = [substitute(load.index, {var: step + i}) for i in range(STRETCH)]
    offsets = [a - at[0] for a in at]
    if not all(isinstance(o, int) for o in offsets):
        return False
    return max(offsets) - min(offsets) < STRETCH


def _bytes_in_blocks(load: Load, var: Expr) -> bool:
    """Whether neighbours along `var` are neighbours in memory except at block borders, as in a
    quantised row: var appears as var % n, or var // n, with n a multiple of 16."""
    index = load.index
    if isinstance(index, int) or var not in index.vars or index.op != "sum":
        return False
    for term, k in index.args[1]:
        if var not in term.vars:
            continue
        if term.op == "mod" and term.args[0] is var and k == 1 and term.args[1] % 16 == 0:
            continue
        if term.op == "div" and term.args[0] is var and term.args[1] % 16 == 0:
            continue
        return False
    return True


def store_score(store: Int, var: Expr) -> int:
    """Lanes that are written side by side count for more than ones that are read so."""
    found = linear_in(store, var)
    return 2 if found and found[0] == 1 else -4
