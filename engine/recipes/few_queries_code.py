"""The OpenCL C of attention of a few queries: some query heads at a time over chunks of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.recipes.panel_code import halves, mark
from engine.recipes.views import View

if TYPE_CHECKING:
    from engine.recipes.few_queries import FewQueries

CHUNK = 64  # keys whose scores lie in scratch memory at once
ROW = CHUNK + 16  # floats between the scores of two heads, with room for a whole vector at the end
QUAD = 4  # keys whose sums are folded at once; lanes are a multiple of it
WIDE = 4  # vectors of a value that are summed at once


def work(spec: FewQueries) -> int:
    """Bytes of scratch: the scores of each head, then vectors of sums that wait to be folded."""
    return spec.strip * (ROW + spec.lanes * spec.lanes // QUAD) * 4


def source(spec: FewQueries) -> tuple[str, ...]:
    return _helpers(spec.lanes, spec.native), _scores(spec), _values(spec), _tile(spec)


def _helpers(lanes: int, native: bool) -> str:
    """2**x to 2e-7 (NaN of NaN), and vectors that may start anywhere."""
    fetch = '__asm__ volatile("prefetcht2 (%0)" :: "r"(p));' if native else ""
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
  {halves(lanes, native)}
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


def _reading(view: View) -> tuple[str, str, str]:
    """(type in memory, function that reads a vector, function that reads one) of an operand."""
    return (
        ("ushort", "zoo_halves", "zoo_half") if view.half else ("float", "zoo_floats", "zoo_float")
    )


def _fetched(spec: FewQueries, view: View, at: str, count: int) -> str:
    """Ask for `count` numbers of this part's next chunk, at the place where `at` is in this one."""
    size = 2 if view.half else 4
    ahead = spec.parts * CHUNK * view.strides[1] * size
    lines = range(ahead, ahead + count * size, 64)
    return " ".join(f"attend_fetch((__global const uchar*)({at}) + {line});" for line in lines)


def _scores(spec: FewQueries) -> str:
    """s[r][j] = queries[r] . keys[j]."""
    memory = _reading(spec.key_view)[0]
    body = _dots_of_columns(spec) if spec.key_view.strides[1] == 1 else _dots_of_rows(spec)
    return f"""
{mark(spec.lanes)} void {spec.name}_scores(
    float* s, float* p, __global const float* q, __global const {memory}* k, int count) {{
{body}
}}"""


def _dots_of_columns(spec: FewQueries) -> str:
    """Neighbouring keys lie side by side: each is a lane."""
    f, lanes, rows = f"float{spec.lanes}", spec.lanes, range(spec.strip)
    (_, load, one), deep = _reading(spec.key_view), spec.key_view.strides[2]
    zero = " ".join(f"{f} a{r} = ({f})(0.0f);" for r in rows)
    step = " ".join(f"a{r} += q[{r * spec.depth} + d] * x;" for r in rows)
    keep = " ".join(f"*(zoo_loose*)(s + {r * ROW} + j) = a{r};" for r in rows)
    return f"""  int j = 0;
  for (; j + {lanes} <= count; j += {lanes}) {{
    {zero}
    for (int d = 0; d < {spec.depth}; d++) {{
      const {f} x = {load}(k + j + (long)d * {deep});
      {step}
    }}
    {keep}
  }}
  for (; j < count; j++)
    for (int r = 0; r < {spec.strip}; r++) {{
      float t = 0.0f;
      for (int d = 0; d < {spec.depth}; d++)
        t += q[r * {spec.depth} + d] * {one}(k + j + (long)d * {deep});
      s[r * {ROW} + j] = t;
    }}"""


