"""Sampling: choose the next token from logits, with llama.cpp's steps, order and defaults.

Order: logit bias, mask, penalties, top-k, typical, top-p, min-p, temperature, draw; or, with
mirostat 2, logit bias, mask, penalties, temperature, mirostat's cut, draw. Sources: top-p, Holtzman
et al., "The Curious Case of Neural Text Degeneration" (2020); typical, Meister et al., "Locally
Typical Sampling" (2022); min-p, Nguyen et al., "Turning Up the Heat" (2024); repeat penalty, Keskar
et al., "CTRL" (2019); mirostat, Basu et al., "Mirostat: A Neural Text Decoding Algorithm that
Directly Controls Perplexity" (2021), in llama.cpp's second version. Logits count in nats, mirostat
in bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np

from zoo.errors import UsageError, UserError


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen; UsageError for a value of another type or out of range.

    `temperature` 0 takes the most likely token, the same each time. `top_k` 0, `top_p` 1, `min_p`
    0, `typical_p` 1, `repeat_penalty` 1 and the other penalties 0 each change nothing. Penalties
    look back `repeat_last_n` tokens, prompt and all; -1 is without end. `mirostat` 2 aims at
    `mirostat_tau` bits of surprise per token, learning at the rate `mirostat_eta`, in place of the
    cuts. `logit_bias`: token id -> what is added to its logit; -inf forbids it.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind, low, high in _RANGES:
            checked(name, getattr(self, name), kind, low, high)
        if self.repeat_penalty == 0:
            raise UsageError("repeat_penalty must be more than 0, got 0")
        if self.mirostat == 1:
            raise UsageError("mirostat must be 0 or 2, got 1; version 2 has taken its place")
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            checked("a token id of logit_bias", token, Integral, 0, math.inf)
            if bias != -math.inf:
                checked(f"logit_bias of token {token}", bias, Real, -math.inf, math.inf)


_RANGES = (
    ("temperature", Real, 0, math.inf),
    ("top_k", Integral, 0, math.inf),
    ("top_p", Real, 0, 1),
    ("min_p", Real, 0, 1),
    ("typical_p", Real, 0, 1),
    ("repeat_penalty", Real, 0, math.inf),
    ("frequency_penalty", Real, -math.inf, math.inf),
    ("presence_penalty", Real, -math.inf, math.inf),
    ("repeat_last_n", Integral, -1, math.inf),
    ("mirostat", Integral, 0, 2),
    ("mirostat_tau", Real, 0, math.inf),
    ("mirostat_eta", Real, 0, math.inf),
)


def checked(name: str, value: object, kind: type, low: float, high: float) -> None:
    """UsageError unless `value` is a finite number of `kind` from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, kind):
        what = "a whole number" if kind is Integral else "a number"
        raise UsageError(f"{name} must be {what}, got {value!r}")
    if not low <= value <= high or not math.isfinite(value):
        span = f"from {low} to {high}" if high < math.inf else f"{low} or more"
        raise UsageError(f"{name} must be {'finite' if low == -math.inf else span}, got {value}")


class Sampler:
    """Draws tokens; holds the options, the random generator's state and mirostat's.

    The same seed and logits give the same tokens; `seed` None draws a new seed.
    """

    def __init__(self, options: SamplingOptions, seed: int | None = None) -> None:
        if seed is not None:
            checked("seed", seed, Integral, 0, math.inf)
        self.options = options
        self._random = np.random.default_rng(seed)
        self._most_bits = 2 * options.mirostat_tau  # mirostat: no token of more surprise is taken

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
        logits = adjusted(logits, context, mask, options)
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):
            raise UserError(f"the model's logits are not finite: {logits[best]}")
        if options.temperature == 0:
            return best
        if options.mirostat:
            return self._mirostat(logits)
        ids, kept = candidates(logits, options)
        return int(ids[self._draw(softmax(kept / options.temperature))])

    def mirostat_cut(self, p: np.ndarray) -> np.ndarray:
        """The ids, ascending, whose surprise is not too much now; the likeliest one is always."""
        return np.flatnonzero(p >= min(2 ** min(-self._most_bits, 0), p.max()))

    def _mirostat(self, logits: np.ndarray) -> int:
        p = softmax(logits.astype(np.float64) / self.options.temperature)
        ids = self.mirostat_cut(p)
        p = p[ids] / p[ids].sum()
        drawn = self._draw(p)
        surprise = -math.log2(p[drawn])
        self._most_bits -= self.options.mirostat_eta * (surprise - self.options.mirostat_tau)
        return int(ids[drawn])

    def _draw(self, p: np.ndarray) -> int:
        drawn = np.searchsorted(p.cumsum(), self._random.random(), side="right")
        return min(int(drawn), int(np.flatnonzero(p)[-1]))


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


def adjusted(
    logits: np.ndarray,
    context: Sequence[int],
    mask: np.ndarray | None,
    options: SamplingOptions,
) -> np.ndarray:
    """Logits after bias, mask and penalties; the same array when none of them is on."""
    if options.logit_bias:
        logits = logits.copy()
        for token, bias in options.logit_bias.items():
            logits[token] += bias
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    penalties = options.repeat_penalty, options.frequency_penalty, options.presence_penalty
    if penalties != (1, 0, 0) and options.repeat_last_n:
        last = len(context) if options.repeat_last_n < 0 else options.repeat_last_n
        logits = penalised(logits, context[-last:], *penalties)
    return logits


def penalised(
    logits: np.ndarray,
    context: Sequence[int],
    repeat: float,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> np.ndarray:
    """A copy in which the tokens of `context` are less likely.

    A positive logit is divided by `repeat`, any other multiplied; then `frequency` is taken off for
    each time the token occurs, and `presence` once.
    """
    seen, counts = np.unique(np.asarray(context, dtype=np.int64), return_counts=True)
    known = (seen >= 0) & (seen < len(logits))
    seen, counts = seen[known], counts[known]
    logits = logits.copy()
    values = logits[seen]
    values = np.where(values > 0, values / repeat, values * repeat)
    logits[seen] = values - counts * frequency - presence
    return logits


def candidates(logits: np.ndarray, options: SamplingOptions) -> tuple[np.ndarray, np.ndarray]:
    """(ids, float64 logits) that pass top-k, typical, top-p and min-p, most likely first."""
    ids = largest(logits, options.top_k or len(logits))
    kept = logits[ids].astype(np.float64)
    allowed = int(np.count_nonzero(kept > -np.inf))
    ids, kept = ids[:allowed], kept[:allowed]
    if options.typical_p < 1:
        chosen = typical(softmax(kept), options.typical_p)
        ids, kept = ids[chosen], kept[chosen]
    if options.top_p < 1:
        # The fewest that reach top_p together; at least one.
        count = int(np.searchsorted(softmax(kept).cumsum(), options.top_p)) + 1
        ids, kept = ids[:count], kept[:count]
    if options.min_p > 0:
        count = int(np.count_nonzero(kept >= kept[0] + math.log(options.min_p)))
        ids, kept = ids[:count], kept[:count]
    return ids, kept


def typical(p: np.ndarray, most: float) -> np.ndarray:
    """Places, ascending, of those whose surprise is nearest the expected, up to `most` together."""
    surprise = -np.log(np.maximum(p, 1e-300))  # 0 times infinity is no number
    distance = np.abs(surprise - (p * surprise).sum())
    order = np.argsort(distance, kind="stable")
    count = int(np.searchsorted(p[order].cumsum(), most, side="right")) + 1
    return np.sort(order[:count])


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
