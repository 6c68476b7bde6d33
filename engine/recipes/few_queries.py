"""Attention of a few queries in float32: the decoding step, which is bound by reading the cache.

Keys and values are read where they lie, through their strides. Up to four queries that share them
go through some hundred keys at a time; no score leaves the work-group.
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
STRIP = 4  # queries at a time
MOST = 64  # queries up to which this is the better way on any device
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
    strip: int = STRIP
    block: int = 16

    @property
    def columns(self) -> int:
        return self.width

    @property
    def name(self) -> str:
        seen = "all" if self.visible is None else "causal"
        places = "_".join(map(str, (*self.key_view.strides, *self.value_view.strides)))
        return f"attend_{self.depth}_{self.width}_{self.heads}_{seen}_{places}"

    @property
    def work(self) -> int:
        """A row of scores per query, with room for a whole vector at its end."""
        return STRIP * (CHUNK + 16) * 4

    def ints(self, queries: Node, keys: Node, values: Node) -> tuple[Int, ...]:
        return queries.shape[1], self.keys, 0 if self.visible is None else self.visible

    def flops(self, queries: Node, keys: Node, values: Node) -> Int:
        return queries.shape[0] * queries.shape[1] * self.keys * (self.depth + self.width) * 2

    def meaning(self, queries: Node, keys: Node, values: Node) -> Node:
        k, v = self.key_view.of(keys), g.permute(self.value_view.of(values), (0, 2, 1))
        weights = softmax2(scores(queries, k, self.heads), self.visible)
        return weighted(*weights, v, self.heads)

    def source(self) -> tuple[str, ...]:
        rows = range(1, STRIP + 1)
        parts = [_scores(self, n) for n in rows] + [_values(self, n) for n in rows]
        return (_helpers(self.lanes), *parts, _source(self))


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
    )
    operands = (queries, keys.base, values.base)
    return found.product.restored(g.intrinsic(spec, operands))


def _keys(keys: Node) -> Operand:
    """Keys side by side in memory make the lanes of a vector, or the depth of one key does."""
    found = strided(keys)
    if found is not None and 1 in found.view.strides[1:]:
        return found
    moved = g.packed(g.permute(keys, (0, 2, 1)))
    return strided(g.permute(moved, (0, 2, 1)))


# --- the code --------------------------------------------------------------------------------


def _helpers(lanes: int) -> str:
    """2**x to 2e-7, and vectors that may start anywhere."""
    f, i = f"float{lanes}", f"int{lanes}"
    halves, width, name = [], lanes, "v"
    while width > 1:
        width //= 2
        kind = f"float{width}" if width > 1 else "float"
        halves.append(f"  const {kind} {name}{width} = OP({name}.lo, {name}.hi);")
        name = f"{name}{width}"
    body = "\n".join(halves)
    highest = body.replace("OP(", "max(")
    total = body.replace("OP(", "(").replace(", ", " + ")
    return f"""
