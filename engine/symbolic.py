"""Symbolic integers with bounds: shapes, buffer indices and launch sizes.

A value is a plain `int` or an `Expr`. Exprs are interned, so equal means identical, and every
operator returns its canonical form: sums of products, with division and modulo simplified by
bounds and common factors. That is what lets a chain of reshapes and slices collapse into one
address that the code generator can see is contiguous.

Division and modulo are Python's (floor).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Union

Int = Union[int, "Expr"]

_interned: dict[tuple, Expr] = {}


class Expr:
    """An interned integer expression: `op` and `args`, inclusive bounds `min` and `max`.

    op      args
    var     (name, min, max)
    sum     (const, ((term, coefficient), ...))   terms sorted by their text, no nested sums
    mul     (factor, factor, ...)                 no constants, no nested products
    div mod min max lt    (a, b)                  lt is 0 or 1
    """

    __slots__ = ("args", "max", "min", "op", "text", "vars")

    op: str
    args: tuple
    min: int
    max: int
    text: str
    vars: frozenset[Expr]

    def __repr__(self) -> str:
        return self.text

    def __add__(self, other: Int) -> Int:
        return _sum(((self, 1), (other, 1))) if isinstance(other, (int, Expr)) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Int) -> Int:
        return _sum(((self, 1), (other, -1))) if isinstance(other, (int, Expr)) else NotImplemented

    def __rsub__(self, other: Int) -> Int:
        return _sum(((self, -1), (other, 1))) if isinstance(other, (int, Expr)) else NotImplemented

    def __neg__(self) -> Int:
        return _sum(((self, -1),))

    def __mul__(self, other: Int) -> Int:
        if isinstance(other, int):
            return _sum(((self, other),))
        return _product(self, other) if isinstance(other, Expr) else NotImplemented

    __rmul__ = __mul__

    def __floordiv__(self, other: Int) -> Int:
        return _floordiv(self, other) if isinstance(other, (int, Expr)) else NotImplemented

    def __rfloordiv__(self, other: Int) -> Int:
        return _floordiv(other, self) if isinstance(other, (int, Expr)) else NotImplemented

    def __mod__(self, other: Int) -> Int:
        return _mod(self, other) if isinstance(other, (int, Expr)) else NotImplemented

    def __rmod__(self, other: Int) -> Int:
        return _mod(other, self) if isinstance(other, (int, Expr)) else NotImplemented


def _intern(op: str, args: tuple, low: int, high: int, text: str, variables: frozenset) -> Expr:
    key = (op, args)
    found = _interned.get(key)
    if found is None:
        found = Expr()
        found.op = op
        found.args = args
        found.min = low
        found.max = high
        found.text = text
        found.vars = variables
        if op == "var":
            found.vars = frozenset((found,))
        _interned[key] = found
    return found


def Var(name: str, low: int, high: int) -> Expr:
    """A named integer between `low` and `high`, both inclusive."""
    if low > high:
        raise ValueError(f"Var {name}: the lower bound {low} is above the upper bound {high}")
    return _intern("var", (name, low, high), low, high, name, frozenset())


def bounds(x: Int) -> tuple[int, int]:
    """The inclusive (min, max) of a value."""
    return (x, x) if isinstance(x, int) else (x.min, x.max)


def variables(x: Int) -> frozenset[Expr]:
    """Every Var in a value."""
    return frozenset() if isinstance(x, int) else x.vars


def upper(x: Int) -> int:
    """The largest value that x can take: what to allocate for a symbolic size."""
    return x if isinstance(x, int) else x.max


def _terms(x: Int) -> tuple[int, tuple]:
    if isinstance(x, int):
        return x, ()
    if x.op == "sum":
        return x.args
    return 0, ((x, 1),)


def _sum(parts: Iterable[tuple[Int, int]]) -> Int:
    const = 0
    terms: dict[Expr, int] = {}
    for part, scale in parts:
        c, ts = _terms(part)
        const += c * scale
        for term, coefficient in ts:
            total = terms.get(term, 0) + coefficient * scale
            if total:
                terms[term] = total
            else:
                terms.pop(term, None)
    if len(terms) > 1:
        const += _recombine(terms)
    if not terms:
        return const
    if len(terms) == 1 and const == 0:
        ((term, coefficient),) = terms.items()
        if coefficient == 1:
            return term
    return _make_sum(const, terms)


def _make_sum(const: int, terms: dict[Expr, int]) -> Expr:
    ordered = tuple(sorted(terms.items(), key=lambda item: item[0].text))
    found = _interned.get(("sum", (const, ordered)))
    if found is not None:
        return found
    low = high = const
    for term, coefficient in ordered:
        low += coefficient * (term.min if coefficient > 0 else term.max)
        high += coefficient * (term.max if coefficient > 0 else term.min)
    pieces = [t.text if c == 1 else f"{t.text}*{c}" for t, c in ordered]
    text = "(" + "+".join(pieces + ([str(const)] if const else [])) + ")"
    return _intern("sum", (const, ordered), low, high, text, _union(t for t, _ in ordered))


def _recombine(terms: dict[Expr, int]) -> int:
    """(x // m) * m * k + (x % m) * k  ->  x * k, in place; returns the constant that x brings."""
    const = 0
    for term in [t for t in terms if t.op == "mod"]:
        x, m = term.args
        if term not in terms or not isinstance(m, int):
            continue
        quotient = _floordiv(x, m)
        k = terms[term]
        if not isinstance(quotient, Expr) or terms.get(quotient) != m * k:
            continue
        del terms[term], terms[quotient]
        const += _add(terms, x, k)
    return const + _round(terms)


def _round(terms: dict[Expr, int]) -> int:
    """Rounding to a multiple of m in its shortest form, in place; returns the constant it brings.

    x - x % m  ->  m * (x // m)   and   m * (x // m) - x  ->  -(x % m): so that a size that was
    padded to whole tiles divides by them again.
    """
    const = 0
    for term in [t for t in terms if t.op in ("mod", "div")]:
        x, m = term.args
        if term not in terms or not isinstance(m, int):
            continue
        scale = -terms[term] if term.op == "mod" else -terms[term] // m
        inner = _terms(x)[1]
        whole = term.op == "mod" or terms[term] % m == 0
        if not whole or any(terms.get(t) != scale * k for t, k in inner):
            continue
        del terms[term]
        const += _add(terms, x, -scale)
        if term.op == "mod":
            const += _add(terms, _floordiv(x, m), scale * m)
        else:
            const += _add(terms, _mod(x, m), scale)
    return const


def _add(terms: dict[Expr, int], x: Int, scale: int) -> int:
    """Add scale * x to terms, in place; returns the constant that x brings."""
    const, inner = _terms(x)
    for t, coefficient in inner:
        total = terms.get(t, 0) + coefficient * scale
        if total:
            terms[t] = total
        else:
            terms.pop(t, None)
    return const * scale


def _product(a: Expr, b: Expr) -> Int:
    if "sum" in (a.op, b.op):
        (ca, ta), (cb, tb) = _terms(a), _terms(b)
        left = [*ta, (1, ca)] if ca else list(ta)
        right = [*tb, (1, cb)] if cb else list(tb)
        return _sum((x * y, p * q) for x, p in left for y, q in right)
    factors = (*(a.args if a.op == "mul" else (a,)), *(b.args if b.op == "mul" else (b,)))
    ordered = tuple(sorted(factors, key=lambda f: f.text))
    low, high = 1, 1
    for f in ordered:
        ends = [low * f.min, low * f.max, high * f.min, high * f.max]
        low, high = min(ends), max(ends)
    text = "(" + "*".join(f.text for f in ordered) + ")"
    return _intern("mul", ordered, low, high, text, _union(ordered))


def _union(exprs: Iterable[Expr]) -> frozenset[Expr]:
    return frozenset().union(*(e.vars for e in exprs))


def _binary(op: str, a: Int, b: Int, low: int, high: int) -> Expr:
    text = f"{op}({a},{b})"
    return _intern(op, (a, b), low, high, text, variables(a) | variables(b))


def _split_by_factor(terms: tuple, const: int, c: int) -> tuple[Int, Int, int] | None:
    """terms + const = g * big + small with g a divisor of c and 0 <= small < g, if there is one."""
    for g in sorted({gcd(k, c) for _, k in terms}, reverse=True):
        if g <= 1:
            continue
        big = [(t, k // g) for t, k in terms if k % g == 0]
        small = _sum([(t, k) for t, k in terms if k % g] + [(1, const % g)])
        low, high = bounds(small)
        if 0 <= low and high < g:
            return _sum([*big, (1, const // g)]), small, g
    return None


def _floordiv(a: Int, c: Int) -> Int:
    if isinstance(a, int) and isinstance(c, int):
        return a // c
    if a is c:
        return 1
    if not isinstance(c, int):
        return _div_symbolic(a, c)
    if c == 1:
        return a
    if c <= 0:
        raise ValueError(f"division of {a} by {c}: the divisor must be positive")
    if a.min // c == a.max // c:
        return a.min // c
    const, terms = _terms(a)
    out = [(t, k // c) for t, k in terms if k % c == 0 or k > c]
    if out or not 0 <= const < c:
        rest = _sum([(t, k % c if k > c else k) for t, k in terms if k % c] + [(1, const % c)])
        return _sum([*out, (1, const // c), (_floordiv(rest, c), 1)])
    if split := _split_by_factor(terms, const, c):
        big, _, g = split
        return _floordiv(big, c // g)
    if a.op == "div" and isinstance(a.args[1], int):
        return _floordiv(a.args[0], a.args[1] * c)
    if a.op == "mod" and isinstance(a.args[1], int) and a.args[1] % c == 0:
        return _mod(_floordiv(a.args[0], c), a.args[1] // c)
    return _binary("div", a, c, a.min // c, a.max // c)


def _mod(a: Int, c: Int) -> Int:
    if isinstance(a, int) and isinstance(c, int):
        return a % c
    if a is c:
        return 0
    if not isinstance(c, int):
        return a - _div_symbolic(a, c) * c
    if c <= 0:
        raise ValueError(f"{a} modulo {c}: the divisor must be positive")
    low, high = bounds(a)
    if low // c == high // c:
        return a - low // c * c
    const, terms = _terms(a)
    reduced = _sum([(t, k % c if k > 0 else -(-k % c)) for t, k in terms] + [(1, const % c)])
    if reduced is not a:
        return _mod(reduced, c)
    if split := _split_by_factor(terms, const, c):
        big, small, g = split
        return _mod(big, c // g) * g + small
    if a.op == "mod" and isinstance(a.args[1], int) and a.args[1] % c == 0:
        return _mod(a.args[0], c)
    return _binary("mod", a, c, 0, c - 1)


def _div_symbolic(a: Int, c: Expr) -> Int:
    """a // c for a symbolic c > 0: exact multiples of c come out, the rest stays a node."""
    if isinstance(a, int) and 0 <= a < c.min:
        return 0
    const, terms = _terms(a)
    out = []
    rest: list[tuple[Int, int]] = [(1, const)]
    for term, k in terms:
        factors = list(term.args) if term.op == "mul" else [term]
        if c in factors:
            factors.remove(c)
            left: Int = 1
            for f in factors:
                left = left * f
            out.append((left, k))
        else:
            rest.append((term, k))
    remainder = _sum(rest)
    low, high = bounds(remainder)
    if 0 <= low and high < c.min:
        return _sum(out)
    ends = [low // c.min, low // c.max, high // c.min, high // c.max] if c.min > 0 else [low, high]
    return _sum([*out, (_binary("div", remainder, c, min(ends), max(ends)), 1)])


def minimum(a: Int, b: Int) -> Int:
    """The smaller of two values."""
    (al, ah), (bl, bh) = bounds(a), bounds(b)
    if ah <= bl:
        return a
    if bh <= al:
        return b
    return _binary("min", a, b, min(al, bl), min(ah, bh))


def maximum(a: Int, b: Int) -> Int:
    """The larger of two values."""
    (al, ah), (bl, bh) = bounds(a), bounds(b)
    if al >= bh:
        return a
    if bl >= ah:
        return b
    return _binary("max", a, b, max(al, bl), max(ah, bh))


def less(a: Int, b: Int) -> Int:
    """1 where a < b, else 0."""
    difference = a - b
    low, high = bounds(difference)
    if high < 0:
        return 1
    if low >= 0:
        return 0
    return _binary("lt", a, b, 0, 1)


def linear_in(x: Int, var: Expr) -> tuple[int, Int] | None:
    """(coefficient, rest) with x = coefficient * var + rest and rest free of var, or None."""
    if isinstance(x, int) or var not in x.vars:
        return 0, x
    const, terms = _terms(x)
    coefficient = 0
    rest: list[tuple[Int, int]] = [(1, const)]
    for term, k in terms:
        if term is var:
            coefficient = k
        elif var in term.vars:
            return None
        else:
            rest.append((term, k))
    return coefficient, _sum(rest)


def substitute(x: Int, values: Mapping[Expr, Int]) -> Int:
    """x with each Var in `values` replaced, simplified again."""
    if isinstance(x, int) or x.vars.isdisjoint(values):
        return x
    if x.op == "var":
        return values[x]
    if x.op == "sum":
        const, terms = x.args
        return _sum([(substitute(t, values), k) for t, k in terms] + [(1, const)])
    args = [substitute(a, values) for a in x.args]
    if x.op == "mul":
        out: Int = 1
        for a in args:
            out = out * a
        return out
    a, b = args
    match x.op:
        case "div":
            return a // b
        case "mod":
            return a % b
        case "min":
            return minimum(a, b)
        case "max":
            return maximum(a, b)
    return less(a, b)


def product(values: Iterable[Int]) -> Int:
    """The product of all values; 1 for none."""
    out: Int = 1
    for v in values:
        out = out * v
    return out


def evaluate(x: Int, values: Mapping[Expr, int]) -> int:
    """The number that x is, every Var being given.

    Raises KeyError naming the first Var without a value.
    """
    result = substitute(x, values)
    if not isinstance(result, int):
        missing = sorted(v.text for v in result.vars)
        raise KeyError(f"no value for {', '.join(missing)} in {x}")
    return result
