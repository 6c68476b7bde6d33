"""Few rows times a quantised matrix, with int8 dot products (AVX-512 VNNI).

The row is quantised twice, per block of 32: x = s (254 q1 + q2), q2 holding what q1 left over. One
int8 term is what llama.cpp uses; it costs SmolLM2 its right answer (an error of 1.3 in the logits,
against 0.006 with two). The second term reads no more memory, which is what bounds one row.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.recipes import blocks
from engine.recipes.blocks import PANEL, Layout
from engine.recipes.product import BLOCK, Product
from engine.recipes.settings import Settings
from engine.symbolic import Int, upper

NEEDED = frozenset({"avx512_vnni", "avx512f", "f16c"})
ROWS = 32  # beyond, one that dequantises once for all rows does better
FINER = 254.0  # steps of q2 in one of q1: what rounding leaves over fills its range
AHEAD = 8192  # bytes that are fetched before they are needed; one stream per core


@dataclass(frozen=True)
class Dots:
    """rows (M, depth) times packed blocks: the INTRINSIC's operands are those of `operands`."""

    kind: Layout
    depth: int
    rows_in_all: Int
    columns_in_all: int
    columns: int = PANEL
    strip: int = 32
    beside: int = 1
    block: int = 32

    @property
    def name(self) -> str:
        return f"dots_{self.kind.name}_{self.depth}"

    @property
    def work(self) -> int:
        return 0

    def shape(self, weight: Node, planes: Node, heads: Node) -> tuple[Int, ...]:
        return 1, self.rows_in_all, self.columns_in_all

    def ints(self, *operands: Node) -> tuple[Int, ...]:
        return ()

    def flops(self, weight: Node, planes: Node, heads: Node) -> Int:
        return self.rows_in_all * self.columns_in_all * self.depth * 2

    def meaning(self, weight: Node, planes: Node, heads: Node) -> Node:
        """(1, M, N): the sums as the instructions make them, apart from the order of additions."""
        m, n, k = self.rows_in_all, self.columns_in_all, self.depth
        scale, total = (_column(_first(heads, m), i) for i in (0, 1))
        scaled, offset = blocks.values(weight, self.kind, n)
        wide = g.cast(_first(planes, m), dt.float32)
        first, second = (_plane(wide, i) for i in (0, 1))
        x = g.binary(Op.MUL, first, g.const(FINER, dt.float32, first.shape))
        x = g.binary(Op.MUL, g.binary(Op.ADD, x, second), _over_block(scale))
        mean = g.binary(Op.MUL, total, g.const(1 / BLOCK, dt.float32, total.shape))
        shape = (1, m, n, k)
        products = [
            g.binary(Op.MUL, _rows(x, shape), _columns(scaled, shape)),
            g.binary(Op.MUL, _rows(_over_block(mean), shape), _columns(offset, shape)),
        ]
        summed = g.reduce(g.binary(Op.ADD, *products), "add", (3,))
        return g.reshape(summed, (1, m, n))

    def source(self) -> tuple[str, ...]:
        return (_source(self),)


def rewrite(found: Product, settings: Settings) -> Node | None:
    """The product by int8 dots, if its right factor is quantised and its rows are few."""
    return by(Dots, 1, found, settings) if NEEDED <= settings.target.features else None


def by(spec: type[Dots], strip: int, found: Product, settings: Settings) -> Node | None:
    """The product by Dots or a kind of them that takes whole strips of rows."""
    _, rows, depth = found.left.shape
    if not settings.terms or found.left.shape[0] != 1 or upper(rows) > ROWS:
        return None
    kind = settings.blocks(found.right)
    if kind is None:
        return None
    weight = settings.pack(found.right, blocks.pack)
    x = g.pad(g.reshape(found.left, (rows, depth)), ((0, -rows % strip), (0, 0)))
    return g.intrinsic(spec(kind, depth, rows, found.right.shape[1]), (weight, *operands(x)))


