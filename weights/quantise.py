"""Values to bytes: what `convert` writes, each type from float32 rows that hold whole blocks.

The types of blocks of 32 take the scale that maps their largest value to the end of the range of
integers, as ggml's reference does; the `gguf` package is the oracle, bit for bit.
Source: ggml's `ggml-quants.c`, functions `quantize_row_*_ref`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.dtype import float32_to_bfloat16
from weights.k_quantise import q4_k

Encode = Callable[[np.ndarray], np.ndarray]


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 of any shape whose last axis is whole blocks -> (bytes,) uint8 of type `kind`.

    ValueError for a value that the type can't hold: beyond the range of F16, or NaN and infinity
    in a block.
    """
    values = np.ascontiguousarray(values, np.float32)
    if kind in _FLOATS:
        return np.ascontiguousarray(_FLOATS[kind](values)).reshape(-1).view(np.uint8)
    size, rows = BLOCKS[kind]
    if not np.isfinite(values).all():
        raise ValueError("NaN or infinity among the values can't be quantised")
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        out = rows(values.reshape(-1, size))
    if not np.isfinite(out[:, : _HALVES.get(kind, 2)].copy().view("<f2")).all():
        raise ValueError("values so far apart need a scale beyond the range of F16")
    return out.reshape(-1)


def _float16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out = x.astype("<f2")
    lost = np.isinf(out) & np.isfinite(x)
    if lost.any():
        raise ValueError(f"{x[lost].flat[0]:g} is beyond the range of F16, which ends at 65504")
    return out


_FLOATS: dict[str, Encode] = {
    "F32": lambda x: x.astype("<f4"),
    "F16": _float16,
    "BF16": lambda x: float32_to_bfloat16(x).astype("<u2"),
}


# --- blocks of 32: x (nb, 32) -> (nb, bytes) -------------------------------------------------


def _half(x: np.ndarray) -> np.ndarray:
    """(nb, 1) float32 -> (nb, 2) bytes of halves."""
    return x.astype("<f2").view(np.uint8)


def _inverse(d: np.ndarray) -> np.ndarray:
    return np.where(d == 0, np.float32(0), 1 / d)


def _nibbles(q: np.ndarray) -> np.ndarray:
    """(nb, 32) integers -> (nb, 16): the low 4 bits, the second half of the block above."""
    return (q[:, :16] & 15) | q[:, 16:] << 4


def _fifth_bits(q: np.ndarray) -> np.ndarray:
    return np.packbits(q >> 4, axis=-1, bitorder="little")  # (nb, 4)


def _by_extreme(x: np.ndarray, half_range: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale (nb, 1) and integers: the value of largest magnitude becomes 0, and zero the middle."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    d = extreme / np.float32(-half_range)
    q = np.trunc(x * _inverse(d) + np.float32(half_range + 0.5))
    return d, q.astype(np.uint8).clip(0, 2 * half_range - 1)


def _by_range(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, minimum (nb, 1) and integers: 0 at the least value, `top` at the largest."""
    least = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - least) / np.float32(top)
    q = np.trunc((x - least) * _inverse(d) + np.float32(0.5))
    return d, least, q.astype(np.uint8).clip(0, top)


def _q4_0(x: np.ndarray) -> np.ndarray:
    d, q = _by_extreme(x, 8)
    return np.concatenate([_half(d), _nibbles(q)], axis=1)


def _q4_1(x: np.ndarray) -> np.ndarray:
    d, least, q = _by_range(x, 15)
    return np.concatenate([_half(d), _half(least), _nibbles(q)], axis=1)


def _q5_0(x: np.ndarray) -> np.ndarray:
    d, q = _by_extreme(x, 16)
    return np.concatenate([_half(d), _fifth_bits(q), _nibbles(q)], axis=1)


def _q5_1(x: np.ndarray) -> np.ndarray:
    d, least, q = _by_range(x, 31)
    return np.concatenate([_half(d), _half(least), _fifth_bits(q), _nibbles(q)], axis=1)


def _q8_0(x: np.ndarray) -> np.ndarray:
    magnitude = np.abs(x)
    d = magnitude.max(axis=1, keepdims=True) / np.float32(127)
    scaled = magnitude * np.abs(_inverse(d))
    whole = np.floor(scaled)
    whole += np.floor(2 * (scaled - whole))  # half away from zero
    q = np.copysign(whole, x).astype(np.int8)
    return np.concatenate([_half(d), q.view(np.uint8)], axis=1)


_HALVES = {"Q4_1": 4, "Q5_1": 4, "Q4_K": 4}  # bytes of the scale, and of the minimum if it has one

# Type -> (values in a block, encoder of (nb, values) to (nb, bytes)).
BLOCKS: dict[str, tuple[int, Encode]] = {
    "Q4_0": (32, _q4_0),
    "Q4_1": (32, _q4_1),
    "Q5_0": (32, _q5_0),
    "Q5_1": (32, _q5_1),
    "Q8_0": (32, _q8_0),
    "Q4_K": (256, q4_k),
}