typedef {f} zoo_loose __attribute__((aligned(4)));
static inline {f} zoo_power({f} x) {{
  x = max(x, ({f})(-126.0f));
  const {f} t = x + ({f})(12582912.0f);
  const {i} n = as_{i}(t) << 23;
  const {f} r = x - (t - ({f})(12582912.0f));
  {f} p = r * 1.5403530e-4f + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return as_{f}(as_{i}(p) + n);
}}
static inline float zoo_max_lane({f} v) {{
{highest}
  return {name};
}}
static inline float zoo_add_lanes({f} v) {{
{total}
  return {name};
}}"""


def _scores(spec: FewQueries, rows: int) -> str:
    """s[r][j] = queries[r] . keys[first + j]."""
    lanes, depth = spec.lanes, spec.depth
    _, key, deep = spec.key_view.strides
    head = (
        f"static void {spec.name}_scores{rows}(float* s, __global const float* q, "
        "__global const float* k, int count, int before) {"
    )
    each = range(rows)
    if key == 1:
        start = " ".join(f"float{lanes} a{r} = (float{lanes})(0.0f), b{r} = a{r};" for r in each)
        one = " ".join(f"float{lanes} a{r} = (float{lanes})(0.0f);" for r in each)
        both = " ".join(
            f"a{r} += q[{r * depth} + d] * x; b{r} += q[{r * depth} + d] * y;" for r in each
        )
        single = " ".join(f"a{r} += q[{r * depth} + d] * x;" for r in each)
        row = CHUNK + 16
        keep = " ".join(f"*(zoo_loose*)(s + {r * row} + j) = a{r};" for r in each)
        keep_b = " ".join(f"*(zoo_loose*)(s + {r * row} + j + {lanes}) = b{r};" for r in each)
        scalar = " ".join(f"s[{r * row} + j] = 0.0f;" for r in each)
        adds = " ".join(
            f"s[{r * row} + j] += q[{r * depth} + d] * k[j + d * {deep}];" for r in each
        )
        body = f"""
  int j = 0;
  for (; j + {2 * lanes} <= count; j += {2 * lanes}) {{
    {start}
    for (int d = 0; d < {depth}; d++) {{
      const float{lanes} x = *(__global const zoo_loose*)(k + j + d * {deep});
      const float{lanes} y = *(__global const zoo_loose*)(k + j + {lanes} + d * {deep});
      {both}
    }}
    {keep} {keep_b}
  }}
  while (j < count) {{
    if (j + {lanes} > count && count + before >= {lanes}) j = count - {lanes};
    if (j + {lanes} <= count) {{
      {one}
      for (int d = 0; d < {depth}; d++) {{
        const float{lanes} x = *(__global const zoo_loose*)(k + j + d * {deep});
        {single}
      }}
      if (j >= 0) {{ {keep} }}
      else {{ for (int i = -j; i < {lanes}; i++) {{ {" ".join(f"s[{r * row} + j + i] = ((float*)&a{r})[i];" for r in each)} }} }}
      j += {lanes};
    }} else {{
      {scalar}
      for (int d = 0; d < {depth}; d++) {{ {adds} }}
      j++;
    }}
  }}
}}"""
        return head + body
    vectors = depth // lanes
    sums = " ".join(f"float{lanes} a{r} = (float{lanes})(0.0f);" for r in each)
    steps = " ".join(
        f"a{r} += *(__global const zoo_loose*)(q + {r * depth} + d) * x;" for r in each
    )
    rest = "".join(
        f"\n    for (int d = {vectors * lanes}; d < {depth}; d++) t{r} += q[{r * depth} + d] * k[j * {key} + d];"
        for r in each
        if depth % lanes
    )
    totals = " ".join(f"float t{r} = zoo_add_lanes(a{r});" for r in each)
    keep = " ".join(f"s[{r * (CHUNK + 16)} + j] = t{r};" for r in each)
    return (
        head
        + f"""
  for (int j = 0; j < count; j++) {{
    {sums}
    for (int d = 0; d < {vectors * lanes}; d += {lanes}) {{
      const float{lanes} x = *(__global const zoo_loose*)(k + j * {key} + d);
      {steps}
    }}
    {totals}{rest}
    {keep}
  }}
}}"""
    )


def _values(spec: FewQueries, rows: int) -> str:
    """tile[r] = tile[r] * f[r] + sum over j of s[r][j] * values[first + j]."""
    lanes, width, row = spec.lanes, spec.width, CHUNK + 16
    key = spec.value_view.strides[1]
    each = range(rows)
    parts = []
    for at in range(0, width - width % lanes, WIDE * lanes):
        vectors = range(min(WIDE, (width - at) // lanes))
        start = " ".join(
            f"float{lanes} a{r}{i} = *(zoo_loose*)(tile + {r * width + at + i * lanes}) * f[{r}];"
            for r in each
            for i in vectors
        )
        loads = " ".join(
            f"const float{lanes} x{i} = *(__global const zoo_loose*)(v + (long)j * {key} + {at + i * lanes});"
            for i in vectors
        )
        steps = " ".join(f"a{r}{i} += s[{r * row} + j] * x{i};" for r in each for i in vectors)
        keep = " ".join(
            f"*(zoo_loose*)(tile + {r * width + at + i * lanes}) = a{r}{i};"
            for r in each
            for i in vectors
        )
        parts.append(f"""  {{ {start}
    for (int j = 0; j < count; j++) {{ {loads} {steps} }}
    {keep} }}""")
    rest = " ".join(
        f"float a{r} = tile[{r * width} + c] * f[{r}]; "
        f"for (int j = 0; j < count; j++) a{r} += s[{r * row} + j] * v[(long)j * {key} + c]; "
        f"tile[{r * width} + c] = a{r};"
        for r in each
    )
    if width % lanes:
        parts.append(f"  for (int c = {width - width % lanes}; c < {width}; c++) {{ {rest} }}")
    body = "\n".join(parts)
    return f"""static void {spec.name}_values{rows}(float* tile, const float* s, const float* f,
    __global const float* v, int count) {{
{body}
}}"""


def _source(spec: FewQueries) -> str:
    lanes, row, width = spec.lanes, CHUNK + 16, spec.width
    causal = spec.visible is not None
    group, key, _ = spec.key_view.strides
    given = (
        "__global const float* queries, __global const float* keys, __global const float* values,"
        " int batch, int row, int column"
    )
    sizes = "int m, int n, int visible"
    last = "min(n, row + rows - 1 + visible)" if causal else "n"
    seen = f"clamp(row + r + visible - first, 0, count)" if causal else "count"

    def by_rows(call: str) -> str:
        cases = " ".join(f"case {n}: {call.format(n)} break;" for n in range(1, STRIP + 1))
        return f"switch (rows) {{ {cases} }}"

    at_keys = f"k + (long)first * {key}"
    at_values = f"v + (long)first * {spec.value_view.strides[1]}"
    return f"""
