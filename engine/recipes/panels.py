"""Right factors in panels of columns, which vectors read.

A panel is one stretch of memory that goes through the depth; at each place its columns lie beside
each other, so that a vector holds columns and sums need no folding. Panels in float32 are
[depth][64], in float16 [depth][32]; bfloat16 ones are the tiles of amx.py and quantised ones the
blocks of blocks.py, so that products of many rows and of one share a copy of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.ir import Target
from engine.recipes import amx, blocks
from engine.recipes.blocks import PANEL, Layout
from engine.recipes.product import BLOCK, Product, multiplied
from engine.recipes.settings import Settings
from engine.recipes.views import View
from engine.symbolic import Int, product, upper

NARROWEST, SHALLOWEST = 16, 8  # fewer columns, and shorter sums, are left to loops
WIDE = 64  # columns of a panel of float32, where there are so many


@dataclass(frozen=True)
class Form:
    """How a right factor lies in memory: as numbers of a type, or as the blocks of a `kind`.

    width: columns of a panel.
    """

    dtype: dt.DType
    kind: Layout | None = None
    width: int = PANEL

    @property
    def is_float32(self) -> bool:
        return self.dtype is dt.float32

    @property
    def name(self) -> str:
        if self.kind is None:
            return f"{self.dtype.name}_{self.width}"
        least = "least" if self.kind.has_least else f"zero{self.kind.zero}"
        return f"q{self.kind.bits}{least}"

    @property
    def word(self) -> str:
        """C's name for what a panel consists of."""
        types = {dt.float32: "float", dt.float16: "ushort", dt.bfloat16: "uint"}
        return types[self.dtype] if self.kind is None else "ushort"

    @property
    def unit(self) -> int:
        """The depth of a panel is a multiple of it."""
        return 1 if self.dtype in (dt.float32, dt.float16) and self.kind is None else BLOCK

    @property
    def layout(self) -> Callable[[Node], Node]:
        """The function that lays a factor (batch, columns, depth) out."""
        if self.kind is not None:
            return blocks.pack
        if self.dtype is dt.float32:
            return wide_panels if self.width == WIDE else float32_panels
        return float16_panels if self.dtype is dt.float16 else amx.right_tiles

    def batch(self, packed: Node) -> Int:
        return packed.shape[0] if self.kind is None else 1

    def panels(self, packed: Node) -> Int:
        """Panels per matrix."""
        return packed.shape[1 if self.kind is None else 0]

    def words(self, depth: int) -> int:
        """Words of a panel."""
        if self.kind is not None:
            return depth // BLOCK * self.kind.words
        return depth * self.width // (2 if self.dtype is dt.bfloat16 else 1)

    def values(self, packed: Node, columns: Int) -> Node:
        """The way back: float32 (batch, columns, depth)."""
        if self.kind is not None:
            w = g.binary(Op.ADD, *blocks.values(packed, self.kind, columns))
            return g.reshape(w, (1, *w.shape))
        if self.dtype is dt.bfloat16:
            w = amx.right_values(packed)
        else:
            batch, panels, depth, _ = packed.shape
            w = g.permute(g.cast(packed, dt.float32), (0, 1, 3, 2))
            w = g.reshape(w, (batch, panels * self.width, depth))
        return g.shrink(w, ((0, w.shape[0]), (0, columns), (0, w.shape[2])))


@dataclass(frozen=True)
class PanelProduct:
    """A view (batch, M, depth) of the left operand times the panels of the right one."""

    form: Form
    view: View
    rows_in_all: Int
    columns_in_all: Int
    depth: int
    lanes: int
    native: bool  # whether halves become floats by an instruction

    @property
    def columns(self) -> int:
        return self.form.width

    def shape(self, left: Node, right: Node, *more: Node) -> tuple[Int, ...]:
        return self.form.batch(right), self.rows_in_all, self.columns_in_all

    def ints(self, left: Node, right: Node, *more: Node) -> tuple[Int, ...]:
        return self.form.panels(right), self.view.strides[0]

    def flops(self, left: Node, right: Node, *more: Node) -> Int:
        return 2 * self.depth * product(self.shape(left, right))

    def meaning(self, left: Node, right: Node, *more: Node) -> Node:
        return multiplied(self.view.of(left), self.form.values(right, self.columns_in_all))


def form_of(factor: Node, settings: Settings) -> Form | None:
    """The form in which a right factor (batch, columns, depth) is kept.

    That of the numbers that a weight holds; float32 for what is computed. None for weights of ints
    that aren't blocks as we know them: in float32 they took many times their memory.
    """
    if settings.is_weight(factor):
        kind = settings.blocks(factor)
        if kind is not None:
            return Form(dt.uint16, kind)
        if any(n.op is Op.BUFFER and n.dtype.is_int for n in sources(factor)):
            return None
        if (half := _half(factor)) is not None:
            return Form(half)
    return Form(dt.float32, width=WIDE if upper(factor.shape[1]) > PANEL else PANEL)


def _half(x: Node) -> dt.DType | None:
    """The type of the halves that a float32 node holds, None for other numbers."""
    while x.op in g.MOVEMENT:
        x = x.src[0]
    is_half = x.op is Op.CAST and x.src[0].dtype in (dt.float16, dt.bfloat16)
    return x.src[0].dtype if is_half else None


def sources(x: Node) -> set[Node]:
    """What lies in memory when x is computed."""
    out, seen, todo = set(), set(), [x]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op in g.MOVEMENT or node.op in g.ELEMENTWISE or node.op is Op.GATHER:
            todo += node.src
        else:
            out.add(node)
    return out


def float32_panels(x: Node, width: int = PANEL) -> Node:
    """float32 (batch, N, depth) -> (batch, N / width, depth, width)."""
    batch, n, depth = x.shape
    x = g.pad(x, ((0, 0), (0, -n % width), (0, 0)))
    x = g.reshape(x, (batch, x.shape[1] // width, width, depth))
    return g.permute(x, (0, 1, 3, 2))


def wide_panels(x: Node) -> Node:
    return float32_panels(x, WIDE)


def float16_panels(x: Node) -> Node:
    return g.cast(float32_panels(x), dt.float16)


def fits(target: Target, found: Product) -> bool:
    """Whether a device has vectors that this is for, and a product is large enough to use them."""
    batch, _, depth = found.left.shape
    if not target.is_cpu or target.lanes not in (4, 8, 16):
        return False
    if not isinstance(batch, int) or not isinstance(depth, int):
        return False
    return upper(found.right.shape[1]) >= NARROWEST and depth >= SHALLOWEST


def in_rows(x: Node) -> View:
    """How a left factor (batch, rows, depth) lies once it is computed into a buffer."""
    _, rows, depth = x.shape
    return View((), (rows * depth, depth, 1), 0, False)


def named(view: View) -> str:
    """How rows lie in memory, as a part of a name in C."""
    return "_".join(str(n).replace("-", "m") for n in (*view.strides[1:], view.offset))


def padded(x: Node, form: Form) -> Node:
    """A left factor (batch, rows, depth) as deep as the form's panels are."""
    return g.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % form.unit)))
