"""Context: the key/value cache of one conversation, and the programs that extend it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from engine import Tensor, program
from engine.dtype import float16, float32, int32
from weights import Params
from zoo.llama import model
from zoo.llama.cache import Span, init_cache

PREFILL = 512  # prompt tokens per call: weights are unpacked once for all of them
FEW = 32  # rows that are multiplied as exactly as a single one
SMALL = 200_000_000  # elements of a small model's weights
SHORT = 64  # prompt tokens up to which that is quick enough
SCORED = FEW  # rows per call when the logits of every position are wanted


class Context:
    """A cache of `size` positions; `ids` are the tokens whose keys and values it holds.

    Asked for the logits after a sequence, it computes only what lies behind the longest prefix
    that it has already. One compile serves every position and every length.
    """

    def __init__(
        self,
        params: Params,
        config: model.Config,
        size: int,
        device: str | None = None,
        dtype: str = "f32",
    ) -> None:
        self.size, self.ids = size, []
        # To plan a program for a few tokens takes longer than a small model needs to take the
        # first short prompt token by token, with the program that the reply needs anyway.
        elements = sum(map(prod, model.expected_shapes(config).values()))
        self._is_first = elements < SMALL
        self._device = device
        # A program's slices are checked for the largest start and length at once, hence the
        # rows behind the last position; no token is ever attended there.
        kind = float32 if dtype == "f32" else float16  # half the memory to read for each token
        cache = init_cache(config, size + PREFILL - 1, device, kind)
        start = (0, size - 1)

        def prefill(ids, start_pos, length):
            # for the cache alone
            model.extend(params, config, ids[:length], Span(cache, start_pos))

        def forward(ids, start_pos):
            return model.forward(params, config, ids, Span(cache, start_pos))

        self._prefill = program(prefill, precision=dtype, start_pos=start, length=(1, PREFILL))
        self._few = program(prefill, precision=dtype, start_pos=start, length=(1, FEW))
        self._forward = program(forward, precision=dtype, start_pos=start)

    def next_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of the token after `ids`, (vocab,) float32; at least one id, at most `size`.

        The last token goes alone through the same program as all that follow it: so its logits
        don't depend on how much of the prompt was in the cache, and are as exact as theirs.
        """
        at = self._keep(ids, len(ids) - 1)
        while at < len(ids) - 1:
            left = len(ids) - 1 - at
            rows, extend = (PREFILL, self._prefill) if left > SHORT else (FEW, self._few)
            if left <= SHORT and self._is_first:
                part = list(ids[at : at + 1])
                self._forward(self._tensor(part), start_pos=at)
            else:
                part = list(ids[at : min(at + rows, len(ids) - 1)])
                padded = self._tensor(part + [0] * (rows - len(part)))
                extend(padded, start_pos=at, length=len(part))
            at += len(part)
            self.ids += part
        logits = self._forward(self._tensor(list(ids[at:])), start_pos=at).numpy()
        self._is_first = False
        self.ids += ids[at:]
        return logits.reshape(-1)

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after every one of `ids`, (len(ids), vocab) float32; nothing is reused."""
        self._keep(ids, 0)
        rows = []
        for at in range(0, len(ids), SCORED):
            part = list(ids[at : at + SCORED])
            # The padding leaves rows in the cache that are overwritten before they are attended.
            out = self._forward(self._tensor(part + [0] * (SCORED - len(part))), start_pos=at)
            rows.append(np.array(out.numpy()[: len(part)]))
        self.ids += ids
        return np.concatenate(rows)

    def rehearse(self) -> None:
        """Run every program once, on prompts of usual lengths, and forget them."""
        for count in (PREFILL + 1, FEW + 1):
            self.reset()
            self.next_logits([0] * min(count, self.size))
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.ids = []

    def _keep(self, ids: Sequence[int], most: int) -> int:
        """Drop what the cache holds beyond its common prefix with `ids`, `most` at most."""
        n, most = 0, min(most, len(self.ids))
        if self.ids[:most] == list(ids[:most]):
            n = most
        else:
            while self.ids[n] == ids[n]:
                n += 1
        # Before the work, so that a Ctrl-C in the midst of it leaves a true state.
        del self.ids[n:]
        return n

    def _tensor(self, ids: list[int]) -> Tensor:
        return Tensor(ids, dtype=int32, device=self._device)