def operands(x: Node) -> tuple[Node, Node]:
    """float32 (M, depth) -> planes int8 (M, depth / 32, 2, 32), heads float32 (M, depth / 32, 2).

    A head is the scale of a block and its total.
    """
    m, k = x.shape
    x = g.reshape(x, (m, k // BLOCK, BLOCK))
    negative = g.binary(Op.MUL, x, g.const(-1.0, dt.float32, x.shape))
    largest = g.reduce(g.binary(Op.MAX, x, negative), "max", (2,))
    scale = g.binary(Op.MUL, largest, g.const(1 / (127 * FINER), dt.float32, largest.shape))
    total = g.reduce(x, "add", (2,))
    pair = (m, k // BLOCK, 2)
    place = g.expand(g.reshape(g.iota(2), (1, 1, 2)), pair)
    first = g.binary(Op.CMPLT, place, g.const(1, dt.int32, pair))
    heads = g.packed(g.where(first, g.expand(scale, pair), g.expand(total, pair)))
    s = g.reshape(_column(heads, 0), (m, k // BLOCK, 1))
    zero = g.const(0.0, dt.float32, s.shape)
    inverse = g.unary(Op.RECIP, g.binary(Op.MUL, s, g.const(FINER, dt.float32, s.shape)))
    tiny = g.const(1e-37, dt.float32, s.shape)  # all but zero: its inverse could overflow
    inverse = g.where(g.binary(Op.CMPLT, s, tiny), zero, inverse)
    v = g.binary(Op.MUL, x, g.expand(inverse, x.shape))
    first = _rounded(v)
    rest = g.binary(Op.ADD, v, g.binary(Op.MUL, first, g.const(-1.0, dt.float32, x.shape)))
    second = _rounded(g.binary(Op.MUL, rest, g.const(FINER, dt.float32, x.shape)))
    shape = (m, k // BLOCK, 2, BLOCK)
    which = g.expand(g.reshape(g.iota(2), (1, 1, 2, 1)), shape)
    is_first = g.binary(Op.CMPLT, which, g.const(1, dt.int32, shape))
    first, second = (
        g.expand(g.reshape(p, (m, k // BLOCK, 1, BLOCK)), shape) for p in (first, second)
    )
    planes = g.cast(g.where(is_first, first, second), dt.int8)
    return g.packed(planes), heads


def _first(x: Node, rows: Int) -> Node:
    return g.shrink(x, ((0, rows), *((0, n) for n in x.shape[1:])))


def _column(heads: Node, i: int) -> Node:
    m, count, _ = heads.shape
    return g.reshape(g.shrink(heads, ((0, m), (0, count), (i, i + 1))), (m, count))


def _rounded(x: Node) -> Node:
    """To the nearest whole number, halves away from zero."""
    half = g.const(0.5, dt.float32, x.shape)
    minus = g.const(-0.5, dt.float32, x.shape)
    below = g.binary(Op.CMPLT, x, g.const(0.0, dt.float32, x.shape))
    return g.unary(Op.TRUNC, g.binary(Op.ADD, x, g.where(below, minus, half)))


def _plane(wide: Node, i: int) -> Node:
    m, count, _, _ = wide.shape
    part = g.shrink(wide, ((0, m), (0, count), (i, i + 1), (0, BLOCK)))
    return g.reshape(part, (m, count * BLOCK))


def _over_block(x: Node) -> Node:
    m, count = x.shape
    wide = g.expand(g.reshape(x, (m, count, 1)), (m, count, BLOCK))
    return g.reshape(wide, (m, count * BLOCK))


def _rows(x: Node, shape: tuple[Int, ...]) -> Node:
    return g.expand(g.reshape(x, (1, shape[1], 1, shape[3])), shape)


def _columns(x: Node, shape: tuple[Int, ...]) -> Node:
    return g.expand(g.reshape(x, (1, 1, shape[2], shape[3])), shape)


# --- the instructions ------------------------------------------------------------------------

OUT = "c00 c01 c10 c11 e00 e01 e10 e11 x0 y0 x1 y1 w0 w1".split()  # c, e: [group][plane]
GIVEN = {"w": "r", "x": "r", "h": "r", "mask": "v", "zero": "v"}
NAMES = [*OUT, "a0", "a1", *GIVEN]


def _source(spec: Dots) -> str:
    kind = spec.kind
    lines = _nibbles(kind) if kind.bits == 4 else _bytes(kind)
    number = {name: f"%{i}" for i, name in enumerate(NAMES)}
    body = "\n".join(f'      "{line.format(**number)}\\n"' for line in lines)
    temporaries = ", ".join(f'"=&v"({v})' for v in OUT)
    ints = ", ".join(OUT)
    count = spec.depth // BLOCK
    given = ", ".join(f'"{where}"({name})' for name, where in GIVEN.items())
    return f"""
static void {spec.name}_tile(
    float* tile, __global const ushort* blocks, __global const char* planes,
    __global const float* heads, int batch, int row, int column,
    int place, int tiles, int rows) {{
  const int16 mask = (int16)(0x0f0f0f0f);
  const float16 zero = (float16)({float(kind.zero)}f);
  for (int r = 0; r < rows; r++) {{
    __global const uchar* w = (__global const uchar*)blocks;
    w += (long)(column / {PANEL}) * {count * kind.nbytes};
    __global const char* x = planes + (long)(row + r) * {2 * spec.depth};
    __global const float* h = heads + (row + r) * {2 * count};
    float16 a0 = (float16)(0.0f), a1 = a0;
    for (int b = 0; b < {count}; b++) {{
      int16 {ints};
      __asm__ volatile(
{body}
      : {temporaries}, "+v"(a0), "+v"(a1)
      : {given} : "memory");
      w += {kind.nbytes}; x += {2 * BLOCK}; h += 2;
    }}
    *(float16*)(tile + r * {PANEL}) = a0;
    *(float16*)(tile + r * {PANEL} + 16) = a1;
  }}
}}"""


def _clear(names: list[str]) -> list[str]:
    return [f"vpxord {{{n}}}, {{{n}}}, {{{n}}}" for n in names]


def _fetch(kind: Layout) -> list[str]:
    return [f"prefetcht2 {AHEAD + at}({{w}})" for at in range(0, kind.nbytes, 64)]


def _nibbles(kind: Layout) -> list[str]:
    out = _clear(OUT[:8]) + _fetch(kind)
    first = 2 * kind.halves
    for u in range(4):
        for plane in (0, 1):
            out.append(f"vpbroadcastd {32 * plane + 4 * u}({{x}}), {{x{plane}}}")
            out.append(f"vpbroadcastd {32 * plane + 16 + 4 * u}({{x}}), {{y{plane}}}")
        for group in (0, 1):
            out += [
                f"vmovdqu32 {first + 64 * (2 * u + group)}({{w}}), {{w1}}",
                "vpandd {w1}, {mask}, {w0}",
                "vpsrld $4, {w1}, {w1}",
                "vpandd {w1}, {mask}, {w1}",
            ]
            for plane in (0, 1):
                out.append(f"vpdpbusd {{x{plane}}}, {{w0}}, {{c{group}{plane}}}")
                out.append(f"vpdpbusd {{y{plane}}}, {{w1}}, {{e{group}{plane}}}")
    return out + _scaled(kind)


def _bytes(kind: Layout) -> list[str]:
    out = _clear(OUT[:8]) + _fetch(kind)
    first = 2 * kind.halves
    for u in range(8):
        for plane in (0, 1):
            out.append(f"vpbroadcastd {32 * plane + 4 * u}({{x}}), {{x{plane}}}")
        for group in (0, 1):
            out.append(f"vmovdqu32 {first + 64 * (2 * u + group)}({{w}}), {{w{group}}}")
            for plane in (0, 1):
                out.append(f"vpdpbusd {{x{plane}}}, {{w{group}}}, {{{'ce'[u % 2]}{group}{plane}}}")
    return out + _scaled(kind)


def _scaled(kind: Layout) -> list[str]:
    """a += scale * (s * (254 c0 + c1) - zero * total) + least * total, for both groups."""
    out = []
    for group in (0, 1):
        c0, c1, e0, e1 = (f"{{{v}{group}{p}}}" for v in "ce" for p in (0, 1))
        out += [f"vpaddd {e0}, {c0}, {c0}", f"vpaddd {e1}, {c1}, {c1}"]
        out += [f"vpslld $8, {c0}, {e0}", f"vpaddd {c0}, {c0}, {c0}", f"vpsubd {c0}, {e0}, {c0}"]
        out += [f"vpaddd {c1}, {c0}, {c0}", f"vcvtdq2ps {c0}, {c0}"]
    out += ["vbroadcastss ({h}), {x0}", "vbroadcastss 4({h}), {y0}"]
    for group in (0, 1):
        c0 = f"{{c{group}0}}"
        out.append(f"vmulps {{x0}}, {c0}, {c0}")
        if kind.zero:
            out.append(f"vfnmadd231ps {{zero}}, {{y0}}, {c0}")
        out.append(f"vcvtph2ps {32 * group}({{w}}), {{w0}}")
        out.append(f"vfmadd231ps {{w0}}, {c0}, {{a{group}}}")
        if kind.has_least:
            out.append(f"vcvtph2ps {2 * PANEL + 32 * group}({{w}}), {{w0}}")
            out.append(f"vfmadd231ps {{w0}}, {{y0}}, {{a{group}}}")
    return out
