"""Statistics of short groups that lie side by side, many times over: group norm, channels last.

Of (B, pixels, groups, channels) memory, a group's few channels are a stretch that no vector fits.
So the sum over its pixels and channels is taken over pixels first, for all channels next to each
other; and what is found of a group is written out for each of its channels, once, before all pixels
read it there in a row. The result differs from the plain sum in its order only.
"""

from __future__ import annotations

from engine import graph as g
from engine.graph import ELEMENTWISE, MOVEMENT, Node, Op
from engine.indexing import flat_index, source_indices
from engine.recipes.settings import Settings
from engine.recipes.views import STORED
from engine.symbolic import Int, Var, linear_in, product, upper

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
    times = 1
    for a in repeated:
        times *= upper(shape[a])
    sizes_known = all(isinstance(n, int) for n in shape[repeated[-1] :])
    return repeated[-1] + 1 if times >= MANY and sizes_known else None


def _summed(node: Node) -> Node | None:
    kind, axes = node.arg
    (source,) = node.src
    shape, last = source.shape, len(source.shape) - 1
    outer = [a for a in axes if a != last]
    first = _groups(shape, outer) if last in axes else None
    if first is None or not _side_by_side(source, first):
        return None
    long = outer[-1]  # in parts: (…, parts, pixels of a part, groups * channels)
    parts = max(n for n in range(1, PARTS + 1) if shape[long] % n == 0)
    width = product(shape[first:])
    split = (*shape[:long], parts, shape[long] // parts, *shape[long + 1 : first], width)
    moved = tuple(a + 1 if a == long else a for a in outer)
    found = g.packed(g.reduce(g.reshape(source, split), kind, moved))
    found = g.reshape(found, (*found.shape[:-1], *shape[first:]))
    rest = (long, len(found.shape) - 1)
    return g.reshape(g.reduce(found, kind, rest), node.shape)


def _spread(node: Node) -> Node | None:
    (source,) = node.src
    last = len(node.shape) - 1
    grown = [a for a, n in enumerate(source.shape) if n == 1 and node.shape[a] != 1]
    first = _groups(node.shape, grown[:-1]) if grown[-1:] == [last] else None
    if first is None or not _reduces(source):
        return None
    return g.expand(g.packed(g.expand(source, (*source.shape[:-1], node.shape[-1]))), node.shape)


def _reduces(node: Node) -> bool:
    """Whether there is a reduction between a node and what is stored."""
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        if node.op is Op.REDUCE:
            return True
        if node.op in ELEMENTWISE | MOVEMENT:
            todo += [s for s in node.src if s not in seen]
            seen.update(node.src)
    return False


def _side_by_side(source: Node, first: int) -> bool:
    """Whether all groups' elements lie in a row, in whatever is read for them from memory."""
    axes = [Var(f"a{i}", 0, max(upper(n) - 1, 1)) for i, n in enumerate(source.shape)]
    strides = [product(source.shape[a + 1 :]) for a in range(first, len(axes))]
    found = False
    todo: list[tuple[Node, tuple[Int, ...]]] = [(source, tuple(axes))]
    seen = set(todo)
    while todo:
        node, index = todo.pop()
        if node.op in (*STORED, Op.REDUCE, Op.INTRINSIC):
            flat = flat_index(index, node.shape)
            steps = [linear_in(flat, axis) for axis in axes[first:]]
            if steps[-1] is None or steps[-1][0] not in (0, 1):
                return False
            found |= [s and s[0] for s in steps] == strides
        elif node.op is Op.GATHER:
            return False
        else:
            below = source_indices(node, index, lambda name, n: 0)
            todo += [x for x in below if x not in seen]
            seen.update(below)
    return found
