"""Convolution in bfloat16 on AMX, without a matrix of windows (implicit GEMM).

The input is stored in planes of 32 channels, bfloat16, the channels of a pixel side by side, in a
frame of zeros (see frames.py) through which the rows of the product are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.memory import SLACK
from engine.recipes import asm
from engine.recipes import terms as split
from engine.recipes.amx import DEEP, FEWEST, NEEDED, is_bfloat16, right_tiles, right_values
from engine.recipes.asm import CONFIG
from engine.recipes.blocks import PANEL
from engine.recipes.convolution import find
from engine.recipes.frames import Frame, frame_of, framed, slides_of
from engine.recipes.settings import Settings
from engine.symbolic import Int, product

STRIP = 48  # outputs: three tiles of rows by two of columns fill the registers
BLOCK = 11 * STRIP  # outputs whose pixels stay in the second-level cache for all panels
MOST_TAPS = 64  # they are written out one by one
FEWEST_CHANNELS = 16  # of the 32 that are multiplied at once
AHEAD = 4096  # bytes of weights that are fetched before they are needed


@dataclass(frozen=True)
class Conv:
    """planes (B, C / 32, …, 32), weights (1, O / 32, C / 32 * taps, 2, 16, 16) -> (B, rows, O).

    Row i sums over the taps the pixel at step * i + offset of each; pixels count from a plane's
    first one.
    """

    offsets: tuple[int, ...]
    step: int
    rows_in_all: int
    columns_in_all: int  # whole panels
    columns: int = PANEL
    strip: int = STRIP
    beside: int = 1
    block: int = BLOCK
    work: int = CONFIG

    @property
    def name(self) -> str:
        return f"conv_{self.step}_" + "_".join(map(str, self.offsets))

    def shape(self, planes: Node, weights: Node) -> tuple[Int, ...]:
        return planes.shape[0], self.rows_in_all, self.columns_in_all

    def ints(self, planes: Node, weights: Node) -> tuple[Int, ...]:
        """Planes of a picture, pixels of a plane."""
        return planes.shape[1], _pixels(planes)

    def flops(self, planes: Node, weights: Node) -> Int:
        depth = planes.shape[1] * DEEP * len(self.offsets)
        return planes.shape[0] * self.rows_in_all * self.columns_in_all * depth * 2

    def meaning(self, planes: Node, weights: Node) -> Node:
        batch, count = planes.shape[:2]
        rows, n = self.rows_in_all, self.columns_in_all
        x = g.reshape(g.cast(planes, dt.float32), (batch, count, _pixels(planes), DEEP))
        reach = max(self.offsets) + rows * self.step - x.shape[2]
        x = g.pad(x, ((0, 0), (0, 0), (0, max(0, reach)), (0, 0)))
        w = g.reshape(right_values(weights), (n, count, len(self.offsets), DEEP))
        shape = (batch, rows, n, count, DEEP)
        total = g.const(0, dt.float32, (batch, rows, n))
        for tap, offset in enumerate(self.offsets):
            ends = ((0, batch), (0, count), (offset, offset + rows * self.step), (0, DEEP))
            part = g.reshape(g.shrink(x, ends), (batch, count, rows, self.step, DEEP))
            part = g.shrink(part, ((0, batch), (0, count), (0, rows), (0, 1), (0, DEEP)))
            part = g.expand(g.permute(part, (0, 2, 3, 1, 4)), shape)
            by = g.shrink(w, ((0, n), (0, count), (tap, tap + 1), (0, DEEP)))
            by = g.expand(g.reshape(by, (1, 1, n, count, DEEP)), shape)
            summed = g.reduce(g.binary(Op.MUL, part, by), "add", (3, 4))
            total = g.binary(Op.ADD, total, g.reshape(summed, total.shape))
        return total

    def source(self) -> tuple[str, ...]:
        return asm.BEGIN, _source(self)


def _pixels(planes: Node) -> Int:
    return product(planes.shape[2:-1])


def rewrite(node: Node, settings: Settings) -> Node | None:
    """A convolution in bfloat16, where that loses nothing or may lose something."""
    if node.op is not Op.REDUCE or not NEEDED <= settings.target.features:
        return None
    found = find(node)
    if found is None or found.groups != 1 or len(found.stride) > 2:
        return None
    if not all(isinstance(n, int) for n in found.x.shape):
        return None
    is_weight = settings.is_weight(found.weight)
    terms = 1
    if not (is_bfloat16(found.x) and is_bfloat16(found.weight)):
        terms = settings.terms
        if not terms or not is_weight or found.x.shape[0] * prod(found.out) < FEWEST:
            return None
    channels, taps = found.x.shape[1], prod(found.weight.shape[2:])
    if channels < FEWEST_CHANNELS or not 2 <= taps <= MOST_TAPS:
        return None
    source, (y, x) = slides_of(found)
    source = split.left(source, terms, 1)
    frame = frame_of(y, x, STRIP, SLACK // (2 * DEEP))
    weights = _weights(split.right(found.weight, terms, 1))
    weights = settings.pack(weights, right_tiles) if is_weight else g.packed(right_tiles(weights))
    rows = y.places * frame.width
    spec = Conv(frame.offsets, x.stride, rows, weights.shape[1] * PANEL)
    sums = g.intrinsic(spec, (g.packed(_planes(source, frame)), weights))
    batch, o = source.shape[0], found.weight.shape[0]
    out = g.reshape(sums, (batch, y.places, frame.width, sums.shape[2]))
    out = g.shrink(out, ((0, batch), (0, y.places), (0, x.places), (0, o)))
    return g.reshape(g.permute(out, (0, 3, 1, 2)), node.shape)


# --- operands --------------------------------------------------------------------------------


def _planes(source: Node, frame: Frame) -> Node:
    """bfloat16 (B, C / 32, lines, pixels, 32); where lines lie apart, these are an axis more."""
    batch, channels, high, wide = source.shape
    count = -(-channels // DEEP)
    x = g.pad(g.cast(source, dt.bfloat16), ((0, 0), (0, -channels % DEEP), (0, 0), (0, 0)))
    x = g.permute(g.reshape(x, (batch, count, DEEP, high, wide)), (0, 1, 3, 4, 2))
    return framed(x, frame)


def _weights(weight: Node) -> Node:
    """(O, C, …) -> (1, O, C / 32 * taps * 32)."""
    o, channels = weight.shape[:2]
    taps = prod(weight.shape[2:])
    w = g.pad(g.reshape(weight, (o, channels, taps)), ((0, 0), (0, -channels % DEEP), (0, 0)))
    w = g.permute(g.reshape(w, (o, -(-channels // DEEP), DEEP, taps)), (0, 1, 3, 2))
    return g.reshape(w, (1, o, w.numel // o))


# --- the instructions ------------------------------------------------------------------------


def _source(spec: Conv) -> str:
    """The sums of a tile stay in the registers 0 to 5, [three of rows][two of columns]."""
    taps = len(spec.offsets)
    words = taps * PANEL * DEEP // 2
    given = (
        "__global const ushort* planes, __global const uint* weights, "
        "int batch, int row, int column, int place, int tiles"
    )
    sizes = "int count, int pixels"
    clear = asm.volatile([f"tilezero tmm{i}" for i in range(6)])
    lines = [line for tap, at in enumerate(spec.offsets) for line in _tap(spec, tap, at)]
    multiply = asm.volatile(lines, "a", "b", f"{2 * DEEP * spec.step}L", "64L")
    places = [(2 * i + j, 4 * PANEL * 16 * i + 64 * j) for i in range(3) for j in range(2)]
    keep = asm.volatile(
        [f"tilestored tmm{i}, {at}(%0, %1, 1)" for i, at in places], "tile", f"{4 * PANEL}L"
    )
    return f"""
