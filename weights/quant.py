"""Tensor types found in checkpoints, each read as a lazy Tensor expression over the file's bytes.

A block format stores the last axis in blocks of 32 values: a half-precision scale `d`, for the
`_1` types a half-precision minimum `m`, and small integers `q`. The value is d * q (+ m), in
float32. Byte layout: ggml's `ggml-common.h` and `ggml-quants.c`; the `gguf` package is the oracle.
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


def plain(numpy_type: str, engine_type: dtype.DType | None = None) -> Decode:
    """The decode of a type that NumPy can view directly; bfloat16 travels as uint16."""

    def decode(raw: np.ndarray, shape: tuple[int, ...], device: str | None) -> Tensor:
        if raw.ctypes.data % np.dtype(numpy_type).itemsize:
            raw = raw.copy()  # a file may put data at any byte; devices need natural alignment
        array = raw.view(numpy_type).reshape(shape)
        return Tensor.from_numpy(array, device=device, dtype=engine_type)

    return decode


def blocks(values: Callable[[Tensor], Tensor], nbytes: int) -> Decode:
    """The decode of a block format, from its function raw (..., nb, nbytes) -> (..., nb, 32)."""

    def decode(raw: np.ndarray, shape: tuple[int, ...], device: str | None) -> Tensor:
        array = raw.reshape(*shape[:-1], -1, nbytes)
        return values(Tensor.from_numpy(array, device=device)).reshape(*shape)

    return decode


def _half(raw: Tensor, at: int) -> Tensor:
    return raw[..., at : at + 2].bitcast(dtype.float16).cast(dtype.float32)  # (..., nb, 1)


def _nibbles(raw: Tensor, at: int) -> Tensor:
    """16 bytes from `at` -> 32 integers 0..15: the low nibbles come first, then the high ones."""
    shift = (Tensor.arange(2, device=raw.device) * 4).cast(dtype.uint8).reshape(2, 1)
    pairs = (raw[..., at : at + 16].unsqueeze(-2) >> shift) & 15  # (..., nb, 2, 16)
    return pairs.reshape(*raw.shape[:-1], 32)


def _fifth_bits(raw: Tensor, at: int) -> Tensor:
    """4 bytes from `at` -> 32 integers 0 or 16: bit k of the little-endian word is value k's."""
    shift = Tensor.arange(32, device=raw.device).cast(dtype.uint32)
    bits = (raw[..., at : at + 4].bitcast(dtype.uint32) >> shift) & 1  # (..., nb, 32)
    return bits.cast(dtype.uint8) << 4


def _signed(q: Tensor, zero: int) -> Tensor:
    return (q.cast(dtype.int8) - zero).cast(dtype.float32)


def q4_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _signed(_nibbles(raw, 2), 8)


def q4_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _nibbles(raw, 4).cast(dtype.float32) + _half(raw, 2)


def q5_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _signed(_nibbles(raw, 6) | _fifth_bits(raw, 2), 16)


def q5_1(raw: Tensor) -> Tensor:
    q = _nibbles(raw, 8) | _fifth_bits(raw, 4)
    return _half(raw, 0) * q.cast(dtype.float32) + _half(raw, 2)


def q8_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * raw[..., 2:34].bitcast(dtype.int8).cast(dtype.float32)


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
    Format("Q2_K", 10, 256, 84),
    Format("Q3_K", 11, 256, 110),
    Format("Q4_K", 12, 256, 144),
    Format("Q5_K", 13, 256, 176),
    Format("Q6_K", 14, 256, 210),
    Format("IQ2_XXS", 16, 256, 66),
    Format("IQ2_XS", 17, 256, 74),
    Format("IQ3_XXS", 18, 256, 98),
    Format("IQ1_S", 19, 256, 50),
    Format("IQ4_NL", 20, 32, 18),
    Format("IQ3_S", 21, 256, 110),
    Format("IQ2_S", 22, 256, 82),
    Format("IQ4_XS", 23, 256, 136),
    Format("IQ1_M", 29, 256, 56),
    Format("TQ1_0", 34, 256, 54),
    Format("TQ2_0", 35, 256, 66),
    Format("MXFP4", 39, 32, 17),
    Format("F64", 28, 1, 8),
    Format("C64", None, 1, 8),
    Format("C128", None, 1, 16),
    Format("F8_E4M3", None, 1, 1),
    Format("F8_E5M2", None, 1, 1),
)
BY_NAME = {f.name: f for f in FORMATS}
BY_GGML = {f.ggml: f for f in FORMATS if f.ggml is not None}
READABLE = tuple(f.name for f in FORMATS if f.decode)
