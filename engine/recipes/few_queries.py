"""Attention of a few queries in float32: the decoding step, which is bound by reading the cache.

Keys and values are read where they lie, through their strides, and once for all the query heads
that share them; of a cache of many texts, those of the texts that are asked for. If there are fewer
such groups than cores can divide evenly, the keys are split as well: each part gives its sums with
their scale, and the parts are added up where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.recipes import few_queries_code as code
from engine.recipes.attention import scores
from engine.recipes.settings import Settings
from engine.recipes.softmax import LOG2E, Attention, find_attention
from engine.recipes.views import Operand, View, beneath, strided, view_of
from engine.symbolic import Int, upper

MOST = 64  # queries up to which this is the better way on any device
TOGETHER = 6  # query heads whose sums stay in registers
EVEN = 4  # groups per core that balance without more ado
PARTS = 8  # of the keys, at most


@dataclass(frozen=True)
class FewQueries:
    """queries (groups, T * heads, depth), scaled for powers of two; keys and values as views.

    key_view (groups, N, depth), value_view (groups, N, width). Row r is at position i = r / heads,
    which sees the first i + visible keys, all if visible is None. The result is (groups, T * heads,
    width). If the keys are in `parts`, chunk by chunk in turns, it is (groups * parts, T * heads,
    width + lanes): sums that aren't divided yet, then the largest score and the sum of the weights.

    More operands, int32 (groups,), where there are such: which of the `chosen` keys and values are
    a group's, and how many of the keys, `limited`, it sees.
    """

    depth: int
    width: int
    heads: int
    keys: Int
    visible: Int | None
    key_view: View
    value_view: View
    lanes: int
    native: bool  # whether halves become floats by an instruction
    parts: int = 1
    chosen: bool = False
    limited: bool = False
    beside: int = 1

    @property
    def columns(self) -> int:
        return self.width + (self.lanes if self.parts > 1 else 0)

    @property
    def strip(self) -> int:
        """Rows that are done together: they see the same keys."""
        return max(n for n in range(1, TOGETHER + 1) if self.heads % n == 0)

    @property
    def block(self) -> int:
        return self.strip

    @property
    def name(self) -> str:
        seen = "all" if self.visible is None else "causal"
        places = "_".join(map(str, (*self.key_view.strides, *self.value_view.strides)))
        places = places.replace("-", "m")
        kinds = "".join("h" if v.half else "f" for v in (self.key_view, self.value_view))
        sizes = f"{self.depth}_{self.width}_{self.heads}_{self.parts}"
        sizes += "_chosen" * self.chosen + "_limited" * self.limited
        return f"attend{kinds}_{sizes}_{seen}_{places}"

    @property
    def work(self) -> int:
        return code.work(self)

    def shape(self, queries: Node, keys: Node, values: Node, *more: Node) -> tuple[Int, ...]:
        return queries.shape[0] * self.parts, queries.shape[1], self.columns

    def ints(self, queries: Node, keys: Node, values: Node, *more: Node) -> tuple[Int, ...]:
        visible = 0 if self.visible is None else self.visible
        offsets = self.key_view.offset, self.value_view.offset
        return queries.shape[1], self.keys, visible, *offsets, self.key_view.shape(keys)[0]

    def flops(self, queries: Node, keys: Node, values: Node, *more: Node) -> Int:
        return queries.shape[0] * queries.shape[1] * self.keys * (self.depth + self.width) * 2

    def meaning(self, queries: Node, keys: Node, values: Node, *more: Node) -> Node:
        k, v = self.key_view.of(keys), self.value_view.of(values)
        if self.chosen:
            k, v = (g.gather(x, more[0], 0) for x in (k, v))
        limits = more[-1] if self.limited else None
        s = self._seen(scores(queries, k, 1), limits)  # (groups * parts, R, N)
        batch, rows, n = s.shape
        most = g.reduce(s, "max", (2,))
        nothing = g.const(-float("inf"), dt.float32, most.shape)
        some = g.binary(Op.CMPLT, nothing, most)
        some = g.binary(Op.OR, some, g.binary(Op.CMPNE, most, most))
        base = g.where(some, most, g.const(0.0, dt.float32, most.shape))
        minus = g.binary(Op.MUL, base, g.const(-1.0, dt.float32, base.shape))
        weights = g.unary(Op.EXP2, g.binary(Op.ADD, s, g.expand(minus, s.shape)))
        total = g.reduce(weights, "add", (2,))
        v = _repeated(v, self.parts)  # (groups * parts, N, width)
        shape = (batch, rows, n, self.width)
        w = g.expand(g.reshape(weights, (batch, rows, n, 1)), shape)
        v = g.expand(g.reshape(v, (batch, 1, n, self.width)), shape)
        sums = g.reshape(g.reduce(g.binary(Op.MUL, w, v), "add", (2,)), (batch, rows, self.width))
        if self.parts == 1:
            return g.binary(Op.MUL, sums, g.expand(g.unary(Op.RECIP, total), sums.shape))
        return _beside(sums, most, total, self.columns)

    def _seen(self, s: Node, limits: Node | None) -> Node:
        """The scores of each part, -inf where a row doesn't see a key or it is another part's."""
        groups, rows, n = s.shape
        s = _repeated(s, self.parts)
        key = g.expand(g.reshape(g.iota(n), (1, 1, n)), s.shape)
        hidden = g.const(-float("inf"), dt.float32, s.shape)
        if limits is not None:
            last = g.expand(g.reshape(_repeated(limits, self.parts), (s.shape[0], 1, 1)), s.shape)
            s = g.where(g.binary(Op.CMPLT, key, last), s, hidden)
        if self.visible is not None:
            query = g.binary(Op.IDIV, g.iota(rows), g.const(self.heads, dt.int32, (rows,)))
            last = g.binary(Op.ADD, query, g.const(self.visible, dt.int32, (rows,)))
            last = g.expand(g.reshape(last, (1, rows, 1)), s.shape)
            s = g.where(g.binary(Op.CMPLT, key, last), s, hidden)
        if self.parts > 1:
            count = groups * self.parts
            size, parts = (g.const(m, dt.int32, s.shape) for m in (code.CHUNK, self.parts))
            mine = g.binary(Op.MOD, g.iota(count), g.const(self.parts, dt.int32, (count,)))
            mine = g.expand(g.reshape(mine, (count, 1, 1)), s.shape)
            other = g.binary(Op.CMPNE, g.binary(Op.MOD, g.binary(Op.IDIV, key, size), parts), mine)
            s = g.where(other, hidden, s)
        return s

    def source(self) -> tuple[str, ...]:
        return code.source(self)


def rewrite(node: Node, settings: Settings) -> Node | None:
    """An attention of few queries, if its values lie in rows."""
    target = settings.target
    if node.op is not Op.REDUCE or not target.is_cpu or target.lanes < 4:
        return None
    found = find_attention(node)
    if found is None or upper(found.queries.shape[1]) > MOST:
        return None
    batch, positions, depth = found.queries.shape
    width, count = found.values.shape[2], found.keys.shape[1]
    if not isinstance(depth, int) or not isinstance(width, int) or not isinstance(batch, int):
        return None
    if depth < 8 or width < target.lanes:
        return None
    chosen, keys, values = _stored(found)
    heads, groups = found.heads, batch // found.heads
    scale = g.const(found.scale * LOG2E, dt.float32, found.queries.shape)
    queries = g.binary(Op.MUL, found.queries, scale)
    queries = g.permute(g.reshape(queries, (groups, heads, positions, depth)), (0, 2, 1, 3))
    queries = g.packed(g.reshape(queries, (groups, positions * heads, depth)))
    alike = positions * heads if found.visible is None else heads  # rows that see the same keys
    alike = alike if isinstance(alike, int) else heads
    native = {"f16c", "avx512f"} <= target.features and target.lanes == 16
    parts = 1
    if alike == positions * heads and upper(count) > code.CHUNK:
        # of texts side by side as for one: a text's sums don't depend on how many there are
        parts = _parts(groups if found.limits is None else 1, target.cores)
    seen, more = found.visible, (chosen is not None, found.limits is not None)
    views = keys.view, values.view
    spec = FewQueries(depth, width, alike, count, seen, *views, target.lanes, native, parts, *more)
    ints = [g.packed(x) for x in (chosen, found.limits) if x is not None]
    made = g.intrinsic(spec, (queries, keys.base, values.base, *ints))
    if parts > 1:
        made = _added(g.packed(made), spec)
    made = g.permute(g.reshape(made, (groups, positions, heads, width)), (0, 2, 1, 3))
    return found.product.restored(g.reshape(made, (batch, positions, width)))


def _parts(groups: int, cores: int) -> int:
    """In how many parts the keys are done: as few as keep all cores at work for as long."""
    for parts in range(1, PARTS):
        if groups * parts % cores == 0 or groups * parts >= EVEN * cores:
            return parts
    return PARTS


def _added(made: Node, spec: FewQueries) -> Node:
    """The parts of each group, (groups * parts, R, columns), together: (groups, R, width)."""
    batch, rows, columns = made.shape
    made = g.reshape(made, (batch // spec.parts, spec.parts, rows, columns))
    parts = [_piece(_piece(made, 1, i, 1), 3, 0, columns) for i in range(spec.parts)]
    most = [_piece(p, 3, spec.width, 1) for p in parts]
    largest = reduce(lambda a, b: g.binary(Op.MAX, a, b), most)
    minus = g.binary(Op.MUL, largest, g.const(-1.0, dt.float32, largest.shape))
    factors = [g.unary(Op.EXP2, g.binary(Op.ADD, m, minus)) for m in most]

    def weighted(start: int, length: int) -> Node:
        pieces = (_piece(p, 3, start, length) for p in parts)
        terms = [g.binary(Op.MUL, x, g.expand(f, x.shape)) for x, f in zip(pieces, factors)]
        return reduce(lambda a, b: g.binary(Op.ADD, a, b), terms)

    sums, total = weighted(0, spec.width), weighted(spec.width + 1, 1)
    made = g.binary(Op.MUL, sums, g.expand(g.unary(Op.RECIP, total), sums.shape))
    return g.packed(g.reshape(made, (batch // spec.parts, rows, spec.width)))


def _piece(x: Node, axis: int, start: int, length: int) -> Node:
    ranges = [(0, n) for n in x.shape]
    ranges[axis] = (start, start + length)
    return g.shrink(x, tuple(ranges))


def _repeated(x: Node, times: int) -> Node:
    """(groups, …) -> (groups * times, …), each of the first axis's so many times in a row."""
    groups, *rest = x.shape
    x = g.expand(g.reshape(x, (groups, 1, *rest)), (groups, times, *rest))
    return g.reshape(x, (groups * times, *rest))


