"""Q4_K from values: for each 32 of them the scale and minimum are searched, not only their range.

Each of 21 candidate scales rounds the values, and a weighted least-squares fit to these integers
gives a better scale and minimum; the candidate of least weighted error is kept. All blocks go
through the search together, and sums run from the first value to the last, in float32.
Source: ggml's `ggml-quants.c`, `make_qkx2_quants` and `quantize_row_q4_K_ref`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_TOP = 15  # the largest integer
_SIX_BITS = 63  # the largest scale and minimum of a group
_STEPS = 21  # candidates: the range of integers made from -1 to +1 longer


def q4_k(x: np.ndarray) -> np.ndarray:
    """(nb, 256) float32 -> (nb, 144) bytes: two units, 8 scales and minima in 6 bits, nibbles."""
    groups = np.ascontiguousarray(x.reshape(-1, 32).T)  # (32, 8 nb): a group is a column
    found = _search(groups)
    d, scales = _six_bits(found.scale.reshape(-1, 8))
    unit, minima = _six_bits(-found.least.reshape(-1, 8))
    steps = (d.astype(np.float32) * scales).reshape(-1)
    shift = (unit.astype(np.float32) * minima).reshape(-1)
    # Where a group's scale is lost against the others', its integers no longer matter.
    lost = _rounded(groups, found.inverse, found.base)
    q = np.where(steps == 0, lost, np.rint((groups + shift) / steps).clip(0, _TOP))
    q = np.nan_to_num(q).astype(np.uint8).T.reshape(-1, 4, 2, 32)
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    halves = (d.view(np.uint8), unit.view(np.uint8))
    return np.concatenate([*halves, _packed(scales, minima), nibbles], axis=1)


def _six_bits(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(nb, 8) numbers -> their unit (nb, 1) as halves and how many of it each is, 0 to 63."""
    largest = np.maximum(x.max(axis=1, keepdims=True), np.float32(0))
    inverse = np.where(largest > 0, np.float32(_SIX_BITS) / largest, np.float32(0))
    count = np.rint(inverse * x).clip(0, _SIX_BITS).astype(np.uint8)
    return (largest / np.float32(_SIX_BITS)).astype("<f2"), count


def _packed(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Twice (nb, 8) integers of 6 bits -> (nb, 12) bytes, the inverse of `quant._six_bits`."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([first, second, (scales[:, 4:] & 15) | minima[:, 4:] << 4], axis=1)


@dataclass
class _Found:
    """Per group (n,): x is nearly scale * q + least, where q is round(inverse * (x - base))."""

    scale: np.ndarray
    least: np.ndarray
    inverse: np.ndarray
    base: np.ndarray
    error: np.ndarray


def _search(x: np.ndarray) -> _Found:
    """The best scale and least value for each group of (32, n) values."""
    weight = np.sqrt(_sum(x * x) / np.float32(32)) + np.abs(x)
    sum_w, sum_x = _sum(weight), _sum(weight * x)
    top, least = x.max(axis=0), np.minimum(x.min(axis=0), np.float32(0))
    flat = top == least  # all values are one number, not above 0
    inverse = _TOP / (top - least)
    scale = np.where(flat, np.float32(0), 1 / inverse)
    error = _error(weight, scale, _rounded(x, inverse, least), least, x)
    best = _Found(scale, least, inverse, least, error)
    for step in range(_STEPS):
        longer = np.float32(-1) + np.float32(0.1) * np.float32(step) + np.float32(_TOP)
        base = best.least
        inverse = longer / (top - base)
        q = _rounded(x, inverse, base)
        wq = weight * q
        sum_q, sum_q2, sum_xq = _sum(wq), _sum(wq * q), _sum(wq * x)
        det = sum_w * sum_q2 - sum_q * sum_q
        least = (sum_q2 * sum_x - sum_q * sum_xq) / det
        above = least > 0
        scale = np.where(above, sum_xq / sum_q2, (sum_w * sum_xq - sum_x * sum_q) / det)
        least = np.where(above, np.float32(0), least)
        error = _error(weight, scale, q, least, x)
        better = (det > 0) & (error < best.error) & ~flat
        new = _Found(scale, least, inverse, base, error)
        for name, values in vars(new).items():
            setattr(best, name, np.where(better, values, getattr(best, name)))
    return best


def _rounded(x: np.ndarray, inverse: np.ndarray, least: np.ndarray) -> np.ndarray:
    return np.rint(inverse * (x - least)).clip(0, _TOP)


def _error(
    weight: np.ndarray, scale: np.ndarray, q: np.ndarray, least: np.ndarray, x: np.ndarray
) -> np.ndarray:
    off = scale * q + least - x
    return _sum(weight * (off * off))


def _sum(x: np.ndarray) -> np.ndarray:
    """(32, n) -> (n,), one row after the other: NumPy adds rows of a matrix in order."""
    return np.add.reduce(x, axis=0)
