"""Products on a GPU, by teams that stage both factors (see engine/staged.py).

A tile of sums is 64 columns wide; 128 blocks of it are dealt to the work-items, each block's sums
stay in an item's registers. Where the processor multiplies bfloat16 matrices and both factors are
bfloat16 in value, four groups of 32 items each make a quarter of the tile by `mma`; on Apple's, by
matrices of a simdgroup, which are float32 and as exact as work-items alone.
Sources: PTX ISA, "Matrix Fragments for mma.m16n8k16"; Metal Shading Language Specification,
"SIMD-Group Matrix Functions".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine import dtype as dt
from engine import graph as g
from engine.dialects import DIALECTS
from engine.dtype import DType
from engine.graph import Node, Op, rebuild, toposort
from engine.ir import Target
from engine.recipes import tiles
from engine.recipes.analysis import analyse
from engine.recipes.product import Product, again, find, multiplied
from engine.recipes.settings import Settings
from engine.schedule import Kernel
from engine.staged import StagedPlan
from engine.symbolic import Int, product, upper
from engine.tiles import ROOM

COLUMNS = 64  # of a tile
BLOCKS = 128  # of a tile, 8 beside 16
FEWEST = 16  # rows, columns and depth that are worth a tile
LOCAL = 32 << 10  # bytes that a team may share on every GPU
TOGETHER = 128  # work-items of a team that multiplies by units: four of them, a quarter each
TENSOR_CORES = "sm_80"  # the feature of processors with mma for bfloat16
SIMDGROUPS = "apple7"  # and of those with matrices of a simdgroup


@dataclass(frozen=True)
class Staged:
    """A StagedProduct of (batch, rows, depth) and (batch, columns, depth)."""

    dialect: str
    team: int
    strip: int
    unit: (
        str  # what multiplies: "" for the work-items, "mma" or "simdgroup" for 32 of them together
    )
    columns: int = COLUMNS
    beside: int = 1
    work: int = 0

    @property
    def block(self) -> int:
        return self.strip

    @property
    def step(self) -> int:
        return 32 if self.unit == "mma" else 16

    @property
    def deep(self) -> bool:
        return self.unit == "mma"

    @property
    def staged(self) -> DType:
        return dt.bfloat16 if self.unit == "mma" else dt.float32

    def pitch(self, rows: int) -> int:
        """Places of memory that work-items read at once lie in different banks."""
        return self.step + 8 if self.unit == "mma" else rows + 4

    @property
    def tile_bytes(self) -> int:
        return 4 * (self.strip * self.columns + ROOM)

    @property
    def staged_bytes(self) -> int:
        places = sum(
            self.pitch(rows) * (rows if self.deep else self.step)
            for rows in (self.strip, self.columns)
        )
        return places * self.staged.itemsize

    @property
    def kind(self) -> str:
        return "simdgroup_float8x8" if self.unit == "simdgroup" else ""

    @property
    def sums(self) -> int:
        if self.unit == "simdgroup":
            return self.strip // 16 * 4
        return self.strip * self.columns // self.team

    @property
    def name(self) -> str:
        return f"staged{self.strip}{self.unit and '_' + self.unit}_{self.team}"

    def shape(self, left: Node, right: Node) -> tuple[Int, ...]:
        return left.shape[0], left.shape[1], right.shape[1]

    def ints(self, left: Node, right: Node) -> tuple[Int, ...]:
        return ()

    def flops(self, left: Node, right: Node) -> Int:
        return 2 * left.shape[2] * product(self.shape(left, right))

    def meaning(self, left: Node, right: Node) -> Node:
        return multiplied(left, right)

    def source(self) -> tuple[str, ...]:
        match self.unit:
            case "mma":
                return MMA, _by_mma(self)
            case "simdgroup":
                return (_by_simdgroup(self),)
        return (_by_blocks(self),)


def rewrite(found: Product, settings: Settings) -> Node | None:
    """Both factors rounded to bfloat16, where that may be and is what the processor is fast at."""
    target = settings.target
    if settings.terms != 1 or not _has_tensor_cores(target) or not _is_large(found):
        return None
    if _is_bfloat16(found.left) and _is_bfloat16(found.right):
        return None
    return multiplied(_rounded(found.left, settings), _rounded(found.right, settings))


def _rounded(x: Node, settings: Settings) -> Node:
    """A factor in bfloat16, still as float32. Activations are stored so, once for all who stage
    them: what windows share isn't rounded for each."""
    chain: list[Node] = []
    base = x
    while base.op in g.MOVEMENT:
        chain.append(base)
        base = base.src[0]
    if _is_bfloat16(base):
        return x
    near = g.cast(base, dt.bfloat16)
    near = near if settings.is_weight(base) else g.packed(near)
    return g.cast(again(chain, near), dt.float32)


