"""Some rows times a quantised matrix: the sums of vnni.py, to the last bit, by AMX.

Each block of 32 along the depth has scales of its own, so its int8 dots have to leave the tile
registers before the next block's: 16 rows by 16 columns of them at a time, for the row's two terms.
The instructions of a block run while the numbers of the one before it become float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.graph import Node
from engine.recipes import asm, panel_code, vnni
from engine.recipes.asm import CONFIG
from engine.recipes.blocks import PANEL, Layout
from engine.recipes.product import BLOCK, Product
from engine.recipes.settings import Settings
from engine.symbolic import upper

NEEDED = frozenset({"amx_int8", "avx512f", "f16c"})
FEWEST = 9  # rows; fewer are bound by memory, and vectors stream better
GROUP = 16  # rows, or columns, of a tile
DOTS = 1024  # bytes of a tile of sums
FIRST = CONFIG + 4 * DOTS  # where in the scratch the small ints begin


@dataclass(frozen=True)
class TileDots(vnni.Dots):
    """Dots over rows padded to whole tiles."""

    @property
    def name(self) -> str:
        return f"tile_{super().name}"

    @property
    def work(self) -> int:
        """The tiles' shapes, the sums of two blocks, and a panel's small ints, a byte each."""
        return FIRST + self.depth * PANEL

    def source(self) -> tuple[str, ...]:
        return (asm.BEGIN, asm.HALVES, SHAPES, _source(self))


def rewrite(found: Product, settings: Settings) -> Node | None:
    """The product by int8 dots in tiles, if its right factor is quantised and its rows are some."""
    if not NEEDED <= settings.target.features or upper(found.left.shape[1]) < FEWEST:
        return None
    return vnni.by(TileDots, GROUP, found, settings)


# --- the instructions ------------------------------------------------------------------------

# Registers 0 and 1 hold sums, 4 and 5 rows of 32 bytes, 6 the ints of 16 columns, four to a lane.
SHAPES = """
static inline void zoo_dots_begin(uchar* config) {
  zoo_tiles_begin(config);
  config[16 + 2 * 4] = config[16 + 2 * 5] = 32;
  config[48 + 6] = 8;
  __asm__ volatile("ldtilecfg (%0)" :: "r"(config) : "memory");
}
static inline float16 zoo_fma(float16 a, float16 b, float16 sum) {
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // fma() would be a call
  return sum;
}
"""


def _source(spec: TileDots) -> str:
    kind, count = spec.kind, spec.depth // BLOCK
    mark = panel_code.mark(GROUP)
    given = (
        "__global const ushort* blocks, __global const char* planes, "
        "__global const float* heads, int batch, int row, int column, int place, int tiles"
    )
    sums = " ".join(f"float16 a{i} = (float16)(0.0f);" for i in range(GROUP))
    kept = "\n".join(f"      *(float16*)(to + {i * PANEL}) = a{i};" for i in range(GROUP))
    rows = "\n".join(line for i in range(GROUP) for line in _row(kind, i, 2 * count))
    least = f"const float16 least = zoo_load_halves(w + {2 * PANEL});" if kind.has_least else ""
    return f"""
