"""Attention on AMX without a matrix of scores in memory (Dao et al. 2022, FlashAttention).

A work-group takes 32 queries of one head at a time through all keys that they see, some hundred
keys at once: scores by tiles, their softmax by vectors, times the values by tiles again. What it
keeps per query are the largest score so far and the sum of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.recipes import asm
from engine.recipes import terms as split
from engine.recipes.amx import (
    DEEP,
    NEEDED,
    STRIP,
    is_bfloat16,
    left_tiles,
    left_values,
    right_tiles,
    right_values,
)
from engine.recipes.asm import CONFIG
from engine.recipes.blocks import PANEL
from engine.recipes.settings import Settings
from engine.recipes.softmax import LOG2E, find_attention
from engine.symbolic import Int, upper

FEWEST = 33  # queries from which on rounding to bfloat16 and whole tiles pay
TILES = 512  # words of two tiles of columns: 32 by 32 numbers
CHUNK = 256  # keys whose scores lie in scratch memory at once
ROW = CHUNK + 32  # numbers between two rows of them: not a power of two, for the cache's sake


@dataclass(frozen=True)
class Flash:
    """(batch, T, depth) queries in tiles, keys (batch / heads, N, depth) and values (…, depth, N).

    Scores come in powers of two: the queries are scaled by 1 / ln 2. Query i sees the first
    i + visible keys, all if visible is None.
    """

    depth: int
    width: int  # of a value
    heads: int
    queries: Int
    keys: Int
    visible: Int | None
    strip: int = STRIP
    beside: int = 1
    block: int = 128

    @property
    def columns(self) -> int:
        return -(-self.width // PANEL) * PANEL

    @property
    def name(self) -> str:
        seen = "all" if self.visible is None else "causal"
        return f"flash_{self.depth}_{self.width}_{self.heads}_{seen}"

    @property
    def work(self) -> int:
        """Configuration, scores (float32), weights (bfloat16), two floats per query."""
        return CONFIG + STRIP * ROW * (4 + 2) + STRIP * 2 * 4

    def shape(self, queries: Node, keys: Node, values: Node) -> tuple[Int, ...]:
        return queries.shape[0], self.queries, self.width

    def ints(self, queries: Node, keys: Node, values: Node) -> tuple[Int, ...]:
        return queries.shape[1], self.keys, 0 if self.visible is None else self.visible

    def flops(self, queries: Node, keys: Node, values: Node) -> Int:
        pairs = queries.shape[0] * self.queries * self.keys
        return pairs * (self.depth + self.width) * 2

    def meaning(self, queries: Node, keys: Node, values: Node) -> Node:
        q = left_values(queries)
        batch, _, deep = q.shape
        q = g.shrink(q, ((0, batch), (0, self.queries), (0, deep)))
        n, groups = self.keys, batch // self.heads
        k = g.shrink(right_values(keys), ((0, groups), (0, n), (0, deep)))
        v = g.shrink(right_values(values), ((0, groups), (0, self.width), (0, n)))
        weights = softmax2(scores(q, k, self.heads), self.visible)
        weights = g.cast(g.cast(weights[0], dt.bfloat16), dt.float32), weights[1]
        return weighted(*weights, v, self.heads)

    def source(self) -> tuple[str, ...]:
        return (asm.BEGIN, EXP2, WEIGHTS, _products(self), _source(self))


def scores(q: Node, k: Node, heads: int) -> Node:
    """(batch, T, D) and (batch / heads, N, D) -> (batch, T, N) products."""
    batch, t, d = q.shape
    n = k.shape[1]
    shape = (batch, t, n, d)
    q = g.expand(g.reshape(q, (batch, t, 1, d)), shape)
    k = g.expand(_per_head(k, heads), shape)
    return g.reshape(g.reduce(g.binary(Op.MUL, q, k), "add", (3,)), (batch, t, n))


def _per_head(x: Node, heads: int) -> Node:
    """(groups, a, b) -> (groups * heads, 1, a, b)."""
    groups, a, b = x.shape
    x = g.expand(g.reshape(x, (groups, 1, a, b)), (groups, heads, a, b))
    return g.reshape(x, (groups * heads, 1, a, b))


def softmax2(s: Node, visible: Int | None) -> tuple[Node, Node]:
    """2 ** (s - max) of the keys that are seen, (batch, T, N), and its sum, (batch, T, 1)."""
    if visible is not None:
        _, t, n = s.shape
        row = g.binary(Op.ADD, g.iota(t), g.const(visible, dt.int32, (t,)))
        row = g.expand(g.reshape(row, (1, t, 1)), s.shape)
        key = g.expand(g.reshape(g.iota(n), (1, 1, n)), s.shape)
        seen = g.binary(Op.CMPLT, key, row)
        s = g.where(seen, s, g.const(-float("inf"), dt.float32, s.shape))
    largest = g.expand(g.reduce(s, "max", (2,)), s.shape)
    minus = g.binary(Op.MUL, largest, g.const(-1.0, dt.float32, s.shape))
    weights = g.unary(Op.EXP2, g.binary(Op.ADD, s, minus))
    return weights, g.reduce(weights, "add", (2,))


def weighted(weights: Node, total: Node, v: Node, heads: int) -> Node:
    """(batch, T, N) weights and values (batch / heads, width, N) -> (batch, T, width)."""
    batch, t, n = weights.shape
    width = v.shape[1]
    shape = (batch, t, width, n)
    w = g.expand(g.reshape(weights, (batch, t, 1, n)), shape)
    summed = g.reduce(g.binary(Op.MUL, w, g.expand(_per_head(v, heads), shape)), "add", (3,))
    summed = g.reshape(summed, (batch, t, width))
    return g.binary(Op.MUL, summed, g.expand(g.unary(Op.RECIP, total), summed.shape))


def rewrite(node: Node, settings: Settings) -> Node | None:
    """An attention of many queries, where its factors may be rounded to bfloat16."""
    if node.op is not Op.REDUCE or not settings.target.features >= NEEDED | {"avx512dq"}:
        return None
    found = find_attention(node)
    if found is None or found.limits is not None or upper(found.queries.shape[1]) < FEWEST:
        return None
    parts = (found.queries, found.keys, found.values)
    terms = 1 if all(is_bfloat16(x) for x in parts) else settings.terms
    if not terms:
        return None
    if not all(isinstance(x.shape[2], int) and isinstance(x.shape[0], int) for x in parts):
        return None
    scale = g.const(found.scale * LOG2E, dt.float32, found.queries.shape)
    queries = split.left(g.binary(Op.MUL, found.queries, scale), terms, 2)
    queries = g.packed(left_tiles(queries))
    keys = g.packed(right_tiles(split.right(found.keys, terms, 2)))
    values = found.values if terms == 1 else split.join(split.parts(found.values), 2)
    packed = g.packed(right_tiles(g.permute(values, (0, 2, 1))))
    depth, width = queries.shape[2] * DEEP, values.shape[2]
    rows, seen = found.queries.shape[1], found.keys.shape[1]
    spec = Flash(depth, width, found.heads, rows, seen, found.visible)
    out = g.intrinsic(spec, (queries, keys, packed))
    if terms > 1:
        halves = g.reshape(out, (*out.shape[:2], 2, width // 2))
        out = g.reshape(g.reduce(halves, "add", (2,)), (*out.shape[:2], width // 2))
    return found.product.restored(out)


# --- the instructions ------------------------------------------------------------------------

# 2**x, relative error below 6e-6, 0 at -infinity: x - floor(x) by vreduceps, times 2**floor(x)
EXP2 = """
static inline float16 zoo_exp2_short(float16 x) {
  float16 r, p;
  __asm__("vreduceps $1, %1, %0" : "=v"(r) : "v"(x));
  p = r * 0.013534165f + 0.052011466f;
  p = p * r + 0.24144275f;
  p = p * r + 0.69300384f;
  p = p * r + 1.0000026f;
  __asm__("vscalefps %1, %0, %0" : "+v"(p) : "v"(x));
  return p;
}
static inline float zoo_highest(float16 v) {
  float8 a = max(v.lo, v.hi);
  float4 b = max(a.lo, a.hi);
  return max(max(b.x, b.y), max(b.z, b.w));
}
static inline float zoo_sum_of(float16 v) {
  float8 a = v.lo + v.hi;
  float4 b = a.lo + a.hi;
  return (b.x + b.y) + (b.z + b.w);
}
"""


def _source(spec: Flash) -> str:
    deep, wide, name = spec.depth // DEEP, spec.columns, spec.name
    causal = spec.visible is not None
    given = (
        "__global const ushort* queries, __global const uint* keys, __global const uint* values,"
        " int batch, int row, int column, int place, int tiles"
    )
    sizes = "int strips, int n, int visible"
    last = "min(n, row + rows - 1 + visible)" if causal else "n"
    end = "min(n, row + r + visible)" if causal else "n"
    scale = f"for (int c = 0; c < {wide}; c += 16) *(float16*)(tile + r * {wide} + c) *= f;"
    return f"""
