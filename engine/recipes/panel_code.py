"""Code for panels of columns (see panels.py): reads them as float32 vectors, sums their products.

All of it is OpenCL C over vectors of 4, 8 or 16 numbers, a column to a lane. `w` points into the
panel, at what is read next; sums are vectors a0_0, a0_1, … (row, vector).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine import dtype as dt
from engine.ir import Target
from engine.recipes.blocks import PANEL, Layout
from engine.recipes.panels import Form
from engine.recipes.product import BLOCK

LINE = 16  # numbers of float32 that the cache fetches at once
GLOBAL = "__global const"
GROUP = 16  # columns that lie beside each other in tiles and blocks


class Step(NamedTuple):
    """Vectors of columns at one place of the depth.

    at: the place in C, counted from the start of the turn; lines: what must run before; names: the
    vectors, expressions in C.
    """

    at: str
    lines: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Reader:
    """Code that goes through a panel in turns of `deep` places, and `words` words.

    A turn is `lines`, then `inner` times (u counts) the steps. Quantised columns are scale * step +
    offset; scale and offset are vectors in C, that `lines` define, and () elsewhere.
    """

    deep: int
    words: int
    inner: int
    lines: tuple[str, ...]
    steps: tuple[Step, ...]
    scale: tuple[str, ...] = ()
    offset: tuple[str, ...] = ()


def mark(lanes: int) -> str:
    """What a function's definition starts with: LLVM halves wide vectors where it isn't told."""
    return f"static __attribute__((min_vector_width({32 * lanes})))"


def is_native(target: Target) -> bool:
    """Whether vectors of halves become floats by an instruction that this code knows."""
    needed = {16: {"f16c", "avx512f"}, 8: {"f16c", "avx2"}, 4: {"f16c"}}[target.lanes]
    return needed <= target.features


def halves(lanes: int, native: bool) -> str:
    """The body of a function that reads a vector of halves at p as float32."""
    if native:
        return (
            f'float{lanes} r; __asm__("vcvtph2ps %1, %0" : "=v"(r) : '
            f'"m"(*(__global const ushort{lanes}*)p)); return r;'
        )
    return f"return vload_half{lanes}(0, (__global const half*)p);"


def helpers(lanes: int, native: bool) -> str:
    """What the code of a Reader calls."""
    f, i = f"float{lanes}", f"int{lanes}"
    return f"""
