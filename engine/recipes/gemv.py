"""Few rows times a weight in float32 arithmetic: what bounds them is reading the weight, once.

The weight streams by in panels (see panels.py), each column a lane, and up to four rows take what
is loaded. Quantised blocks are summed as the small ints they hold and scaled once per block.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import graph as g
from engine.graph import Node
from engine.recipes import panel_code as code
from engine.recipes import panels
from engine.recipes.panels import PanelProduct
from engine.recipes.product import BLOCK, Product
from engine.recipes.settings import Settings
from engine.recipes.views import Operand, strided
from engine.symbolic import upper

MOST = 16  # rows; beyond, numbers that are unpacked once for all rows do better
AHEAD = 8192  # bytes that are fetched before they are needed; one stream per core
TOGETHER = {16: 4, 8: 2, 4: 2}  # lanes -> rows whose sums stay in registers


@dataclass(frozen=True)
class Stream(PanelProduct):
    """Few rows. A third operand has the sums (M, depth / 32) of the left one's blocks, where the
    form needs it."""

    strip: int = MOST
    beside: int = 1
    block: int = MOST
    work: int = 0

    @property
    def name(self) -> str:
        place = panels.named(self.view)
        return f"stream{self.lanes}_{self.form.name}_{self.depth}_{place}"

    def source(self) -> tuple[str, ...]:
        return code.helpers(self.lanes, self.native), _source(self)


def rewrite(found: Product, settings: Settings) -> Node | None:
    """The product with a weight on the right, if its rows are few."""
    _, m, k = found.left.shape
    n = found.right.shape[1]
    if not panels.fits(settings.target, found) or upper(m) > MOST:
        return None
    if not settings.is_weight(found.right):
        return None
    form = panels.form_of(found.right, settings)
    if form is None or form.is_float32 and upper(m) > TOGETHER[settings.target.lanes]:
        return None  # tiles of sums read it as fast and do more with it
    x = panels.padded(found.left, form)
    left = strided(x, ())
    if left is None or left.view.strides[2] != 1:
        left = Operand(g.packed(x), panels.in_rows(x))
    operands = [left.base, settings.pack(found.right, form.layout)]
    if form.kind is not None:
        blocks = g.reshape(found.left, (m, k // BLOCK, BLOCK))
        total = g.reduce(blocks, "add", (2,))
        operands.append(g.packed(g.reshape(total, (m, k // BLOCK))))
    depth = -(-k // form.unit) * form.unit
    target = settings.target
    spec = Stream(form, left.view, m, n, depth, target.lanes, code.is_native(target))
    return g.intrinsic(spec, tuple(operands))


# --- the code --------------------------------------------------------------------------------


def _source(spec: Stream) -> str:
    form, name, row = spec.form, spec.name, spec.view.strides[1]
    count, together = spec.depth // BLOCK, TOGETHER[spec.lanes]
    totals, forward = ("totals, ", f"totals += {together * count};") if form.kind else ("", "")
    return f"""{_rows(spec, 1)}{_rows(spec, together)}
{code.mark(spec.lanes)} void {name}_tile(
    float* tile, __global const float* left, __global const {form.word}* right,
    {_TOTALS if form.kind else ""}int batch, int row, int column, int place, int tiles,
    int rows, int panels, int apart) {{
  __global const {form.word}* w = right;
  w += ((long)batch * panels + column / {form.width}) * {form.words(spec.depth)};
  __global const float* x = left + {spec.view.offset} + (long)batch * apart + (long)row * {row};
  {f"totals += (long)row * {count};" if form.kind else ""}
  if (rows == 1) {{
    {name}_1(tile, x, w, {totals}1);
    return;
  }}
  for (int r = 0; r < rows; r += {together}) {{
    {name}_{together}(tile + r * {form.width}, x, w, {totals}rows - r);
    x += {together * row}; {forward}
  }}
}}"""


_TOTALS = "__global const float* totals, "


def _rows(spec: Stream, rows: int) -> str:
    """A function for so many rows; where there are fewer, the last one is taken again."""
    form, lanes = spec.form, spec.lanes
    read = code.reader(form, lanes, AHEAD)
    taken = [f"x{r}[K]" for r in range(rows)]
    advance = " ".join(f"x{r} += {read.deep};" for r in range(rows))
    splits = max(1, 4 * lanes // (form.width * rows))
    count = spec.depth // BLOCK
    totals = [f"totals[min({r}, rows - 1) * {count} + b]" for r in range(rows)]
    return f"""
{code.mark(lanes)} void {spec.name}_{rows}(
    float* tile, __global const float* x, __global const {form.word}* w,
    {_TOTALS if form.kind else ""}int rows) {{
  {code.row_pointers(rows, spec.view.strides[1])}
{code.sums(read, spec.depth, taken, advance, splits, totals)}
{code.kept(rows, form.width, lanes, form.width)}
}}"""
