"""RoPE scaling: how LLaMAs stretch their rotations to texts longer than those they grew up with.

Sources: Chen et al. 2023 (linear), bloc97 2023 (dynamic NTK), Peng et al. 2023 (YaRN), Dubey et al.
2024 (Llama 3.1); the parameters are those of transformers' `modeling_rope_utils.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.functional import rope_table


@dataclass(frozen=True)
class Scaling:
    """One way of `SCALINGS` with what it needs; `original` is the context, in tokens, before it."""

    kind: str
    factor: float = 1.0
    original: int = 0
    low: float = 1.0  # llama3: turns in the original context, up to which all of `factor` applies
    high: float = 4.0  # llama3: and from which on none does
    slow: float = 1.0  # yarn: the same two
    fast: float = 32.0
    truncate: bool = True  # yarn: whether the two are rounded outwards to whole pairs
    attention: float = 1.0  # yarn: what cosines and sines are multiplied by
    factors: tuple[float, ...] = ()  # factors: by what each frequency is divided


def table(length: int, head_dim: int, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """(2, length, head_dim / 2) float32: cosines and sines of every position's angles."""
    if scaling is None:
        return rope_table(length, head_dim, theta)
    scale = partial(SCALINGS[scaling.kind], s=scaling, theta=theta, length=length)
    return rope_table(length, head_dim, theta, scale) * np.float32(scaling.attention)


def linear(f: np.ndarray, s: Scaling, theta: float, length: int) -> np.ndarray:
    """All positions closer together by `factor`."""
    return f / s.factor


def dynamic(f: np.ndarray, s: Scaling, theta: float, length: int) -> np.ndarray:
    """(length, D / 2): theta grows with the text, beyond the original context.

    A token is rotated by the theta of the text that ends with it, as when it comes alone: so its
    keys stay what they are when the text goes on.
    """
    d, seen = 2 * len(f), np.maximum(np.arange(length) + 1, s.original)
    grown = (s.factor * seen / s.original - (s.factor - 1)) ** (d / (d - 2))
    return f * grown[:, None] ** (-np.arange(0, d, 2) / d)


def yarn(f: np.ndarray, s: Scaling, theta: float, length: int) -> np.ndarray:
    """Slow rotations like linear, fast ones as they are, a ramp over the pairs between them."""

    def pair(turns: float) -> float:  # that makes so many turns in the original context
        return len(f) * math.log(s.original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(s.fast), pair(s.slow)
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(f) - 1)
    share = ((np.arange(len(f)) - first) / ((last - first) or 0.001)).clip(0, 1)
    return f / s.factor * share + f * (1 - share)


def llama3(f: np.ndarray, s: Scaling, theta: float, length: int) -> np.ndarray:
    """Slow rotations like linear, fast ones as they are, a ramp over the turns between them."""
    turns = s.original * f / (2 * math.pi)
    share = ((turns - s.low) / (s.high - s.low)).clip(0, 1)
    return f / s.factor * (1 - share) + f * share


def factors(f: np.ndarray, s: Scaling, theta: float, length: int) -> np.ndarray:
    """Each by its own: what GGUF files keep of Llama 3's way."""
    return f / np.array(s.factors)


SCALINGS = {
    "linear": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "llama3": llama3,
    "factors": factors,
}
