"""A text as a vector: the mean of what a language model's last layer makes of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine import Tensor, program
from engine.dtype import int32
from engine.functional import rms_norm
from zoo.llama import model
from zoo.llama.cache import Span, init_cache

ROWS = 32  # tokens per call


class Embedder:
    """Has a cache and a program of its own, made at the first text."""

    def __init__(
        self,
        params: Any,
        config: model.Config,
        size: int,
        device: str | None = None,
        dtype: str = "f32",
    ) -> None:
        self._given = params, config, size, device, dtype
        self._config, self._device = config, device
        self._states: Any = None

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        """The mean of the last layer's normalised states, of length 1: (dim,) float32."""
        if self._states is None:
            self._states = _program(*self._given)
        total = np.zeros(self._config.dim, np.float64)
        for start in range(0, len(ids), ROWS):
            part = list(ids[start : start + ROWS])
            # What the padding leaves in the cache is overwritten before it is attended.
            padded = Tensor(part + [0] * (ROWS - len(part)), dtype=int32, device=self._device)
            total += self._states(padded, start=start).numpy()[: len(part)].sum(0)
        return (total / np.linalg.norm(total)).astype(np.float32)


def _program(p: Any, config: model.Config, size: int, device: str | None, dtype: str) -> Any:
    cache = init_cache(config, size + ROWS - 1, device)

    def states(ids: Tensor, start: Any) -> Tensor:
        return rms_norm(p.norm, model.extend(p, config, ids, Span(cache, start)), config.norm_eps)

    return program(states, precision=dtype, start=(0, size - 1))
