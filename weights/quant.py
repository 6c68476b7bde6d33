"""Tensor types found in checkpoints, each read as a lazy Tensor expression over the file's bytes.

A block format stores the last axis in blocks of 32 or 256 values: small integers q, packed, a
half-precision scale d and for some a half-precision minimum m. The value is d * q (+ m), in
float32; the larger blocks multiply d and m by small integers that each group of 16 or 32 has.
Every product is exact in float32, so that the value is rounded once at most, whatever the device.
Byte layout: ggml's `ggml-common.h` and `ggml-quants.c`; the `gguf` package is the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine import Tensor, dtype

Decode = Callable[[np.ndarray, tuple[int, ...], "str | None"], Tensor]


@dataclass(frozen=True)
class Format:
    """One tensor type: `block` values take `nbytes` bytes; `ggml` is its number in a GGUF file.

    `decode(raw uint8 (bytes,), shape, device)` gives the Tensor; None where we can't read it yet.
    """

    name: str
    ggml: int | None
    block: int
    nbytes: int
    decode: Decode | None = None

    def size(self, shape: tuple[int, ...]) -> int | None:
        """Bytes of a tensor of `shape`; None when its rows aren't a whole number of blocks."""
        if self.block > 1 and (not shape or shape[-1] % self.block):
            return None
        return math.prod(shape) // self.block * self.nbytes


def countable(shape: tuple[int, ...]) -> bool:
    """Whether NumPy can hold such an array; it counts the other axes even if one has length 0."""
    return math.prod(n for n in shape if n) < 2**59  # of at most 16 bytes each


def plain(numpy_type: str, engine_type: dtype.DType | None = None) -> Decode:
    """The decode of a type that NumPy can view directly; bfloat16 travels as uint16."""

    def decode(raw: np.ndarray, shape: tuple[int, ...], device: str | None) -> Tensor:
        if raw.ctypes.data % np.dtype(numpy_type).itemsize:
            raw = raw.copy()  # a file may put data at any byte; devices need natural alignment
        array = raw.view(numpy_type).reshape(shape)
        return Tensor.from_numpy(array, device=device, dtype=engine_type)

    return decode


def doubles(raw: np.ndarray, shape: tuple[int, ...], device: str | None) -> Tensor:
    """Rounded to float32 at once: the engine has no wider float."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        array = np.frombuffer(raw, "<f8").astype(np.float32)
    return Tensor.from_numpy(array.reshape(shape), device=device)


def blocks(values: Callable[[Tensor], Tensor], nbytes: int) -> Decode:
    """The decode of a block format, from its function raw (..., nb, nbytes) -> (..., nb, block)."""

    def decode(raw: np.ndarray, shape: tuple[int, ...], device: str | None) -> Tensor:
        array = raw.reshape(*shape[:-1], -1, nbytes)
        return values(Tensor.from_numpy(array, device=device)).reshape(*shape)

    return decode


def eight_bits(values: Callable[[Tensor], Tensor]) -> Decode:
    """The decode of a float of one byte, from its function uint8 -> float32."""

    def decode(raw: np.ndarray, shape: tuple[int, ...], device: str | None) -> Tensor:
        return values(Tensor.from_numpy(raw.reshape(shape), device=device))

    return decode


# --- parts of a block ------------------------------------------------------------------------


def _half(raw: Tensor, at: int) -> Tensor:
    return raw[..., at : at + 2].bitcast(dtype.float16).cast(dtype.float32)  # (..., nb, 1)


def _fields(raw: Tensor, at: int, count: int, bits: int, group: int) -> Tensor:
    """`count` bytes from `at` -> their fields of `bits` bits: (..., nb, 8 / bits * count).

    The bytes lie in groups: the lowest field of each byte of a group comes first, then the next.
    """
    lead, per_byte = raw.shape[:-1], 8 // bits
    steps = Tensor.arange(per_byte, device=raw.device)
    shift = (steps * bits).cast(dtype.uint8).reshape(per_byte, 1)
    groups = raw[..., at : at + count].reshape(*lead, count // group, 1, group)
    return ((groups >> shift) & ((1 << bits) - 1)).reshape(*lead, per_byte * count)


def _fifth_bits(raw: Tensor, at: int) -> Tensor:
    """4 bytes from `at` -> 32 integers 0 or 16: bit k of the little-endian word is value k's."""
    shift = Tensor.arange(32, device=raw.device).cast(dtype.uint32)
    bits = (raw[..., at : at + 4].bitcast(dtype.uint32) >> shift) & 1  # (..., nb, 32)
    return bits.cast(dtype.uint8) << 4


