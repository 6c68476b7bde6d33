"""Attention seen in the graph: softmax(scores) times values, where the scores are a product.

What is recognised is what `functional.attention` and its like write down; anything else in the
place of the scale or the mask leaves the three kernels of the plain way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.indexing import move_index
from engine.recipes.product import Product, find
from engine.symbolic import Expr, Int, Var, bounds, linear_in, product, upper

LOG2E = 1 / math.log(2)


@dataclass(frozen=True)
class Attention:
    """result (batch, rows, columns) = softmax(scale * queries keysᵀ) values.

    queries (batch, rows, D), keys (batch / heads, N, D), values (batch / heads, N, columns); row i
    sees the first i + visible keys, or all where visible is None. Or `limits`, int32 (batch /
    heads,), says of how many keys all that share them see the first. `product` restores the shape.
    """

    queries: Node
    keys: Node
    values: Node
    heads: int
    scale: float
    visible: Int | None
    limits: Node | None
    product: Product


def find_attention(node: Node) -> Attention | None:
    """The Attention that a node is, or None."""
    outer = find(node)
    if outer is None:
        return None
    for order in (outer, outer.swapped()):
        found = _attention(order)
        if found is not None:
            return found
    return None


def _attention(outer: Product) -> Attention | None:
    weights = _narrowed(outer.node, outer.left)
    scores = None if weights is None else _softmax_input(weights)
    if scores is None:
        return None
    scores, mask = _unmasked(scores)
    scores, scale = _unscaled(scores)
    while scores.op is Op.RESHAPE:
        scores = scores.src[0]
    inner = find(scores)
    if inner is None or scores.shape[: len(weights.shape)] != weights.shape:
        return None
    return _matched(outer, inner, weights, scale, mask)


def _narrowed(node: Node, left: Node) -> Node | None:
    """The factor of node's product that `left` was made from, without what movement did to it."""
    for factor in node.src[0].src:
        x = factor.src[0] if factor.op is Op.EXPAND else factor
        base = x
        while base.op is Op.RESHAPE:
            base = base.src[0]
        same = base.shape[:-1] == x.shape[: len(base.shape) - 1]  # the axes keep their places
        if base.op is Op.MUL and same and _base(left) is base:
            return base
    return None


def _base(x: Node) -> Node:
    while x.op in (Op.RESHAPE, Op.PERMUTE):
        x = x.src[0]
    return x


def _constant(x: Node) -> float | None:
    while x.op in (Op.RESHAPE, Op.EXPAND):
        x = x.src[0]
    return x.arg if x.op is Op.CONST and not isinstance(x.arg, Expr) else None


def _times(x: Node) -> tuple[Node, float] | None:
    """x = y * constant."""
    if x.op is Op.MUL:
        for y, c in (x.src, x.src[::-1]):
            if _constant(c) is not None:
                return y, _constant(c)
    return None


def _softmax_input(weights: Node) -> Node | None:
    """The x of e / sum(e) with e = exp(x - max(x)), along the last axis."""
    for e, inverse in (weights.src, weights.src[::-1]):
        if e.op is not Op.EXP2 or inverse.op is not Op.RECIP:
            continue
        last = (len(e.shape) - 1,)
        total = _spread(inverse.src[0])
        if total.op is not Op.REDUCE or total.arg != ("add", last) or total.src[0] is not e:
            return None
        scaled = _times(e.src[0])
        if scaled is None or abs(scaled[1] - LOG2E) > 1e-6 or scaled[0].op is not Op.ADD:
            return None
        for x, minus in (scaled[0].src, scaled[0].src[::-1]):
            negated = _times(minus)
            if negated is None or negated[1] != -1:
                continue
            largest = _spread(negated[0])
            if largest.op is Op.REDUCE and largest.arg == ("max", last) and largest.src[0] is x:
                return x
    return None


def _spread(x: Node) -> Node:
    return x.src[0] if x.op is Op.EXPAND else x


def _unmasked(x: Node) -> tuple[Node, Node | None]:
    if x.op is Op.WHERE and _constant(x.src[2]) == -math.inf:
        return x.src[1], x.src[0]
    return x, None


def _unscaled(x: Node) -> tuple[Node, float]:
    return _times(x) or (x, 1.0)