def _dots_of_rows(spec: FewQueries) -> str:
    """As many keys as there are lanes: a vector of partial sums each, all folded in one tree.

    The tree's first levels are done for QUAD keys at once, in registers. If each vector waited in
    memory, reads of keys that lie a multiple of 4 KB from one that waits would wait for it.
    """
    f, lanes, depth = f"float{spec.lanes}", spec.lanes, spec.depth
    memory, load, one = _reading(spec.key_view)
    key, whole, keys = spec.key_view.strides[1], depth - depth % lanes, range(QUAD)
    at = [f"min(j + i + {i}, count - 1)" for i in keys]  # behind the last key, that one again
    lines = [f"__global const {memory}* x{i} = k + (long){a} * {key};" for i, a in enumerate(at)]
    lines += [_fetched(spec, spec.key_view, f"x{i}", depth) for i in keys]
    columns = range(0, whole, lanes)
    lines += [f"const {f} x{i}_{d} = {load}(x{i} + {d});" for i in keys for d in columns]
    for r in range(spec.strip):
        at, names = f"q + {r * depth}", [f"t{r}_{i}" for i in keys]
        for i, t in enumerate(names):
            terms = [f"*(__global const zoo_loose*)({at} + {d}) * x{i}_{d}" for d in columns]
            lines.append(f"{f} {t} = {' + '.join(terms) or f'({f})(0.0f)'};")
            lines += [f"{t}.s0 += ({at})[{d}] * {one}(x{i} + {d});" for d in range(whole, depth)]
        folds, total = _folded(f, names)
        place = f"p + {r * lanes * lanes // QUAD} + i * {lanes // QUAD}"
        lines += [*folds, f"*(zoo_loose*)({place}) = {total};"]
    body = "\n      ".join(lines)
    ends = "\n    ".join(_ended(spec, r) for r in range(spec.strip))
    return f"""  for (int j = 0; j < count; j += {lanes}) {{
    for (int i = 0; i < {lanes}; i += {QUAD}) {{
      {body}
    }}
    {ends}
  }}"""