def _signed(q: Tensor, zero: int) -> Tensor:
    return (q.cast(dtype.int8) - zero).cast(dtype.float32)


def _scaled(q: Tensor, scale: Tensor, minus: Tensor | None = None) -> Tensor:
    """(..., nb, n) float32 values, (..., nb, s) scales and what to subtract: one per n / s."""
    parts = q.reshape(*scale.shape, -1) * scale.unsqueeze(-1)
    return (parts if minus is None else parts - minus.unsqueeze(-1)).reshape(*q.shape)


# --- blocks of 32 ----------------------------------------------------------------------------


def q4_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _signed(_fields(raw, 2, 16, 4, 16), 8)


def q4_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _fields(raw, 4, 16, 4, 16).cast(dtype.float32) + _half(raw, 2)


def q5_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _signed(_fields(raw, 6, 16, 4, 16) | _fifth_bits(raw, 2), 16)


def q5_1(raw: Tensor) -> Tensor:
    q = _fields(raw, 8, 16, 4, 16) | _fifth_bits(raw, 4)
    return _half(raw, 0) * q.cast(dtype.float32) + _half(raw, 2)


def q8_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * raw[..., 2:34].bitcast(dtype.int8).cast(dtype.float32)


def iq4_nl(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _non_linear(_fields(raw, 2, 16, 4, 16))


# --- blocks of 256 in groups with scales of their own ----------------------------------------


def q2_k(raw: Tensor) -> Tensor:
    low, high = raw[..., :16] & 15, raw[..., :16] >> 4
    scale = _half(raw, 80) * low.cast(dtype.float32)  # (..., nb, 16)
    minus = _half(raw, 82) * high.cast(dtype.float32)
    return _scaled(_fields(raw, 16, 64, 2, 32).cast(dtype.float32), scale, minus)


def q3_k(raw: Tensor) -> Tensor:
    packed = _fields(raw, 96, 8, 4, 8) | (_fields(raw, 104, 4, 2, 4) << 4)  # 6 bits
    q = _fields(raw, 32, 64, 2, 32) | (_fields(raw, 0, 32, 1, 32) << 2)
    return _scaled(_signed(q, 4), _half(raw, 108) * _signed(packed, 32))


def _six_bits(raw: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """12 bytes from `at` -> 8 scales and 8 minima, float32.

    The first 4 of each are the low 6 bits of a byte of theirs, and the high 2 bits of these bytes
    are those of the last 4, whose low 4 bits share a third group of bytes.
    """
    scale, least, rest = (raw[..., at + k : at + k + 4] for k in (0, 4, 8))
    scales = Tensor.cat(scale & 63, (rest & 15) | (scale >> 6 << 4), axis=-1)
    minima = Tensor.cat(least & 63, (rest >> 4) | (least >> 6 << 4), axis=-1)
    return scales.cast(dtype.float32), minima.cast(dtype.float32)


def q4_k(raw: Tensor) -> Tensor:
    scales, minima = _six_bits(raw, 4)
    q = _fields(raw, 16, 128, 4, 32).cast(dtype.float32)
    return _scaled(q, _half(raw, 0) * scales, _half(raw, 2) * minima)


def q5_k(raw: Tensor) -> Tensor:
    scales, minima = _six_bits(raw, 4)
    q = _fields(raw, 48, 128, 4, 32) | (_fields(raw, 16, 32, 1, 32) << 4)
    return _scaled(q.cast(dtype.float32), _half(raw, 0) * scales, _half(raw, 2) * minima)


def q6_k(raw: Tensor) -> Tensor:
    q = _fields(raw, 0, 128, 4, 64) | (_fields(raw, 128, 64, 2, 32) << 4)
    scales = raw[..., 192:208].bitcast(dtype.int8).cast(dtype.float32)
    return _scaled(_signed(q, 32), _half(raw, 208) * scales)


# What a 4-bit value of IQ4_NL and IQ4_XS stands for.
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _non_linear(q: Tensor) -> Tensor:
    table = Tensor.from_numpy(np.array(NON_LINEAR, np.float32), device=q.device)
    return table[q.reshape(-1)].reshape(*q.shape)


def iq4_xs(raw: Tensor) -> Tensor:
    packed = _fields(raw, 4, 4, 4, 1) | (_fields(raw, 2, 2, 2, 1) << 4)  # 8 scales of 6 bits
    return _scaled(_non_linear(_fields(raw, 8, 128, 4, 16)), _half(raw, 0) * _signed(packed, 32))


# --- floats of one byte ----------------------------------------------------------------------


def f8_e5m2(raw: Tensor) -> Tensor:
    """A half without its low byte."""
    return (raw.cast(dtype.uint16) << 8).bitcast(dtype.float16).cast(dtype.float32)


def f8_e4m3(raw: Tensor) -> Tensor:
    """The finite kind ("fn"): no infinity, and NaN where all other bits are 1.

    A half has room for sign, exponent and mantissa; its exponent counts from 15 instead of 7.
    """
    bits = raw.cast(dtype.uint16)
    half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).bitcast(dtype.float16)
    return Tensor.where((bits & 0x7F) == 0x7F, math.nan, half.cast(dtype.float32) * 256)


# One row per type. A row without a decode is known by size only: `inspect` can list it.
FORMATS = (
    Format("F32", 0, 1, 4, plain("<f4")),
    Format("F16", 1, 1, 2, plain("<f2")),
    Format("BF16", 30, 1, 2, plain("<u2", dtype.bfloat16)),
    Format("I8", 24, 1, 1, plain("i1")),
    Format("I16", 25, 1, 2, plain("<i2")),
    Format("I32", 26, 1, 4, plain("<i4")),
    Format("I64", 27, 1, 8, plain("<i8")),
    Format("U8", None, 1, 1, plain("u1")),
    Format("U16", None, 1, 2, plain("<u2")),
    Format("U32", None, 1, 4, plain("<u4")),
    Format("U64", None, 1, 8, plain("<u8")),
    Format("BOOL", None, 1, 1, plain("?")),
    Format("Q4_0", 2, 32, 18, blocks(q4_0, 18)),
    Format("Q4_1", 3, 32, 20, blocks(q4_1, 20)),
    Format("Q5_0", 6, 32, 22, blocks(q5_0, 22)),
    Format("Q5_1", 7, 32, 24, blocks(q5_1, 24)),
    Format("Q8_0", 8, 32, 34, blocks(q8_0, 34)),
    Format("Q2_K", 10, 256, 84, blocks(q2_k, 84)),
    Format("Q3_K", 11, 256, 110, blocks(q3_k, 110)),
    Format("Q4_K", 12, 256, 144, blocks(q4_k, 144)),
    Format("Q5_K", 13, 256, 176, blocks(q5_k, 176)),
    Format("Q6_K", 14, 256, 210, blocks(q6_k, 210)),
    Format("IQ2_XXS", 16, 256, 66),
    Format("IQ2_XS", 17, 256, 74),
    Format("IQ3_XXS", 18, 256, 98),
    Format("IQ1_S", 19, 256, 50),
    Format("IQ4_NL", 20, 32, 18, blocks(iq4_nl, 18)),
    Format("IQ3_S", 21, 256, 110),
    Format("IQ2_S", 22, 256, 82),
    Format("IQ4_XS", 23, 256, 136, blocks(iq4_xs, 136)),
    Format("IQ1_M", 29, 256, 56),
    Format("TQ1_0", 34, 256, 54),
    Format("TQ2_0", 35, 256, 66),
    Format("MXFP4", 39, 32, 17),
    Format("F64", 28, 1, 8, doubles),
    Format("F8_E4M3", None, 1, 1, eight_bits(f8_e4m3)),
    Format("F8_E5M2", None, 1, 1, eight_bits(f8_e5m2)),
    Format("C64", None, 1, 8),
    Format("C128", None, 1, 16),
)
BY_NAME = {f.name: f for f in FORMATS}
BY_GGML = {f.ggml: f for f in FORMATS if f.ggml is not None}
READABLE = tuple(f.name for f in FORMATS if f.decode)