static void {spec.name}_begin(uchar* work, {given}, {sizes}) {{
  zoo_tiles_begin(work);
}}
static void {spec.name}_end(void) {{ zoo_tiles_end(); }}
static void {spec.name}_tile(float* tile, uchar* work, {given}, int rows, {sizes}) {{
  const long first = (long)batch * count * pixels + (long)row * {spec.step};
  __global const ushort* a = planes + first * {DEEP};
  __global const uint* b = weights + (long)(column / {PANEL}) * count * {words};
  {clear}
  for (int k = 0; k < count; k++, a += (long)pixels * {DEEP}, b += {words})
    {multiply}
  {keep}
}}"""


def _tap(spec: Conv, tap: int, offset: int) -> list[str]:
    """Instructions that add one tap's products with 32 channels."""
    first, below = 2 * DEEP * offset, 2 * DEEP * 16 * spec.step
    rows = [f"tileloadd {first + i * below}(%0, %2, 1), tmm6" for i in range(3)]
    columns = [f"tileloadd {2048 * tap + 1024 * j}(%1, %3, 1), tmm7" for j in range(2)]
    fetch = [f"prefetcht0 {2048 * tap + AHEAD + at}(%1)" for at in range(0, 2048, asm.LINE)]

    def add(i: int, j: int) -> str:
        return f"tdpbf16ps tmm7, tmm6, tmm{2 * i + j}"

    steps = [
        [columns[0], rows[0], add(0, 0)],
        [rows[1], add(1, 0)],
        [rows[2], add(2, 0)],
        [columns[1], add(2, 1)],
        [rows[1], add(1, 1)],
        [rows[0], add(0, 1)],
    ]
    return [line for i, part in enumerate(steps) for line in (*part, *fetch[i :: len(steps)])]
