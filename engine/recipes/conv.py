"""Convolution in bfloat16 on AMX, without a matrix of windows (implicit GEMM).

The input is stored in planes of 32 channels, bfloat16, the channels of a pixel side by side. Zeros
to the left of each line of pixels are also what lies to the right of the line above it. So an
element of the kernel (a tap) reads, for all outputs, the same stretch of pixels, moved by a number
of pixels of its own: the outputs are rows of a product, counted through lines and the few numbers
between two lines that nobody wants. Where the stride skips lines, the skipped ones lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.indexing import Index, move_index
from engine.memory import SLACK
from engine.recipes import asm
from engine.recipes.amx import DEEP, FEWEST, NEEDED, is_bfloat16, right_tiles, right_values
from engine.recipes.asm import CONFIG
from engine.recipes.blocks import PANEL
from engine.recipes.product import Product
from engine.recipes.settings import Settings
from engine.symbolic import Expr, Int, Var, linear_in, product, variables

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


def rewrite(found: Product, settings: Settings) -> Node | None:
    """The sums by tiles, if the left factor is windows of a picture and bfloat16 is allowed."""
    if not NEEDED <= settings.target.features or found.axes[0]:
        return None
    is_weight = settings.is_weight(found.right)
    if not (is_bfloat16(found.left) and is_bfloat16(found.right)):
        rows = found.left.shape[1]
        if settings.exact or not is_weight or not isinstance(rows, int) or rows < FEWEST:
            return None
    windows = find_windows(found)
    if windows is None or not 2 <= windows.taps <= MOST_TAPS or windows.channels < FEWEST_CHANNELS:
        return None
    frame = frame_of(*windows.space)
    planes = g.packed(_planes(windows, frame))
    weights = _weights(found, windows)
    weights = settings.pack(weights, right_tiles) if is_weight else g.packed(right_tiles(weights))
    y, x = windows.space
    spec = Conv(frame.offsets, x.stride, y.places * frame.width, weights.shape[1] * PANEL)
    return _as_rows(g.intrinsic(spec, (planes, weights)), found, windows, frame)


# --- windows ---------------------------------------------------------------------------------


class Slide(NamedTuple):
    """How windows lie along one axis: element k of the one at i is i * stride + k * apart + first.

    Elements outside of 0 … size - 1 are zero. place, element: which of the product's row axes and
    summed axes i and k are, None where there is one value only.
    """

    size: int
    places: int
    elements: int
    stride: int = 1
    apart: int = 1
    first: int = 0
    place: int | None = None
    element: int | None = None

    @property
    def last(self) -> int:
        """The last element that a window needs."""
        return (self.places - 1) * self.stride + (self.elements - 1) * self.apart + self.first


class Windows(NamedTuple):
    """A factor that is windows of `source` (…, in any order: batch axes, one of channels, space).

    order: source's axes as batch, channels, space. batch: which of the product's row axes each of
    the first is; channel: which of its summed axes. space: along y and x.
    """

    source: Node
    order: tuple[int, ...]
    batch: tuple[int, ...]
    channel: int
    channels: int
    space: tuple[Slide, Slide]

    @property
    def taps(self) -> int:
        return self.space[0].elements * self.space[1].elements


def find_windows(found: Product) -> Windows | None:
    """The left factor as windows that slide along one axis or two; None if it isn't that."""
    rows, summed = found.axes[1], found.node.arg[1]
    sizes = [found.node.src[0].shape[a] for a in (*rows, *summed)]
    if not all(isinstance(n, int) for n in sizes):
        return None
    axes = [Var(f"w{i}", 0, n - 1) for i, n in enumerate(sizes)]
    node, index = g.reshape(found.left, tuple(sizes)), tuple(axes)
    best = seen = None
    is_padded = False
    while node.op in g.MOVEMENT and not (is_padded and node.op not in (Op.PAD, Op.PERMUTE)):
        index, guard = move_index(node, index)
        if guard and seen is None:
            break  # what is outside isn't just what is beyond the ends of axes
        is_padded = is_padded or bool(guard)
        node = node.src[0]
        seen = _windows(node, index, axes[: len(rows)], axes[len(rows) :])
        if is_padded and seen is None:
            break
        best = seen or best
    return best


