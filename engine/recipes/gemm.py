"""Matrix products in float32: a tile of sums that stays in registers while the depth goes by.

The left factor is read as it lies, a number of each row at a time; the right one lies in panels of
columns (see panels.py). A work-group goes through many rows with one panel, and fetches the next
one meanwhile: without that, the first rows would wait for memory. Panels that hold fewer bits are
turned into float32 once per work-group, in memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node
from engine.recipes import panel_code as code
from engine.recipes import panels
from engine.recipes.panel_code import Step
from engine.recipes.panels import Form, PanelProduct
from engine.recipes.product import Product
from engine.recipes.settings import Settings
from engine.recipes.views import Operand, strided
from engine.symbolic import upper

# (lanes, columns of a panel) -> rows and vectors of a tile of sums
SHAPES = {(16, 64): (6, 4), (16, 32): (8, 2), (8, 64): (6, 2), (8, 32): (6, 2)}
SHAPES |= {(4, 64): (6, 4), (4, 32): (6, 4)}
FEWEST = 32  # rows that make it pay to lay activations out in panels
CACHE = {16: 3 << 19, 8: 1 << 19, 4: 1 << 19}  # lanes -> bytes of left rows that stay in the cache
DEEPEST = 1 << 14  # sums whose panel in float32 is memory that a work-group may have
UNPACKED = 128  # rows that make it pay to turn a panel into float32
FAR = 512  # multiples of so many floats apart, numbers compete for the same places in caches
SPREAD = 4  # times the size of what it is from, that an operand is stored at
GROUPS = 4  # work-groups per core, at least, where there are enough rows


@dataclass(frozen=True)
class RegisterTile(PanelProduct):
    """Many rows: a tile of sums after the other.

    runs: where in its row each of the equal parts of the depth begins.
    """

    block: int
    beside: int = 1
    runs: tuple[int, ...] = (0,)

    @property
    def run(self) -> int:
        """How long such a part is."""
        return self.depth // len(self.runs)

    @property
    def rows(self) -> int:
        """Rows whose sums stay in registers."""
        return SHAPES[self.lanes, self.columns][0]

    @property
    def wide(self) -> int:
        """Columns whose sums do."""
        return SHAPES[self.lanes, self.columns][1] * self.lanes

    @property
    def strip(self) -> int:
        return 4 * self.rows

    @property
    def work(self) -> int:
        """The panel in float32, where it isn't so already."""
        return 0 if self.form.is_float32 else self.depth * self.columns * 4

    @property
    def shares(self) -> int:
        """In how many parts the next panel is fetched: one per tile of sums, 8 at most."""
        most = min(upper(self.rows_in_all), self.block) // self.rows * (self.columns // self.wide)
        return next((n for n in (8, 4, 2) if n <= most), 1)

    @property
    def share(self) -> int:
        """Numbers of such a part."""
        return self.depth * self.columns // self.shares

    @property
    def name(self) -> str:
        place = panels.named(self.view)
        name = f"fma{self.lanes}_{self.form.name}_{self.depth}_{place}_{self.shares}"
        return "_".join([name, *map(str, self.runs)]) if len(self.runs) > 1 else name

    def source(self) -> tuple[str, ...]:
        return code.helpers(self.lanes, self.native), _source(self)


