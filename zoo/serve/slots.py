"""Slots that are worked in turn: the interface of a batch, on a context of its own for each.

A stand-in for `zoo.llama.batch`: the replies are the same, but a step of many slots takes as long
as the steps of each, and a prompt is computed in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine import Tensor, program
from engine.dtype import int32
from engine.functional import rms_norm
from zoo.llama import model
from zoo.llama.context import Context

ROWS = 32  # tokens per call of an embedding


class Slots:
    """`add` a prompt, then `step` for logits and `feed` the token that was drawn from them, again
    and again; `free` the slot in the end. A slot keeps what it has computed for a later prompt."""

    def __init__(
        self,
        params: Any,
        config: model.Config,
        slots: int,
        size: int,
        device: str | None = None,
        dtype: str = "f32",
    ) -> None:
        self.size, self._count = size, slots
        self._make = lambda: Context(params, config, size, device, dtype)
        self._contexts: list[Context] = []  # each is made when it is first needed
        self._ids: dict[int, list[int]] = {}
        self._params, self._config, self._device, self._dtype = params, config, device, dtype
        self._hidden: Any = None

    def add(self, ids: Sequence[int]) -> int:
        """Take the free slot that has the most of a prompt already."""
        free = [n for n in range(len(self._contexts)) if n not in self._ids]
        slot = max(free, key=lambda n: self._common(n, ids), default=len(self._contexts))
        is_new = not free or not self._common(slot, ids)
        if is_new and len(self._contexts) < self._count:
            slot = len(self._contexts)
            self._contexts.append(self._make())
        self._ids[slot] = list(ids)
        return slot

    def reused(self, slot: int) -> int:
        """How many tokens of a prompt that was just added need not be computed."""
        return self._common(slot, self._ids[slot][:-1])

    def step(self) -> dict[int, np.ndarray]:
        """The logits after each slot's tokens, (vocab,) float32."""
        return {n: self._contexts[n].next_logits(ids).copy() for n, ids in self._ids.items()}

    def feed(self, slot: int, token: int) -> None:
        self._ids[slot].append(token)

    def free(self, slot: int) -> None:
        del self._ids[slot]

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        """The mean of the last layer's normalised states, of length 1: (dim,) float32."""
        if self._hidden is None:
            self._hidden = self._states()
        total = np.zeros(self._config.dim, np.float64)
        for start in range(0, len(ids), ROWS):
            part = list(ids[start : start + ROWS])
            # What the padding leaves in the cache is overwritten before it is attended.
            padded = Tensor(part + [0] * (ROWS - len(part)), dtype=int32, device=self._device)
            total += self._hidden(padded, start_pos=start).numpy()[: len(part)].sum(0)
        return (total / np.linalg.norm(total)).astype(np.float32)

    def _states(self) -> Any:
        p, config = self._params, self._config
        cache = model.init_cache(config, self.size + ROWS - 1, self._device)

        def states(ids: Tensor, start_pos: Any) -> Tensor:
            return rms_norm(p.norm, model.extend(p, config, ids, start_pos, cache), config.norm_eps)

        return program(states, precision=self._dtype, start_pos=(0, self.size - 1))

    def _common(self, slot: int, ids: Sequence[int]) -> int:
        had = self._contexts[slot].ids
        pairs = zip(had, ids)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(had), len(ids)))
