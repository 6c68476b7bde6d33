"""Convolutions of each channel by itself: channels last, which makes them the lanes.

Windows overlap only along space, so in (B, *space, C) memory every tap is a row of neighbours, and
the weight, laid out in the same way, is read once for the pixels beside each other that a plan
makes at a time.
"""

from __future__ import annotations

from math import prod

from engine import graph as g
from engine.graph import Node, Op
from engine.recipes.convolution import Convolution, find
from engine.recipes.settings import Settings
from engine.recipes.views import STORED
from engine.windows import windows

TAPS = 9  # up to so many, far apart, it doesn't pay to copy a picture for the zeros around it


def rewrite(node: Node, settings: Settings) -> Node | None:
    """The convolution with channels last, where they fill the lanes of a CPU."""
    target = settings.target
    if node.op is not Op.REDUCE or not target.is_cpu or target.lanes == 1:
        return None
    found = find(node)
    if found is None or found.weight.shape[:2] != (found.groups, 1):
        return None
    if not all(isinstance(n, int) for n in found.x.shape) or found.groups < target.lanes:
        return None
    rank = len(found.stride)
    x = _picture(found)
    view = windows(x, range(1, 1 + rank), found.weight.shape[2:], found.stride, found.dilation)
    if settings.is_weight(found.weight):
        weight = settings.pack(found.weight, _taps)
    else:
        weight = g.packed(_taps(found.weight))
    order = (*range(1 + rank), *range(2 + rank, 2 + 2 * rank), 1 + rank)  # (B, *out, *kernel, C)
    view = g.permute(view, order)
    weight = g.reshape(weight, ((1,) * (1 + rank)) + weight.shape)
    terms = g.binary(Op.MUL, view, g.expand(weight, view.shape))
    summed = g.reduce(terms, "add", tuple(range(1 + rank, 1 + 2 * rank)))
    summed = g.reshape(summed, (*view.shape[: 1 + rank], found.groups))
    return g.reshape(g.permute(summed, (0, 1 + rank, *range(1, 1 + rank))), node.shape)


def _picture(found: Convolution) -> Node:
    """The input (B, *space, C), padded, as it lies in memory or stored."""
    x, padding = found.unpadded()
    x = g.permute(x, (0, *range(2, len(x.shape)), 1))
    padding = (padding[0], *padding[2:], padding[1])
    if not any(map(any, padding)):
        return x if x.op in STORED else g.packed(x)
    apart = min(found.stride) > 1 and prod(found.weight.shape[2:]) <= TAPS
    return g.pad(x, padding) if x.op in STORED and apart else g.packed(g.pad(x, padding))


def _taps(weight: Node) -> Node:
    """(C, 1, *kernel) -> (*kernel, C)."""
    channels, _, *kernel = weight.shape
    return g.permute(g.reshape(weight, (channels, *kernel)), (*range(1, 1 + len(kernel)), 0))
