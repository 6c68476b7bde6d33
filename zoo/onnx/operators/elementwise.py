"""Operators that work on each element by itself."""

from __future__ import annotations

import math

import numpy as np

from engine import Tensor
from zoo.onnx import values as v
from zoo.onnx.registry import OPERATORS, add, pointwise
from zoo.onnx.values import Value


def _table(rows: dict, since: int = 1) -> None:
    for name, function in rows.items():
        add(name, function, since=since, pointwise=True)


def _unary(function):
    def run(x: Value):
        return function(x)

    return run


def _binary(function):
    def run(a: Value, b: Value):
        return function(a, b)

    return run


def _half_log(x):
    """The inverse of tanh."""
    return v.log((1 + x) / (1 - x)) * v.number(x, 0.5)


def _log1p(x):
    """log(1 + x) for x from 0 to 1, as twice an inverse tanh."""
    return v.log(x + 1)


def softplus(x):
    """log(1 + exp(x)), without overflow."""
    return v.maximum(x, 0) + _log1p(v.exp(-v.absolute(x)))


def atan(x):
    """By the angle's fraction of a quarter turn: |x| > 1 is turned over first (Cephes' atanf)."""
    if not isinstance(x, Tensor):
        return np.arctan(x)
    a = x.abs()
    large, middle = a > 2.414213562373095, a > 0.4142135623730950
    y = Tensor.where(large, -a.reciprocal(), Tensor.where(middle, (a - 1) / (a + 1), a))
    base = Tensor.where(large, math.pi / 2, Tensor.where(middle, math.pi / 4, 0.0))
    z = y * y
    out = (((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z
           - 3.33329491539e-1) * z * y + y + base  # fmt: skip
    return Tensor.where(x < 0, -out, out)


def _sign(x):
    if not isinstance(x, Tensor):
        return np.sign(x)
    one = (x > 0).cast(x.dtype)
    return one if x.dtype.kind == "u" else one - (x < 0).cast(x.dtype)


_table(
    {
        "Abs": _unary(v.absolute),
        "Acos": _unary(lambda x: math.pi / 2 - 2 * atan(x / (1 + v.sqrt(1 - x * x)))),
        "Acosh": _unary(lambda x: v.log(x + v.sqrt(x * x - 1))),
        "Asin": _unary(lambda x: 2 * atan(x / (1 + v.sqrt(1 - x * x)))),
        "Asinh": _unary(lambda x: _sign(x) * v.log(v.absolute(x) + v.sqrt(x * x + 1))),
        "Atan": _unary(atan),
        "Atanh": _unary(_half_log),
        "Ceil": _unary(v.ceil),
        "Cos": _unary(v.cos),
        "Cosh": _unary(lambda x: (v.exp(x) + v.exp(-x)) * v.number(x, 0.5)),
        "Erf": _unary(v.erf),
        "Exp": _unary(v.exp),
        "Floor": _unary(v.floor),
        "HardSwish": _unary(lambda x: x * v.minimum(v.maximum(x + 3, 0), 6) * v.number(x, 1 / 6)),
        "Log": _unary(v.log),
        "Mish": _unary(lambda x: x * v.tanh(softplus(x))),
        "Neg": _unary(lambda x: -x),
        "Not": _unary(lambda x: ~x),
        "BitwiseNot": _unary(lambda x: ~x),
        "Reciprocal": _unary(v.reciprocal),
        "Relu": _unary(lambda x: v.maximum(x, 0)),
        "Round": _unary(v.round_),
        "Sigmoid": _unary(v.sigmoid),
        "Sign": _unary(_sign),
        "Sin": _unary(v.sin),
        "Sinh": _unary(lambda x: (v.exp(x) - v.exp(-x)) * v.number(x, 0.5)),
        "Softplus": _unary(softplus),
        "Softsign": _unary(lambda x: x / (1 + v.absolute(x))),
        "Sqrt": _unary(v.sqrt),
        "Tan": _unary(lambda x: v.sin(x) / v.cos(x)),
        "Tanh": _unary(v.tanh),
        "IsNaN": _unary(lambda x: x != x),
        "Identity": _unary(lambda x: x),
    }
)
_table(
    {
        "Add": _binary(lambda a, b: a + b),
        "Sub": _binary(lambda a, b: a - b),
        "Mul": _binary(lambda a, b: a * b),
        "And": _binary(lambda a, b: a & b),
        "Or": _binary(lambda a, b: a | b),
        "Xor": _binary(lambda a, b: a ^ b),
        "BitwiseAnd": _binary(lambda a, b: a & b),
        "BitwiseOr": _binary(lambda a, b: a | b),
        "BitwiseXor": _binary(lambda a, b: a ^ b),
        "Equal": _binary(lambda a, b: a == b),
        "Less": _binary(lambda a, b: a < b),
        "LessOrEqual": _binary(lambda a, b: a <= b),
        "Greater": _binary(lambda a, b: a > b),
        "GreaterOrEqual": _binary(lambda a, b: a >= b),
    },
    since=7,
)


@pointwise("Div", since=7)
def div(a: Value, b: Value):
    """Whole numbers are cut towards zero, as in C."""
    if v.is_float(a):
        return a / b
    if isinstance(a, Tensor):
        down = a // b
        return down + ((down * b != a) & ((a < 0) ^ (b < 0))).cast(a.dtype)
    down = a // b
    return (down + ((down * b != a) & ((a < 0) ^ (b < 0)))).astype(a.dtype)


@pointwise("Mod")
def mod(a: Value, b: Value, *, fmod: int = 0):
    """The divisor's sign, or with fmod the dividend's."""
    if not isinstance(a, Tensor):
        return np.fmod(a, b) if fmod else a % b
    if not a.dtype.is_float:
        return a - div(a, b) * b if fmod else a % b
    cut = a - (a / b).trunc() * b
    endless = b.abs() == float("inf")
    cut = Tensor.where(endless & (a.abs() < float("inf")), a, cut)
    if fmod:
        return cut
    return Tensor.where((cut != 0) & ((cut < 0) ^ (b < 0)), cut + b, cut)


@pointwise("Pow", since=7)
def power(x: Value, y: Value):
    """x to the y, of x's type. A whole power of a negative number is a number."""
    if not isinstance(x, Tensor):
        if x.dtype.kind in "iu" and y.dtype.kind in "iu":
            return np.power(x.astype(np.int64), y.astype(np.int64)).astype(x.dtype)
        return np.power(x.astype(np.result_type(x, y)), y).astype(x.dtype)
    constant = _one_number(y)
    if constant is not None and constant == int(constant) and abs(constant) <= 8:
        return (x.float() ** int(constant)).cast(x.dtype)
    base, e = x.float(), y.float()
    size = (base.abs().log2() * e).exp2()
    whole = e.floor() == e
    odd = (e * 0.5).floor() * 2 != e
    signed = Tensor.where(odd, -size, size)
    out = Tensor.where(base < 0, Tensor.where(whole, signed, float("nan")), size)
    return Tensor.where(e == 0, 1.0, out).cast(x.dtype)


def _one_number(t: Tensor) -> float | None:
    """The number that a tensor is known to be."""
    node = t.node
    while node.op.name in ("RESHAPE", "EXPAND"):
        node = node.src[0]
    if node.op.name == "CONST" and isinstance(node.arg, (int, float)):
        return float(node.arg)
    constant = node.op.name == "BUFFER" and node.arg[0].constant and node.arg[0].size == 1
    return float(t.numpy().reshape(-1)[0]) if constant and t.node is node else None


def _before_7(function):
    """Before opset 7 the axes of b lay at `axis` of a, and at the end only without one."""

    def run(a: Value, b: Value, *, axis: int | None = None, broadcast: int = 0):
        if axis is not None and b.ndim:
            axis = v.axis_in(axis, a.ndim)
            b = v.reshape(b, (*b.shape, *(1,) * (a.ndim - axis - b.ndim)))
        return function(a, b)

    return run


for _name in ("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Less", "Greater"):
    add(_name, _before_7(OPERATORS["", _name][0].function), pointwise=True)


@pointwise("BitShift")
def bit_shift(x: Value, y: Value, *, direction: str):
    """By as many bits as y says; all bits are gone where that is all that there are."""
    return x << y if direction == "LEFT" else x >> y


@pointwise("Where")
def where(condition: Value, x: Value, y: Value):
    """x where the condition holds, else y."""
    return v.where(condition, x, y)


def _fold(function):
    def run(*xs: Value):
        out = xs[0]
        for x in xs[1:]:
            out = function(out, x)
        return out

    return run


_table(
    {
        "Max": _fold(v.maximum),
        "Min": _fold(v.minimum),
        "Sum": _fold(lambda a, b: a + b),
    }
)


@pointwise("Mean")
def mean(*xs: Value):
    """The mean of the inputs."""
    return _fold(lambda a, b: a + b)(*xs) * v.number(xs[0], 1 / len(xs))


@pointwise("Clip")
def clip(x: Value, min: Value = None, max: Value = None):
    """Within min and max, of which either may be missing."""
    if min is not None:
        x = v.maximum(x, min)
    return x if max is None else v.minimum(x, max)


@pointwise("IsInf")
def is_inf(x: Value, *, detect_negative: int = 1, detect_positive: int = 1):
    """Where x is infinite, of either sign or of one."""
    none = x != x
    none = none & ~none
    up = x == float("inf") if detect_positive else none
    return up | (x == -float("inf") if detect_negative else none)