def _matched(
    outer: Product, inner: Product, weights: Node, scale: float, mask: Node | None
) -> Attention | None:
    """Put the two products together: the columns of the inner one are the outer one's depth."""
    rank = len(weights.shape)
    shape = weights.shape
    batch, rows, columns = outer.axes
    kept = [a for a in range(rank - 1) if shape[a] != 1]
    if [a for a in kept if a in batch] != list(batch) or set(kept) != {*batch, *rows}:
        return None  # the softmax lies in other axes than the result
    if inner.axes[2] != (rank - 1,):
        inner = inner.swapped()
    if inner.axes != (batch, rows, (rank - 1,)):
        return None
    heads, row = rows[:-1], rows[-1:]  # a single query for each of the keys' heads has no axis
    visible, limits = None, None
    if mask is not None:
        visible = _visible(mask, row)
        limits = _limits(mask, batch) if visible is None else None
        if visible is None and limits is None:
            return None
        visible = None if visible == EVERY else visible
    count = product(shape[a] for a in heads)
    groups = product(shape[a] for a in batch)
    if not isinstance(count, int) or not isinstance(groups, int):
        return None
    queries = product(shape[a] for a in row)
    queries = g.reshape(inner.left, (groups * count, queries, inner.depth))
    values = g.permute(outer.right, (0, 2, 1))
    joined = Product(outer.node, queries, outer.right, ((*batch, *heads), row, columns))
    return Attention(queries, inner.right, values, count, scale, visible, limits, joined)


EVERY = "every"


def _visible(mask: Node, row: tuple[int, ...]) -> Int | str | None:
    """How many keys row 0 of the axis `row` (none: of a single one) sees, each later row one more.

    EVERY where the mask hides nothing, None for masks of another form.
    """
    variables = [
        Var(f"m{a}", 0, max(upper(n) - 1, 0)) if n != 1 else 0 for a, n in enumerate(mask.shape)
    ]
    index = tuple(variables)
    limit = _limit(mask, index, index[-1])
    if limit is None:
        return None
    if bounds(limit - mask.shape[-1])[0] >= 0:
        return EVERY
    found = linear_in(limit, index[row[0]]) if row and index[row[0]] != 0 else (1, limit)
    if found is None or found[0] != 1:
        return None
    first = found[1]
    return None if isinstance(first, Expr) and first.vars & _vars(index) else first


def _limits(mask: Node, batch: tuple[int, ...]) -> Node | None:
    """How many keys are seen, int32, where that is computed for each index of the axes `batch`."""
    axes = tuple(Var(f"m{a}", 0, max(upper(n) - 1, 1)) for a, n in enumerate(mask.shape))
    found = _unmoved(mask, axes)
    if found is None or found[1].op is not Op.CMPLT:
        return None
    moved, compared, index = found
    key, limit = compared.src
    below = _unmoved(limit, index)
    if _number(key, index) is not axes[-1] or below is None:
        return None
    if _vars(below[2]) - {axes[a] for a in batch}:
        return None
    for step in reversed(moved):
        limit = g.make(step.op, (limit,), step.arg, limit.dtype, step.shape)
    ends = tuple((0, n if a in batch else 1) for a, n in enumerate(limit.shape))
    limit = g.shrink(limit, ends)
    return g.cast(g.reshape(limit, (limit.numel,)), dt.int32)


def _unmoved(x: Node, index: tuple[Int, ...]) -> tuple[list[Node], Node, tuple[Int, ...]] | None:
    """The movement that x is made by, from x inwards, the node below, and where in it x's element
    at `index` lies; None where some of that is padding."""
    moved = []
    while x.op in g.MOVEMENT:
        moved.append(x)
        index, guard = move_index(x, index)
        if guard:
            return None
        x = x.src[0]
    return moved, x, index


def _vars(index: tuple[Int, ...]) -> frozenset[Expr]:
    return frozenset().union(*(i.vars for i in index if isinstance(i, Expr)))


def _limit(mask: Node, index: tuple[Int, ...], key: Int) -> Int | None:
    """The number of keys for which a condition on key < … or key <= … holds."""
    if mask.op in g.MOVEMENT:
        moved, guard = move_index(mask, index)
        return None if guard else _limit(mask.src[0], moved, key)
    if mask.op is Op.CMPLT:
        a, b = (_number(s, index) for s in mask.src)
        return b if a is key and b is not None else None
    if mask.op is Op.OR:  # key < b or key == b
        for less, equal in (mask.src, mask.src[::-1]):
            strict = _limit(less, index, key) if less.op is Op.CMPLT else None
            if strict is not None and _equals(equal, index, key, strict):
                return strict + 1
    return None


def _equals(x: Node, index: tuple[Int, ...], key: Int, other: Int) -> bool:
    if x.op is not Op.XOR or _constant(x.src[1]) is not True or x.src[0].op is not Op.CMPNE:
        return False
    return {_number(s, index) for s in x.src[0].src} == {key, other}


def _number(x: Node, index: tuple[Int, ...]) -> Int | None:
    """An int node's element as an expression of its index."""
    if x.op in g.MOVEMENT:
        moved, guard = move_index(x, index)
        return None if guard else _number(x.src[0], moved)
    match x.op:
        case Op.CONST if x.dtype.is_int:
            return x.arg
        case Op.IOTA:
            return index[0]
        case Op.CAST if x.dtype is dt.int32 and x.src[0].dtype.is_int:
            return _number(x.src[0], index)
        case Op.ADD | Op.MUL:
            a, b = (_number(s, index) for s in x.src)
            if a is None or b is None:
                return None
            return a + b if x.op is Op.ADD else a * b
    return None
