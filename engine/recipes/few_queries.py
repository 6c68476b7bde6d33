"""Attention of a few queries in float32: the decoding step, which is bound by reading the cache.

Keys and values are read where they lie, through their strides. A work-group takes one query through
some hundred keys at a time; no score leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import dtype as dt
from engine import graph as g
from engine.graph import Node, Op
from engine.recipes.attention import scores, softmax2, weighted
from engine.recipes.settings import Settings
from engine.recipes.softmax import LOG2E, find_attention
from engine.recipes.views import Operand, View, strided, view_of
from engine.symbolic import Int, upper

CHUNK = 512  # keys whose scores lie in scratch memory at once
MOST = 64  # queries up to which this is the better way on any device
AHEAD = 4096  # bytes of keys and of values that are fetched before they are needed
WIDE = 4  # vectors of a value that are summed at once


@dataclass(frozen=True)
class FewQueries:
    """queries (batch, T, depth), scaled for powers of two; keys and values as views of buffers.

    key_view (batch / heads, N, depth), value_view (batch / heads, N, width). Query i sees the first
    i + visible keys, all if visible is None.
    """

    depth: int
    width: int
    heads: int
    keys: Int
    visible: Int | None
    key_view: View
    value_view: View
    lanes: int
    native: bool  # whether halves become floats by an instruction
    strip: int = 1
    block: int = 1

    @property
    def columns(self) -> int:
        return self.width

    @property
    def name(self) -> str:
        seen = "all" if self.visible is None else "causal"
        places = "_".join(map(str, (*self.key_view.strides, *self.value_view.strides)))
        places = places.replace("-", "m")
        kinds = "".join("h" if v.half else "f" for v in (self.key_view, self.value_view))
        return f"attend{kinds}_{self.depth}_{self.width}_{self.heads}_{seen}_{places}"

    @property
    def work(self) -> int:
        """The scores, with room for a whole vector at their end."""
        return (CHUNK + 16) * 4

    def shape(self, queries: Node, keys: Node, values: Node) -> tuple[Int, ...]:
        return *queries.shape[:2], self.width

    def ints(self, queries: Node, keys: Node, values: Node) -> tuple[Int, ...]:
        visible = 0 if self.visible is None else self.visible
        offsets = self.key_view.offset, self.value_view.offset
        return queries.shape[1], self.keys, visible, *offsets

    def flops(self, queries: Node, keys: Node, values: Node) -> Int:
        return queries.shape[0] * queries.shape[1] * self.keys * (self.depth + self.width) * 2

    def meaning(self, queries: Node, keys: Node, values: Node) -> Node:
        k, v = self.key_view.of(keys), g.permute(self.value_view.of(values), (0, 2, 1))
        weights = softmax2(scores(queries, k, self.heads), self.visible)
        return weighted(*weights, v, self.heads)

    def source(self) -> tuple[str, ...]:
        return (_helpers(self.lanes, self.native), _scores(self), _values(self), _source(self))


def rewrite(node: Node, settings: Settings) -> Node | None:
    """An attention of few queries, if its values lie in rows."""
    if node.op is not Op.REDUCE or not settings.target.is_cpu or settings.target.lanes < 4:
        return None
    found = find_attention(node)
    if found is None or upper(found.queries.shape[1]) > MOST:
        return None
    depth, width = found.queries.shape[2], found.values.shape[2]
    if not isinstance(depth, int) or not isinstance(width, int):
        return None
    if not isinstance(found.queries.shape[0], int) or depth < 8 or width < settings.target.lanes:
        return None
    keys = _keys(found.keys)
    values = view_of(found.values, lambda strides: strides[2] == 1)
    scale = g.const(found.scale * LOG2E, dt.float32, found.queries.shape)
    queries = g.packed(g.binary(Op.MUL, found.queries, scale))
    spec = FewQueries(
        depth,
        width,
        found.heads,
        found.keys.shape[1],
        found.visible,
        keys.view,
        values.view,
        settings.target.lanes,
        {"f16c", "avx512f"} <= settings.target.features and settings.target.lanes == 16,
    )
    operands = (queries, keys.base, values.base)
    return found.product.restored(g.intrinsic(spec, operands))


def _keys(keys: Node) -> Operand:
    """Keys side by side in memory make the lanes of a vector, or the depth of one key does."""
    found = strided(keys)
    if found is not None and 1 in found.view.strides[1:]:
        return found
    if not isinstance(keys.shape[1], int):  # side by side, they would have no constant strides
        return view_of(keys, lambda strides: False)
    moved = g.packed(g.permute(keys, (0, 2, 1)))
    return strided(g.permute(moved, (0, 2, 1)))


# --- the code --------------------------------------------------------------------------------


def _helpers(lanes: int, native: bool) -> str:
    """2**x to 2e-7 (NaN of NaN), and vectors that may start anywhere."""
    if native:
        halves = (
            f'float{lanes} r; __asm__("vcvtph2ps %1, %0" : "=v"(r) : '
            f'"m"(*(__global const ushort{lanes}*)p)); return r;'
        )
        fetch = '__asm__ volatile("prefetcht2 (%0)" :: "r"(p));'
    else:
        fetch = ""
        halves = f"return vload_half{lanes}(0, (__global const half*)p);"
    f, i = f"float{lanes}", f"int{lanes}"
    folds, width, name = [], lanes, "v"
    while width > 1:
        width //= 2
        kind = f"float{width}" if width > 1 else "float"
        folds.append(f"  const {kind} {name}{width} = OP({name}.lo, {name}.hi);")
        name = f"{name}{width}"
    body = "\n".join(folds)
    highest = body.replace("OP(", "max(")
    total = body.replace("OP(", "(").replace(", ", " + ")
    return f"""
