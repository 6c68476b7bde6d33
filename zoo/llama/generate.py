"""Llama: a loaded model that continues text, answers a conversation and gives logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.errors import UsageError, UserError
from zoo.llama.decoding import Decoding
from zoo.llama.lookup import Lookup
from zoo.llama.reply import Reply
from zoo.llama.sampling import SamplingOptions
from zoo.llama.template import ChatTemplate, Message
from zoo.llama.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zoo.llama.constraint import Constraint, Constraints
    from zoo.llama.context import Context
    from zoo.llama.model import Config


class Generation(Iterator[str]):
    """Pieces of text as they are made; `stats` says how it went, `reply` has the tokens."""

    def __init__(self, pieces: Iterator[str], reply: Reply) -> None:
        self._pieces, self.reply, self.stats = pieces, reply, reply.stats

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
        embedder: Callable[[list[int]], np.ndarray] | None = None,
    ) -> None:
        self.config, self.tokenizer, self.context, self.name = config, tokenizer, context, name
        self.template = ChatTemplate(tokenizer)
        self._embedder = embedder

    @property
    def ctx(self) -> int:
        """The most tokens that prompt and reply may have together."""
        return self.context.size

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Next-token logits after each of `ids`: (len(ids), vocab) float32.

        UserError for ids outside the vocabulary, none at all, or more than the context holds.
        """
        return self.context.all_logits(self._checked(ids))

    def each_logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """The same in parts, so that a long text's need not be held all at once."""
        return self.context.each_logits(self._checked(ids))

    def embed(self, text: str | Sequence[int]) -> np.ndarray:
        """A text, or its ids, as a vector of length 1: (dim,) float32.

        It is the mean over the tokens of the last layer's normalised states. UserError when the
        text is empty or longer than the context.
        """
        if self._embedder is None:
            raise UserError(f"{self.name} was loaded without what makes embeddings")
        ids = self.prompt_ids(text) if isinstance(text, str) else text
        return self._embedder(self._checked(ids))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Continue a raw prompt; iterate over the result for the text.

        In a text prompt special tokens are parsed ("<|im_start|>"). Ends at a stop token or
        string (neither is given out), after `max_tokens`, or when the context is full. `options`
        are those of `reply` and of Decoding. UserError when the prompt doesn't fit.
        """
        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else prompt
        return self._run(ids, options)

    def chat(
        self, messages: str | Sequence[Message], stop: str | Sequence[str] = (), **options: Any
    ) -> Generation:
        """Reply to a conversation: [{"role": "user", "content": "Hello"}], or one user's turn.

        Options as in `generate`. What the messages contain never becomes a special token.
        TemplateError when the model's template refuses the conversation.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = self.template.ids(messages)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        return self._run(ids, options | {"stop": stop + self.template.stop, "lstrip": True})

    def reply(
        self,
        ids: Sequence[int],
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        json_schema: Mapping[str, Any] | bool | str | None = None,
        regex: str | None = None,
        logprobs: int | None = None,
        lstrip: bool = False,
        **sampling: Any,
    ) -> Reply:
        """The reply to a prompt of token ids, for a caller that feeds it logits by himself.

        `json_schema` or `regex`: what the whole reply must match, see Constraints. `sampling`: the
        fields of SamplingOptions; for the rest see Reply. UserError when the prompt doesn't fit.
        """
        try:
            options = SamplingOptions(**sampling)
        except TypeError:
            unknown = ", ".join(sampling.keys() - SamplingOptions.__dataclass_fields__.keys())
            raise UsageError(f"unknown option: {unknown}") from None
        ids = self._checked(ids)
        constraint = self._constraint(json_schema, regex)
        rest = (seed, max_tokens, stop, constraint, logprobs, lstrip)
        reply = Reply(self.tokenizer, ids, options, *rest)
        reply.stats.ctx_can_grow = self.context.size < self.config.max_context
        return reply

    @cached_property
    def constraints(self) -> Constraints:
        """What a reply can be held to; UserError without the package that does it."""
        from zoo.llama.constraint import Constraints

        return Constraints(self.tokenizer)

    def _constraint(self, json_schema: Any, regex: str | None) -> Constraint | None:
        if json_schema is not None and regex is not None:
            raise UsageError("json_schema and regex can't be had at once")
        if json_schema is not None:
            return self.constraints.json(json_schema)
        return None if regex is None else self.constraints.regex(regex)

    def prompt_ids(self, prompt: str) -> list[int]:
        """A raw prompt as ids, with its special tokens."""
        tokenizer = self.tokenizer
        ids = tokenizer.encode(prompt, special=True, add_bos=tokenizer.add_bos)
        # The empty prompt: any text at all, as the model would begin it.
        return ids or [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]

    def _run(self, ids: Sequence[int], options: Mapping[str, Any]) -> Generation:
        known = Decoding.__dataclass_fields__.keys() & options.keys()
        decoding = Decoding(**{key: options[key] for key in known})
        reply = self.reply(ids, **{key: options[key] for key in options.keys() - known})
        return Generation(self._pieces(reply, decoding), reply)

    def _pieces(self, reply: Reply, decoding: Decoding) -> Iterator[str]:
        """Feed the reply until something ends it."""
        begun, stats, lookup = time.perf_counter(), reply.stats, Lookup(decoding.lookup)
        seen = list(reply.ids)  # what the model is shown
        stats.reused_tokens = _common(self.context.ids, seen[:-1])
        while reply.finish is None:
            guess = lookup.guess(reply.ids)
            if not guess or len(seen) + len(guess) > self.context.size:
                guess, rows = [], [self.context.next_logits(seen)]
            else:
                rows = self.context.each_next(seen, guess)
            stats.guessed_tokens += len(guess)
            for logits, guessed in zip(rows, [*guess, None]):
                token = reply.feed(logits)
                seen.append(token)
                stats.took(time.perf_counter() - begun)
                if reply.finish is None and len(seen) > self.context.size:
                    self._full(reply, seen, decoding)
                if reply.piece:
                    yield reply.piece
                if reply.finish is not None or token != guessed:
                    break
                stats.right_guesses += 1

    def _full(self, reply: Reply, seen: list[int], decoding: Decoding) -> None:
        if decoding.context_shift:
            first = int(self.tokenizer.add_bos and seen[0] == self.tokenizer.bos_id)
            reply.stats.dropped_tokens += decoding.shift(seen, reply.stats.prompt_tokens, first)
        else:
            reply.end("context")

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


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