def _beside(sums: Node, most: Node, total: Node, columns: int) -> Node:
    """Sums (B, R, width), then a column each of `most` and `total`, then zeros."""
    batch, rows, width = sums.shape
    shape = (batch, rows, columns)
    at = g.expand(g.reshape(g.iota(columns), (1, 1, columns)), shape)
    made = g.const(0.0, dt.float32, shape)
    for end, column in ((width + 2, total), (width + 1, most)):
        before = g.binary(Op.CMPLT, at, g.const(end, dt.int32, shape))
        made = g.where(before, g.expand(column, shape), made)
    sums = g.pad(sums, ((0, 0), (0, 0), (0, columns - width)))
    return g.where(g.binary(Op.CMPLT, at, g.const(width, dt.int32, shape)), sums, made)


def _stored(found: Attention) -> tuple[Node | None, Operand, Operand]:
    """Which of the keys and values are the groups', None for all in turn; and where they lie."""
    keys, values = (_chosen(x) for x in (found.keys, found.values))
    if keys is not None and values is not None and keys[1] is values[1]:
        k, v = strided(keys[0]), strided(values[0])
        if k is not None and v is not None and v.view.strides[2] == 1 in k.view.strides[1:]:
            return keys[1], k, v
    return None, _keys(found.keys), view_of(found.values, lambda strides: strides[2] == 1)


def _chosen(x: Node) -> tuple[Node, Node] | None:
    """(all, which) where x, of float32, is all[which]."""
    _, base, axes, index = beneath(x)
    if base.op is not Op.GATHER or base.arg != 0 or len(base.src[1].shape) != 1 or index != axes:
        return None
    return g.cast(base.src[0], dt.float32), g.cast(base.src[1], dt.int32)


def _keys(keys: Node) -> Operand:
    """Keys side by side in memory make the lanes of a vector, or the depth of one key does."""
    found = strided(keys)
    if found is not None and 1 in found.view.strides[1:]:
        return found
    if not isinstance(keys.shape[1], int):  # side by side, they would have no constant strides
        return view_of(keys, lambda strides: False)
    moved = g.packed(g.permute(keys, (0, 2, 1)))
    return strided(g.permute(moved, (0, 2, 1)))