static void {name}_begin(uchar* work, {given}, {sizes}) {{ zoo_tiles_begin(work); }}
static void {name}_end(void) {{ zoo_tiles_end(); }}
static void {name}_tile(float* tile, uchar* work, {given}, int rows, {sizes}) {{
  float* const s = (float*)(work + {CONFIG});
  ushort* const p = (ushort*)(s + {STRIP * ROW});
  float* const most = (float*)(p + {STRIP * ROW});
  float* const sum = most + {STRIP};
  const long panels = (n + {PANEL - 1}) / {PANEL}, group = batch / {spec.heads};
  const long strip = (long)batch * strips + row / {STRIP};
  __global const ushort* q = queries + strip * {deep * STRIP * DEEP};
  __global const uint* k = keys + group * panels * {deep * TILES};
  __global const uint* v = values + group * panels * {wide // PANEL * TILES};
  for (int r = 0; r < {STRIP}; r++) {{ most[r] = -INFINITY; sum[r] = 0.0f; }}
  const int last = {last};
  for (int first = 0; first < last; first += {CHUNK}) {{
    const int blocks = (min({CHUNK}, last - first) + {PANEL - 1}) / {PANEL};
    {name}_scores(s, q, k + (long)(first / {PANEL}) * {deep * TILES}, blocks);
    for (int r = 0; r < rows; r++) {{
      const int seen = {end} - first;
      const float f = zoo_weights(s + r * {ROW}, p + r * {ROW}, blocks, seen, most + r, sum + r);
      if (first > 0) {scale}
    }}
    {name}_values(tile, p, v + (long)(first / {PANEL}) * {TILES}, panels, blocks, first > 0);
  }}
  for (int r = 0; r < rows; r++) {{
    const float f = 1.0f / sum[r];
    {scale}
  }}
}}"""


def _products(spec: Flash) -> str:
    """The two products of a chunk: queries with keys, weights with values."""
    deep, wide, name = spec.depth // DEEP, spec.columns, spec.name
    scores = asm.multiply("a", f"a + {16 * DEEP}", "k", 64)
    weighted = asm.multiply(
        f"p + b * {PANEL}", f"p + {16 * ROW} + b * {PANEL}", f"v + b * {TILES}", 2 * ROW
    )
    return f"""
static inline void {name}_scores(
    float* s, __global const ushort* q, __global const uint* k, int blocks) {{
  for (int b = 0; b < blocks; b++, s += {PANEL}) {{
    __global const ushort* a = q;
    {asm.CLEAR}
    for (int d = 0; d < {deep}; d++, k += {TILES}, a += {STRIP * DEEP})
      {scores}
    {asm.keep("s", f"s + {16 * ROW}", 4 * ROW)}
  }}
}}
static inline void {name}_values(
    float* tile, const ushort* p, __global const uint* v, long panels, int blocks, int more) {{
  for (int c = 0; c < {wide}; c += {PANEL}, v += panels * {TILES}) {{
    float* to = tile + c;
    if (more)
      {asm.take("to", f"to + {16 * wide}", 4 * wide)}
    else
      {asm.CLEAR}
    for (int b = 0; b < blocks; b++)
      {weighted}
    {asm.keep("to", f"to + {16 * wide}", 4 * wide)}
  }}
}}"""


# One row of scores -> weights in bfloat16; returns by what all that came before is to be scaled.
WEIGHTS = f"""
static inline float zoo_weights(
    float* s, ushort* p, int blocks, int seen, float* most, float* sum) {{
  const int16 lanes = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int i = max(0, seen) & ~15; i < blocks * {PANEL}; i += 16) {{
    float16* x = (float16*)(s + i);
    *x = select((float16)(-INFINITY), *x, lanes + i < (int16)(seen));
  }}
  float16 a = *(float16*)s, b = *(float16*)(s + 16);
  for (int i = {PANEL}; i < blocks * {PANEL}; i += {PANEL}) {{
    float16 x = *(float16*)(s + i), y = *(float16*)(s + i + 16);
    __asm__("vmaxps %1, %0, %0" : "+v"(a) : "v"(x));
    __asm__("vmaxps %1, %0, %0" : "+v"(b) : "v"(y));
  }}
  const float high = max(*most, max(zoo_highest(a), zoo_highest(b)));
  const float16 from = (float16)(high == -INFINITY ? 0.0f : high);
  float16 low = (float16)(0.0f), odd = low;
  for (int i = 0; i < blocks * {PANEL}; i += {PANEL}) {{
    const float16 x = zoo_exp2_short(*(float16*)(s + i) - from);
    const float16 y = zoo_exp2_short(*(float16*)(s + i + 16) - from);
    uint16 both;
    low += x;
    odd += y;
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(x), "v"(y));
    *(uint16*)(p + i) = both;
  }}
  const float f = *most == -INFINITY ? 0.0f : zoo_exp2_short((float16)(*most) - from).s0;
  *most = high;
  *sum = *sum * f + zoo_sum_of(low + odd);
  return f;
}}"""
