"""Matrix products in bfloat16 on AMX: 32 rows by 32 columns in four tile registers at a time.

The left factor is stored as bfloat16 in strips of 32 rows, which whatever computes it writes
directly. The right one is in tiles already (weights that are halves), or a work-group turns its
panels of quantised blocks into tiles once and then goes through all rows with them.

A core fetches from its second-level cache about half as fast as it multiplies, so one of the two
factors must come from the first level. A work-group has some panels of columns that fit into the
second. Of each strip it makes all tiles before the next strip: the rows stay in the first level,
and the columns stream past it. Deep rows don't fit: they are taken in parts, and the sums
over all parts but the last are kept for all tiles of the strip.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.recipes import asm, blocks
from engine.recipes import terms as split
from engine.recipes.asm import CONFIG
from engine.recipes.blocks import PANEL, Layout
from engine.recipes.product import Product, multiplied
from engine.recipes.settings import Settings
from engine.recipes.views import Operand, View, strided
from engine.symbolic import Int, product, upper

NEEDED = frozenset({"amx_bf16", "avx512_bf16", "avx512f", "f16c"})
STRIP = 32  # rows of four tiles
DEEP = 32  # summed elements per tile
PART = 640  # summed elements of a strip that stay in the first-level cache
CACHE = 1 << 20  # bytes of columns that stay in the second-level one
GROUPS = 4  # work-groups per core, at least, where they share rows
BLOCK = 512  # rows of a work-group, where it isn't known how many there are
FEWEST = 33  # rows from which on rounding to bfloat16 pays: few of them are bound by memory


@dataclass(frozen=True)
class Tiles:
    """(M, depth) times (N, depth), or the blocks of a quantised matrix where kind says how."""

    depth: int
    rows_in_all: Int
    columns_in_all: Int
    kind: Layout | None = None
    view: View | None = None  # of the left factor, where it is read as it lies
    columns: int = PANEL
    strip: int = STRIP
    block: int = BLOCK
    beside: int = 1

    @property
    def name(self) -> str:
        parts = [str(self.depth), str(self.beside)]
        if self.kind is not None:
            parts = [self.kind.name, *parts]
        if self.view is not None:
            parts += ["by", *map(str, (*self.view.strides[:2], self.view.offset))]
        return "tiles_" + "_".join(parts)

    @property
    def part(self) -> int:
        """Tiles of the depth that are multiplied before the next tile of the strip."""
        count = self.depth // DEEP
        return -(-count // -(-self.depth // PART))

    @property
    def last(self) -> int:
        """Those that remain for the last part."""
        return (self.depth // DEEP - 1) % self.part + 1

    @property
    def unpacked(self) -> int:
        """Bytes of the panels' tiles, where they aren't in memory."""
        return 0 if self.kind is None else self.beside * self.depth * PANEL * 2

    @property
    def work(self) -> int:
        """The configuration, the panels' tiles, the sums over all parts but the last."""
        sums = self.beside * STRIP * PANEL * 4 if self.part * DEEP < self.depth else 0
        return CONFIG + self.unpacked + sums

    def shape(self, left: Node, right: Node) -> tuple[Int, ...]:
        batch = self.view.shape(left)[0] if self.view else left.shape[0]
        return batch, self.rows_in_all, self.columns_in_all

    def ints(self, left: Node, right: Node) -> tuple[Int, ...]:
        """Strips of a packed left factor, panels of the right one."""
        return 0 if self.view else left.shape[1], right.shape[1]

    def flops(self, left: Node, right: Node) -> Int:
        return product(self.shape(left, right)) * self.depth * 2

    def meaning(self, left: Node, right: Node) -> Node:
        x = self.view.of(left) if self.view else left_values(left)
        batch, _, k = x.shape
        m, n = self.rows_in_all, self.columns_in_all
        x = g.shrink(x, ((0, batch), (0, m), (0, k)))
        if self.kind is None:
            w = g.shrink(right_values(right), ((0, batch), (0, n), (0, k)))
        else:
            w = g.binary(Op.ADD, *blocks.values(right, self.kind, n))
            w = g.reshape(g.cast(g.cast(w, dt.bfloat16), dt.float32), (1, n, k))
        return multiplied(x, w)

    def source(self) -> tuple[str, ...]:
        return (asm.BEGIN, *((PAIRS, asm.HALVES) if self.kind else ()), _source(self))


