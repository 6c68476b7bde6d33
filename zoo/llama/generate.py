"""Llama: a loaded model that continues text, answers a conversation and gives logits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.errors import UsageError, UserError
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

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Continue a raw prompt; iterate over the result for the text.

        In a text prompt special tokens are parsed ("<|im_start|>"). Ends at a stop token or
        string (neither is given out), after `max_tokens`, or when the context is full. `options`
        are those of `reply`. UserError when the prompt doesn't fit.
        """
        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else prompt
        return self._run(self.reply(ids, **options))

    def chat(
        self, messages: str | Sequence[Message], stop: str | Sequence[str] = (), **options: Any
    ) -> Generation:
        """Reply to a conversation: [{"role": "user", "content": "Hello"}], or one user's turn.

        Options as in `reply`. What the messages contain never becomes a special token.
        TemplateError when the model's template refuses the conversation.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = self.template.ids(messages)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        return self._run(self.reply(ids, stop=stop + self.template.stop, lstrip=True, **options))

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

    def _run(self, reply: Reply) -> Generation:
        return Generation(self._pieces(reply), reply)

    def _pieces(self, reply: Reply) -> Iterator[str]:
        """Feed the reply until something ends it."""
        begun, stats = time.perf_counter(), reply.stats
        stats.reused_tokens = _common(self.context.ids, reply.ids[:-1])
        while reply.finish is None:
            reply.feed(self.context.next_logits(reply.ids))
            now = time.perf_counter()
            if len(stats.ids) == 1:
                stats.prefill_s = now - begun
            else:
                stats.decode_s = now - begun - stats.prefill_s
            if reply.finish is None and len(reply.ids) > self.context.size:
                reply.end("context")
            if reply.piece:
                yield reply.piece

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
