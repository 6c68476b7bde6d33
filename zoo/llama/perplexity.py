"""Perplexity: how well a model foretells a text, counted as llama.cpp counts it.

The text is cut into windows of `ctx` tokens that each begin anew. Without a stride the windows
don't overlap, and the second half of each is scored, so that every scored token has at least half
a window before it; what is left at the end is dropped. With a stride a window begins that many
tokens after the one before, and scores what none before it has: all tokens but the first.
Sources: llama.cpp's `llama-perplexity`; the page "Perplexity of fixed-length models" of
transformers's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.errors import UserError

if TYPE_CHECKING:
    from zoo.llama.generate import Llama

CTX = 512  # llama.cpp's


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood of `scored` tokens, with its standard error."""

    perplexity: float
    error: float
    scored: int
    tokens: int
    windows: int
    ctx: int
    stride: int | None

    def json(self) -> dict[str, Any]:
        """The fields, for a line of JSON."""
        return asdict(self)

    def __str__(self) -> str:
        how = "the second half of each" if self.stride is None else f"stride {self.stride}"
        return (
            f"perplexity {self.perplexity:.4f} ± {self.error:.4f} ({self.scored} of {self.tokens} "
            f"tokens scored, {self.windows} windows of {self.ctx}, {how})"
        )


def windows(tokens: int, ctx: int, stride: int | None = None) -> list[tuple[int, int, int]]:
    """(begin, end, first scored) of each window; the token at `begin` is never scored."""
    if stride is None:
        starts = range(0, tokens - ctx + 1, ctx)
        return [(start, start + ctx, start + ctx // 2 + 1) for start in starts]
    out, scored = [], 1
    for start in range(0, tokens, stride):
        end = min(start + ctx, tokens)
        if end > scored:
            out.append((start, end, scored))
        scored = max(scored, end)
    return out


def measure(
    model: Llama,
    text: str | Sequence[int],
    ctx: int | None = None,
    stride: int | None = None,
    shown: Callable[[Sequence], Iterable] = iter,
) -> Perplexity:
    """The perplexity of a text, or of token ids, under a model.

    `ctx` defaults to 512 or what the model's context holds; `stride` is at most that. `shown`
    passes the windows on, for a progress bar. Where the model wants a beginning-of-sequence token,
    it stands in the place of each window's first token. UserError for a text that is too short.
    """
    tokenizer = model.tokenizer
    ids = tokenizer.encode(text, add_bos=tokenizer.add_bos) if isinstance(text, str) else list(text)
    ctx = min(CTX, model.ctx) if ctx is None else ctx
    shortest = 2 if stride else 3  # the second half of two tokens holds none to score
    if ctx < shortest or ctx > model.ctx:
        raise UserError(f"ctx must be from {shortest} to {model.ctx}, got {ctx}")
    if stride is not None and not 1 <= stride < ctx:
        raise UserError(f"stride must be from 1 to {ctx - 1}, got {stride}")
    cuts = windows(len(ids), ctx, stride)
    if not cuts:
        least = 2 if stride else ctx
        hint = f"; --ctx {len(ids)} would do" if len(ids) > 2 else ""
        raise UserError(f"the text has {len(ids)} tokens, perplexity needs at least {least}{hint}")
    losses = []
    for begin, end, first in shown(cuts):
        part = list(ids[begin:end])
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            part[0] = tokenizer.bos_id
        losses += _losses(model, part, first - begin)
    mean, count = float(np.mean(losses)), len(losses)
    error = float(np.std(losses)) / math.sqrt(count - 1) if count > 1 else math.inf
    value = math.exp(mean)
    return Perplexity(value, error * value, count, len(ids), len(cuts), ctx, stride)


def _losses(model: Llama, ids: list[int], first: int) -> list[float]:
    """-log p of the tokens from `first` on, each after all that stand before it."""
    out = []
    at = 1  # the token that the next row of logits foretells
    for rows in model.each_logits(ids):
        for logits in rows[: len(ids) - at]:
            if at >= first:
                wide = logits.astype(np.float64)
                most = wide.max()
                out.append(most + math.log(np.exp(wide - most).sum()) - wide[ids[at]])
            at += 1
    return out