def tiled(kernel: Kernel, target: Target) -> tuple[Kernel, StagedPlan] | None:
    """The kernel with its products as INTRINSICs, and the plan for it; None if that doesn't do."""
    if target.team == 1 or kernel.rows is not None:
        return None
    sums = [n for n in toposort([kernel.root]) if n.op is Op.REDUCE]
    found = [find(n) for n in sums]
    if not sums or None in found or not all(_is_large(p) for p in found):
        return None
    strip = 64 if len(sums) == 1 and max(upper(p.left.shape[1]) for p in found) > 32 else 32
    found = [_columns_last(p) for p in found]
    spec = Staged(target.dialect, target.team, strip, _unit(found, target))
    if len(sums) * spec.tile_bytes + spec.staged_bytes > LOCAL:
        return None
    new: dict[Node, Node] = {}
    for n in toposort([kernel.root]):
        if n in sums:
            p = found[sums.index(n)]
            new[n] = p.restored(g.intrinsic(spec, (p.left, p.right)))
        else:
            new[n] = rebuild(n, new)
    changed = _columns_joined(replace(kernel, root=new[kernel.root]))
    facts = analyse(changed)
    plan = tiles.match(changed, facts, target)
    if plan is None or not plan.rows:
        return None
    _, axis = min((share, axis) for share, axis in tiles.column_axes(facts))
    across = tuple(tuple(_is_across(x) for x in node.src) for node, _ in plan.where)
    order = (*(a for a in plan.order if a != axis), axis)
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    values |= {"recipe": "staged", "order": order, "vector": axis, "team": target.team}
    values["unroll"] = (1,) * len(plan.unroll)
    return changed, StagedPlan(**values, across=across)


def _columns_joined(kernel: Kernel) -> Kernel:
    """The kernel with the axes of its columns as one, if they are neighbours: of whatever size they
    are, a tile then ends where the next begins."""
    facts = analyse(kernel)
    axes = sorted({axis for _, axis in tiles.column_axes(facts)}) if facts.tiles else []
    shape, old = kernel.root.shape, kernel.target
    if len(axes) < 2 or kernel.box is not None or axes != list(range(axes[0], axes[-1] + 1)):
        return kernel
    joined = (*shape[: axes[0]], product(shape[a] for a in axes), *shape[axes[-1] + 1 :])
    target = g.make(Op.BUFFER, (), old.arg, old.dtype, joined)
    return replace(kernel, root=g.reshape(kernel.root, joined), target=target)


def _unit(found: list[Product], target: Target) -> str:
    """What multiplies the factors of these products, as exactly as work-items would."""
    if target.team != TOGETHER:
        return ""
    if _has_tensor_cores(target) and all(_is_bfloat16(x) for p in found for x in (p.left, p.right)):
        return "mma"
    is_apple = target.dialect == "metal" and SIMDGROUPS in target.features
    return "simdgroup" if is_apple else ""