def _windows(node: Node, index: Index, rows: list[Expr], summed: list[Expr]) -> Windows | None:
    """The Windows that elements of `node` at `index` are, for all values of the two lists' Vars."""
    batch: list[tuple[int, int]] = []  # (axis, which of the rows)
    channel: list[tuple[int, int]] = []
    space: list[tuple[int, Slide]] = []
    ones = []
    for axis, (n, at) in enumerate(zip(node.shape, index)):
        place = [i for i, v in enumerate(rows) if v in variables(at)]
        element = [i for i, v in enumerate(summed) if v in variables(at)]
        if not isinstance(n, int) or len(place) > 1 or len(element) > 1:
            return None
        if not place and not element:
            if n != 1:
                return None
            ones.append(axis)
        elif place and at is rows[place[0]] and at.max == n - 1:
            batch.append((axis, place[0]))
        elif element and at is summed[element[0]] and at.max == n - 1:
            channel.append((axis, element[0]))
        else:
            slide = _slide(n, at, rows, place, summed, element)
            if slide is None:
                return None
            space.append((axis, slide))
    if len(channel) != 1 or not 1 <= len(space) <= 2 or _is_repeated(rows, summed, index):
        return None
    slides = [slide for _, slide in space]
    y, x = slides if len(slides) == 2 else (Slide(1, 1, 1), slides[0])
    order = [*ones, *(a for a, _ in batch), channel[0][0], *(a for a, _ in space)]
    width = node.shape[channel[0][0]]
    return Windows(node, tuple(order), tuple(i for _, i in batch), channel[0][1], width, (y, x))


def _is_repeated(rows: list[Expr], summed: list[Expr], index: Index) -> bool:
    """Whether an axis moves no index, or several."""
    return any(sum(v in variables(at) for at in index) != 1 for v in (*rows, *summed))


def _slide(
    n: int, at: Int, rows: list[Expr], place: list[int], summed: list[Expr], element: list[int]
) -> Slide | None:
    steps, counts = [], []
    for var in (*(rows[i] for i in place), *(summed[i] for i in element)):
        found = linear_in(at, var)
        if found is None or found[0] < 1:
            return None
        step, at = found
        steps.append(step)
        counts.append(var.max + 1)
    if not isinstance(at, int):
        return None
    stride, places = (steps[0], counts[0]) if place else (1, 1)
    apart, elements = (steps[-1], counts[-1]) if element else (1, 1)
    return Slide(
        n, places, elements, stride, apart, at, *(i[0] if i else None for i in (place, element))
    )


# --- operands --------------------------------------------------------------------------------


class Frame(NamedTuple):
    """How many zeros are stored around the lines of a plane, and what follows from that.

    Lines that lie `apart` are neighbours. width: rows of the product per line of outputs.
    """

    above: int
    below: int
    left: int
    right: int
    apart: int
    width: int
    offsets: tuple[int, ...]


