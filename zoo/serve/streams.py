"""Answers that come bit by bit, and work that ends when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from zoo.serve.errors import Gone, as_api_error

T = TypeVar("T")
DONE = "[DONE]"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy passes each event on as it comes
    "x-content-type-options": "nosniff",
}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; Gone then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events: an item is a dict (sent as JSON), or DONE.

    A dict with `type` is an event of that name, as OpenAI's newer streams have it. The first item
    is awaited before the status is sent, so that an error that comes first is a status of its own;
    a later one is an event with `error`.
    """

    def __init__(self, items: AsyncIterator[dict[str, Any] | str]) -> None:
        self.items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except Gone:
            pass

    async def start(self, receive: Receive) -> EventStream:
        """The response, once there is an item; raises what the items raise before that."""
        try:
            first = await while_connected(receive, anext(self.items))
        except BaseException:
            await self.items.aclose()
            raise
        self.items = _with_first(first, self.items)
        return self

    async def _send(self, send: Send) -> None:
        headers = [(key.encode(), value.encode()) for key, value in _HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(self.items) as items:
            try:
                async for item in items:
                    await _send_event(send, item)
            except Exception as error:  # noqa: BLE001 - told, and logged if it is ours
                await _send_event(send, as_api_error(error).body())
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_first(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


async def _send_event(send: Send, item: dict[str, Any] | str) -> None:
    name = f"event: {item['type']}\n" if isinstance(item, dict) and "type" in item else ""
    data = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    body = f"{name}data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
