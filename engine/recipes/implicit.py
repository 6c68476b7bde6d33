"""Convolutions in float32 without a matrix of windows (implicit GEMM).

The picture is stored channels last, in a frame of zeros (see frames.py). So the row of a window
lies in a row of memory, and the outputs are rows of a matrix product, each beginning a number of
pixels behind the last: the register tiles of gemm.py read them where they lie, once per kernel row.
Volumes, groups and weights that change do get a matrix of windows, unless it is huge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.memory import SLACK
from engine.recipes import gemm, panels
from engine.recipes import panel_code as code
from engine.recipes.convolution import Convolution, find
from engine.recipes.frames import frame_of, framed, slides_of
from engine.recipes.gemm import RegisterTile
from engine.recipes.product import multiplied
from engine.recipes.settings import Settings
from engine.recipes.views import View
from engine.symbolic import Int
from engine.windows import windows

FEWEST = 4  # output channels, of the 32 that are computed at least
LARGEST = 1 << 28  # bytes of a matrix of windows


@dataclass(frozen=True)
class Windows(RegisterTile):
    """picture (B, …, C) and panels (1, O / width, depth, width) -> (B, rows, O).

    A row is all of its runs, the depth's equal parts; `runs` says how far behind the first, which
    the view begins with.
    """

    def shape(self, picture: Node, right: Node, *more: Node) -> tuple[Int, ...]:
        return picture.shape[0], self.rows_in_all, self.columns_in_all

    def ints(self, picture: Node, right: Node, *more: Node) -> tuple[Int, ...]:
        return 0, self.view.strides[0]  # every picture meets the same panels

    def meaning(self, picture: Node, right: Node, *more: Node) -> Node:
        batch, size, step, each = picture.shape[0], *self.view.strides[:2], self.run
        starts = [self.view.offset + at for at in self.runs]
        reach = (self.rows_in_all - 1) * step + each
        flat = g.reshape(picture, (batch, size))
        flat = g.pad(flat, ((0, 0), (0, max(0, max(starts) + reach - size))))
        weights = self.form.values(right, self.columns_in_all)
        weights = g.expand(weights, (batch, *weights.shape[1:]))
        total = g.const(0, dt.float32, self.shape(picture, right))
        for i, at in enumerate(starts):
            rows = g.shrink(flat, ((0, batch), (at, at + reach)))
            rows = windows(rows, (1,), (each,), (step,), (1,))
            ends = ((0, batch), (0, self.columns_in_all), (i * each, (i + 1) * each))
            part = multiplied(rows, g.shrink(weights, ends))
            total = g.binary(Op.ADD, total, part)
        return total


def rewrite(node: Node, settings: Settings) -> Node | None:
    """The convolution as a product, where the kernel has several taps."""
    target = settings.target
    if node.op is not Op.REDUCE or not target.is_cpu or target.lanes not in gemm.CACHE:
        return None
    found = find(node)
    if found is None or not _is_fixed(found):
        return None
    suits = _suits(found) and settings.is_weight(found.weight)
    return (_implicit(found, settings) if suits else None) or _by_matrix(found)


def _is_fixed(found: Convolution) -> bool:
    """Whether all sizes are known, and the windows overlap."""
    known = all(isinstance(n, int) for n in (*found.x.shape, *found.weight.shape))
    return known and prod(found.weight.shape[2:]) > 1


def _suits(found: Convolution) -> bool:
    o, channels, *kernel = found.weight.shape
    deep = channels * prod(kernel) >= panels.SHALLOWEST
    return found.groups == 1 and len(kernel) <= 2 and o >= FEWEST and deep


def _implicit(found: Convolution, settings: Settings) -> Node | None:
    """By windows that are read where they lie; None where the weight's numbers don't suit."""
    target = settings.target
    o, channels, *kernel = found.weight.shape
    depth = channels * prod(kernel)
    last = g.permute(found.weight, (0, *range(2, 2 + len(kernel)), 1))
    factor = g.reshape(last, (1, o, depth))
    form = panels.form_of(factor, settings)
    if form is None or form.kind is not None or depth % form.unit:
        return None
    source, (y, x) = slides_of(found)
    frame = frame_of(y, x, 1, SLACK // (4 * channels))
    picture = g.packed(framed(g.permute(source, (0, 2, 3, 1)), frame))
    batch = picture.shape[0]
    starts = frame.offsets[:: x.taps] if x.apart == 1 else frame.offsets
    runs = tuple(channels * (at - starts[0]) for at in starts)
    strides = picture.numel // batch, x.stride * channels, 1
    view = View((), strides, channels * starts[0], False)
    rows = y.places * frame.width
    native = code.is_native(target)
    spec = Windows(form, view, rows, o, depth, target.lanes, native, 0, runs=runs)
    weights = settings.pack(factor, form.layout)
    groups = batch * form.panels(weights)
    spec = replace(spec, block=gemm.block(spec, groups, target.cores))
    out = g.reshape(g.intrinsic(spec, (picture, weights)), (batch, y.places, frame.width, o))
    out = g.shrink(out, ((0, batch), (0, y.places), (0, x.places), (0, o)))
    return g.reshape(g.permute(out, (0, 3, 1, 2)), found.node.shape)


def _by_matrix(found: Convolution) -> Node | None:
    """By a matrix of all windows (groups, B * places, depth), channels last."""
    groups, rank, weight = found.groups, len(found.stride), found.weight
    each, depth = weight.shape[0] // groups, weight.numel // weight.shape[0]
    batch, out = found.x.shape[0], found.out
    rows = batch * prod(out)
    narrow = each < panels.NARROWEST or depth < panels.SHALLOWEST
    if narrow or 4 * groups * rows * depth > LARGEST:
        return None
    space = range(2, 2 + rank)
    picture = g.packed(g.permute(found.x, (0, *space, 1)))
    view = windows(picture, range(1, 1 + rank), weight.shape[2:], found.stride, found.dilation)
    split = (batch, *out, groups, weight.shape[1], *weight.shape[2:])
    kernel = range(3 + rank, 3 + 2 * rank)
    view = g.permute(g.reshape(view, split), (1 + rank, *range(1 + rank), *kernel, 2 + rank))
    left = g.packed(g.reshape(view, (groups, rows, depth)))
    right = g.reshape(g.permute(weight, (0, *space, 1)), (groups, each, depth))
    made = g.reshape(multiplied(left, right), (groups, batch, *out, each))
    order = (1, 0, 2 + rank, *range(2, 2 + rank))
    return g.reshape(g.permute(made, order), found.node.shape)
