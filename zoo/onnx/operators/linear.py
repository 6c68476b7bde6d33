"""Products of matrices."""

from __future__ import annotations

import numpy as np

from zoo.onnx import values as v
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value


@operator("MatMul")
def matmul(a: Value, b: Value):
    """NumPy's product of stacks of matrices."""
    return a @ b


@operator("Gemm")
def gemm(a: Value, b: Value, c: Value = None, *, alpha: float = 1.0, beta: float = 1.0,
         transA: int = 0, transB: int = 0, broadcast: int = 1):  # fmt: skip
    """alpha A B + beta C, each of A and B turned if asked for."""
    a = v.permute(a, (1, 0)) if transA else a
    out = a @ (v.permute(b, (1, 0)) if transB else b)
    out = out if alpha == 1 else out * v.number(out, alpha)
    if c is None or not beta:
        return out
    return out + (c if beta == 1 else c * v.number(c, beta))


@operator("Einsum")
def einsum(*xs: Value, equation: str):
    """Sums of products in Einstein's notation: axes by letters, those not in the result summed."""
    terms, out = _letters(equation.replace(" ", ""), [x.ndim for x in xs])
    everything = sorted(set("".join(terms)), key="".join([out, *terms]).index)
    product = None
    for x, letters in zip(xs, terms):
        x, letters = _diagonal(x, letters)
        order = [letters.index(c) for c in everything if c in letters]
        sizes = iter(v.permute(x, order).shape)
        wide = v.reshape(v.permute(x, order), [next(sizes) if c in letters else 1
                                               for c in everything])  # fmt: skip
        product = wide if product is None else product * wide
    summed = tuple(i for i, c in enumerate(everything) if c not in out)
    kept = [n for i, n in enumerate(product.shape) if i not in summed]
    return v.reshape(v.reduce("sum", product, summed), kept)


def _letters(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """The letters of each input and of the result, with `...` written out in capitals' place."""
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    rank = max(
        (n - len(t.replace("...", "")) for t, n in zip(terms, ranks) if "..." in t), default=0
    )
    spare = "".join(chr(0x391 + i) for i in range(rank))
    if not arrow:
        once = [c for c in sorted(set(left) - set(",.")) if left.count(c) == 1]
        out = ("..." if "..." in left else "") + "".join(once)
    filled = [
        t.replace("...", spare[rank - (n - len(t.replace("...", ""))) :] if "..." in t else "")
        for t, n in zip(terms, ranks)
    ]
    return filled, out.replace("...", spare)


def _diagonal(x: Value, letters: str) -> tuple[Value, str]:
    """x along the diagonal of axes that have the same letter."""
    for letter in letters:
        while letters.count(letter) > 1:
            i, j = letters.index(letter), letters.rindex(letter)
            n = x.shape[i]
            sizes = [1] * x.ndim
            sizes[i] = n
            one = v.reshape(v.iota(n, x), sizes)
            sizes[i], sizes[j] = 1, n
            same = one == v.reshape(v.iota(n, x), sizes)
            x = v.reduce("sum", v.where(same, x, v.number(x, 0)), (j,))
            x = v.reshape(x, [n for a, n in enumerate(x.shape) if a != j])
            letters = letters[:j] + letters[j + 1 :]
    return x, letters


@operator("Det")
def det(x: Known):
    """The determinants of square matrices."""
    return np.linalg.det(x).astype(x.dtype)


@operator("MatMulInteger")
def matmul_integer(a: Value, b: Value, a_zero: Value = None, b_zero: Value = None):
    """The product of 8-bit integers less their zero points, int32."""
    return centred(a, a_zero, -1) @ centred(b, b_zero, 0)


def centred(x: Value, zero: Value | None, axis: int) -> Value:
    """x - zero as int32; a zero point per row (axis -1: of the left side) or column."""
    x = v.cast(x, "int32")
    if zero is None:
        return x
    zero = v.cast(zero, "int32")
    many = zero.ndim == 1 and zero.shape[0] > 1
    return x - (v.reshape(zero, (-1, 1)) if many and axis == -1 else zero)
