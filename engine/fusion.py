"""What gets a buffer of its own, and what is computed inside the kernels that read it.

One sweep from the outputs down decides it. Every node learns from its consumers at which indices,
inside which loops, each kernel would evaluate it; from that it is plain whether computing it there
costs more than storing it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from engine.graph import ELEMENTWISE, MOVEMENT, TRANSCENDENTAL, Node, Op
from engine.indexing import Index, source_indices
from engine.symbolic import Expr, Int, Var, product, upper, variables

ROW_LIMIT = 1 << 17  # longest row (elements) that one work-group reduces and then rewrites
DEPTH_LIMIT = 96  # longest chain of nodes in a kernel; also keeps its argument list short
SUMS = frozenset({Op.REDUCE, Op.INTRINSIC})  # what no reader computes anew
INNERMOST = 1 << 10  # reductions loop inside of all outputs
INDEX_LIMIT = 6  # at how many different indices one kernel may recompute a node


class Use(NamedTuple):
    """A kernel would evaluate a node at `index`, once for each value of the loops in `space`."""

    index: Index
    space: frozenset[Expr]

    @property
    def free(self) -> frozenset[Expr]:
        return frozenset().union(*(variables(i) for i in self.index)) if self.index else frozenset()


def bordered(node: Node) -> Node | None:
    """What is written into a border of zeros, for an operand of an INTRINSIC that has one."""
    is_packed = node.op is Op.CONTIGUOUS and node.arg == "packed"
    return node.src[0].src[0] if is_packed and node.src[0].op is Op.PAD else None


class Fusion:
    """Decides which nodes are stored. `stored` is the result."""

    def __init__(self, order: list[Node], sinks: Iterable[Node]) -> None:
        self.stored = set(sinks) | {n for n in order if n.op in (Op.ASSIGN, Op.CONTIGUOUS)}
        self.stored |= {s for n in order if n.op is Op.INTRINSIC for s in n.src}
        self.stored = {n for n in self.stored if n.op is not Op.BUFFER}
        self.consumers = Counter(s for n in order for s in n.src)
        self.uses: dict[Node, dict[Node, dict[Use, None]]] = defaultdict(lambda: defaultdict(dict))
        self.sizes: dict[Expr, Int] = {}  # loop variable -> extent
        self.order: dict[Expr, int] = {}  # loop variable -> how far inside its loop is
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
            if fixed and n.op not in SUMS and n.op not in TRANSCENDENTAL:
                out.add(n)
        return out

    def _costly(self, order: list[Node], reductions_only: bool) -> set[Node]:
        """Nodes whose recomputation, from what is likely stored, meets a reduction or exp2, …

        With reductions_only, a reduction that is spread over a row (EXPAND) doesn't count: however
        often the row is gone through, it is wanted once.
        """
        out: set[Node] = set()
        for n in order:
            if reductions_only and n.op is Op.EXPAND:
                continue
            own = n.op in SUMS or (not reductions_only and n.op in TRANSCENDENTAL)
            fed = any(s in out and not (s in self.stored or self.consumers[s] > 1) for s in n.src)
            direct = any(s in out and s.op in MOVEMENT | SUMS for s in n.src)
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
            below = node.src[1] if node.op is Op.ASSIGN else bordered(node) or node
            axes = tuple(self._loop(f"a{i}", n, i) for i, n in enumerate(below.shape))
            self.axes[node] = axes
            whole = Use(axes, frozenset(v for a in axes for v in variables(a)))
            self.depth[node] = 0
            if below is not node:  # nothing reads its base, or its border: the write is in place
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

    def _loop(self, name: str, size: Int, position: int) -> Int:
        if size == 1:
            return 0
        if not isinstance(size, int):
            name = f"{name}_{size}"  # two symbolic sizes may have the same bounds
        var = Var(name, 0, max(upper(size) - 1, 0))
        self.sizes[var] = size
        self.order[var] = position
        return var

    def _below(self, node: Node, use: Use, number: int) -> list[tuple[Node, Use]]:
        """The uses of node's sources that one use of node makes."""
        made: list[Int] = []

        def fresh(name: str, size: Int) -> Int:
            if node.op is Op.GATHER:
                made.append(Var(f"{name}{number}", 0, max(upper(size) - 1, 0)))
            else:  # the same names in each kernel, so that equal layers ask equal questions
                made.append(self._loop(name, size, INNERMOST))
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
        if node.op is Op.INTRINSIC:
            return not self._tiles_in_place(node)
        if len(uses) > 1 and node in self.heavy:
            return True
        if node in self.reducing and any(len({u.index for u in us}) > 1 for us in uses.values()):
            return True
        if any(len(u) > INDEX_LIMIT for u in uses.values()):
            return True
        return any(self._repeats(node, u) for us in uses.values() for u in us)

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

    def _repeats(self, node: Node, use: Use) -> bool:
        """Whether this use computes the same element again and again at a cost worth a buffer.

        A loop inside of all those that the index varies with repeats nothing: there the value is
        at hand already.
        """
        free = self._free(use)
        innermost = max((self.order.get(v, 0) for v in free), default=-1)
        around = [v for v in use.space - free if self.order.get(v, 0) < innermost]
        times = upper(product(self.sizes[v] for v in around if v in self.sizes))
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

    def _tiles_in_place(self, node: Node) -> bool:
        """Whether one kernel alone reads an INTRINSIC, no fewer elements than it has outputs.

        It may read it at several indices: a tile is made once, and they all find theirs in it.
        """
        uses = self.uses[node]
        if len(uses) != 1:
            return False
        ((root, indices),) = uses.items()
        space = frozenset(v for a in self.axes[root] for v in variables(a))
        if any(not u.space <= space for u in indices):  # inside of a reduction
            return False
        if upper(node.numel) < upper(product(self.sizes[v] for v in space)):
            return False
        if self.row.get(root) is not None:
            return False
        self.row[root] = None
        return True
