"""What can be wrong with a request, in OpenAI's words: {"error": {message, type, param, code}}."""

from __future__ import annotations

import traceback
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from zoo import cli
from zoo.errors import UserError

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error status; `param` is the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _KINDS.get(self.status, default)
        named = {"type": kind, "param": self.param, "code": self.code}
        return {"error": {"message": str(self), **named}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


class Gone(Exception):
    """The client has closed the connection; nobody waits for an answer."""


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error; of one that is ours only that there was one."""
    match error:
        case ApiError():
            return error
        case UserError():  # a prompt that is too long, a sound file that is none
            return ApiError(400, cli.one_line(error))
        case RecursionError():  # in what walks through a schema, or tools
            return ApiError(400, "the request is nested too deeply")
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
    cli.note("".join(traceback.format_exception(error)).rstrip())
    return ApiError(500, "the server failed; its log says how", code="internal_error")


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of every error that an endpoint raises."""
    if isinstance(error, Gone | ClientDisconnect):
        return Response(status_code=499)  # for the log alone
    return as_api_error(error).response()
