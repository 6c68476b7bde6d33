"""AMX in OpenCL C: statements that work on 32 by 32 float32 sums in the tile registers 0 to 3.

Registers 4 and 5 take two tiles of rows, 6 and 7 two tiles of columns. A tile is 16 rows of 64
bytes; in a tile of columns a row holds the bfloat16 pairs at 2 i and 2 i + 1 of 16 columns.
"""

from __future__ import annotations

from collections.abc import Sequence

CONFIG = 64  # bytes of scratch for the shapes of the tile registers
LINE = 64  # bytes that the cache fetches at once

# Palette 1, eight registers of 16 rows of 64 bytes.
BEGIN = """
static inline void zoo_tiles_begin(uchar* config) {
  for (int i = 0; i < 64; i++) config[i] = 0;
  config[0] = 1;
  for (int i = 0; i < 8; i++) { config[16 + 2 * i] = 64; config[48 + i] = 16; }
  __asm__ volatile("ldtilecfg (%0)" :: "r"(config) : "memory");
}
static inline void zoo_tiles_end(void) { __asm__ volatile("tilerelease" ::: "memory"); }
"""

# The scales of 16 columns.
HALVES = """
static inline float16 zoo_load_halves(__global const uchar* p) {
  float16 r;
  __asm__("vcvtph2ps %1, %0" : "=v"(r) : "m"(*(__global const ushort16*)p));
  return r;
}
"""


def volatile(lines: Sequence[str], *operands: str) -> str:
    """A statement of instructions over operands in general registers, %0 and on."""
    body = "\\n ".join(line.replace("tmm", "%%tmm") for line in lines)
    given = ", ".join(f'"r"({operand})' for operand in operands)
    return f'__asm__ volatile("{body}" :: {given} : "memory");'


CLEAR = volatile([f"tilezero tmm{i}" for i in range(4)])


def multiply(
    rows: str,
    below: str,
    columns: str,
    stride: int,
    once: str = "",
    ahead: str = "",
    count: int = 0,
) -> str:
    """The sums += the tiles at `rows` and `below` times those at `columns` and 1 KB behind.

    stride is in bytes, between two rows of the first two. once: "t1" for columns that are read
    again only when the first-level cache holds others. `ahead`, and so many rows, are fetched into
    the second-level cache.
    """
    lines = [
        "tileloadd (%0, %3, 1), tmm4",
        f"tileloadd{once} (%2, %4, 1), tmm6",
        "tdpbf16ps tmm6, tmm4, tmm0",
        f"tileloadd{once} 1024(%2, %4, 1), tmm7",
        "tdpbf16ps tmm7, tmm4, tmm1",
        "tileloadd (%1, %3, 1), tmm5",
        *(f"prefetcht1 {stride * i}(%5)" for i in range(count)),
        "tdpbf16ps tmm6, tmm5, tmm2",
        "tdpbf16ps tmm7, tmm5, tmm3",
    ]
    operands = [rows, below, columns, f"{stride}L", "64L", *([ahead] if count else [])]
    return volatile(lines, *operands)


def keep(place: str, below: str, stride: int) -> str:
    """Store the sums as rows of float32, the lower 16 of them at `below`; stride is in bytes."""
    return _move("tilestored tmm{}, {}", place, below, stride)


def take(place: str, below: str, stride: int) -> str:
    """Load sums that `keep` stored."""
    return _move("tileloadd {1}, tmm{0}", place, below, stride)


def _move(line: str, place: str, below: str, stride: int) -> str:
    places = ("(%0, %2, 1)", "64(%0, %2, 1)", "(%1, %2, 1)", "64(%1, %2, 1)")
    lines = [line.format(i, at) for i, at in enumerate(places)]
    return volatile(lines, place, below, f"{stride}L")
