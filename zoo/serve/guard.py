"""Who may ask, and how much: what is checked before any endpoint sees a request."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zoo.serve.errors import ApiError
from zoo.serve.metrics import Metrics

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PATIENCE_S = 30.0  # how long a request's body may pause
DRAINED = 8  # times the limit: what is read of a body that is too large, so that the client, which
# may be deaf until it has sent all, hears why
SAFE = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Rules:
    """keys: API keys, any of which lets in; none: everyone. open_paths need no key. hosts: names
    that the server answers to; none: any. origins: of pages elsewhere that may call it. most: bytes
    of a body."""

    keys: Sequence[str] = ()
    open_paths: Collection[str] = ()
    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    most: int = 25 << 20


class Guard:
    """Refuses what the rules don't allow, bounds bodies in size and time, and counts answers."""

    def __init__(
        self, app: ASGIApp, rules: Rules, metrics: Metrics, paths: Collection[str]
    ) -> None:
        self.app, self.rules, self.metrics, self.paths = app, rules, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 499  # unless an answer begins

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is None:
                await self.app(scope, self._bounded(receive), told)
            else:
                if refusal.status == 413:
                    await self._drain(receive)
                await refusal.response()(scope, receive, told)
        finally:
            # Paths that nothing serves are one: anyone could make up millions.
            endpoint = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.add(1, endpoint, status)
            self.metrics.seconds.add(time.perf_counter() - begun, endpoint)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, rules = Headers(scope=scope), self.rules
        host = headers.get("host", "")
        if rules.hosts and _name(host) not in rules.hosts:
            # A page elsewhere whose name was made to mean this machine would be one of ours.
            return ApiError(403, "this server doesn't answer to that name; --host says which")
        origin = headers.get("origin")
        if origin is not None and not self._is_own(origin, host):
            return ApiError(403, "pages of other sites may not call this server; --cors lets them")
        if scope["path"] not in rules.open_paths and not self._has_key(headers):
            message = "a valid API key is missing: send it as 'Authorization: Bearer KEY'"
            known = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, code="invalid_api_key", headers=known)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > rules.most:
            return self._too_large()
        return None

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether a page is ours or one that may call; browsers say of which a request comes."""
        allowed = self.rules.origins
        return origin.partition("://")[2] == host or "*" in allowed or origin in allowed

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        offered = given.strip().encode() if scheme.lower() == "bearer" else b""
        # All are compared, each in a time that doesn't tell how much of it was right.
        matches = [hmac.compare_digest(offered, key.encode()) for key in self.rules.keys]
        return not matches or any(matches)

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` for an endpoint: ApiError for a body that is too large or takes too long."""
        size, whole = 0, False

        async def bounded() -> Message:
            nonlocal size, whole
            if whole:  # only a disconnection can come: whoever waits for it may wait
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), PATIENCE_S)
            except asyncio.TimeoutError:
                raise ApiError(408, f"no more of the body came for {PATIENCE_S:.0f} s") from None
            if message["type"] != "http.request":
                return message
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self.rules.most:
                if not whole:
                    await self._drain(receive)
                raise self._too_large()
            return message

        return bounded

    async def _drain(self, receive: Receive) -> None:
        """Read on for a while, and forget it."""
        left, until = DRAINED * self.rules.most, time.monotonic() + PATIENCE_S
        while left > 0 and (rest := until - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(receive(), rest)
            except asyncio.TimeoutError:
                return
            left -= len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.rules.most} bytes", code="too_large")


def _name(host: str) -> str | None:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
