"""Q4_K from values: for each 32 of them the scale and minimum are searched, not only their range.

Each of 21 candidate scales rounds the values, and a weighted least-squares fit to these integers
gives a better scale and minimum; the candidate of least weighted error is kept. All blocks go
through the search together, and sums run from the first value to the last, in float32.
Source: ggml's `ggml-quants.c`, `make_qkx2_quants` and `quantize_row_q4_K_ref`.
"""

from __future__ import annotations

import numpy as np

_TOP = 15  # the largest integer
_SIX_BITS = 63  # the largest scale and minimum of a group
_STEPS = 21  # candidates: the range of integers made from -1 to +1 longer


def q4_k(x: np.ndarray) -> np.ndarray:
    """(nb, 256) float32 -> (nb, 144) bytes: two units, 8 scales and minima in 6 bits, nibbles."""
    groups = np.ascontiguousarray(x.reshape(-1, 32).T)  # (32, 8 nb): a group is a column
    scale, minimum = (part.reshape(-1, 8) for part in _search(groups))  # (nb, 8)
    d, scales = _six_bits(scale)
    least, minima = _six_bits(minimum)
    steps = (d.astype(np.float32) * scales).reshape(1, -1)
    shift = (least.astype(np.float32) * minima).reshape(1, -1)
    exact = np.where(steps > 0, np.rint((groups + shift) / steps), 0)
    q = exact.clip(0, _TOP).astype(np.uint8).T.reshape(-1, 4, 2, 32)
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    halves = (d.view(np.uint8), least.view(np.uint8))
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


def _search(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(32, n) values -> (n,) scale and minimum, so that x is nearly scale * integer - minimum."""
    weight = np.sqrt(_sum(x * x) / np.float32(32)) + np.abs(x)
    sum_w, sum_x = _sum(weight), _sum(weight * x)
    top, least = x.max(axis=0), np.minimum(x.min(axis=0), np.float32(0))
    flat = top == least  # all values are one number, not above 0
    scale = np.where(flat, np.float32(0), 1 / (_TOP / (top - least)))
    error = _error(weight, scale, _rounded(x, _TOP / (top - least), least), least, x)
    for step in range(_STEPS):
        longer = np.float32(-1) + np.float32(0.1) * np.float32(step) + np.float32(_TOP)
        q = _rounded(x, longer / (top - least), least)
        wq = weight * q
        sum_q, sum_q2, sum_xq = _sum(wq), _sum(wq * q), _sum(wq * x)
        det = sum_w * sum_q2 - sum_q * sum_q
        new = (sum_w * sum_xq - sum_x * sum_q) / det
        new_least = (sum_q2 * sum_x - sum_q * sum_xq) / det
        above = new_least > 0
        new = np.where(above, sum_xq / sum_q2, new)
        new_least = np.where(above, np.float32(0), new_least)
        new_error = _error(weight, new, q, new_least, x)
        better = (det > 0) & (new_error < error) & ~flat
        scale = np.where(better, new, scale)
        least = np.where(better, new_least, least)
        error = np.where(better, new_error, error)
    return scale, -least


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
