"""Small functions that generated C calls, by name; only the ones a source needs go into it."""

from __future__ import annotations

from engine.ir import Target

VECTORS = (1, 2, 4, 8, 16)
SCALARS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float")


def helpers(target: Target) -> dict[str, str]:
    """name -> definition, for every helper a renderer may ask for."""
    out: dict[str, str] = {}
    for kind in SCALARS:
        for n in VECTORS:
            name = kind + (str(n) if n > 1 else "")
            # numbers inside a quantised block may start at any byte
            out[f"loose_{name}"] = f"typedef {name} loose_{name} __attribute__((aligned(1)));"
    for kind in SCALARS:
        for n in VECTORS[1:]:
            for combine in ("add", "max"):
                out[f"fold_{combine}_{kind}{n}"] = _fold(kind, n, combine)
        if kind != "float":
            out |= _division(kind)
    for n in VECTORS:
        f = "float" + (str(n) if n > 1 else "")
        out[f"zoo_max_{f}"] = _max(n)
        out |= _halves(n, target)
        out |= _functions(n)
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
        if combine == "add":
            text = f"{lo} + {hi}"
        elif kind == "float":
            text = _larger(lo, hi, width // 2)
        else:
            text = f"max({lo}, {hi})"
        lines.append(f"  {half} v{width // 2} = {text};")
        width //= 2
    return "\n".join([*lines, "  return v1;", "}"])


def _larger(a: str, b: str, n: int) -> str:
    if n == 1:
        return f"({a} > {b} || {a} != {a}) ? {a} : {b}"
    return f"select({b}, {a}, ({a} > {b}) | ({a} != {a}))"


def _max(n: int) -> str:
    f = _v("float", n)
    return f"static inline {f} zoo_max_{f}({f} a, {f} b) {{ return {_larger('a', 'b', n)}; }}"


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
    pick = f"x != x ? {quiet} : r" if n == 1 else f"select(r, {quiet}, x != x)"
    out = {
        f"unpack_bfloat16_{f}": (
            f"static inline {f} unpack_bfloat16_{f}({h} h) {{ return as_{f}({convert_u} << 16); }}"
        ),
        f"pack_bfloat16_{f}": (
            f"static inline {h} pack_bfloat16_{f}({f} x) {{\n"
            f"  {u} b = as_{u}(x);\n"
            f"  {u} r = (b + ({u})(0x7fffu) + ((b >> 16) & ({u})(1u))) >> 16;\n"
            f"  r = {pick};\n"
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
    if "f16c" in target.features and "avx512f" in target.features and n == 16:
        out["unpack_float16_float16"] = (
            "static inline float16 unpack_float16_float16(ushort16 h) { float16 r; "
            '__asm__("vcvtph2ps %1, %0" : "=v"(r) : "v"(h)); return r; }'
        )
    if "f16c" in target.features and n == 1:
        out["unpack_float16_float"] = (
            "static inline float unpack_float16_float(ushort h) { float4 r; "
            '__asm__("vmovd %1, %0\\n vcvtph2ps %0, %0" : "=x"(r) : "r"((uint)h)); return r.x; }'
        )
    return out


def _functions(n: int) -> dict[str, str]:
    """exp2 as a polynomial (relative error below 2e-7), the rest from the runtime's library.

    x = whole + fraction, fraction in -0.5 … 0.5; 2**fraction by its Taylor series, 2**whole by
    building the exponent, in two halves so that results down to the smallest normal number and
    overflow to infinity come out right.
    """
    f, i = _v("float", n), _v("int", n)
    whole = "(int)w" if n == 1 else f"convert_int{n}(w)"
    clamp_low = _larger("x", f"({f})(-160.0f)", n)
    low = f"x < ({f})(160.0f)"
    clamp_high = f"({low}) ? x : ({f})(160.0f)" if n == 1 else f"select(({f})(160.0f), x, {low})"
    back = "x != x ? x : r" if n == 1 else "select(r, x, x != x)"
    coefficients = (
        1.5252734e-5,
        1.5403530e-4,
        1.3333558e-3,
        9.6181291e-3,
        5.5504109e-2,
        2.4022651e-1,
        6.9314718e-1,
        1.0,
    )
    poly = f"({f})({coefficients[0]!r}f)"
    for c in coefficients[1:]:
        poly = f"({poly} * t + ({f})({c!r}f))"
    exp2 = (
        f"static inline {f} zoo_exp2_{f}({f} x) {{\n"
        f"  {f} y = {clamp_low};\n"
        f"  y = {clamp_high.replace('x', 'y')};\n"
        f"  {f} w = (y + ({f})(12582912.0f)) - ({f})(12582912.0f);\n"
        f"  {f} t = y - w;\n"
        f"  {i} k = {whole}, a = k >> 1, b = k - a;\n"
        f"  {f} r = {poly};\n"
        f"  r = r * as_{f}((a + ({i})(127)) << 23) * as_{f}((b + ({i})(127)) << 23);\n"
        f"  return {back};\n}}"
    )
    return {
        f"zoo_exp2_{f}": exp2,
        f"zoo_log2_{f}": f"static inline {f} zoo_log2_{f}({f} x) {{ return log2(x); }}",
        f"zoo_sin_{f}": f"static inline {f} zoo_sin_{f}({f} x) {{ return sin(x); }}",
    }
