"""Llama: a loaded model that continues text, answers a conversation and gives logits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from zoo.errors import UsageError, UserError
from zoo.llama.sampling import Sampler, SamplingOptions
from zoo.llama.template import ChatTemplate, Message
from zoo.llama.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zoo.llama.context import Context
    from zoo.llama.model import Config


@dataclass
class Stats:
    """What a generation did so far; times in seconds.

    `finish` is "stop" (stop token or string), "length" (max_tokens), "context" (no room left), or
    None while it runs. `ids` are the tokens drawn, the stop token included. `ctx_can_grow`: the
    model allows a longer context than it was loaded with.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    ctx_can_grow: bool = False

    def __str__(self) -> str:
        computed, drawn = self.prompt_tokens - self.reused_tokens, len(self.ids) - 1
        rate = f"{drawn / self.decode_s:.1f} tokens/s" if drawn > 0 and self.decode_s else "-"
        return (
            f"prompt {computed} tokens in {self.prefill_s:.2f} s, "
            f"reply {len(self.ids)} tokens, {rate}"
        )


class Generation(Iterator[str]):
    """Pieces of text as they are made; `stats` says how it went."""

    def __init__(self, pieces: Iterator[str], stats: Stats) -> None:
        self._pieces, self.stats = pieces, stats

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop here."""
        self._pieces.close()


class Llama:
    """A model with its tokenizer, chat template and one cached context.

    The context is shared by all calls: each reuses the longest common prefix with what was
    computed last, so a conversation costs only its new tokens.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        context: Context,
        name: str = "model",
    ) -> None:
        self.config, self.tokenizer, self.context, self.name = config, tokenizer, context, name
        self.template = ChatTemplate(tokenizer)

    @property
    def ctx(self) -> int:
        """The most tokens that prompt and reply may have together."""
        return self.context.size

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Next-token logits after each of `ids`: (len(ids), vocab) float32.

        UserError for ids outside the vocabulary, none at all, or more than the context holds.
        """
        return self.context.all_logits(self._checked(ids))

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        **sampling: float,
    ) -> Generation:
        """Continue a raw prompt; iterate over the result for the text.

        In a text prompt special tokens are parsed ("<|im_start|>"). Ends at a stop token or
        string (neither is given out), after `max_tokens`, or when the context is full. `sampling`:
        the fields of SamplingOptions. UserError when the prompt doesn't fit.
        """
        ids = self._prompt_ids(prompt) if isinstance(prompt, str) else prompt
        return self._start(ids, max_tokens, stop, seed, sampling, lstrip=False)

    def chat(
        self,
        messages: str | Sequence[Message],
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        **sampling: float,
    ) -> Generation:
        """Reply to a conversation: [{"role": "user", "content": "Hello"}], or one user's turn.

        Options as in `generate`. What the messages contain never becomes a special token.
        TemplateError when the model's template refuses the conversation.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = self.template.ids(messages)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        stop = stop + self.template.stop
        return self._start(ids, max_tokens, stop, seed, sampling, lstrip=True)

    def _prompt_ids(self, prompt: str) -> list[int]:
        tokenizer = self.tokenizer
        ids = tokenizer.encode(prompt, special=True, add_bos=tokenizer.add_bos)
        # The empty prompt: any text at all, as the model would begin it.
        return ids or [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]

    def _start(self, ids, max_tokens, stop, seed, sampling, lstrip) -> Generation:
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens must be 1 or more, got {max_tokens}")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise UsageError("a stop string is empty")
        try:
            options = SamplingOptions(**sampling)
        except TypeError:
            unknown = ", ".join(sampling.keys() - SamplingOptions.__dataclass_fields__.keys())
            raise UsageError(f"unknown sampling option: {unknown}") from None
        ids = self._checked(ids)
        can_grow = self.context.size < self.config.max_context
        stats = Stats(prompt_tokens=len(ids), ctx_can_grow=can_grow)
        sampler = Sampler(options, seed)
        tokens = self._tokens(ids, sampler, max_tokens, stats)
        return Generation(self._pieces(tokens, StopStrings(stops), stats, lstrip), stats)

    def _tokens(
        self, ids: list[int], sampler: Sampler, max_tokens: int | None, stats: Stats
    ) -> Iterator[int]:
        """Draw tokens until something ends it; `stats.finish` says what."""
        begun = time.perf_counter()
        stats.reused_tokens = _common(self.context.ids, ids[:-1])
        while True:
            logits = self.context.next_logits(ids)
            # a padded embedding has rows that no token owns
            token = sampler(logits[: self.tokenizer.vocab_size], ids)
            ids.append(token)
            stats.ids.append(token)
            now = time.perf_counter()
            if len(stats.ids) == 1:
                stats.prefill_s = now - begun
            else:
                stats.decode_s = now - begun - stats.prefill_s
            if token in self.tokenizer.stop_ids:
                stats.finish = "stop"
                return
            yield token
            if len(stats.ids) == max_tokens:
                stats.finish = "length"
                return
            if len(ids) > self.context.size:
                stats.finish = "context"
                return

    def _pieces(
        self, tokens: Iterator[int], stops: StopStrings, stats: Stats, lstrip: bool
    ) -> Iterator[str]:
        """Tokens as text, up to a stop string."""
        stream = self.tokenizer.stream(lstrip)
        for token in tokens:
            text = stops.feed(stream.feed(token))
            if text:
                yield text
            if stops.found:
                stats.finish = "stop"
                return
        text = stops.feed(stream.finish()) + stops.finish()
        if text:
            yield text

    def _checked(self, ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in ids]
        if not ids:
            raise UserError("the prompt is empty")
        wrong = next((i for i in ids if not 0 <= i < self.config.vocab_size), None)
        if wrong is not None:
            size = self.config.vocab_size
            raise UserError(f"token id {wrong} is outside the model's vocabulary of {size}")
        if len(ids) > self.context.size:
            raise PromptTooLong(len(ids), self.context.size, self.config.max_context)
        return ids


class PromptTooLong(UserError):
    """A prompt that the context, or any context of this model, can't hold."""

    def __init__(self, tokens: int, ctx: int, max_context: int) -> None:
        if tokens > max_context:
            limit = f"too long for the model, which takes at most {max_context}"
        else:
            limit = f"the context holds {ctx}; the model allows up to --ctx {max_context}"
        super().__init__(f"the prompt has {tokens} tokens, {limit}")


class StopStrings:
    """Passes text on, up to the first stop string; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", False

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


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
