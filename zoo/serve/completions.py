"""POST /v1/completions: raw text continued, by OpenAI's older interface."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from zoo.serve.errors import ApiError
from zoo.serve.fields import Fields, read_json
from zoo.serve.generation import (
    FINISH,
    KNOWN,
    Make,
    Wanted,
    pieces,
    prepared,
    shown,
    token_text,
    usage,
    wanted,
)
from zoo.serve.models import Served
from zoo.serve.scheduler import checked_prompt
from zoo.serve.streams import DONE, EventStream, while_connected

if TYPE_CHECKING:
    from zoo.llama.generate import Llama
    from zoo.llama.reply import Reply
    from zoo.llama.sampling import TokenLogprobs
    from zoo.llama.tokenizer import Tokenizer

DEFAULT_TOKENS = 16  # OpenAI's
MOST_PROMPTS, MOST_LOGPROBS = 16, 5
_KNOWN = KNOWN | {"prompt", "echo", "best_of", "suffix"}


async def completions(request: Request) -> Response:
    """The endpoint."""
    fields = Fields(await read_json(request), _KNOWN)
    model = request.app.state.models.find("chat", fields)
    prompts = texts_or_ids(fields, "prompt", MOST_PROMPTS)
    asked = wanted(fields)
    logprobs = fields.integer("logprobs", None, 0, MOST_LOGPROBS)
    has_echo = fields.flag("echo")
    if fields.integer("best_of", asked.n, 1, 99) != asked.n:
        raise ApiError(400, "'best_of' can only be as 'n' is here", "best_of")
    if fields.get("suffix"):
        raise ApiError(400, "'suffix' is not supported: text is only continued", "suffix")
    if has_echo and logprobs is not None:
        raise ApiError(400, "'logprobs' of the prompt are not supported: leave out 'echo'", "echo")
    asked.options.update(logprobs=logprobs)
    if asked.options["max_tokens"] is None:
        asked.options["max_tokens"] = DEFAULT_TOKENS

    def replies(llama: Llama) -> list[Reply]:
        made = []
        for prompt in prompts:
            ids = llama.prompt_ids(prompt) if isinstance(prompt, str) else prompt
            checked_prompt(llama, ids)
            made += [llama.reply(ids, **asked.of(n)) for n in range(asked.n)]
        return made

    echoes = [p for p in prompts for _ in range(asked.n)] if has_echo else []
    many = replace(asked, n=asked.n * len(prompts))
    completion = _Completion(model, many, asked.n, echoes)
    if asked.stream:
        return await EventStream(completion.chunks(replies)).start(request.receive)
    return JSONResponse(await while_connected(request.receive, completion.whole(replies)))


def texts_or_ids(fields: Fields, name: str, most: int) -> list[str | list[int]]:
    """A text, a list of them, token ids, or a list of lists of these."""
    given = fields.get(name)
    given = [given] if isinstance(given, str) else given
    if isinstance(given, list) and given and all(type(each) is int for each in given):
        given = [given]
    if not isinstance(given, list) or not 0 < len(given) <= most:
        raise fields.wrong(name, f"a text, token ids, or a list of 1 to {most} of them", given)
    for each in given:
        is_ids = isinstance(each, list) and each and all(type(i) is int for i in each)
        if not is_ids and not isinstance(each, str):
            raise fields.wrong(name, "texts or lists of token ids", each)
    return given


class _Completion:
    """One request on its way; `echoes` are the prompts that begin the choices' texts."""

    def __init__(
        self, model: Served, asked: Wanted, choices: int, echoes: Sequence[str | list[int]]
    ) -> None:
        self.model, self.asked, self.choices, self.echoes = model, asked, choices, echoes
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": None,
        }

    async def whole(self, make: Make) -> dict[str, Any]:
        """The answer in one."""
        with self.model.gate.entered(self.asked.n):
            llama, replies = await prepared(self.model, make)
            texts = [[self._echo(llama, n)] for n in range(len(replies))]
            async with aclosing(pieces(self.model, replies)) as made:
                async for choice, piece in made:
                    texts[choice].append(piece.text)
        choices = [
            self._choice(
                n, "".join(text), self._logprobs(llama.tokenizer, reply.logprobs, 0), reply.finish
            )
            for n, (reply, text) in enumerate(zip(replies, texts))
        ]
        return self.head | {"choices": choices, "usage": usage(replies, self.choices)}

    async def chunks(self, make: Make) -> AsyncIterator[dict[str, Any] | str]:
        """The answer as it is made."""
        head = self.head | ({"usage": None} if self.asked.usage else {})
        with self.model.gate.entered(self.asked.n):
            llama, replies = await prepared(self.model, make)
            sizes = [0] * len(replies)
            async with aclosing(pieces(self.model, replies)) as made:
                async for n, piece in made:
                    echo = self._echo(llama, n) if sizes[n] == 0 else ""
                    logprobs = self._logprobs(llama.tokenizer, piece.logprobs, sizes[n])
                    text = echo + piece.text
                    sizes[n] += len(text)
                    if text or piece.finish or (logprobs and logprobs["tokens"]):
                        yield head | {"choices": [self._choice(n, text, logprobs, piece.finish)]}
        if self.asked.usage:
            yield head | {"choices": [], "usage": usage(replies, self.choices)}
        yield DONE

    def _choice(self, n: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        named = {"index": n, "text": text, "logprobs": logprobs}
        return named | {"finish_reason": finish and FINISH[finish]}

    def _echo(self, llama: Llama, n: int) -> str:
        if not self.echoes:
            return ""
        prompt = self.echoes[n]
        return prompt if isinstance(prompt, str) else llama.tokenizer.decode(prompt)

    def _logprobs(
        self, tokenizer: Tokenizer, found: Sequence[TokenLogprobs], offset: int
    ) -> dict[str, Any] | None:
        """In lists by token; `offset` is where the text of the first begins, in characters."""
        if self.asked.options["logprobs"] is None:
            return None
        found = shown(tokenizer, found)
        tokens = [token_text(tokenizer, each.token) for each in found]
        offsets = [offset + len("".join(tokens[:n])) for n in range(len(tokens))]
        top = [{token_text(tokenizer, i): p for i, p in each.top} for each in found]
        values = [each.logprob for each in found]
        named = {"tokens": tokens, "token_logprobs": values, "top_logprobs": top}
        return named | {"text_offset": offsets}
