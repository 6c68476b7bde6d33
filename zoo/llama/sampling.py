"""Sampling: choose the next token from logits, with llama.cpp's steps, order and defaults.

Order: repeat penalty, top-k, top-p, min-p, temperature, draw. Sources: top-p, Holtzman et al.,
"The Curious Case of Neural Text Degeneration" (2020); min-p, Nguyen et al., "Turning Up the Heat"
(2024); repeat penalty, Keskar et al., "CTRL" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zoo.errors import UsageError, UserError


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen; UsageError for a value out of range.

    `temperature` 0 takes the most likely token, the same each time. `top_k` 0, `top_p` 1, `min_p`
    0 and `repeat_penalty` 1 each change nothing. The penalty looks back `repeat_last_n` tokens.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, math.inf)
        _check("top_k", self.top_k, 0, math.inf)
        _check("top_p", self.top_p, 0, 1)
        _check("min_p", self.min_p, 0, 1)
        _check("repeat_last_n", self.repeat_last_n, 0, math.inf)
        if not 0 < self.repeat_penalty < math.inf:
            got = self.repeat_penalty
            raise UsageError(f"repeat_penalty must be more than 0 and finite, got {got}")


class Sampler:
    """Draws tokens; holds the options and the random generator's state.

    The same seed and logits give the same tokens; `seed` None draws a new seed.
    """

    def __init__(self, options: SamplingOptions, seed: int | None = None) -> None:
        if seed is not None and seed < 0:
            raise UsageError(f"seed must be 0 or more, got {seed}")
        self.options = options
        self._random = np.random.default_rng(seed)

    def __call__(
        self, logits: np.ndarray, context: Sequence[int] = (), mask: np.ndarray | None = None
    ) -> int:
        """The next token's id. `logits`: (vocab,) float32, left as they are; `context`: ids so far.

        `mask`: (vocab,) bool, the tokens to choose among. UserError when the logits hold no finite
        maximum (a broken model).
        """
        options = self.options
        if logits.ndim != 1:
            raise ValueError(f"logits must have one axis, got shape {logits.shape}")
        if mask is not None:
            logits = np.where(mask, logits, -np.inf)
        if options.repeat_penalty != 1 and options.repeat_last_n:
            logits = penalised(logits, context[-options.repeat_last_n :], options.repeat_penalty)
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):
            raise UserError(f"the model's logits are not finite: {logits[best]}")
        if options.temperature == 0:
            return best
        ids, kept = candidates(logits, options)
        p = softmax(kept / options.temperature)
        drawn = np.searchsorted(p.cumsum(), self._random.random(), side="right")
        return int(ids[min(int(drawn), len(ids) - 1)])


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities: of the token drawn, and of the likeliest `top`."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits: np.ndarray, token: int, top: int) -> TokenLogprobs:
    """What the model itself, before any sampling option, gave `token` and the `top` likeliest."""
    most = float(logits.max())
    total = most + math.log(np.exp(logits - most).sum(dtype=np.float64))
    ids = largest(logits, top) if top else ()
    likeliest = [(int(i), float(logits[i]) - total) for i in ids]
    return TokenLogprobs(token, float(logits[token]) - total, likeliest)


def penalised(logits: np.ndarray, context: Sequence[int], penalty: float) -> np.ndarray:
    """A copy in which each token of `context` is made less likely, once however often it occurs."""
    seen = np.unique(np.asarray(context, dtype=np.int64))
    seen = seen[(seen >= 0) & (seen < len(logits))]
    logits = logits.copy()
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def candidates(logits: np.ndarray, options: SamplingOptions) -> tuple[np.ndarray, np.ndarray]:
    """(ids, float64 logits) that pass top-k, top-p and min-p, most likely first."""
    ids = largest(logits, options.top_k or len(logits))
    kept = logits[ids].astype(np.float64)
    if options.top_p < 1:
        # The fewest that reach top_p together; at least one.
        count = int(np.searchsorted(softmax(kept).cumsum(), options.top_p)) + 1
        ids, kept = ids[:count], kept[:count]
    if options.min_p > 0:
        count = int(np.count_nonzero(kept >= kept[0] + math.log(options.min_p)))
        ids, kept = ids[:count], kept[:count]
    return ids, kept


def largest(logits: np.ndarray, k: int) -> np.ndarray:
    """The ids of the `k` largest logits, largest first, the lower id first among equals."""
    n = len(logits)
    if k >= n:
        return np.argsort(-logits, kind="stable")
    ids = np.argpartition(logits, n - k)[n - k :]  # sorting 128k logits would cost 10 ms a token
    return ids[np.lexsort((ids, -logits[ids]))]


def softmax(x: np.ndarray) -> np.ndarray:
    """Probabilities from float64 logits, (n,) -> (n,)."""
    e = np.exp(x - x.max())
    return e / e.sum()


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or value == math.inf:
        span = f"{low} or more" if high == math.inf else f"from {low} to {high}"
        raise UsageError(f"{name} must be {span}, got {value}")
