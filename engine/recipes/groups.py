"""Statistics of short groups that lie side by side, many times over: group norm, channels last.

Of (B, pixels, groups, channels) memory, a group's few channels are a stretch that no vector fits.
So the sum over its pixels and channels is taken over pixels first, for all channels next to each
other; and what is found of a group is written out for each of its channels, once, before all pixels
read it there in a row. The result differs from the plain sum in its order only.

A variance goes through the same numbers as its mean. So both come from one pass over memory, which
sums in each part the distances from the part's first pixel and their squares: shifted so, they lose
nothing to cancellation (Chan, Golub, LeVeque 1983).
"""

from __future__ import annotations

from engine import dtype as dt
from engine import graph as g
from engine.graph import ELEMENTWISE, MOVEMENT, Node, Op
from engine.indexing import flat_index, source_indices
from engine.recipes.settings import Settings
from engine.recipes.views import STORED
from engine.symbolic import Int, Var, linear_in, product, upper, variables

SHORT = 64  # elements of a group in a row: from there on it is a row of its own
MANY = 64  # times that the groups lie side by side
PARTS = 16  # at most so many sums under way for each channel, so that every core has some


def rewrite(node: Node, settings: Settings) -> Node | None:
    """A sum over groups in two steps, or what is known of groups spread over their channels."""
    if not settings.target.is_cpu:
        return None
    match node.op:
        case Op.REDUCE:
            return _summed(node)
        case Op.EXPAND:
            return _spread(node)
    return None


def _groups(shape: tuple[Int, ...], repeated: list[int]) -> int | None:
    """Where the groups' axes begin, if those between the repeated ones and the last are groups."""
    last = len(shape) - 1
    if not repeated or repeated[-1] >= last - 1 or not 1 < upper(shape[last]) < SHORT:
        return None
    times = product(upper(shape[a]) for a in repeated)
    sizes_known = all(isinstance(n, int) for n in shape[repeated[0] :])
    return repeated[-1] + 1 if times >= MANY and sizes_known else None