typedef {f} zoo_loose __attribute__((aligned(4)));
static inline void attend_fetch(__global const uchar* p) {{ {fetch} }}
static inline {f} zoo_floats(__global const float* p) {{ return *(__global const zoo_loose*)p; }}
static inline float zoo_float(__global const float* p) {{ return *p; }}
static inline float zoo_half(__global const ushort* p) {{
  return vload_half(0, (__global const half*)p);
}}
static inline {f} zoo_halves(__global const ushort* p) {{
  {halves}
}}
static inline {f} zoo_power({f} x) {{
  x = x < ({f})(-126.0f) ? ({f})(-126.0f) : x;
  const {f} t = x + ({f})(12582912.0f);
  const {i} n = as_{i}(t) << 23;
  const {f} r = x - (t - ({f})(12582912.0f));
  {f} p = r * 1.5403530e-4f + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return as_{f}(as_{i}(p) + n) + (x - x);
}}
static inline float zoo_max_lane({f} v) {{
{highest}
  return {name};
}}
static inline float zoo_add_lanes({f} v) {{
{total}
  return {name};
}}"""


def _scores(spec: FewQueries) -> str:
    """s[j] = query . keys[j]."""
    lanes, depth = spec.lanes, spec.depth
    _, key, deep = spec.key_view.strides
    memory, load, one = _reading(spec.key_view)
    if key == 1:
        body = _dots_of_columns(lanes, depth, deep, load)
    else:
        body = _dots_of_rows(lanes, depth, key, load, one, memory)
    return f"""
static void {spec.name}_scores(
    float* s, __global const float* q, __global const {memory}* k, int count) {{
  int j = 0;
{body}
  for (; j < count; j++) {{
    float t = 0.0f;
    for (int d = 0; d < {depth}; d++) t += q[d] * {one}(k + (long)j * {key} + d * {deep});
    s[j] = t;
  }}
}}"""


def _fetched(name: str, at: str, count: int, memory: str) -> str:
    """Ask for the numbers that lie AHEAD bytes behind name + at: `count` of them, a line each."""
    size = 2 if memory == "ushort" else 4
    lines = range(AHEAD, AHEAD + count * size, 64)
    start = f"(__global const uchar*)({name} + {at})"
    return "{ " + " ".join(f"attend_fetch({start} + {line});" for line in lines) + " }"


def _reading(view: View) -> tuple[str, str, str]:
    """(type in memory, function that reads a vector, function that reads one) of an operand."""
    return (
        ("ushort", "zoo_halves", "zoo_half") if view.half else ("float", "zoo_floats", "zoo_float")
    )


def _dots_of_columns(lanes: int, depth: int, deep: int, load: str) -> str:
    """Neighbouring keys lie side by side: each is a lane."""
    f = f"float{lanes}"
    return f"""  for (; j + {2 * lanes} <= count; j += {2 * lanes}) {{
    {f} a = ({f})(0.0f), b = a;
    for (int d = 0; d < {depth}; d++) {{
      a += q[d] * {load}(k + j + (long)d * {deep});
      b += q[d] * {load}(k + j + {lanes} + (long)d * {deep});
    }}
    *(zoo_loose*)(s + j) = a;
    *(zoo_loose*)(s + j + {lanes}) = b;
  }}"""


def _dots_of_rows(lanes: int, depth: int, key: int, load: str, one: str, memory: str) -> str:
    """As many keys as there are lanes: a vector of partial sums each, all folded in one tree."""
    f, whole = f"float{lanes}", depth - depth % lanes
    names = [f"x{i}" for i in range(lanes)]
    lines = [f"{f} {x} = ({f})(0.0f);" for x in names]
    fetched = _fetched("k", f"(long)(j + i) * {key}", depth, memory)
    lines.append(f"for (int i = 0; i < {lanes}; i++) {fetched}")
    for d in range(0, whole, lanes):
        lines.append(f"const {f} q{d} = *(__global const zoo_loose*)(q + {d});")
        lines += [
            f"{x} += q{d} * {load}(k + (long)(j + {i}) * {key} + {d});" for i, x in enumerate(names)
        ]
    for d in range(whole, depth):
        lines += [
            f"{x}.s0 += q[{d}] * {one}(k + (long)(j + {i}) * {key} + {d});"
            for i, x in enumerate(names)
        ]
    while len(names) > 1:
        pairs = list(zip(names[::2], names[1::2]))
        names = [f"{a}_" for a, _ in pairs]
        lines += [
            f"const {f} {c} = ({f})({a}.even + {a}.odd, {b}.even + {b}.odd);"
            for c, (a, b) in zip(names, pairs)
        ]
    lines.append(f"*(zoo_loose*)(s + j) = {names[0]};")
    body = "\n    ".join(lines)
    return f"""  for (; j + {lanes} <= count; j += {lanes}) {{
    {body}
  }}"""


def _values(spec: FewQueries) -> str:
    """tile = tile * f + sum over j of s[j] * values[j]."""
    lanes, width, key = spec.lanes, spec.width, spec.value_view.strides[1]
    f, whole = f"float{lanes}", width - width % lanes
    memory, load, one = _reading(spec.value_view)
    parts = []
    for at in range(0, whole, WIDE * lanes):
        columns = list(range(at, min(at + WIDE * lanes, whole), lanes))
        start = " ".join(f"{f} a{c} = *(zoo_loose*)(tile + {c}) * f;" for c in columns)
        steps = " ".join(f"a{c} += s[j] * {load}(v + (long)j * {key} + {c});" for c in columns)
        keep = " ".join(f"*(zoo_loose*)(tile + {c}) = a{c};" for c in columns)
        fetched = _fetched("v", f"(long)j * {key} + {at}", len(columns) * lanes, memory)
        parts.append(f"""  {{
    {start}
    for (int j = 0; j < count; j++) {{ {fetched} {steps} }}
    {keep}
  }}""")
    if width % lanes:
        parts.append(f"""  for (int c = {whole}; c < {width}; c++) {{
    float a = tile[c] * f;
    for (int j = 0; j < count; j++) a += s[j] * {one}(v + (long)j * {key} + c);
    tile[c] = a;
  }}""")
    body = "\n".join(parts)
    return f"""