def _has_tensor_cores(target: Target) -> bool:
    return target.dialect == "cuda" and TENSOR_CORES in target.features


def _is_large(found: Product) -> bool:
    depth, m, n = found.depth, found.left.shape[1], found.right.shape[1]
    return isinstance(depth, int) and min(depth, upper(m), upper(n)) >= FEWEST


def _columns_last(found: Product) -> Product:
    """The product whose columns are neighbours in the result.

    Of those that lie apart, as the pixels of several pictures do, the outer ones count as a batch.
    """
    _, rows, columns = found.axes
    if max(rows, default=-1) > max(columns, default=-1):
        return _columns_last(found.swapped())
    inner = [a for a in columns if not any(a < row < columns[-1] for row in rows)]
    outer = tuple(a for a in columns if a not in inner)
    if not outer:
        return found
    shape, (batch, m, depth) = found.node.shape, found.left.shape
    count = product(shape[a] for a in outer)
    left = g.reshape(found.left, (batch, 1, m, depth))
    left = g.reshape(g.expand(left, (batch, count, m, depth)), (batch * count, m, depth))
    n = product(shape[a] for a in inner)
    right = g.reshape(found.right, (batch * count, n, depth))
    axes = ((*found.axes[0], *outer), rows, tuple(inner))
    return Product(found.node, left, right, axes)


def _is_bfloat16(x: Node) -> bool:
    """Whether a float32 node's values are all bfloat16 ones."""
    while x.op in g.MOVEMENT:
        x = x.src[0]
    return x.op is Op.CAST and x.src[0].dtype is dt.bfloat16


def _is_across(factor: Node) -> bool:
    """Whether its largest part lies in a row across the depth and not along it."""
    target = g.make(Op.BUFFER, (), (0, False), factor.dtype, factor.shape)
    facts = analyse(Kernel(factor, target))
    largest = max(facts.loads, key=lambda load: upper(load.buffer.numel), default=None)
    _, row, deep = facts.axes
    if largest is None or row is None or deep is None:
        return False
    return largest.stride(row) == 1 and largest.stride(deep) != 1


# --- the code --------------------------------------------------------------------------------


def _by_blocks(spec: Staged) -> str:
    """Sums in float32: a block is strip / 8 rows of 4 columns."""
    d = DIALECTS[spec.dialect]
    rows, blocks, wide = spec.strip // 8, BLOCKS // spec.team, spec.columns // 16
    own, shared = f"{d.private} float*", f"{d.shared} const float*"
    where = f"const int at = item + b * {spec.team}, r = at / 16 * {rows}, c = at % 16 * {wide};"
    return f"""
static inline void {spec.name}_clear({own} sums, const int item) {{
  for (int i = 0; i < {spec.sums}; i++) sums[i] = 0.0f;
}}
static inline void {spec.name}_step(
    {own} sums, {shared} left, {shared} right, const int item) {{
  for (int b = 0; b < {blocks}; b++) {{
    {where}
    for (int k = 0; k < {spec.step}; k++) {{
      float x[{rows}], w[{wide}];
      for (int i = 0; i < {rows}; i++) x[i] = left[k * {spec.pitch(spec.strip)} + r + i];
      for (int j = 0; j < {wide}; j++) w[j] = right[k * {spec.pitch(spec.columns)} + c + j];
      for (int i = 0; i < {rows}; i++)
        for (int j = 0; j < {wide}; j++) sums[(b * {rows} + i) * {wide} + j] += x[i] * w[j];
    }}
  }}
}}
static inline void {spec.name}_keep(
    {d.shared} float* tile, {own} sums, const int item) {{
  for (int b = 0; b < {blocks}; b++) {{
    {where}
    for (int i = 0; i < {rows}; i++)
      for (int j = 0; j < {wide}; j++)
        tile[(r + i) * {spec.columns} + c + j] = sums[(b * {rows} + i) * {wide} + j];
  }}
}}"""


