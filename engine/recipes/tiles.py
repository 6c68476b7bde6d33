"""Kernels around INTRINSICs: which outputs a work-group makes from one column of tiles.

The outputs of a group must be exactly those that read one tile's columns; where the surrounding
code scatters them otherwise, there is no plan, and the INTRINSIC gets a kernel of its own.
"""

from __future__ import annotations

from engine.graph import Node
from engine.indexing import Index
from engine.ir import Target
from engine.recipes.analysis import Facts, contiguous_score, store_score
from engine.schedule import Kernel
from engine.symbolic import Expr, Int, Var, bounds, linear_in, substitute, upper, variables
from engine.tiles import Intrinsic, Rows, TilePlan, rows_in_all

COPIES = (2, 3, 4)  # vectors of a tile's row that are written at once
HUGE = 1 << 23  # bytes: a tile's rows are far apart then, and memory is slow at fetching such lines


def match(kernel: Kernel, facts: Facts, target: Target) -> TilePlan | None:
    """A plan for a kernel with INTRINSICs, None where it has none or they don't fit."""
    if not facts.tiles or facts.reductions:
        return None
    spec = facts.tiles[0][0].arg
    if any((n.arg.columns, n.arg.strip) != (spec.columns, spec.strip) for n, _ in facts.tiles):
        return None
    rows = _rows(facts)
    if rows is None:
        return None
    block = _blocks(kernel, facts, spec, rows)
    where = _corners(facts, block, spec.columns)
    if where is None:
        return None
    vector = _vector(facts, block, rows, spec.strip, target)
    beside = _beside(facts, where, block) if rows else (0, 1)
    loops, grid = _orders(kernel, facts, rows, block, beside[1] > 1)
    order = [a for a in loops if a != vector] + ([] if vector is None else [vector])
    lanes = target.lanes if vector is not None else 1
    axes = tuple(facts.axes)
    return TilePlan(
        "tiles",
        tuple(block),
        _unroll(block, vector, lanes),
        tuple(order),
        vector,
        lanes,
        rows=rows,
        grid=grid,
        axes=axes,
        where=where,
        beside=beside,
        around=beside[1] == 1 and _is_huge(kernel, target),
    )


def _is_huge(kernel: Kernel, target: Target) -> bool:
    """Whether results had better not go through the caches, and the processor can do that."""
    size = upper(kernel.target.numel) * kernel.target.dtype.itemsize
    return target.is_cpu and "sse2" in target.features and size >= HUGE


def _rows(facts: Facts) -> Rows | None:
    """How the rows lie in the output; None where they are scattered otherwise."""
    found = {index[1] for _, index in facts.tiles}
    if len(found) != 1:
        return None
    rest = found.pop()
    rows: list[tuple[int, int]] = []
    for axis, var in enumerate(facts.axes):
        part = (0, rest) if var is None else linear_in(rest, var)
        if part is None:
            return None
        step, rest = part
        if step:
            rows.append((axis, step))
    if rest != 0:
        return None
    rows.sort(key=lambda row: -row[1])
    inside = 0  # rows that the axes of smaller steps pass
    for axis, step in reversed(rows):
        if step <= inside or (inside == 0 and step != 1):
            return None
        inside += (facts.extent(axis) - 1) * step
    counting = {facts.axes[axis] for axis, _ in rows}
    if any(not counting.isdisjoint(variables(i)) for _, (b, _, c) in facts.tiles for i in (b, c)):
        return None
    return tuple(rows)


def _blocks(kernel: Kernel, facts: Facts, spec: Intrinsic, rows: Rows) -> list[Int]:
    """Outputs per group: all of what doesn't move the tile, `columns` columns, `block` rows."""
    shape = kernel.root.shape
    used = frozenset().union(*(variables(i) for _, index in facts.tiles for i in index))
    block: list[Int] = [n if facts.axes[a] not in used else 1 for a, n in enumerate(shape)]
    for axis, _ in rows:
        block[axis] = shape[axis]
    if rows:
        total = rows_in_all(shape, rows)
        block[rows[0][0]] = total if upper(total) <= spec.block else spec.block
    for _, axis in sorted(column_axes(facts)):
        extent = facts.extent(axis)
        sizes = [1 << i for i in reversed(range(spec.columns.bit_length())) if 1 << i < extent]
        for size in (shape[axis], *sizes):
            trial = [*block[:axis], size, *block[axis + 1 :]]
            if size == 1 or _corners(facts, trial, spec.columns) is not None:
                block = trial
                break
    return block


