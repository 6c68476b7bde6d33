"""Context: the key/value cache of one conversation, and the programs that extend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from engine import Tensor, program
from engine.dtype import int32
from weights import Params
from zoo.errors import UsageError
from zoo.llama import model
from zoo.llama.cache import KINDS, Span, Step, init_cache

PREFILL = 512  # prompt tokens per call: weights are unpacked once for all of them
FEW = 32  # rows that are multiplied as a single one is
SMALL = 200_000_000  # elements of a small model's weights
SHORT = 64  # prompt tokens up to which that is quick enough
SCORED = FEW  # rows per call when the logits of every position are wanted


class Context:
    """A cache of `size` positions; `ids` are the tokens whose keys and values it holds.

    Asked for the logits after a sequence, it computes only what lies behind the longest prefix
    that it has already. One compile serves every position and every length.

    Up to 32 rows go through the cache as a batch's do: each as if it were alone, so that on a CPU a
    quantised model's logits are the same to the last bit, whatever comes with it in a call.
    """

    def __init__(
        self,
        params: Params,
        config: model.Config,
        size: int,
        device: str | None = None,
        dtype: str = "f32",
        cache_type: str | None = None,
    ) -> None:
        """`cache_type`: what keys and values are kept as, see KINDS; None: f16, f32 with dtype f32.

        UsageError for one that there isn't, or that the model's heads don't allow.
        """
        self.size, self.ids = size, []
        # To plan a program for a few tokens takes longer than a small model needs to take the
        # first short prompt token by token, with the program that the reply needs anyway.
        elements = sum(map(prod, model.expected_shapes(config).values()))
        self._is_first = elements < SMALL
        self._device = device
        # Halves are half the memory to read for each token.
        self.cache_type = cache_type or ("f32" if dtype == "f32" else "f16")
        if self.cache_type not in KINDS:
            raise UsageError(f"cache_type must be one of {', '.join(KINDS)}, got {cache_type!r}")
        # A program's slices are checked for the largest start and length at once, hence the
        # rows behind the last position; no token is ever attended there.
        cache = init_cache(config, size + PREFILL - 1, device, KINDS[self.cache_type])
        self.cache = cache
        start = (0, size - 1)

        def prefill(ids, start_pos, length):
            # for the cache alone
            model.extend(params, config, ids[:length], Span(cache, start_pos))

        def step(ids, positions, length):
            slots = Tensor.zeros(*ids.shape, dtype=int32, device=device)
            return Step(cache, slots, positions, length)

        def few(ids, positions, length):
            model.extend(params, config, ids, step(ids, positions, length))

        def forward(ids, positions, length):
            return model.forward(params, config, ids, step(ids, positions, length))

        # `length` of these counts all tokens so far, as that of a Step does
        longest = (1, size + FEW - 1)
        self._prefill = program(prefill, precision=dtype, start_pos=start, length=(1, PREFILL))
        self._few = program(few, precision=dtype, length=longest)
        self._forward = program(forward, precision=dtype, length=longest)

    def next_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of the token after `ids`, (vocab,) float32; at least one id, at most `size`.

        The last token goes alone through the same program as all that follow it: so its logits
        don't depend on how much of the prompt was in the cache, and are as exact as theirs.
        """
        return self.each_next(ids).reshape(-1)

    def each_next(self, ids: Sequence[int], guess: Sequence[int] = ()) -> np.ndarray:
        """Logits after `ids`, and as if each of `guess` followed: (1 + len(guess), vocab) float32.

        All in one call, hence of at most 31 guesses. A wrong one is forgotten with the next ids.
        """
        self._extend(ids[:-1])
        logits = self._rows(self._forward, [*ids, *guess], 1 + len(guess)).numpy()
        self._is_first = False
        return logits

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after every one of `ids`, (len(ids), vocab) float32; nothing is reused."""
        return np.concatenate(list(self.each_logits(ids)))

    def each_logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """The same in parts of (at most 32, vocab), as they are computed."""
        self._keep(ids, 0)
        for at in range(0, len(ids), SCORED):
            part = ids[: at + SCORED]
            yield self._rows(self._forward, part, len(part) - at, SCORED).numpy()[: len(part) - at]

    def rehearse(self) -> None:
        """Run every program once, on prompts of usual lengths, and forget them."""
        for count in (PREFILL + 1, FEW + 1):
            self.reset()
            self.next_logits([0] * min(count, self.size))
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.ids = []

    def _extend(self, ids: Sequence[int]) -> None:
        """Have the keys and values of `ids`, and of nothing behind them."""
        at = self._keep(ids, len(ids))
        while at < len(ids):
            left = len(ids) - at
            if left > SHORT:
                part = list(ids[at : at + PREFILL])
                padded = self._tensor(part + [0] * (PREFILL - len(part)))
                self._prefill(padded, start_pos=at, length=len(part))
                self.ids += part
            elif self._is_first:
                self._rows(self._forward, ids[: at + 1], 1)
            else:
                self._rows(self._few, ids[: at + FEW], min(left, FEW), FEW)
            at = len(self.ids)

    def _rows(self, run: Callable, ids: Sequence[int], count: int, rows: int = 0) -> Any:
        """What `run` makes of the last `count` of `ids`, padded to `rows`; the cache has the rest.

        What the padding leaves there is overwritten before it is attended.
        """
        at, rows = len(ids) - count, max(count, rows)
        positions = self._tensor(list(range(at, at + rows)))
        out = run(self._tensor([*ids[at:], *[0] * (rows - count)]), positions, length=at + rows)
        self.ids += ids[at:]
        return out

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
        return Tensor(np.array(ids, np.int32), device=self._device)
