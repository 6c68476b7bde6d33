"""Small functions that generated C calls, by name; only the ones a source needs go into it."""

from __future__ import annotations

from engine.dialects import DIALECTS, Dialect
from engine.ir import Target

VECTORS = (1, 2, 4, 8, 16)
NATIVE = (1, 16)  # as many floats as code for AVX-512 takes at once
SIZES = {"char": 1, "short": 2, "int": 4, "long": 8, "float": 4}
SCALARS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float")
WARP = 32  # work-items that change values by themselves

# 2**t for t in 0 … 1; the ends are exact, so whole powers are
EXP2 = (0.0018793186, 0.0089909947, 0.055818677, 0.24015927, 0.6931517, 1.0)
# log2(1 + s) / s for s in -0.25 … 0.5
LOG2 = (
    0.07806677,
    -0.17423026,
    0.21632488,
    -0.24272351,
    0.2881915,
    -0.36057591,
    0.48090208,
    -0.72134846,
    1.442695,
)
# sin(r) / r in r * r, |r| <= pi / 2
SIN = (2.6054815e-6, -1.9809476e-4, 8.3330646e-3, -0.1666666, 1.0)
PI = (3.140625, 9.675025939941406e-4, 1.509958e-7)  # of 8, 11 and 24 bits
FAR = 25000.0  # up to here the second product is exact

# a cache line that will be written whole needn't be waited for either
FETCH = """static inline void {name}(__global const void* p) {{
#ifdef __clang__
  __builtin_prefetch((const void*)(size_t)p, {writes});
#endif
}}"""


def helpers(target: Target) -> dict[str, str]:
    """name -> definition, for every helper a renderer may ask for."""
    out = {
        name: FETCH.format(name=name, writes=writes)
        for name, writes in (("zoo_fetch", 0), ("zoo_fetch_out", 1))
    }
    for kind in SCALARS:
        for n in VECTORS:
            name = kind + (str(n) if n > 1 else "")
            # numbers inside a quantised block may start at any byte
            out[f"loose_{name}"] = f"typedef {name} loose_{name} __attribute__((aligned(1)));"
    dialect = DIALECTS[target.dialect]
    for kind in SCALARS:
        out[f"zoo_bytes_{kind}"] = _bytes(kind, dialect.pointer)
        for n in VECTORS:
            out[f"zoo_max_{_v(kind, n)}"] = _max(kind, n)
            for combine in ("add", "max") if n > 1 else ():
                out[f"fold_{combine}_{kind}{n}"] = _fold(kind, n, combine)
        for combine in ("add", "max"):
            out[f"zoo_team_{combine}_{kind}"] = _team(kind, combine, target.team, dialect)
        if kind != "float":
            out |= _division(kind)
    for n in VECTORS:
        f = "float" + (str(n) if n > 1 else "")
        out |= _halves(n, target)
        out |= _rounding(n, target)
        out |= {f"zoo_exp2_{f}": _exp2(n), f"zoo_log2_{f}": _log2(n), f"zoo_sin_{f}": _sin(n)}
        if n in NATIVE and {"avx512f", "avx512dq"} <= target.features:
            out |= {f"zoo_exp2_{f}": _native_exp2(n), f"zoo_log2_{f}": _native_log2(n)}
            out |= {f"zoo_max_{f}": _native_max(n)}
    return out


def _v(kind: str, n: int) -> str:
    return kind if n == 1 else f"{kind}{n}"


def _fold(kind: str, n: int, combine: str) -> str:
    """All lanes into one, halving the width each time."""
    lines = [f"static inline {kind} fold_{combine}_{kind}{n}({kind}{n} v{n}) {{"]
    width = n
    while width > 1:
        half = _v(kind, width // 2)
        lo, hi = f"v{width}.lo", f"v{width}.hi"
        text = f"{lo} + {hi}" if combine == "add" else _larger(lo, hi, kind)
        lines.append(f"  {half} v{width // 2} = {text};")
        width //= 2
    return "\n".join([*lines, "  return v1;", "}"])


def _bytes(kind: str, space: str) -> str:
    """A number that may lie anywhere, byte by byte: a GPU reads whole ones at multiples only."""
    size = SIZES[kind.removeprefix("u")]
    bits = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}[size]
    each = " | ".join(f"({bits})p[{i}] << {8 * i}" for i in range(size))
    return (
        f"static inline {kind} zoo_bytes_{kind}({space} const uchar* p) {{ "
        f"return as_{kind}(({bits})({each})); }}"
    )