static inline void {spec.name}_block(uchar* sums, __global const char* x, const uchar* q) {{
  {_multiply(2 * spec.depth)}
}}
{mark} void {spec.name}_begin(uchar* work, {given}) {{
  zoo_dots_begin(work);
  __global const uchar* w = (__global const uchar*)blocks;
  w += (long)(column / {PANEL}) * {count * kind.nbytes} + {2 * kind.halves};
  uchar* to = work + {FIRST};
  for (int b = 0; b < {count}; b++, w += {kind.nbytes}, to += {BLOCK * PANEL})
    for (int g = 0; g < 2; g++)
      for (int u = 0; u < {kind.bits}; u++) {{
        const uint16 q = *(__global const uint16*)(w + 64 * (2 * u + g));
        {_unpacked(kind)}
      }}
}}
static void {spec.name}_end(void) {{ zoo_tiles_end(); }}
{mark} void {spec.name}_tile(float* tile, uchar* work, {given}, int rows) {{
  const float16 finer = (float16)({vnni.FINER}f);
  for (int r = 0; r < rows; r += {GROUP}) {{
    __global const char* x = planes + (long)(row + r) * {2 * spec.depth};
    for (int g = 0; g < 2; g++) {{
      __global const float* h = heads + (long)(row + r) * {2 * count};
      __global const uchar* w = (__global const uchar*)blocks + 32 * g;
      w += (long)(column / {PANEL}) * {count * kind.nbytes};
      const uchar* q = work + {FIRST} + {BLOCK * GROUP} * g;
      uchar* sums = work + {CONFIG};
      {sums}
      {spec.name}_block(sums, x, q);
      for (int b = 0; b < {count}; b++, w += {kind.nbytes}, h += 2) {{
        const uchar* c = sums + (b & 1) * {2 * DOTS};
        if (b + 1 < {count})
          {spec.name}_block(sums + (~b & 1) * {2 * DOTS}, x + {2 * BLOCK} * (b + 1),
                            q + {BLOCK * PANEL} * (b + 1));
        const float16 scale = zoo_load_halves(w); {least}
        {_fetched(kind, count)}
        float16 v;
{rows}
      }}
      float* to = tile + r * {PANEL} + {GROUP} * g;
{kept}
    }}
  }}
}}"""


def _multiply(stride: int) -> str:
    """One block's sums of both terms, 16 by 16 each."""
    lines = [
        "tilezero tmm0",
        "tilezero tmm1",
        "tileloadd (%2, %3, 1), tmm6",
        "tileloadd (%1, %4, 1), tmm4",
        "tdpbsud tmm6, tmm4, tmm0",
        f"tileloadd {BLOCK}(%1, %4, 1), tmm5",
        "tdpbsud tmm6, tmm5, tmm1",
        "tilestored tmm0, (%0, %3, 1)",
        f"tilestored tmm1, {DOTS}(%0, %3, 1)",
    ]
    return asm.volatile(lines, "sums", "x", "q", "64L", f"{stride}L")


def _fetched(kind: Layout, count: int) -> str:
    """Ask for the same block of the next panel, half of it for each half of the columns."""
    lines = range(0, kind.nbytes, 2 * asm.LINE)
    at = f"w + g * {asm.LINE - 32} + {count * kind.nbytes}"
    fetch = asm.volatile([f"prefetcht1 {line}(%0)" for line in lines], at)
    return f"if (r == 0) {fetch}"


def _unpacked(kind: Layout) -> str:
    """The bytes of four places along the depth, or of eight where they are nibbles."""
    at = f"(uint16*)(to + {BLOCK * GROUP} * g + 64 * u"
    if kind.bits == 8:
        return f"*{at}) = q;"
    mask = "(uint16)(0x0f0f0f0f)"
    return f"*{at}) = q & {mask}; *{at} + 256) = (q >> 4) & {mask};"


def _row(kind: Layout, i: int, heads: int) -> list[str]:
    """a += scale * (s * (254 c0 + c1) - zero * total) + least * total, rounded as vnni.py does."""
    first, second = (f"convert_float16(*(const int16*)(c + {at + 64 * i}))" for at in (0, DOTS))
    s, total = (f"(float16)(h[{i * heads + at}])" for at in (0, 1))
    lines = [f"v = zoo_fma({first}, finer, {second}) * {s};"]
    if kind.zero:
        lines.append(f"v = zoo_fma((float16)({float(-kind.zero)}f), {total}, v);")
    lines.append(f"a{i} = zoo_fma(scale, v, a{i});")
    if kind.has_least:
        lines.append(f"a{i} = zoo_fma(least, {total}, a{i});")
    return ["        " + line for line in lines]