def column_axes(facts: Facts) -> list[tuple[float, int]]:
    """(columns that a step along it passes, axis), for the output axes that move the column."""
    column = facts.tiles[0][1][2]
    out = []
    for axis, var in enumerate(facts.axes):
        if var is None or var not in variables(column):
            continue
        others = {v: 0 for v in variables(column) if v is not var}
        low, high = bounds(substitute(column, others))
        out.append(((high - low) / (facts.extent(axis) - 1), axis))
    return out


def _corners(facts: Facts, block: list[Int], columns: int) -> tuple[tuple[Node, Index], ...] | None:
    """Each INTRINSIC with the corner of its tile, if all that a group reads lies inside that."""
    starts: dict[Expr, Int] = {}
    inside: dict[Expr, Int] = {}
    for axis, var in enumerate(facts.axes):
        if var is None:
            continue
        size, extent = upper(block[axis]), facts.extent(axis)
        whole = size >= extent
        starts[var] = 0 if whole else Var(f"g{axis}", 0, (extent - 1) // size) * size
        inside[var] = starts[var] + (Var(f"j{axis}", 0, min(size, extent) - 1) if size > 1 else 0)
    found: dict[Node, Index] = {}
    for node, (batch, row, column) in facts.tiles:
        corner = (batch, row, column // columns * columns)
        known = found.setdefault(node, corner)
        if any(substitute(a, starts) != substitute(b, starts) for a, b in zip(known, corner)):
            return None
        low, high = bounds(substitute(column, inside) - substitute(corner[2], starts))
        if low < 0 or high >= columns or substitute(batch, inside) != substitute(batch, starts):
            return None
    return tuple(found.items())


def _beside(
    facts: Facts, where: tuple[tuple[Node, Index], ...], block: list[Int]
) -> tuple[int, int]:
    """TilePlan.beside: the tiles of a strip that the INTRINSICs want to be made together.

    That takes an axis along which tiles follow each other; others may not move them as well.
    """
    most = min(n.arg.beside for n, _ in where) // len(where)
    moving = [a for _, a in column_axes(facts) if upper(block[a]) < facts.extent(a)]
    if most < 2 or len(moving) != 1:
        return 0, 1
    (axis,), starts = moving, {v: 0 for v in facts.axes if v is not None}
    size, extent = upper(block[axis]), facts.extent(axis)
    place = Var("place", 0, (extent - 1) // size)
    starts[facts.axes[axis]] = place * size
    for node, (_, _, column) in where:
        found = linear_in(substitute(column, starts), place)
        if found is None or found[0] != node.arg.columns:
            return 0, 1
    return axis, min(most, -(-extent // size))


def _orders(
    kernel: Kernel, facts: Facts, rows: Rows, block: list[Int], together: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes from the outermost loop to the innermost, and in the order of groups.

    Groups that follow each other share what is dearer to fetch: a panel of columns, if a group
    goes through all rows with it, or several of them; otherwise a block of rows, with which all
    panels are done before the next.
    """
    counting = [axis for axis, _ in rows]
    columns = [axis for _, axis in column_axes(facts)]
    batch = [a for a in range(len(block)) if a not in counting and a not in columns]
    loops = (*batch, *counting, *columns)
    parts = rows and upper(block[counting[0]]) < upper(rows_in_all(kernel.root.shape, rows))
    if parts and not together:
        return loops, loops
    return loops, (*columns, *batch, *counting)


def _unroll(block: list[Int], vector: int | None, lanes: int) -> tuple[int, ...]:
    """Copies along each axis: what is the same for all rows is loaded once, before their loop."""
    whole = [1 if a != vector else upper(size) // lanes for a, size in enumerate(block)]
    return tuple(n if n in COPIES else 1 for n in whole)


def _vector(facts: Facts, block: list[Int], rows: Rows, strip: int, target: Target) -> int | None:
    """The axis across lanes: one along which the result, or at least the reads, lie in a row."""
    best, vector = -1, None
    for axis in reversed(range(len(block))):
        var = facts.axes[axis]
        extent = upper(block[axis])
        steps = dict(rows).get(axis)
        if steps is not None:
            extent = min(facts.extent(axis), strip) if steps == 1 else 0
        if var is None or extent < target.lanes or target.lanes == 1:
            continue
        score = contiguous_score(facts, facts.loads, var)
        if score is None:
            continue
        score += store_score(facts.store, var)
        if score > best:
            best, vector = score, axis
    return vector