static void {spec.name}_values(
    float* tile, const float* s, float f, __global const {memory}* v, int count) {{
{body}
}}"""


def _source(spec: FewQueries) -> str:
    f, lanes, width = f"float{spec.lanes}", spec.lanes, spec.width
    group, key, _ = spec.key_view.strides
    head, value, _ = spec.value_view.strides
    last = "n" if spec.visible is None else "min(n, row + visible)"
    kinds = [_reading(v)[0] for v in (spec.key_view, spec.value_view)]
    given = (
        f"__global const float* queries, __global const {kinds[0]}* keys, "
        f"__global const {kinds[1]}* values, int batch, int row, int column"
    )
    sizes = "int m, int n, int visible, int key_offset, int value_offset"
    return f"""
static void {spec.name}_begin(uchar* work, {given}, {sizes}) {{}}
static void {spec.name}_end(void) {{}}
static void {spec.name}_tile(float* tile, uchar* work, {given}, int rows, {sizes}) {{
  float* const s = (float*)work;
  __global const float* q = queries + ((long)batch * m + row) * {spec.depth};
  __global const {kinds[0]}* k = keys + key_offset + (long)(batch / {spec.heads}) * {group};
  __global const {kinds[1]}* v = values + value_offset + (long)(batch / {spec.heads}) * {head};
  float most = -INFINITY, sum = 0.0f;
  for (int c = 0; c < {width}; c++) tile[c] = 0.0f;
  const int last = {last};
  for (int i = 0; i < {AHEAD}; i += 64) {{
    attend_fetch((__global const uchar*)k + i);
    attend_fetch((__global const uchar*)v + i);
  }}
  for (int first = 0; first < last; first += {CHUNK}) {{
    const int count = min({CHUNK}, last - first);
    {spec.name}_scores(s, q, k + (long)first * {key}, count);
    for (int j = count; j % {lanes} != 0; j++) s[j] = -INFINITY;
    {f} a = ({f})(-INFINITY);
    for (int j = 0; j < count; j += {lanes}) a = max(a, *(zoo_loose*)(s + j));
    const float high = max(most, zoo_max_lane(a));
    a = ({f})(0.0f);
    for (int j = 0; j < count; j += {lanes}) {{
      const {f} e = zoo_power(*(zoo_loose*)(s + j) - ({f})(high));
      *(zoo_loose*)(s + j) = e;
      a += e;
    }}
    const float f = first == 0 ? 0.0f : zoo_power(({f})(most - high)).s0;
    {spec.name}_values(tile, s, f, v + (long)first * {value}, count);
    most = high;
    sum = sum * f + zoo_add_lanes(a);
  }}
  const float scale = 1.0f / sum;
  for (int c = 0; c < {width}; c++) tile[c] *= scale;
}}"""