# the processor's own instruction; what runs elsewhere brings another definition
MMA = """
#ifdef __CUDACC_RTC__
static inline void zoo_mma(float* d, const uint* a, const uint* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif"""


def _by_mma(spec: Staged) -> str:
    """A quarter of the tile for each 32 items: strip / 32 fragments of 16 rows beside 4 of 8."""
    high, pitch = spec.strip // 32, spec.pitch(0) // 2  # two numbers to a word
    where = f"""const int lane = item % 32, g = lane / 4, q = lane % 4;
  const int r = item / 64 * {16 * high}, c = item / 32 % 2 * 32;"""
    return f"""
static inline void {spec.name}_clear(float* sums, const int item) {{
  for (int i = 0; i < {spec.sums}; i++) sums[i] = 0.0f;
}}
static inline void {spec.name}_step(
    float* sums, const ushort* left, const ushort* right, const int item) {{
  {where}
  const uint *x = (const uint*)left + (r + g) * {pitch} + q;
  const uint *w = (const uint*)right + (c + g) * {pitch} + q;
  for (int k = 0; k < {spec.step // 2}; k += 8) {{
    uint a[{high}][4], b[4][2];
    for (int i = 0; i < {high}; i++)
      for (int e = 0; e < 4; e++)
        a[i][e] = x[(16 * i + e % 2 * 8) * {pitch} + k + e / 2 * 4];
    for (int j = 0; j < 4; j++)
      for (int e = 0; e < 2; e++) b[j][e] = w[8 * j * {pitch} + k + e * 4];
    for (int i = 0; i < {high}; i++)
      for (int j = 0; j < 4; j++) zoo_mma(sums + (i * 4 + j) * 4, a[i], b[j]);
  }}
}}
static inline void {spec.name}_keep(float* tile, float* sums, const int item) {{
  {where}
  for (int i = 0; i < {high}; i++)
    for (int j = 0; j < 4; j++)
      for (int e = 0; e < 4; e++)
        tile[(r + 16 * i + g + e / 2 * 8) * {spec.columns} + c + 8 * j + 2 * q + e % 2] =
            sums[(i * 4 + j) * 4 + e];
}}"""


def _by_simdgroup(spec: Staged) -> str:
    """A quarter of the tile for each simdgroup: strip / 16 matrices of 8 x 8 beside 4.

    Left factors lie across the depth, so their matrices are read transposed.
    """
    high, sums = spec.strip // 16, f"thread {spec.kind}* sums"
    where = f"const int r = item / 64 * {8 * high}, c = item / 32 % 2 * 32;"
    left, right = spec.pitch(spec.strip), spec.pitch(spec.columns)
    return f"""
static inline void {spec.name}_clear({sums}, const int item) {{
  for (int i = 0; i < {spec.sums}; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}}
static inline void {spec.name}_step(
    {sums}, threadgroup const float* left, threadgroup const float* right, const int item) {{
  {where}
  for (int k = 0; k < {spec.step}; k += 8) {{
    {spec.kind} a[{high}], b[4];
    for (int i = 0; i < {high}; i++)
      simdgroup_load(a[i], left + k * {left} + r + 8 * i, {left}, ulong2(0, 0), true);
    for (int j = 0; j < 4; j++) simdgroup_load(b[j], right + k * {right} + c + 8 * j, {right});
    for (int i = 0; i < {high}; i++)
      for (int j = 0; j < 4; j++)
        simdgroup_multiply_accumulate(sums[i * 4 + j], a[i], b[j], sums[i * 4 + j]);
  }}
}}
static inline void {spec.name}_keep(threadgroup float* tile, {sums}, const int item) {{
  {where}
  for (int i = 0; i < {high}; i++)
    for (int j = 0; j < 4; j++)
      simdgroup_store(
          sums[i * 4 + j], tile + (r + 8 * i) * {spec.columns} + c + 8 * j, {spec.columns});
}}"""
