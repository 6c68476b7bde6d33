"""Fourier transforms, and bits."""

from __future__ import annotations

import re

import numpy as np

from weights.onnx_schema import NAMES
from weights.onnx_tensor import dtype_of
from zoo.onnx import values as v
from zoo.onnx.registry import operator
from zoo.onnx.values import Known


def _complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _pairs(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.stack([x.real, x.imag], -1).astype(dtype)


@operator("DFT", since=20)
def dft(x: Known, length: Known = None, axis: Known = None, *, inverse: int = 0, onesided: int = 0):
    """The discrete Fourier transform along an axis; the last axis has real and imaginary parts."""
    at = v.axis_in(-2 if axis is None else int(axis), x.ndim)
    n = None if length is None else int(length)
    if inverse and onesided:
        return np.fft.irfft(_complex(x), n, at)[..., None].astype(x.dtype)
    out = (np.fft.ifft if inverse else np.fft.fft)(_complex(x), n, at)
    if onesided:
        out = out[(*[slice(None)] * at, slice(0, out.shape[at] // 2 + 1))]
    return _pairs(out, x.dtype)


@operator("DFT")
def dft_17(x: Known, length: Known = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0):
    """With the axis as an attribute."""
    return dft(x, length, np.array(axis), inverse=inverse, onesided=onesided)


@operator("STFT")
def stft(x: Known, step: Known, window: Known = None, length: Known = None, *, onesided: int = 1):
    """The transforms of windows that slide over each signal: (B, frames, bins, 2)."""
    n = int(length) if length is not None else len(window)
    signal = _complex(x)
    frames = np.lib.stride_tricks.sliding_window_view(signal, n, 1)[:, :: int(step)]
    out = np.fft.fft(frames * (1 if window is None else window), axis=-1)
    return _pairs(out[..., : n // 2 + 1] if onesided else out, x.dtype)


@operator("MelWeightMatrix")
def mel_weight_matrix(bands: Known, length: Known, rate: Known, low: Known, high: Known, *,
                      output_datatype: int = 1):  # fmt: skip
    """(bins, bands): triangles between points that are evenly spaced in mels."""
    n = int(length) // 2 + 1
    ends = [2595 * np.log10(1 + float(f) / 700) for f in (low, high)]
    step = (ends[1] - ends[0]) / (int(bands) + 2)
    mels = np.arange(int(bands) + 2) * step + ends[0]
    hertz = 700 * (10 ** (mels / 2595) - 1)
    bins = ((int(length) + 1) * hertz // int(rate)).astype(int)
    out = np.zeros((n, int(bands)))
    for i, (a, b, c) in enumerate(zip(bins, bins[1:], bins[2:])):
        if b == a:
            out[b, i] = 1
        else:
            out[a : b + 1, i] = (np.arange(a, b + 1) - a) / (b - a)
        if c > b:
            out[b:c, i] = (c - np.arange(b, c)) / (c - b)
    return out.astype(dtype_of(NAMES[output_datatype]))


@operator("BitCast")
def bit_cast(x: Known, *, to: int):
    """The same bits as another type of the same size."""
    return x.view(dtype_of(NAMES[to]))


@operator("RegexFullMatch")
def regex_full_match(x: Known, *, pattern: str):
    """Whether each text as a whole matches."""
    found = [re.fullmatch(pattern, str(text)) is not None for text in x.reshape(-1)]
    return np.array(found, bool).reshape(x.shape)
