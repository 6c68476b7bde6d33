"""One reply in the making: logits go in, tokens and text come out. It needs no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Protocol

import numpy as np

from zoo.errors import UsageError
from zoo.llama.sampling import (
    Sampler,
    SamplingOptions,
    TokenLogprobs,
    checked,
    token_logprobs,
)
from zoo.llama.tokenizer import Tokenizer


@dataclass
class Stats:
    """What a generation did so far; times in seconds.

    `finish` is "stop" (stop token or string, or a constraint that is met), "length" (max_tokens),
    "context" (no room left), or None while it runs. `ids` are the tokens drawn, the stop token
    included. `guessed_tokens` were verified, and of these `right_guesses` taken; `dropped_tokens`
    were forgotten for want of room. `ctx_can_grow`: the model allows a longer context than it was
    loaded with.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    guessed_tokens: int = 0
    right_guesses: int = 0
    dropped_tokens: int = 0
    ctx_can_grow: bool = False

    def took(self, seconds: float) -> None:
        """A token has come, so long after the beginning."""
        if len(self.ids) == 1:
            self.prefill_s = seconds
        else:
            self.decode_s = seconds - self.prefill_s

    def __str__(self) -> str:
        computed, drawn = self.prompt_tokens - self.reused_tokens, len(self.ids) - 1
        rate = f"{drawn / self.decode_s:.1f} tokens/s" if drawn > 0 and self.decode_s else "-"
        parts = [f"prompt {computed} tokens in {self.prefill_s:.2f} s"]
        parts += [f"reply {len(self.ids)} tokens", rate]
        if self.guessed_tokens:
            parts.append(f"{self.right_guesses} of {self.guessed_tokens} guesses right")
        if self.dropped_tokens:
            parts.append(f"{self.dropped_tokens} tokens forgotten for want of room")
        return ", ".join(parts)


class Constraint(Protocol):
    """What a reply must look like; `zoo.llama.constraint` makes them."""

    @property
    def finished(self) -> bool:
        """Nothing may follow."""

    def mask(self) -> np.ndarray:
        """(vocab,) bool: the tokens that may come next, stop tokens where it may end."""

    def advance(self, token: int) -> None:
        """`token`, which was allowed and is no stop token, has come."""


class Reply:
    """One reply: feed it logits until `finish` says why it ended.

    `ids` are prompt and reply so far: the next logits must be those after them. `piece` is the
    text that the last token set free, often none; joined, the pieces are the reply. `logprobs`
    has an entry per token drawn if `logprobs` likeliest alternatives were asked for (0 is none
    but the token's own). `lstrip` drops the space that a tokenizer puts before a text, but not from
    a constrained one, where it is meant.
    UsageError for a `max_tokens` under 1, an empty stop string, a bad seed, or a bias of no token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        options: SamplingOptions | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        lstrip: bool = False,
    ) -> None:
        for name, value, least in (("max_tokens", max_tokens, 1), ("logprobs", logprobs, 0)):
            if value is not None:
                checked(name, value, Integral, least, math.inf)
        options = options or SamplingOptions()
        wrong = [i for i in options.logit_bias if i >= tokenizer.vocab_size]
        if wrong:
            size = tokenizer.vocab_size
            raise UsageError(f"logit_bias: token {wrong[0]} is outside the vocabulary of {size}")
        self.ids, self.stats = list(ids), Stats(prompt_tokens=len(ids))
        self.piece, self.logprobs = "", []
        self._sampler = Sampler(options, seed)
        self._stops = StopStrings((stop,) if isinstance(stop, str) else stop)
        self._tokenizer, self._stream = tokenizer, tokenizer.stream(lstrip and constraint is None)
        self._max_tokens, self._constraint, self._top = max_tokens, constraint, logprobs

    logprobs: list[TokenLogprobs]

    @property
    def finish(self) -> str | None:
        """Why it ended, None before; see Stats."""
        return self.stats.finish

    def feed(self, logits: np.ndarray) -> int:
        """Draw the token that follows `ids`; `logits`: (vocab or more,) float32."""
        assert self.finish is None, "the reply has ended"
        # a padded embedding has rows that no token owns
        logits = logits[: self._tokenizer.vocab_size]
        mask = None if self._constraint is None else self._constraint.mask()[: len(logits)]
        token = self._sampler(logits, self.ids, mask)
        if self._top is not None:
            self.logprobs.append(token_logprobs(logits, token, self._top))
        self.ids.append(token)
        self.stats.ids.append(token)
        self.piece = ""
        if token in self._tokenizer.stop_ids:
            self.end("stop")
            return token
        if self._constraint is not None:
            self._constraint.advance(token)
        self.piece = self._stops.feed(self._stream.feed(token))
        if self._stops.found:
            self.stats.finish = "stop"
        elif self._constraint is not None and self._constraint.finished:
            self.end("stop")
        elif len(self.stats.ids) == self._max_tokens:
            self.end("length")
        return token

    def end(self, finish: str) -> None:
        """No more tokens come: `finish` says why, `piece` gets the text that was held back."""
        self.stats.finish = finish
        self.piece += self._stops.feed(self._stream.finish()) + self._stops.finish()


class StopStrings:
    """Passes text on, up to the first stop string; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", False
        if "" in self._stops:
            raise UsageError("a stop string is empty")

    def feed(self, text: str) -> str:
        """The text that is certain not to belong to a stop string; sets `found` at one."""
        if not self._stops:
            return text
        held = self._held + text
        places = [held.find(stop) for stop in self._stops]
        first = min((place for place in places if place >= 0), default=None)
        if first is not None:
            self.found, self._held = True, ""
            return held[:first]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back, once nothing more comes."""
        text, self._held = self._held, ""
        return "" if self.found else text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