def _summed(node: Node) -> Node | None:
    kind, axes = node.arg
    if len(axes) < 2:  # pixels, and the channels of a group
        return None
    order = None if 0 in node.src[0].shape else _as_in_memory(node.src[0])
    if order is None:
        return None
    source = g.permute(node.src[0], order)
    shape, last = source.shape, len(order) - 1
    outer = [a for a in range(last) if order[a] in axes and shape[a] != 1]
    first = _groups(shape, outer) if order[last] in axes else None
    if first is None:
        return None
    # in parts: (…, parts, pixels of a part, groups * channels)
    long = outer[0]
    parts = max(n for n in range(1, PARTS + 1) if shape[long] % n == 0)
    width = product(shape[first:])
    split = (*shape[:long], parts, shape[long] // parts, *shape[long + 1 : first], width)
    summed = tuple(a + 1 for a in outer)

    def in_parts(x: Node) -> Node:
        return g.reshape(g.permute(x, order), split)

    if kind != "add" or node.dtype is not dt.float32:
        found = g.packed(g.reduce(in_parts(node.src[0]), kind, summed))
    else:
        found = _squared_distance(node.src[0], {order[a] for a in outer})
        x, centre = found or (node.src[0], None)
        found = _moment(in_parts(x), summed, centre and in_parts(centre))
    found = g.reshape(found, (*found.shape[:-1], *shape[first:]))
    found = g.reduce(found, kind, (long, len(found.shape) - 1))
    found = g.reshape(found, tuple(node.shape[a] for a in order))
    return g.permute(found, tuple(order.index(a) for a in range(len(order))))


def _squared_distance(square: Node, pixels: set[int]) -> tuple[Node, Node] | None:
    """(x, minus c) of (x - c)^2, with a c that all pixels share."""
    if square.op is not Op.MUL or square.src[0] is not square.src[1]:
        return None
    apart = square.src[0]
    if apart.op is not Op.ADD:
        return None
    found = [pair for pair in (apart.src, apart.src[::-1]) if _is_same(pair[1], pixels)]
    return found[0] if found else None


def _is_same(node: Node, axes: set[int]) -> bool:
    """Whether a node doesn't vary along the axes."""
    index = tuple(Var(f"a{i}", 0, max(upper(n) - 1, 1)) for i, n in enumerate(node.shape))
    varying = {index[a] for a in axes}
    todo = [(node, index)]
    while todo:
        node, index = todo.pop()
        if node.op in (*STORED, Op.REDUCE, Op.INTRINSIC):
            if not varying.isdisjoint(variables(flat_index(index, node.shape))):
                return False
        elif node.op in (Op.GATHER, Op.IOTA):
            return False
        elif node.src:
            todo += source_indices(node, index, lambda name, n: 0)
    return True


def _moment(x: Node, axes: tuple[int, ...], centre: Node | None) -> Node:
    """Along axes the sum of x, or of (x + centre)^2, with both sums of one kernel."""
    ends = tuple((0, 1 if a in axes else n) for a, n in enumerate(x.shape))
    start = g.shrink(x, ends)
    count = g.const(product(x.shape[a] for a in axes), dt.float32, start.shape)
    both = (
        2,
        *x.shape,
    )  # all in this shape: what is wanted twice would be stored

    def twice(part: Node) -> Node:
        return g.expand(g.reshape(part, (1, *part.shape)), both)

    minus = g.binary(Op.MUL, twice(start), g.const(-1, dt.float32, both))
    apart = g.binary(Op.ADD, twice(x), minus)
    power = g.expand(g.reshape(g.iota(2), (2, *(1 for _ in x.shape))), both)
    is_plain = g.binary(Op.CMPLT, power, g.const(1, dt.int32, both))
    by = g.where(is_plain, g.const(1, dt.float32, both), apart)
    sums = g.packed(g.reduce(g.binary(Op.MUL, apart, by), "add", tuple(a + 1 for a in axes)))
    rest = tuple((0, n) for n in start.shape)
    plain, squares = (g.reshape(g.shrink(sums, ((i, i + 1), *rest)), start.shape) for i in range(2))
    if centre is None:
        return g.binary(Op.ADD, plain, g.binary(Op.MUL, start, count))
    away = g.binary(Op.ADD, start, g.shrink(centre, ends))
    more = g.binary(Op.ADD, g.binary(Op.ADD, plain, plain), g.binary(Op.MUL, away, count))
    return g.binary(Op.ADD, squares, g.binary(Op.MUL, away, more))


def _spread(node: Node) -> Node | None:
    (source,) = node.src
    grown = [a for a, n in enumerate(source.shape) if n == 1 and node.shape[a] != 1]
    channels = [a for a in grown if a and source.shape[a - 1] != 1 and upper(node.shape[a]) < SHORT]
    if len(channels) != 1 or not _in_two_steps(source):
        return None
    (channel,) = channels
    if product(upper(node.shape[a]) for a in grown if a != channel) < MANY:
        return None
    shape = (*source.shape[:channel], node.shape[channel], *source.shape[channel + 1 :])
    return g.expand(g.packed(g.expand(source, shape)), node.shape)


def _in_two_steps(node: Node) -> bool:
    """Whether a node is made, without a buffer between, from a sum that `_summed` made."""
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        if node.op is Op.REDUCE:
            below = [node.src[0]]
            for n in below:
                if n.op is Op.CONTIGUOUS and n.src[0].op is Op.REDUCE:
                    return True
                if n.op in ELEMENTWISE | MOVEMENT:
                    below += n.src
        elif node.op in ELEMENTWISE | MOVEMENT:
            todo += [s for s in node.src if s not in seen]
            seen.update(node.src)
    return False


def _as_in_memory(source: Node) -> tuple[int, ...] | None:
    """The axes in the order in which they lie in memory, the last in a row: wherever a stored
    operand varies along that one, its elements are neighbours."""
    axes = [Var(f"a{i}", 0, max(upper(n) - 1, 1)) for i, n in enumerate(source.shape)]
    strides: list[tuple[int, ...]] = []
    todo: list[tuple[Node, tuple[Int, ...]]] = [(source, tuple(axes))]
    seen = set(todo)
    while todo:
        node, index = todo.pop()
        if node.op in (*STORED, Op.REDUCE, Op.INTRINSIC):
            found = [linear_in(flat_index(index, node.shape), axis) for axis in axes]
            if None in found:
                return None
            strides.append(tuple(step for step, _ in found))
        elif node.op is Op.GATHER:
            return None
        else:
            below = source_indices(node, index, lambda name, n: 0)
            todo += [x for x in below if x not in seen]
            seen.update(below)
    whole = [s for s in strides if all(k or n == 1 for k, n in zip(s, source.shape))]
    if not whole:
        return None
    outermost = [(n != 1, -abs(k)) for n, k in zip(source.shape, whole[0])]
    order = tuple(sorted(range(len(axes)), key=outermost.__getitem__))
    return order if all(s[order[-1]] in (0, 1) for s in strides) else None