def _team(kind: str, combine: str, team: int, d: Dialect) -> str:
    """Every work-item's x into one, by halves: those of 32 items in registers where they can."""
    both = "{} + {}" if combine == "add" else f"zoo_max_{kind}({{}}, {{}})"
    fold = f"x = {both.format('x', 'all[i]')};"
    lines = [f"  {d.shared} {kind}* all = ({d.shared} {kind}*)room;"]
    if d.shuffle and SIZES[kind.removeprefix("u")] == 4 and team >= WARP:
        other = d.shuffle.format("x", "n")
        lines += [
            f"  for (int n = {WARP // 2}; n > 0; n /= 2) x = {both.format('x', other)};",
            f"  if (item % {WARP} == 0) all[item / {WARP}] = x;",
            f"  {d.barrier};",
            "  x = all[0];",
            f"  for (int i = 1; i < {team // WARP}; i++) {fold}",
        ]
    else:
        pair = both.format("all[item]", "all[item + n]")
        lines += [
            "  all[item] = x;",
            f"  {d.barrier};",
            f"  for (int n = {team // 2}; n > 0; n /= 2) {{",
            f"    if (item < n) all[item] = {pair};",
            f"    {d.barrier};",
            "  }",
            "  x = all[0];",
        ]
    head = f"zoo_team_{combine}_{kind}({kind} x, {d.shared} long* room, const int item)"
    return "\n".join(
        [f"static inline {kind} {head} {{", *lines, f"  {d.barrier};", "  return x;", "}"]
    )


def _larger(a: str, b: str, kind: str) -> str:
    """a NaN if either is one: `>` alone is a single instruction, and gives a NaN in a."""
    larger = f"{b} > {a} ? {b} : {a}"
    return f"{b} != {b} ? {b} : ({larger})" if kind == "float" else larger


def _max(kind: str, n: int) -> str:
    f = _v(kind, n)
    text = _larger("a", "b", kind)
    return f"static inline {f} zoo_max_{f}({f} a, {f} b) {{ return {text}; }}"


def _native_max(n: int) -> str:
    """The same; in a loop, only the maximum itself waits for the one before."""
    f = _v("float", n)
    larger = _instruction("vmax", n, "a b", "%1, %2, %0")
    return (
        f"static inline {f} zoo_max_{f}({f} a, {f} b) {{ {f} r; {larger} return b != b ? b : r; }}"
    )


def _division(kind: str) -> dict[str, str]:
    """Floor division and modulo that never trap: x // 0 and x % 0 are 0."""
    if kind.startswith("u"):
        quotient, remainder = "b ? a / b : 0", "b ? a % b : 0"
    else:  # the lowest number divided by -1 would trap
        quotient = (
            f"b == 0 ? 0 : b == -1 ? ({kind})(0 - (u{kind})a) : "
            f"({kind})(a / b - ((a % b != 0) & ((a < 0) != (b < 0))))"
        )
        remainder = (
            "b == 0 || b == -1 ? 0 : "
            f"({kind})(a % b + (((a % b != 0) & ((a < 0) != (b < 0))) ? b : 0))"
        )
    return {
        f"zoo_idiv_{kind}": (
            f"static inline {kind} zoo_idiv_{kind}({kind} a, {kind} b) {{ return {quotient}; }}"
        ),
        f"zoo_mod_{kind}": (
            f"static inline {kind} zoo_mod_{kind}({kind} a, {kind} b) {{ return {remainder}; }}"
        ),
    }