def frame_of(y: Slide, x: Slide) -> Frame:
    """The smallest frame in which no wanted tap meets anything but zeros outside of the picture,
    and no strip reads further behind the last plane than is allowed."""
    above, before = max(0, -y.first), max(0, -x.first)
    beyond = max(0, x.last + 1 - x.size)
    lines = max(above + y.size, above + y.last + 1)
    right = 0
    if y.places == 1:
        left, right = before, beyond
    else:  # the zeros of the next line serve as well
        left, lines = max(before, beyond), lines + (beyond > 0)
    while True:
        lines += -lines % y.stride
        needed = max(left + x.size + right, (x.places - 1) * x.stride + 1)
        pitch = -(-needed // x.stride) * x.stride
        left = pitch - x.size - right
        offsets = tuple(
            (line % y.stride * (lines // y.stride) + line // y.stride) * pitch + pixel
            for line in _range(above + y.first, y)
            for pixel in _range(left + x.first, x)
        )
        strips = -(-y.places * (pitch // x.stride) // STRIP)
        most = lines * pitch + SLACK // (2 * DEEP)
        excess = (strips * STRIP - 1) * x.stride + max(offsets) + 1 - most
        if excess <= 0:
            below = lines - above - y.size
            return Frame(above, below, left, right, y.stride, pitch // x.stride, offsets)
        lines, right = (lines + 1, right) if y.places > 1 else (lines, right + excess)


def _range(first: int, slide: Slide) -> range:
    return range(first, first + slide.elements * slide.apart, slide.apart)


def _planes(windows: Windows, frame: Frame) -> Node:
    """bfloat16 (B, C / 32, lines, pixels, 32); where lines lie apart, these are an axis more."""
    y, x = windows.space
    source = windows.source
    if source.op is Op.CAST and source.src[0].dtype is dt.bfloat16:
        source = source.src[0]
    count = -(-windows.channels // DEEP)
    v = g.permute(source, windows.order)
    v = g.reshape(
        v, (v.numel // (windows.channels * y.size * x.size), windows.channels, y.size, x.size)
    )
    v = g.pad(g.cast(v, dt.bfloat16), ((0, 0), (0, -windows.channels % DEEP), (0, 0), (0, 0)))
    v = g.permute(g.reshape(v, (v.shape[0], count, DEEP, y.size, x.size)), (0, 1, 3, 4, 2))
    sides = (frame.above, frame.below), (frame.left, frame.right)
    v = g.pad(v, ((0, 0), (0, 0), *sides, (0, 0)))
    if frame.apart == 1:
        return v
    batch, _, lines, pitch, _ = v.shape
    v = g.reshape(v, (batch, count, lines // frame.apart, frame.apart, pitch, DEEP))
    return g.permute(v, (0, 1, 3, 2, 4, 5))


def _weights(found: Product, windows: Windows) -> Node:
    """float32 (1, O, C / 32 * taps * 32) of the right factor (1, O, depth)."""
    summed = [found.node.src[0].shape[a] for a in found.node.arg[1]]
    o, channels = found.right.shape[1], windows.channels
    order = [windows.channel, *(s.element for s in windows.space if s.element is not None)]
    w = g.permute(g.reshape(found.right, (o, *summed)), (0, *(i + 1 for i in order)))
    w = g.pad(g.reshape(w, (o, channels, windows.taps)), ((0, 0), (0, -channels % DEEP), (0, 0)))
    w = g.permute(g.reshape(w, (o, w.shape[1] // DEEP, DEEP, windows.taps)), (0, 1, 3, 2))
    return g.reshape(w, (1, o, w.numel // o))


def _as_rows(result: Node, found: Product, windows: Windows, frame: Frame) -> Node:
    """(B, lines of outputs * width, columns) -> (1, rows, O) in the order of the product."""
    y, x = windows.space
    rows, o = found.axes[1], found.right.shape[1]
    batch = result.shape[0]
    out = g.reshape(result, (batch, y.places, frame.width, result.shape[2]))
    out = g.shrink(out, ((0, batch), (0, y.places), (0, x.places), (0, o)))
    axes = [*windows.batch, *(s.place for s in (y, x) if s.place is not None)]
    shape = found.node.shape
    out = g.reshape(out, (*(shape[rows[i]] for i in axes), o))
    out = g.permute(out, (*(axes.index(i) for i in range(len(rows))), len(rows)))
    return g.reshape(out, (1, *found.left.shape[1:2], o))


# --- the instructions ------------------------------------------------------------------------


def _source(spec: Conv) -> str:
    """The sums of a tile stay in the registers 0 to 5, [three of rows][two of columns]."""
    taps = len(spec.offsets)
    given = "__global const ushort* planes, __global const uint* weights, int batch, int row"
    sizes = "int count, int pixels"
    clear = asm.volatile([f"tilezero tmm{i}" for i in range(6)])
    lines = [line for tap, at in enumerate(spec.offsets) for line in _tap(spec.step, tap, at)]
    multiply = asm.volatile(lines, "a", "b", f"{2 * DEEP * spec.step}L", "64L")
    places = [(2 * i + j, 4 * PANEL * 16 * i + 64 * j) for i in range(3) for j in range(2)]
    keep = asm.volatile(
        [f"tilestored tmm{i}, {at}(%0, %1, 1)" for i, at in places], "tile", f"{4 * PANEL}L"
    )
    return f"""
static void {spec.name}_begin(uchar* work, {given}, int column, {sizes}) {{
  zoo_tiles_begin(work);
}}
static void {spec.name}_end(void) {{ zoo_tiles_end(); }}
static void {spec.name}_tile(float* tile, uchar* work, {given}, int column, int rows, {sizes}) {{
  const long first = (long)batch * count * pixels + (long)row * {spec.step};
  __global const ushort* a = planes + first * {DEEP};
  __global const uint* b = weights + (long)(column / {PANEL}) * count * {taps * PANEL * DEEP // 2};
  {clear}
  for (int k = 0; k < count; k++, a += (long)pixels * {DEEP}, b += {taps * PANEL * DEEP // 2})
    {multiply}
  {keep}
}}"""


def _tap(step: int, tap: int, offset: int) -> list[str]:
    """Instructions that add one tap's products with 32 channels."""
    first = 2 * DEEP * offset
    rows = [f"tileloadd {first + i * 32 * DEEP * step}(%0, %2, 1), tmm6" for i in range(3)]
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
    share = -(-len(fetch) // len(steps))
    return [
        line
        for i, part in enumerate(steps)
        for line in (*part, *fetch[i * share : (i + 1) * share])
    ]