def rewrite(found: Product, settings: Settings) -> Node | None:
    """The product in bfloat16, where that loses nothing or may lose something."""
    if not NEEDED <= settings.target.features or not isinstance(found.depth, int):
        return None
    batch, m, k = found.left.shape
    n = found.right.shape[1]
    if upper(m) < 2 or upper(n) < PANEL // 2 or k < DEEP // 2:
        return None
    weight = settings.is_weight(found.right)
    kind = settings.blocks(found.right)
    terms = 1
    if not (is_bfloat16(found.left) and is_bfloat16(found.right)):
        if not settings.terms or not weight or upper(m) < FEWEST:
            return None
        terms = settings.terms if kind is None else 1
    operand = _as_it_lies(found.left)
    view = operand and operand.view
    left = operand.base if operand else g.packed(left_tiles(split.left(found.left, terms, 2)))
    factor = split.right(found.right, terms, 2)
    depth = -(-factor.shape[2] // DEEP) * DEEP
    if kind is not None:
        right = settings.pack(found.right, blocks.pack)
    elif weight:
        right = settings.pack(factor, right_tiles)
    else:
        right = g.packed(right_tiles(factor))
    beside, block = _cut(batch, m, n, depth, kind is not None, settings.target.cores)
    return g.intrinsic(Tiles(depth, m, n, kind, view, block=block, beside=beside), (left, right))


def _cut(batch: Int, m: Int, n: Int, depth: int, is_packed: bool, cores: int) -> tuple[int, int]:
    """Tiles beside each other and rows of a work-group: many, but every core needs enough groups.

    Quantised panels are unpacked by each group, so that these share columns only.
    """
    panels = -(-upper(n) // PANEL)
    most = max(1, CACHE // (depth * PANEL * 2))
    if is_packed or not isinstance(m, int):
        return _even(panels, max(1, min(most, panels // cores)), cores), BLOCK
    wanted = -(-GROUPS * cores // upper(batch))
    groups = -(-panels // most)
    blocks = -(-wanted // groups)
    return -(-panels // groups), -(-m // (STRIP * blocks)) * STRIP


def _even(count: int, most: int, cores: int) -> int:
    """The size, up to most, of groups such that the core with most of `count` has fewest."""
    busiest = {n: -(-count // n // cores) * n for n in range(1, most + 1)}
    return min(busiest, key=lambda n: (busiest[n], -n))


def _as_it_lies(x: Node) -> Operand | None:
    """A left factor that is stored as bfloat16 in rows that tiles can be loaded from.

    Rows that are a quarter of a page apart, or a multiple of that, would compete for the same
    places in the first-level cache: those are packed.
    """
    _, m, k = x.shape
    if not isinstance(m, int) or m % STRIP or k % DEEP:
        return None
    found = strided(x, (dt.bfloat16,))
    if found is None or found.base.dtype is not dt.bfloat16 or found.view.strides[2] != 1:
        return None
    return None if found.view.strides[1] * 2 % 1024 == 0 else found


def is_bfloat16(x: Node) -> bool:
    """Whether a float32 node holds numbers that are bfloat16 already."""
    while x.op in g.MOVEMENT:
        x = x.src[0]
    return x.op is Op.CAST and x.src[0].dtype is dt.bfloat16


def left_tiles(x: Node) -> Node:
    """float32 (batch, M, depth) -> bfloat16 (batch, M / 32, depth / 32, 32 rows, 32).

    A strip of rows is one stretch of memory: at a power of two apart, its parts would compete for
    the same places in the first-level cache.
    """
    batch, m, k = x.shape
    x = g.cast(g.pad(x, ((0, 0), (0, -m % STRIP), (0, -k % DEEP))), dt.bfloat16)
    shape = (batch, x.shape[1] // STRIP, STRIP, x.shape[2] // DEEP, DEEP)
    return g.permute(g.reshape(x, shape), (0, 1, 3, 2, 4))


def left_values(tiles: Node) -> Node:
    """The way back from left_tiles: float32 (batch, M, depth), both padded."""
    batch, strips, count = tiles.shape[:3]
    x = g.permute(g.cast(tiles, dt.float32), (0, 1, 3, 2, 4))
    return g.reshape(x, (batch, strips * STRIP, count * DEEP))


def right_tiles(x: Node) -> Node:
    """float32 (batch, N, depth) -> uint32 (batch, N / 32, depth / 32, 2, 16, 16 columns).

    A word holds the bfloat16 pair at 2 i and 2 i + 1 along the depth.
    """
    batch, n, k = x.shape
    x = g.pad(x, ((0, 0), (0, -n % PANEL), (0, -k % DEEP)))
    shape = (batch, x.shape[1] // PANEL, 2, 16, x.shape[2] // DEEP, 16, 2)
    x = g.permute(g.reshape(x, shape), (0, 1, 4, 2, 5, 3, 6))
    even, odd = (_bits(x, i) for i in (0, 1))
    high = g.binary(Op.SHL, odd, g.const(16, dt.uint32, odd.shape))
    return g.binary(Op.OR, even, high)


def _bits(pairs: Node, i: int) -> Node:
    """The bfloat16 bits of pairs[..., i], as uint32."""
    ranges = (*((0, n) for n in pairs.shape[:-1]), (i, i + 1))
    one = g.reshape(g.shrink(pairs, ranges), pairs.shape[:-1])
    return g.cast(g.bitcast(g.cast(one, dt.bfloat16), dt.uint16), dt.uint32)


def right_values(tiles: Node) -> Node:
    """The way back from right_tiles: float32 (batch, N, depth), both padded."""
    batch, panels, count = tiles.shape[:3]
    words = g.reshape(tiles, (*tiles.shape, 1))
    shape = (*tiles.shape, 2)
    shift = g.binary(Op.MUL, g.iota(2), g.const(16, dt.int32, (2,)))
    shift = g.expand(g.reshape(g.cast(shift, dt.uint32), (1,) * 6 + (2,)), shape)
    halves = g.cast(g.binary(Op.SHR, g.expand(words, shape), shift), dt.uint16)
    x = g.cast(g.bitcast(halves, dt.bfloat16), dt.float32)
    x = g.permute(x, (0, 1, 3, 5, 2, 4, 6))
    return g.reshape(x, (batch, panels * PANEL, count * DEEP))


# --- the instructions ------------------------------------------------------------------------

# a and b: the numbers at 2 i and 2 i + 1 along the sum, of 16 outputs
PAIRS = """
static inline void zoo_store_pairs(ushort* p, float16 a, float16 b) {
  const uint16 order = (uint16)(ORDER);
  uint16 r;
  __asm__("vcvtne2ps2bf16 %1, %2, %0\\n vpermw %0, %3, %0" : "=&v"(r) : "v"(a), "v"(b), "v"(order));
  *(uint16*)p = r;
}
typedef uint16 zoo_uint16 __attribute__((aligned(4)));
""".replace("ORDER", ", ".join(str(i | (16 + i) << 16) for i in range(16)))


def _source(spec: Tiles) -> str:
    if spec.view is None:
        start = f"((long)batch * strips + row / {STRIP}) * {spec.depth * STRIP}"
        row, step, ahead = DEEP, STRIP * DEEP, spec.depth * STRIP
    else:
        image, row, _ = spec.view.strides
        start = f"{spec.view.offset} + (long)batch * {image} + (long)row * {row}"
        step, ahead = DEEP, STRIP * row
    panel = spec.depth * PANEL
    if spec.kind is None:
        matrix, space, fill = "uint", "__global const ushort*", ""
        first = f"(right + ((long)batch * panels + column / {PANEL} - place) * {panel // 2})"
    else:
        matrix, space, fill = "ushort", "const ushort*", _fill(spec)
        first = f"(work + {CONFIG})"
    given = (
        f"__global const ushort* left, __global const {matrix}* right, "
        "int batch, int row, int column, int place, int tiles"
    )
    sizes = "int strips, int panels"
    rows = -(-STRIP // spec.beside)
    multiply = asm.multiply("a", f"a + {16 * row}", "b", 2 * row, "t1", "next", rows)
    return f"""
static inline void {spec.name}_add(
    __global const ushort* a, {space} b, __global const ushort* next, int count) {{
  for (int k = 0; k < count; k++, a += {step}, b += {PANEL * DEEP}, next += {step})
    {multiply}
}}
static void {spec.name}_begin(uchar* work, {given}, {sizes}) {{
  zoo_tiles_begin(work);{fill}
}}
static void {spec.name}_end(void) {{ zoo_tiles_end(); }}
static void {spec.name}_tile(float* tile, uchar* work, {given}, int rows, {sizes}) {{
  __global const ushort* a = left + {start};
  __global const ushort* next = a + {ahead} + place * {rows * row};
  {space} b = ({space}){first};
  {_start(spec, step, panel)}
  {spec.name}_add(a, b + place * {panel}, next, {spec.last});
  {asm.keep("tile", f"tile + {16 * PANEL}", 4 * PANEL)}
}}"""


def _start(spec: Tiles, step: int, panel: int) -> str:
    """Code that makes the sums over all parts of the depth but the last.

    At the strip's first tile it makes those of all its tiles, a part at a time.
    """
    before = spec.depth // DEEP - spec.last
    if not before:
        return asm.CLEAR
    size = 4 * PANEL
    return f"""float* sums = (float*)(work + {CONFIG + spec.unpacked});
  for (int k = 0; place == 0 && k < {before}; k += {spec.part})
    for (int t = 0; t < tiles; t++) {{
      float* to = sums + t * {STRIP * PANEL};
      if (k == 0)
        {asm.CLEAR}
      else
        {asm.take("to", f"to + {16 * PANEL}", size)}
      const long at = (long)k * {DEEP * PANEL} + t * {panel}L;
      {spec.name}_add(a + k * {step}, b + at, next + k * {step}, {spec.part});
      {asm.keep("to", f"to + {16 * PANEL}", size)}
    }}
  a += {before * step};
  b += {before * DEEP * PANEL};
  next += {before * step};
  sums += place * {STRIP * PANEL};
  {asm.take("sums", f"sums + {16 * PANEL}", size)}"""


def _fill(spec: Tiles) -> str:
    """Code that turns the panels of blocks from `column` on into tiles in `work`."""
    kind = spec.kind
    least = (
        f"zoo_load_halves(w + {2 * PANEL} + 32 * g)"
        if kind.has_least
        else f"scale * (float16)({float(-kind.zero)}f)"
    )
    steps = []
    for nibble in range(8 // kind.bits):
        for pair in (0, 1):
            even, odd = (16 * pair + 8 * i + kind.bits * nibble for i in (0, 1))
            at = f"(2 * u + {pair + 8 * nibble}) * 32"
            a, b = (
                f"convert_float16((x >> {s}u) & {(1 << kind.bits) - 1}u) * scale + least"
                for s in (even, odd)
            )
            steps.append(f"          zoo_store_pairs(to + {at}, {a}, {b});")
    lines = "\n".join(steps)
    count = spec.depth // DEEP
    return f"""
  __global const uchar* w = (__global const uchar*)right;
  w += (long)(column / {PANEL}) * {count * kind.nbytes};
  ushort* to = (ushort*)(work + {CONFIG});
  for (int k = 0; k < tiles * {count}; k++, w += {kind.nbytes}) {{
    for (int g = 0; g < 2; g++, to += 512) {{
      const float16 scale = zoo_load_halves(w + 32 * g), least = {least};
      for (int u = 0; u < {kind.bits}; u++) {{
        const uint16 x = *(__global const zoo_uint16*)(w + {2 * kind.halves} + 64 * (2 * u + g));
{lines}
      }}
    }}
  }}"""