def rewrite(found: Product, settings: Settings) -> Node | None:
    """The product by tiles of sums, where it is large enough to pay for its panels."""
    _, m, k = found.left.shape
    n = found.right.shape[1]
    if not panels.fits(settings.target, found):
        return None
    weight = settings.is_weight(found.right)
    if not weight and (upper(m) < FEWEST or _is_spread(found.right)):
        return None
    if _is_better_swapped(found, settings):
        return None
    form = panels.form_of(found.right, settings)
    if form is None or not form.is_float32 and k > DEEPEST:
        return None
    left = _left(panels.padded(found.left, form), settings)
    if left is None:
        return None
    if weight:
        right = settings.pack(found.right, form.layout)
    else:
        right = g.packed(form.layout(found.right))
    target = settings.target
    depth = -(-k // form.unit) * form.unit
    spec = RegisterTile(form, left.view, m, n, depth, target.lanes, code.is_native(target), 0)
    groups = form.batch(right) * upper(form.panels(right))
    spec = replace(spec, block=block(spec, groups, target.cores))
    return g.intrinsic(spec, (left.base, right))


def _is_better_swapped(found: Product, settings: Settings) -> bool:
    """Whether the left factor had better be laid out in panels than the right one."""
    if settings.is_weight(found.right) or not settings.is_weight(found.left):
        return False
    right = strided(found.right)
    if right is not None and right.view.strides[2] == 1:
        return True
    form = panels.form_of(found.left, settings)
    return form is None or not form.is_float32


def _left(x: Node, settings: Settings) -> Operand | None:
    """The left factor where it lies, or stored; None if that took too much."""
    found = strided(x, ())
    if found is not None and _reads_well(found.view.strides):
        return found
    if settings.is_weight(x):
        return Operand(settings.pack(x, g.packed), panels.in_rows(x))
    return None if _is_spread(x) else Operand(g.packed(x), panels.in_rows(x))


def _is_spread(x: Node) -> bool:
    """Whether x, once computed, takes much more memory than what it is from: windows do."""
    return upper(x.numel) > SPREAD * max((upper(n.numel) for n in panels.sources(x)), default=0)


def _reads_well(strides: tuple[int, ...]) -> bool:
    """Rows lie in a row, or beside each other at a distance that caches get along with."""
    _, row, deep = strides
    return deep == 1 or (row == 1 and deep % FAR != 0)


def block(spec: RegisterTile, panels_in_all: int, cores: int) -> int:
    """Rows per work-group: as many as stay in the cache, if that leaves work for every core."""
    rows = max(CACHE[spec.lanes] // (4 * spec.depth), UNPACKED if spec.work else 0)
    shared = upper(spec.rows_in_all) * panels_in_all // (GROUPS * cores)
    return max(1, min(rows, shared) // spec.strip) * spec.strip


# --- the code --------------------------------------------------------------------------------


def _source(spec: RegisterTile) -> str:
    form, rows, columns = spec.form, spec.rows, spec.columns
    depth, row, fresh = spec.depth, spec.view.strides[1], form.is_float32
    part = f"((row + r) / {rows} * {columns // spec.wide} + c / {spec.wide}) % {spec.shares}"
    given = f"""
    __global const float* left, __global const {form.word}* right,
    int batch, int row, int column, int place, int tiles"""
    panel = f"""
  __global const {form.word}* w = right;
  w += ((long)batch * panels + column / {columns}) * {form.words(depth)};"""
    begin = "" if fresh else _unpack(spec, given, panel)
    if not fresh:
        panel = "\n  const float* w = (const float*)work;"
    mark, name = code.mark(spec.lanes), spec.name
    return f"""{_sums(spec, rows)}{_sums(spec, rows // 2)}{begin}
{mark} void {name}_tile(float* tile, {"" if fresh else "uchar* work,"}{given},
    int rows, int panels, int apart) {{{panel}
  __global const float* x = left + {spec.view.offset} + (long)batch * apart + (long)row * {row};
  int r = 0;
  for (; r + {rows} <= rows; r += {rows}, x += {rows * row}, tile += {rows * columns})
    for (int c = 0; c < {columns}; c += {spec.wide}) {{
      const int part = {part};
      {name}_{rows}(tile + c, x, w + c, w + {depth * columns} + part * {spec.share}, 0);
    }}
  for (; r < rows; r += {rows // 2}, x += {rows // 2 * row}, tile += {rows // 2 * columns})
    for (int c = 0; c < {columns}; c += {spec.wide})
      {name}_{rows // 2}(tile + c, x, w + c, w, rows - r);
}}"""


def _sums(spec: RegisterTile, rows: int) -> str:
    """A function for a tile of sums; the lower one takes its last row again if it has fewer."""
    lanes, wide = spec.lanes, spec.wide
    _, row, deep = spec.view.strides
    space = "const" if spec.work else code.GLOBAL
    read = code.reader(Form(dt.float32, None, spec.columns), lanes, 0, wide, space)
    fetch: list[str] = []
    following = ""
    parts = len(spec.runs) > 1
    at = "o + (K)" if parts else "(K)"  # o counts from the row's beginning
    if rows == spec.rows:
        pointers, taken = "", [f"x[{r * row} + {at} * {deep}]" for r in range(rows)]
        advance = f"x += {read.deep * deep};"
        if not spec.work:
            lines = read.words // code.LINE // spec.shares
            fetch = [f"__builtin_prefetch(next + {code.LINE * i}, 0, 2);" for i in range(lines)]
            following = f" next += {code.LINE * lines};"
    else:
        pointers = code.row_pointers(rows, row)
        taken = [f"x{r}[{at} * {deep}]" for r in range(rows)]
        advance = " ".join(f"x{r} += {read.deep * deep};" for r in range(rows))
    if parts:
        advance = f"o += {read.deep};"
    advance += following
    return f"""
{code.mark(lanes)} void {spec.name}_{rows}(
    float* tile, __global const float* x, {space} float* w, {space} float* next, int rows) {{
  {pointers}
{code.sums(read, spec.run, taken, advance, before=fetch, runs=spec.runs)}
{code.kept(rows, wide, lanes, spec.columns)}
}}"""


def _unpack(spec: RegisterTile, given: str, panel: str) -> str:
    """The functions around the tiles of a work-group: its panel becomes float32 first."""
    read = code.reader(spec.form, spec.lanes)

    def each(_: int, step: Step) -> list[str]:
        numbers = step.names
        if read.scale:
            numbers = [f"{x} * {a} + {b}" for x, a, b in zip(numbers, read.scale, read.offset)]
        return [
            f"*(zoo_columns*)(to + ({step.at}) * {spec.columns} + {v * spec.lanes}) = {x};"
            for v, x in enumerate(numbers)
        ]

    return f"""
{code.mark(spec.lanes)} void {spec.name}_begin(uchar* work,{given},
    int panels, int apart) {{{panel}
  float* to = (float*)work;
{code.turns(read, spec.depth, each, f"to += {read.deep * spec.columns};")}
}}
static void {spec.name}_end(void) {{}}"""
