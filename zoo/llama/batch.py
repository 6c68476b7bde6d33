"""Many sequences in one key/value cache, decoded together; any may join or leave between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine import Tensor, program
from engine.dtype import float16, float32, int32
from weights import Params
from zoo.errors import UserError
from zoo.llama import model
from zoo.llama.cache import Span, Step, init_cache
from zoo.llama.context import PREFILL, SHORT

ROWS = (1, 4, 8, 16, 32)  # tokens per call of the programs that there are


@dataclass
class Slot:
    """One sequence: `ids` are its tokens, keys and values of the first `done` are in the cache.

    What a sequence that has left leaves behind stays until another takes the slot.
    """

    ids: list[int] = field(default_factory=list)
    done: int = 0
    taken: bool = False
    used: int = 0  # when something of it was last computed, or it was freed


class Batch:
    """Up to `slots` sequences of up to `size` tokens each.

    `add` takes a sequence in, `step` computes, `feed` gives a sequence its next token, `free` lets
    it go. Memory stays what it was at the beginning. For one thread.
    """

    def __init__(
        self,
        params: Params,
        config: model.Config,
        slots: int,
        size: int,
        device: str | None = None,
        dtype: str = "f32",
    ) -> None:
        self.size, self.slots = size, [Slot() for _ in range(slots)]
        self._device, self._clock, self._turn = device, 0, False
        kind = float32 if dtype == "f32" else float16
        # Slices are checked for the largest start and length at once, hence the rows behind the
        # last position; the slot behind the last is for calls with fewer sequences than rows.
        cache = init_cache(config, size + PREFILL - 1, device, kind, slots + 1)

        def prefill(ids, start, slot, length):
            model.extend(params, config, ids[:length], Span(cache, start, slot))

        def decode(ids, slots, positions, longest):
            return model.forward(params, config, ids, Step(cache, slots, positions, longest))

        ends = {"start": (0, size - 1), "slot": (0, slots - 1)}
        self._prefill = program(prefill, precision=dtype, length=(1, PREFILL), **ends)
        self._decode = program(decode, precision=dtype, longest=(1, size))

    def add(self, ids: Sequence[int]) -> int:
        """Take a sequence in and return its slot: the free one that begins most like it.

        UserError for a sequence that is empty or too long, and where no slot is free.
        """
        if not 1 <= len(ids) <= self.size:
            raise UserError(f"a sequence of {len(ids)} tokens; there is room for 1 to {self.size}")
        free = [n for n, slot in enumerate(self.slots) if not slot.taken]
        if not free:
            raise UserError(f"all of the {len(self.slots)} slots are taken")
        kept = {n: self._common(self.slots[n], ids) for n in free}
        best = max(free, key=lambda n: (kept[n], -self.slots[n].used))
        self.slots[best] = Slot(list(ids), kept[best], True)
        return best

    def feed(self, slot: int, token: int) -> None:
        """The next token of a sequence; UserError where there is no room for it."""
        if len(self.slots[slot].ids) >= self.size:
            raise UserError(f"the sequence is full: {self.size} tokens")
        self.slots[slot].ids.append(int(token))

    def free(self, slot: int) -> None:
        """Let a sequence go; another that begins alike may go on from what it leaves."""
        self._clock += 1
        left = self.slots[slot]
        self.slots[slot] = Slot(left.ids[: left.done], left.done, False, self._clock)

    def step(self) -> dict[int, np.ndarray]:
        """Compute some of the tokens that are left: of each reply one, of prompts as many as fit.

        Returns the logits (vocab,) after the last token of the sequences that have all theirs
        computed now, by slot. Where there isn't room for all, prompts and replies take turns at
        going first, and who has waited longest; so do long prompts and the rest.
        """
        left = {n: len(s.ids) - s.done for n, s in enumerate(self.slots) if s.taken}
        long = [n for n, count in left.items() if count - 1 > SHORT]
        rest = [n for n, count in left.items() if 0 < count <= SHORT + 1]
        self._turn = not self._turn
        if long and (self._turn or not rest):
            self._extend(long[0])
            return {}
        rest.sort(key=lambda n: ((left[n] == 1) == self._turn, self.slots[n].used))
        rows: list[int] = []
        for n in rest:
            rows += [n] * min(left[n], ROWS[-1] - len(rows))
        return self._advance(rows) if rows else {}

    def _extend(self, n: int) -> None:
        """A piece of a long prompt, for the cache alone."""
        slot = self.slots[n]
        part = slot.ids[slot.done : min(slot.done + PREFILL, len(slot.ids) - 1)]
        padded = self._tensor(part + [0] * (PREFILL - len(part)))
        self._prefill(padded, start=slot.done, slot=n, length=len(part))
        self._computed(slot, len(part))

    def _advance(self, rows: list[int]) -> dict[int, np.ndarray]:
        """The next token of a slot for each time that it is among the rows, side by side."""
        spare = next(n for n in ROWS if n >= len(rows)) - len(rows)
        positions = [self.slots[n].done + rows[:i].count(n) for i, n in enumerate(rows)]
        ids = [self.slots[n].ids[at] for n, at in zip(rows, positions)]
        inputs = ids + [0] * spare, rows + [len(self.slots)] * spare, positions + [0] * spare
        longest = max(positions) + 1
        logits = self._decode(*map(self._tensor, inputs), longest=longest).numpy()
        for n in rows:
            self._computed(self.slots[n], 1)
        last = {n: i for i, n in enumerate(rows)}
        whole = (n for n in last if self.slots[n].done == len(self.slots[n].ids))
        return {n: logits[last[n]].copy() for n in whole}

    def _computed(self, slot: Slot, count: int) -> None:
        self._clock += 1
        slot.done, slot.used = slot.done + count, self._clock

    @staticmethod
    def _common(slot: Slot, ids: Sequence[int]) -> int:
        """How many tokens of `ids` a slot has, the last left out: its logits are wanted."""
        most = min(slot.done, len(ids) - 1)
        return next((i for i in range(most) if slot.ids[i] != ids[i]), most)

    def _tensor(self, ids: list[int]) -> Tensor:
        return Tensor(ids, dtype=int32, device=self._device)