def _halves(n: int, target: Target) -> dict[str, str]:
    """16-bit floats to float32 and back; only pointers to `half` are sure to exist everywhere."""
    f, h, u = _v("float", n), _v("ushort", n), _v("uint", n)
    suffix = "" if n == 1 else str(n)
    convert_u = "(uint)h" if n == 1 else f"convert_uint{n}(h)"
    narrow = "(ushort)(r)" if n == 1 else f"convert_ushort{n}(r)"
    quiet = f"(b >> 16) | ({u})(64u)"
    out = {
        f"unpack_bfloat16_{f}": (
            f"static inline {f} unpack_bfloat16_{f}({h} h) {{ return as_{f}({convert_u} << 16); }}"
        ),
        f"pack_bfloat16_{f}": (
            f"static inline {h} pack_bfloat16_{f}({f} x) {{\n"
            f"  {u} b = as_{u}(x);\n"
            f"  {u} r = (b + ({u})(0x7fffu) + ((b >> 16) & ({u})(1u))) >> 16;\n"
            f"  r = x != x ? {quiet} : r;\n"
            f"  return {narrow};\n}}"
        ),
        f"unpack_float16_{f}": (
            f"static inline {f} unpack_float16_{f}({h} h) {{ "
            f"return vload_half{suffix}(0, (const __private half*)&h); }}"
        ),
        f"pack_float16_{f}": (
            f"static inline {h} pack_float16_{f}({f} x) {{ {h} r; "
            f"vstore_half{suffix}_rte(x, 0, (__private half*)&r); return r; }}"
        ),
    }
    if n == 1:
        unpack, pack = DIALECTS[target.dialect].halves
        out |= {
            "unpack_float16_float": (
                f"static inline float unpack_float16_float(ushort h) {{ {unpack} }}"
            ),
            "pack_float16_float": f"static inline ushort pack_float16_float(float x) {{ {pack} }}",
        }
    if "f16c" in target.features and "avx512f" in target.features and n == 16:
        out["pack_float16_float16"] = (
            "static inline ushort16 pack_float16_float16(float16 x) { ushort16 r; "
            '__asm__("vcvtps2ph $0, %1, %0" : "=v"(r) : "v"(x)); return r; }'
        )
        out["unpack_float16_float16"] = (
            "static inline float16 unpack_float16_float16(ushort16 h) { float16 r; "
            '__asm__("vcvtph2ps %1, %0" : "=v"(r) : "v"(h)); return r; }'
        )
    if {"avx512_bf16", "avx512f"} <= target.features and n == 16:
        out["pack_bfloat16_float16"] = (  # it makes zeros of numbers below 2**-126
            "static inline ushort16 pack_bfloat16_float16(float16 x) { ushort16 r; "
            '__asm__("vcvtneps2bf16 %1, %0" : "=v"(r) : "v"(x)); return r; }'
        )
    if "f16c" in target.features and n == 1:
        out["unpack_float16_float"] = (
            "static inline float unpack_float16_float(ushort h) { float4 r; "
            '__asm__("vmovd %1, %0\\n vcvtph2ps %0, %0" : "=x"(r) : "r"((uint)h)); return r.x; }'
        )
    return out


def _rounding(n: int, target: Target) -> dict[str, str]:
    """Instructions that OpenCL compilers turn into calls of a library when lanes take them."""
    f = _v("float", n)
    out = {
        f"zoo_{op}_{f}": f"static inline {f} zoo_{op}_{f}({f} x) {{ return {op}(x); }}"
        for op in ("sqrt", "trunc")
    }
    if n in NATIVE and "avx512f" in target.features:
        root = _instruction("vsqrt", n, "x")
        cut = _instruction("vrndscale", n, "x", "$11, %1, %0")
        for op, text in (("sqrt", root), ("trunc", cut)):
            out[f"zoo_{op}_{f}"] = (
                f"static inline {f} zoo_{op}_{f}({f} x) {{ {f} r; {text} return r; }}"
            )
    return out


def _instruction(name: str, n: int, inputs: str, operands: str = "%1, %0") -> str:
    """r = one instruction of AVX-512 on n floats; the scalar form wants a single input twice."""
    if n == 1 and "%2" not in operands:
        operands = operands.replace("%1", "%1, %1")
    given = ", ".join(f'"v"({i})' for i in inputs.split())
    return f'__asm__("{name}{"ss" if n == 1 else "ps"} {operands}" : "=v"(r) : {given});'


def _polynomial(f: str, x: str, coefficients: tuple[float, ...]) -> str:
    """Horner's scheme, the highest power first."""
    text = f"({f})({coefficients[0]!r}f)"
    for c in coefficients[1:]:
        text = f"({text} * {x} + ({f})({c!r}f))"
    return text


def _exp2(n: int) -> str:
    """2**x for any processor, relative error below 2e-7.

    x = k + t, k whole and t in 0 … 1. Added to 1.5 * 2**23, the lowest bits of the sum are k;
    shifted up they become an exponent. Results below the smallest normal number are 0.
    """
    f, i = _v("float", n), _v("int", n)
    return (
        f"static inline {f} zoo_exp2_{f}({f} x) {{\n"
        f"  {f} y = ({f})(-126.5f) > x ? ({f})(-126.5f) : x;\n"
        f"  y = ({f})(128.0f) < y ? ({f})(128.0f) : y;\n"
        f"  {f} w = (y - ({f})(0.5f)) + ({f})(12582912.0f);\n"
        f"  {f} t = y - (w - ({f})(12582912.0f));\n"
        f"  return {_polynomial(f, 't', EXP2)} * as_{f}((as_{i}(w) << 23) + ({i})(0x3f800000));\n}}"
    )


