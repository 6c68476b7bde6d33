"""POST /v1/chat/completions: replies to a conversation, whole or as a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from zoo.serve import conversation
from zoo.serve.errors import ApiError
from zoo.serve.fields import Fields, read_json
from zoo.serve.generation import (
    FINISH,
    KNOWN,
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

MOST_TOP = 20
_KNOWN = KNOWN | {
    "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools",
    "tool_choice", "modalities",
}  # fmt: skip


async def chat_completions(request: Request) -> Response:
    """The endpoint."""
    fields = Fields(await read_json(request), _KNOWN)
    model = request.app.state.models.find("chat", fields)
    asked = wanted(fields)
    messages, tools = conversation.messages(fields), conversation.tools(fields)
    schema = conversation.schema(fields)
    top = fields.integer("top_logprobs", 0, 0, MOST_TOP)
    has_logprobs = fields.flag("logprobs")
    if top and not has_logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    if fields.get("modalities", ["text"]) != ["text"]:
        raise ApiError(400, "'modalities' can only be ['text'] here", "modalities")
    most = fields.integer("max_completion_tokens", asked.options["max_tokens"], 1, 1 << 24)
    asked.options.update(max_tokens=most, logprobs=top if has_logprobs else None)

    def replies(llama: Llama) -> list[Reply]:
        ids = llama.template.ids(messages, tools=tools)
        checked_prompt(llama, ids)
        own = {"stop": (*asked.options["stop"], *llama.template.stop), "lstrip": True}
        return [llama.reply(ids, json_schema=schema, **asked.of(n) | own) for n in range(asked.n)]

    chat = _Chat(model, asked)
    if asked.stream:
        return await EventStream(chat.chunks(replies)).start(request.receive)
    return JSONResponse(await while_connected(request.receive, chat.whole(replies)))


class _Chat:
    """One request on its way."""

    def __init__(self, model: Served, asked: Wanted) -> None:
        self.model, self.asked = model, asked
        self.id, self.created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        named = {"id": self.id, "object": kind, "created": self.created}
        return named | {"model": self.model.name, "system_fingerprint": None}

    async def whole(self, make: Any) -> dict[str, Any]:
        """The answer in one."""
        with self.model.gate.entered(self.asked.n):
            llama, replies = await prepared(self.model, make)
            texts = [[] for _ in replies]
            async with aclosing(pieces(self.model, replies)) as made:
                async for choice, piece in made:
                    texts[choice].append(piece.text)
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(text), "refusal": None},
                "logprobs": self._logprobs(llama.tokenizer, reply.logprobs),
                "finish_reason": FINISH[reply.finish],
            }
            for i, (reply, text) in enumerate(zip(replies, texts))
        ]
        used = {"usage": usage(replies, self.asked.n)}
        return self._head("chat.completion") | {"choices": choices} | used

    async def chunks(self, make: Any) -> AsyncIterator[dict[str, Any] | str]:
        """The answer as it is made."""
        head = self._head("chat.completion.chunk")
        if self.asked.usage:
            head["usage"] = None

        def chunk(choice: int, delta: dict, logprobs: Any, finish: str | None) -> dict[str, Any]:
            one = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return head | {"choices": [one]}

        begun: set[int] = set()
        with self.model.gate.entered(self.asked.n):
            llama, replies = await prepared(self.model, make)
            async with aclosing(pieces(self.model, replies)) as made:
                async for choice, piece in made:
                    if choice not in begun:
                        begun.add(choice)
                        yield chunk(choice, {"role": "assistant", "content": ""}, None, None)
                    logprobs = self._logprobs(llama.tokenizer, piece.logprobs)
                    if piece.text or (logprobs and logprobs["content"]):
                        yield chunk(choice, {"content": piece.text}, logprobs, None)
                    if piece.finish:
                        yield chunk(choice, {}, None, FINISH[piece.finish])
        if self.asked.usage:
            yield head | {"choices": [], "usage": usage(replies, self.asked.n)}
        yield DONE

    def _logprobs(
        self, tokenizer: Tokenizer, found: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:
        if self.asked.options["logprobs"] is None:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = list(tokenizer.token_bytes(token))
            return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": raw}

        content = [
            entry(each.token, each.logprob) | {"top_logprobs": [entry(*one) for one in each.top]}
            for each in shown(tokenizer, found)
        ]
        return {"content": content, "refusal": None}
