"""Slots that are worked in turn: the interface of a batch, on a context of its own for each.

A stand-in for `zoo.llama.batch`: the replies are the same, but a step of many slots takes as long
as the steps of each, and a prompt is computed in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import Tensor, program
from engine.dtype import int32
from engine.functional import rms_norm
from zoo.llama import model
from zoo.llama.context import Context

ROWS = 32  # tokens per call of an embedding


@dataclass
class Slot:
    """A context, made when it is first needed, and the tokens of who has it; the keys and values
    of `done` of them were there when it was taken."""

    context: Context | None = None
    ids: list[int] | None = None
    done: int = 0

    def common(self, ids: Sequence[int]) -> int:
        """How many tokens of a prompt the context has, the last left out."""
        had = [] if self.context is None else self.context.ids
        pairs = zip(had, ids[:-1])
        most = min(len(had), len(ids) - 1)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), most)


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
        self.size, self.slots = size, [Slot() for _ in range(slots)]
        self._make = lambda: Context(params, config, size, device, dtype)
        self._params, self._config, self._device, self._dtype = params, config, device, dtype
        self._hidden: Any = None

    def add(self, ids: Sequence[int]) -> int:
        """Take the free slot that has the most of a prompt already."""
        free = [n for n, slot in enumerate(self.slots) if slot.ids is None]
        best = max(free, key=lambda n: self.slots[n].common(ids))
        slot = self.slots[best]
        slot.context = slot.context or self._make()
        slot.ids, slot.done = list(ids), slot.common(ids)
        return best

    def step(self) -> dict[int, np.ndarray]:
        """The logits after each slot's tokens, (vocab,) float32."""
        taken = [(n, slot) for n, slot in enumerate(self.slots) if slot.ids is not None]
        return {n: slot.context.next_logits(slot.ids).copy() for n, slot in taken}

    def feed(self, slot: int, token: int) -> None:
        self.slots[slot].ids.append(token)

    def free(self, slot: int) -> None:
        self.slots[slot].ids = None

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