typedef {f} zoo_columns __attribute__((aligned(4)));
typedef {i} zoo_words __attribute__((aligned(4)));
static inline {f} zoo_columns_of_halves(__global const ushort* p) {{ {halves(lanes, native)} }}"""


def reader(form: Form, lanes: int, ahead: int = 0, part: int = 0, space: str = GLOBAL) -> Reader:
    """Code for the columns of the panel at `w`, which lies in `space`; the first `part` of them.

    What is read is fetched `ahead` bytes before, if that isn't 0.
    """
    columns = range(0, part or form.width, lanes)
    if form.kind is not None:
        return _blocks_reader(form.kind, lanes, columns, ahead)
    if form.dtype is dt.bfloat16:
        return _pairs_reader(lanes, columns, ahead)
    size = form.dtype.itemsize
    steps = []
    for k in range(4):
        names = tuple(f"w{k}_{c}" for c in columns)
        lines = []
        for name, c in zip(names, columns):
            at = f"w + {form.width * k + c}"
            lines += _fetch(at, (form.width * k + c) * size, lanes * size, ahead)
            value = f"*({space} zoo_columns*)({at})"
            if not form.is_float32:
                value = f"zoo_columns_of_halves({at})"
            lines.append(f"const float{lanes} {name} = {value};")
        steps.append(Step(str(k), tuple(lines), names))
    return Reader(4, 4 * form.width, 1, (), tuple(steps))


def _fetch(at: str, offset: int, size: int, ahead: int) -> list[str]:
    """Ask for the cache line that is read `ahead` bytes later, at the first read of a line."""
    if not ahead or offset % 64 >= size:
        return []
    return [f"__builtin_prefetch((__global const uchar*)({at}) + {ahead}, 0, 2);"]


def _pairs_reader(lanes: int, columns: range, ahead: int) -> Reader:
    lines, low, high = [], [], []
    for c in columns:
        at = f"w + {GROUP} * u + {c // GROUP * 256 + c % GROUP}"
        lines += _fetch(at, 4 * (c % GROUP), 4 * lanes, ahead)
        lines.append(f"const int{lanes} b{c} = *(__global const zoo_words*)({at});")
        low.append(f"as_float{lanes}(b{c} << 16)")
        high.append(f"as_float{lanes}(b{c} & (int{lanes})(0xffff0000))")
    steps = (Step("2 * u", tuple(lines), tuple(low)), Step("2 * u + 1", (), tuple(high)))
    return Reader(BLOCK, 2 * 256, 16, (), steps)


def _blocks_reader(kind: Layout, lanes: int, columns: range, ahead: int) -> Reader:
    f = f"float{lanes}"
    before, lines, scale, offset = [], [], [], []
    for c in columns:
        before += _fetch(f"w + {c}", 2 * c, 2 * lanes, ahead)
        before.append(f"const {f} scale{c} = zoo_columns_of_halves(w + {c});")
        if kind.has_least:
            least = f"zoo_columns_of_halves(w + {PANEL + c})"
            before += _fetch(f"w + {PANEL + c}", 2 * c, 2 * lanes, ahead)
        else:
            least = f"scale{c} * {float(-kind.zero)}f"
        before.append(f"const {f} offset{c} = {least};")
        at = f"w + {kind.halves} + 64 * u + {c // GROUP * 32 + 2 * (c % GROUP)}"
        lines += _fetch(at, 4 * (c % GROUP), 4 * lanes, ahead)
        lines.append(f"const int{lanes} b{c} = *(__global const zoo_words*)({at});")
        scale.append(f"scale{c}")
        offset.append(f"offset{c}")
    steps = []
    for i in range(4):
        for nibble in range(8 // kind.bits):
            shift, mask = 8 * i + kind.bits * nibble, (1 << kind.bits) - 1
            names = tuple(f"convert_{f}((b{c} >> {shift}) & {mask})" for c in columns)
            steps.append(Step(f"4 * u + {i + 16 * nibble}", () if steps else tuple(lines), names))
    return Reader(
        BLOCK, kind.words, kind.bits, tuple(before), tuple(steps), tuple(scale), tuple(offset)
    )


def turns(
    reader: Reader,
    depth: int,
    each: Callable[[int, Step], list[str]],
    advance: str,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> str:
    """C that goes through a panel; `each` makes the code of a numbered step of a turn.

    before and after surround the steps of a turn; advance moves on what isn't the panel.
    """
    steps = [[*s.lines, *each(i, s)] for i, s in enumerate(reader.steps)]
    rest = depth % reader.deep
    inside = "\n      ".join(line for step in steps for line in step)
    if reader.inner > 1:
        inside = f"for (int u = 0; u < {reader.inner}; u++) {{\n      {inside}\n    }}"
    start, end = (
        "".join(f"    {line}\n" for line in part) for part in ((*reader.lines, *before), after)
    )
    last = "\n    ".join(line for step in steps[:rest] for line in step)
    return f"""  for (int b = 0; b < {depth // reader.deep}; b++) {{
{start}    {inside}
{end}    w += {reader.words}; {advance}
  }}
  {{
    {last}
  }}"""


def sums(
    reader: Reader,
    depth: int,
    rows: Sequence[str],
    advance: str,
    splits: int = 1,
    totals: Sequence[str] = (),
    before: Sequence[str] = (),
    runs: Sequence[int] = (0,),
) -> str:
    """C that leaves the sums of rows times columns in a0_0, a0_1, … (row, vector).

    rows: each row's number at a place, in C with K for the place. A sum is made in `splits` parts,
    which don't wait for each other. totals: for quantised columns the sum of each row's block b.
    """
    kind = "zoo_columns"
    vectors = range(len(reader.steps[0].names))
    every = [(r, v) for r in range(len(rows)) for v in vectors]
    part = "s" if reader.scale else "a"
    zero = "0.0f"
    cleared = [f"{kind} {part}{r}_{v}_{p} = {zero};" for r, v in every for p in range(splits)]

    def each(number: int, step: Step) -> list[str]:
        values = [f"const {kind} v{number}_{v} = {step.names[v]};" for v in vectors]
        return values + [
            f"{part}{r}_{v}_{number % splits} += ({rows[r].replace('K', step.at)}) * v{number}_{v};"
            for r, v in every
        ]

    def whole(r: int, v: int) -> str:
        return " + ".join(f"{part}{r}_{v}_{p}" for p in range(splits))

    if not reader.scale:
        loop = turns(reader, depth, each, advance, before)
        if len(runs) > 1:
            rest = depth % reader.deep * (reader.words // reader.deep)
            loop = f"""  const int runs[] = {{{", ".join(map(str, runs))}}};
  for (int run = 0; run < {len(runs)}; run++) {{
  int o = runs[run];
{loop}
  w += {rest};
  }}"""
        result = [f"const {kind} a{r}_{v} = {whole(r, v)};" for r, v in every]
        return "\n".join([f"  {' '.join(cleared)}", loop, f"  {' '.join(result)}"])
    after = [
        f"a{r}_{v} += {reader.scale[v]} * ({whole(r, v)}) + {reader.offset[v]} * {totals[r]};"
        for r, v in every
    ]
    result = [f"{kind} a{r}_{v} = {zero};" for r, v in every]
    loop = turns(reader, depth, each, advance, (*before, *cleared), after)
    return "\n".join([f"  {' '.join(result)}", loop])


def row_pointers(rows: int, stride: int) -> str:
    """C that finds the rows from `x` on; behind the last of them, that one again."""
    at = [f"x + min({r}, rows - 1) * {stride}L" if r else "x" for r in range(rows)]
    return " ".join(f"__global const float* x{r} = {p};" for r, p in enumerate(at))


def kept(rows: int, columns: int, lanes: int, width: int) -> str:
    """C that puts the sums of so many columns into a tile, `width` numbers to a row."""
    return "\n".join(
        f"  *(zoo_columns*)(tile + {r * width + c}) = a{r}_{c // lanes};"
        for r in range(rows)
        for c in range(0, columns, lanes)
    )