static void {spec.name}_begin(uchar* work, {given}, {sizes}) {{}}
static void {spec.name}_end(void) {{}}
static void {spec.name}_tile(float* tile, uchar* work, {given}, int rows, {sizes}) {{
  float* const s = (float*)work;
  float most[{STRIP}], sum[{STRIP}], f[{STRIP}];
  __global const float* q = queries + ((long)batch * m + row) * {spec.depth};
  __global const float* k = keys + {spec.key_view.offset} + (long)(batch / {spec.heads}) * {group};
  __global const float* v = values + {spec.value_view.offset} + (long)(batch / {spec.heads}) * {spec.value_view.strides[0]};
  for (int r = 0; r < rows; r++) {{ most[r] = -INFINITY; sum[r] = 0.0f; }}
  for (int i = 0; i < rows * {width}; i++) tile[i] = 0.0f;
  const int last = {last};
  for (int first = 0; first < last; first += {CHUNK}) {{
    const int count = min({CHUNK}, last - first);
    {by_rows(f"{spec.name}_scores{{}}(s, q, {at_keys}, count, first);")}
    for (int r = 0; r < rows; r++) {{
      float* x = s + r * {row};
      const int seen = {seen};
      for (int j = seen; j < (count + {lanes - 1}) / {lanes} * {lanes}; j++) x[j] = -INFINITY;
      float{lanes} a = (float{lanes})(-INFINITY);
      for (int j = 0; j < count; j += {lanes}) a = max(a, *(zoo_loose*)(x + j));
      const float high = max(most[r], zoo_max_lane(a));
      const float{lanes} from = (float{lanes})(high == -INFINITY ? 0.0f : high);
      a = (float{lanes})(0.0f);
      for (int j = 0; j < count; j += {lanes}) {{
        const float{lanes} e = zoo_power(*(zoo_loose*)(x + j) - from);
        *(zoo_loose*)(x + j) = e;
        a += e;
      }}
      for (int j = seen; j < count; j++) x[j] = 0.0f;
      f[r] = most[r] == -INFINITY ? 0.0f : zoo_power((float{lanes})(most[r]) - from).s0;
      most[r] = high;
      sum[r] = sum[r] * f[r] + zoo_add_lanes(a);
    }}
    {by_rows(f"{spec.name}_values{{}}(tile, s, f, {at_values}, count);")}
  }}
  for (int r = 0; r < rows; r++) {{
    const float scale = 1.0f / sum[r];
    for (int c = 0; c < {width}; c++) tile[r * {width} + c] *= scale;
  }}
}}"""
