"""Which token comes next: the likeliest, a draw, or the best of several texts side by side.

A search has `rows`, the tokens so far of each candidate for a window's text, and `sums`, the logs
of their probabilities. `advance` adds a token to each row and returns which row each of them was
before; `finished` gives the candidates in the end, each its tokens without the end of text and the
log of its probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

NEVER = -np.inf  # the logit of what must not come


class Sampling:
    """The likeliest token, or above temperature 0 a draw, in each row for itself."""

    def __init__(
        self, count: int, temperature: float, eot: int, random: np.random.Generator
    ) -> None:
        self.rows: list[list[int]] = [[] for _ in range(count)]
        self.sums = [0.0] * count
        self._temperature, self._eot, self._random = temperature, eot, random

    @property
    def done(self) -> bool:
        return all(row[-1] == self._eot for row in self.rows)

    def advance(self, logits: np.ndarray) -> Sequence[int]:
        for n, (row, values) in enumerate(zip(self.rows, logits)):
            if row and row[-1] == self._eot:
                row.append(self._eot)
                continue
            token = self._choose(values)
            self.sums[n] += float(values[token] - log_sum(values))
            row.append(token)
        return range(len(self.rows))

    def _choose(self, values: np.ndarray) -> int:
        if self._temperature == 0:
            return int(values.argmax())
        chances = np.exp((values - values.max()).astype(float) / self._temperature).cumsum()
        return int(np.searchsorted(chances, self._random.random() * chances[-1], side="right"))

    def finished(self) -> list[tuple[list[int], float]]:
        texts = ([*takewhile(self._eot.__ne__, row)] for row in self.rows)
        return list(zip(texts, self.sums))


class Beam:
    """Beam search; with patience p (Kasai et al. 2022) it ends with `size` x p finished texts."""

    def __init__(self, size: int, eot: int, patience: float) -> None:
        self.rows: list[list[int]] = [[] for _ in range(size)]
        self.sums = [0.0] * size
        self._size, self._eot = size, eot
        self._most = max(1, round(size * patience))
        self._found: dict[tuple[int, ...], float] = {}

    @property
    def done(self) -> bool:
        return len(self._found) >= self._most

    def advance(self, logits: np.ndarray) -> Sequence[int]:
        # Rows that are equal, as at the start, count once.
        candidates = {
            (*row, token): (self.sums[n] + chance, n)
            for n, row in enumerate(self.rows)
            for token, chance in _likeliest(logits[n], self._size + 1)
        }
        rows, sums, source, ended = [], [], [], []
        best = sorted(candidates.items(), key=lambda item: item[1][0], reverse=True)
        for tokens, (total, n) in best:
            if tokens[-1] == self._eot:
                ended.append((tokens, total))
                continue
            rows.append(list(tokens))
            sums.append(total)
            source.append(n)
            if len(rows) == self._size:
                break
        self._found.update(ended[: self._most - len(self._found)])
        self.rows, self.sums = rows, sums
        return source

    def finished(self) -> list[tuple[list[int], float]]:
        """Where too few texts have ended, the likeliest others are candidates too."""
        found = [(list(tokens[:-1]), total) for tokens, total in self._found.items()]
        others = sorted(zip(self.rows, self.sums), key=lambda other: -other[1])
        return found + others[: max(0, self._size - len(found))]


def _likeliest(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens with the logs of their probabilities, best first."""
    ids = np.argpartition(logits, -count)[-count:]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return list(zip(ids.tolist(), (logits[ids] - log_sum(logits)).tolist()))


def log_sum(values: np.ndarray) -> float:
    """log of the sum of exp; -inf when all values are."""
    top = values.max()
    return float(top + np.log(np.exp(values - top).sum())) if np.isfinite(top) else NEVER