def _native_exp2(n: int) -> str:
    """The same by AVX-512. Denormals are left out here too: they would take 150 cycles each."""
    f = _v("float", n)
    kind = "ss" if n == 1 else "ps"
    return (
        f"static inline {f} zoo_exp2_{f}({f} x) {{\n"
        f"  {f} r;\n"
        f"  {_instruction('vreduce', n, 'x', '$9, %1, %0')}\n"
        f"  const {f} p = {_polynomial(f, 'r', EXP2)};\n"
        f'  __asm__("vcmp{kind} $5, %3, %2, %%k1\\n vscalef{kind} %2, %1, %0%{{%%k1%}}%{{z%}}"\n'
        f'          : "=v"(r) : "v"(p), "v"(x), "v"(({f})(-126.0f)) : "k1");\n'
        f"  return r;\n}}"
    )


def _log2(n: int) -> str:
    """log2(x) for any processor, relative error below 3e-7.

    x = 2**e * (1 + s), s in -0.25 … 0.5; denormals are scaled up first.
    """
    f, i = _v("float", n), _v("int", n)
    whole = "(float)e" if n == 1 else f"convert_{f}(e)"
    return (
        f"static inline {f} zoo_log2_{f}({f} x) {{\n"
        f"  {f} y = x < ({f})(1.17549435e-38f) ? x * ({f})(8388608.0f) : x;\n"
        f"  {i} e = (as_{i}(y) - ({i})(0x3f400000)) >> 23;\n"
        f"  {f} s = as_{f}(as_{i}(y) - (e << 23)) - ({f})(1.0f);\n"
        f"  {f} w = {whole} - (x < ({f})(1.17549435e-38f) ? ({f})(23.0f) : ({f})(0.0f));\n"
        f"  {f} r = s * {_polynomial(f, 's', LOG2)} + w;\n"
        f"  r = x < ({f})(INFINITY) ? r : x;\n"
        f"  r = x > ({f})(0.0f) ? r : x == ({f})(0.0f) ? ({f})(-INFINITY) : ({f})(NAN);\n"
        f"  return x != x ? x : r;\n}}"
    )


def _native_log2(n: int) -> str:
    """The same by AVX-512, whose instructions give what is right for 0, infinity and NaN."""
    f = _v("float", n)
    return (
        f"static inline {f} zoo_log2_{f}({f} x) {{\n"
        f"  {f} r;\n"
        f"  {_instruction('vgetexp', n, 'x')}\n"
        f"  {f} e = r;\n"
        f"  {_instruction('vgetmant', n, 'x', '$11, %1, %0')}\n"
        f"  {f} s = r - ({f})(1.0f);\n"
        f"  {_instruction('vgetexp', n, 'r')}\n"
        f"  return s * {_polynomial(f, 's', LOG2)} + (e - r);\n}}"
    )


def _sin(n: int) -> str:
    """sin(x), absolute error below 3e-7; large numbers are left to the runtime's library.

    x = k * pi + r, |r| <= pi / 2: pi in three parts, the first two so short that their products
    with k are exact; an odd k turns the sign.
    """
    f, i, u = _v("float", n), _v("int", n), _v("uint", n)
    a, b, c = PI
    far = f"(x > ({f})({FAR}f)) | (x < ({f})(-{FAR}f))"
    lines = [
        f"static inline {f} zoo_sin_{f}({f} x) {{",
        f"  {f} w = x * ({f})(0.31830987f) + ({f})(12582912.0f);",
        f"  {f} k = w - ({f})(12582912.0f);",
        f"  {f} r = ((x - k * ({f})({a}f)) - k * ({f})({b}f)) - k * ({f})({c}f);",
        f"  {f} q = r * r;",
        f"  r = r * {_polynomial(f, 'q', SIN)};",
        f"  r = as_{f}(as_{u}(r) ^ (as_{u}(w) << 31));",
    ]
    if n == 1:
        return "\n".join([*lines, f"  return {far} ? sin(x) : r;", "}"])
    width = n // 2
    lines.append(f"  {i} m{n} = {far};")
    while width:
        lines.append(f"  {_v('int', width)} m{width} = m{2 * width}.lo | m{2 * width}.hi;")
        width //= 2
    return "\n".join([*lines, f"  if (m1) r = m{n} ? sin(x) : r;", "  return r;", "}"])