def _ended(spec: FewQueries, row: int) -> str:
    """The rest of the tree: a row's vectors in p become its sums, side by side in s."""
    f, lanes = f"float{spec.lanes}", spec.lanes
    names = [f"y{i}" for i in range(lanes // QUAD)]
    start = f"p + {row * lanes * lanes // QUAD}"
    lines = [f"const {f} {y} = *(zoo_loose*)({start} + {i * lanes});" for i, y in enumerate(names)]
    folds, total = _folded(f, names)
    return " ".join(["{", *lines, *folds, f"*(zoo_loose*)(s + {row * ROW} + j) = {total};", "}"])


def _folded(f: str, names: list[str]) -> tuple[list[str], str]:
    """Statements that add neighbouring lanes of so many vectors, again and again, until what is
    left fits one; and the name of that."""
    lines = []
    while len(names) > 1:
        pairs = list(zip(names[::2], names[1::2]))
        names = [f"{a}_" for a, _ in pairs]
        lines += [
            f"const {f} {c} = ({f})({a}.even + {a}.odd, {b}.even + {b}.odd);"
            for c, (a, b) in zip(names, pairs)
        ]
    return lines, names[0]


def _values(spec: FewQueries) -> str:
    """tile[r] = tile[r] * f[r] + sum over j of s[r][j] * values[j]."""
    lanes, width, key = spec.lanes, spec.width, spec.value_view.strides[1]
    f, whole, rows = f"float{lanes}", width - width % lanes, range(spec.strip)
    memory, load, one = _reading(spec.value_view)
    parts = []
    for first in range(0, whole, WIDE * lanes):
        columns = list(range(first, min(first + WIDE * lanes, whole), lanes))
        places = [(r, c, f"tile + {r * spec.columns + c}") for r in rows for c in columns]
        start = " ".join(f"{f} a{r}_{c} = *(zoo_loose*)({at}) * f[{r}];" for r, c, at in places)
        keep = " ".join(f"*(zoo_loose*)({at}) = a{r}_{c};" for r, c, at in places)
        loads = " ".join(f"const {f} x{c} = {load}(x + {c});" for c in columns)
        steps = " ".join(f"a{r}_{c} += s[{r * ROW} + j] * x{c};" for r, c, _ in places)
        fetched = _fetched(spec, spec.value_view, f"x + {first}", len(columns) * lanes)
        parts.append(f"""  {{
    {start}
    for (int j = 0; j < count; j++) {{
      __global const {memory}* x = v + (long)j * {key};
      {fetched} {loads}
      {steps}
    }}
    {keep}
  }}""")
    if width % lanes:
        parts.append(f"""  for (int r = 0; r < {spec.strip}; r++)
    for (int c = {whole}; c < {width}; c++) {{
      float a = tile[r * {spec.columns} + c] * f[r];
      for (int j = 0; j < count; j++)
        a += s[r * {ROW} + j] * {one}(v + (long)j * {key} + c);
      tile[r * {spec.columns} + c] = a;
    }}""")
    body = "\n".join(parts)
    return f"""
{mark(spec.lanes)} void {spec.name}_values(
    float* tile, const float* s, const float* f, __global const {memory}* v, int count) {{
{body}
}}"""


def _tile(spec: FewQueries) -> str:
    f, lanes, parts = f"float{spec.lanes}", spec.lanes, spec.parts
    group, key, _ = spec.key_view.strides
    head, value, _ = spec.value_view.strides
    last = "n" if spec.visible is None else f"min(n, row / {spec.heads} + visible)"
    last = "clamp(limits[at], 0, n)" if spec.limited else last
    stored = "clamp(chosen[at], 0, count - 1)" if spec.chosen else "at"
    kinds = [_reading(v)[0] for v in (spec.key_view, spec.value_view)]
    given = (
        f"__global const float* queries, __global const {kinds[0]}* keys, "
        f"__global const {kinds[1]}* values, "
        + "__global const int* chosen, " * spec.chosen
        + "__global const int* limits, " * spec.limited
        + "int batch, int row, int column, int place, int tiles"
    )
    sizes = "int m, int n, int visible, int key_offset, int value_offset, int count"
    if parts == 1:
        end = f"""const float scale = 1.0f / sum[r];
    for (int c = 0; c < {spec.width}; c++) to[c] *= scale;"""
    else:
        end = f"""to[{spec.width}] = most[r];
    to[{spec.width + 1}] = sum[r];"""
    return f"""
{mark(lanes)} float {spec.name}_weights(float* s, int count, float* most) {{
  for (int j = count; j % {lanes} != 0; j++) s[j] = -INFINITY;
  {f} a = ({f})(-INFINITY);
  for (int j = 0; j < count; j += {lanes}) {{
    const {f} x = *(zoo_loose*)(s + j);
    a = x <= a ? a : x;
  }}
  const float high = zoo_max_lane(a);
  *most = high <= *most ? *most : high;
  const float base = *most == -INFINITY ? 0.0f : *most;
  a = ({f})(0.0f);
  for (int j = 0; j < count; j += {lanes}) {{
    const {f} e = zoo_power(*(zoo_loose*)(s + j) - ({f})(base));
    *(zoo_loose*)(s + j) = e;
    a += e;
  }}
  return zoo_add_lanes(a);
}}
static void {spec.name}_begin(uchar* work, {given}, {sizes}) {{}}
static void {spec.name}_end(void) {{}}
{mark(lanes)} void {spec.name}_tile(float* tile, uchar* work, {given}, int rows, {sizes}) {{
  float* const s = (float*)work;
  const int at = batch / {parts}, stored = {stored};
  __global const float* q = queries + ((long)at * m + row) * {spec.depth};
  __global const {kinds[0]}* k = keys + key_offset + (long)stored * {group};
  __global const {kinds[1]}* v = values + value_offset + (long)stored * {head};
  float most[{spec.strip}], sum[{spec.strip}], f[{spec.strip}];
  for (int r = 0; r < {spec.strip}; r++) {{
    most[r] = -INFINITY;
    sum[r] = 0.0f;
  }}
  for (int i = 0; i < {spec.strip * spec.columns}; i++) tile[i] = 0.0f;
  const int last = {last};
  for (int first = batch % {parts} * {CHUNK}; first < last; first += {parts * CHUNK}) {{
    const int count = min({CHUNK}, last - first);
    {spec.name}_scores(s, s + {spec.strip * ROW}, q, k + (long)first * {key}, count);
    for (int r = 0; r < {spec.strip}; r++) {{
      const float before = most[r];
      const float total = {spec.name}_weights(s + r * {ROW}, count, most + r);
      f[r] = before == -INFINITY ? 0.0f : zoo_power(({f})(before - most[r])).s0;
      sum[r] = sum[r] * f[r] + total;
    }}
    {spec.name}_values(tile, s, f, v + (long)first * {value}, count);
  }}
  for (int r = 0; r < {spec.strip}; r++) {{
    float* const to = tile + r * {spec.columns};
    {end}
  }}
}}"""
