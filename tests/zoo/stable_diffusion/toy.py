"""A model of no weights for samplers to work on, and fixed noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SHAPE = (1, 4, 3, 5)


def model(x: np.ndarray, time: float) -> np.ndarray:
    """Something smooth that depends on every input, no larger than noise is."""
    return np.tanh(0.8 * x + 0.3 * np.cos(time / 137) + 0.1 * x[:, ::-1]).astype(np.float32)


def normals(seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(SHAPE).astype(np.float32)


def fresh_noise() -> Callable[[], np.ndarray]:
    """A function that gives the same sequence of normals every time it is made."""
    state = np.random.RandomState(1)
    return lambda: state.standard_normal(SHAPE).astype(np.float32)
