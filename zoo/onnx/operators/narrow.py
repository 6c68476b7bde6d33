"""Casts that NumPy leaves open: to numbers of 8 bits and less, and between numbers and texts."""

from __future__ import annotations

import numpy as np

from weights.onnx_tensor import dtype_of

SMALL = {"uint4": (0, 15), "int4": (-8, 7), "uint2": (0, 3), "int2": (-2, 1)}


def narrowed(x: np.ndarray, name: str, saturate: bool) -> np.ndarray:
    """x in the type of that name; saturate: what is too large becomes the largest number."""
    if name == "str":
        return _spelled(x)
    if x.dtype == object:
        x = _parsed(x, whole=name.startswith(("int", "uint")))
    dtype = dtype_of(name)
    if name in SMALL and x.dtype.kind not in "iub":  # halves of ml_dtypes know no integers
        return x.astype(np.float32).astype(dtype)
    if not name.startswith(("float8", "float4")):
        return x.astype(dtype)
    if name == "float8_e8m0fnu" and saturate:
        x = np.maximum(x.astype(np.float32), 2.0**-127)
    if saturate and name != "float8_e8m0fnu":
        import ml_dtypes

        largest = float(ml_dtypes.finfo(dtype).max)
        x = x.astype(np.float32)
        x = np.where(np.isnan(x), x, np.clip(x, -largest, largest))
    return x.astype(np.float32).astype(dtype)


def _parsed(x: np.ndarray, whole: bool) -> np.ndarray:
    numbers = [int(text) if whole else float(text) for text in x.reshape(-1)]
    return np.array(numbers).reshape(x.shape)


def _spelled(x: np.ndarray) -> np.ndarray:
    texts = [_text(value) for value in x.reshape(-1)]
    return np.array(texts, object).reshape(x.shape)


def _text(value) -> str:
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        return str(int(value))
    number = float(value)
    if np.isnan(number):
        return "NaN"
    return "INF" if number == np.inf else "-INF" if number == -np.inf else f"{number:.8g}"
