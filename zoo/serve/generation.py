"""What chats and completions share: sampling options, replies on their way, usage, logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from zoo.serve.errors import ApiError
from zoo.serve.fields import Fields
from zoo.serve.models import Served
from zoo.serve.scheduler import Piece, Ticket

if TYPE_CHECKING:
    from zoo.llama.generate import Llama
    from zoo.llama.reply import Reply
    from zoo.llama.sampling import TokenLogprobs
    from zoo.llama.tokenizer import Tokenizer

MOST_CHOICES = 16
MOST_STOPS = 16
# Sampling options of ours that OpenAI doesn't have; requests may give them all the same.
OWN = {
    "top_k": (0, 1 << 20, int),
    "min_p": (0, 1, float),
    "typical_p": (0, 1, float),
    "repeat_penalty": (1e-6, 100, float),
    "repeat_last_n": (0, 1 << 20, int),
}
KNOWN = frozenset(
    ("model", "stream", "stream_options", "n", "stop", "seed", "temperature", "top_p",
     "frequency_penalty", "presence_penalty", "logit_bias", "max_tokens", "logprobs", *OWN)
)  # fmt: skip
FINISH = {"stop": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True)
class Wanted:
    """How replies are to be made: `n` of them, `options` for Llama.reply, and how they are sent."""

    n: int
    options: dict[str, Any]
    stream: bool
    usage: bool  # a last chunk of a stream says how many tokens there were

    def of(self, choice: int) -> dict[str, Any]:
        """The options of one choice: each draws its own."""
        seed = self.options["seed"]
        return self.options | {"seed": None if seed is None else (seed + choice) % (1 << 63)}


def wanted(fields: Fields) -> Wanted:
    """The options that chats and completions share; temperature 1 and top_p 1 as at OpenAI."""
    options: dict[str, Any] = {
        "temperature": fields.number("temperature", 1.0, 0, 2),
        "top_p": fields.number("top_p", 1.0, 0, 1),
        "max_tokens": fields.integer("max_tokens", None, 1, 1 << 24),
        "stop": fields.texts("stop", MOST_STOPS),
        "seed": fields.integer("seed", None, -(1 << 63), (1 << 64) - 1),
    }
    if "" in options["stop"]:
        raise ApiError(400, "a stop string is empty", "stop")
    if options["seed"] is not None:
        options["seed"] %= 1 << 63
    for name in ("frequency_penalty", "presence_penalty"):
        if name in fields:
            options[name] = fields.number(name, 0.0, -2, 2)
    for name, (low, high, kind) in OWN.items():
        if name in fields:
            read = fields.integer if kind is int else fields.number
            options[name] = read(name, None, low, high)
    if "logit_bias" in fields:
        options["logit_bias"] = _bias(fields)
    stream = fields.flag("stream")
    told = fields.get("stream_options", {})
    if not isinstance(told, dict) or (told and not stream):
        raise ApiError(400, "'stream_options' is an object, for streams only", "stream_options")
    usage = Fields(told, ("include_usage", "include_obfuscation")).flag("include_usage")
    return Wanted(fields.integer("n", 1, 1, MOST_CHOICES), options, stream, usage)


def _bias(fields: Fields) -> dict[int, float]:
    given = fields.get("logit_bias")
    try:
        bias = {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise fields.wrong("logit_bias", "an object of token ids and numbers", given) from None
    if not all(-100 <= value <= 100 for value in bias.values()):
        raise fields.wrong("logit_bias", "of numbers from -100 to 100", given)
    return bias


Make = Callable[["Llama"], "list[Reply]"]
T = TypeVar("T")


async def prepared(model: Served, make: Callable[[Llama], T]) -> tuple[Llama, T]:
    """The loaded model and what `make` makes with it, in a thread: templates, schemas and long
    texts take their time."""
    llama = await model.run(lambda scheduler: scheduler.llama)
    return llama, await asyncio.to_thread(make, llama)


async def pieces(model: Served, replies: Sequence[Reply]) -> AsyncIterator[tuple[int, Piece]]:
    """(choice, piece) as they are made; raises what ends a reply.

    Whoever stops iterating frees the slots.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

    def poster(choice: int) -> Callable[[Piece], None]:
        def post(piece: Piece) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, (choice, piece))

        return post

    tickets = [Ticket(reply, poster(choice)) for choice, reply in enumerate(replies)]
    try:
        for ticket in tickets:
            model.worker.submit(lambda scheduler, ticket=ticket: scheduler.add(ticket))
        left = len(tickets)
        while left:
            choice, piece = await queue.get()
            if piece.error is not None:
                raise piece.error
            left -= piece.finish is not None
            yield choice, piece
    finally:
        for ticket in tickets:
            ticket.cancelled = True


def usage(replies: Sequence[Reply], choices: int) -> dict[str, Any]:
    """How many tokens there were; a prompt counts once for all its choices, which are adjacent."""
    stats = [reply.stats for reply in replies]
    prompt = sum(each.prompt_tokens for each in stats[::choices])
    completion = sum(len(each.ids) for each in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(each.reused_tokens for each in stats[::choices])
        },
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself as text; what is no whole character in it becomes U+FFFD."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def shown(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
    """Without the stop token, which is no part of the text."""
    return [each for each in found if each.token not in tokenizer.stop_ids]
