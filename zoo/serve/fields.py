"""Checked reading of what a request says: each field has its type and bounds, or a 400 names it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request

from zoo.serve.errors import ApiError

LONGEST_JSON = 4 << 20  # bytes: parsing takes the event loop some 30 ms
# What OpenAI's clients may send, and what changes nothing here.
IGNORED = frozenset(
    ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
     "prompt_cache_retention", "parallel_tool_calls", "reasoning_effort", "verbosity")
)  # fmt: skip


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body must be JSON, sent with Content-Type: application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_JSON:
            raise ApiError(413, f"the body has more than {LONGEST_JSON} bytes of JSON")
    try:
        value = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ApiError(400, f"the body is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


class Fields:
    """The fields of a request by name; null is as good as absent.

    `known` are the names that an endpoint reads; any other is refused, because a misspelt option
    that does nothing is hard to find. `as_text`: all values are text, as a form's are.
    """

    def __init__(
        self, values: Mapping[str, Any], known: Collection[str], as_text: bool = False
    ) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._as_text = as_text
        for name in self._values.keys() - IGNORED - set(known):
            raise ApiError(400, f"unrecognized request argument: {name[:99]}", name[:99])

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it came."""
        return self._values.get(name, default)

    def text(self, name: str, default: str | None = None, longest: int = LONGEST_JSON) -> str:
        """A text; without a default it must be there."""
        value = self._values.get(name, default)
        if value is None:
            raise ApiError(400, f"'{name}' is missing", name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        if len(value) > longest:
            raise ApiError(400, f"'{name}' has more than {longest} characters", name)
        return value

    def texts(self, name: str, most: int) -> list[str]:
        """A text or a list of up to `most`."""
        value = self._values.get(name, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.wrong(name, "a string or a list of strings", value)
        if len(found) > most:
            raise self.wrong(name, f"at most {most} strings", f"{len(found)}")
        return found

    def number(self, name: str, default: Any, low: float, high: float) -> Any:
        """A finite number from `low` to `high`."""
        return self._numeric(name, default, low, high, float, "a number")

    def integer(self, name: str, default: Any, low: int, high: int) -> Any:
        """A whole number from `low` to `high`."""
        return self._numeric(name, default, low, high, int, "a whole number")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name, default)
        if self._as_text and isinstance(value, str):
            value = {"true": True, "false": False}.get(value.lower(), value)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def choice(self, name: str, default: str, choices: Collection[str]) -> str:
        value = self._values.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(name, " or ".join(choices), value)
        return value

    def wrong(self, name: str, expected: str, got: Any) -> ApiError:
        """The error that says what was expected of a field."""
        return ApiError(400, f"'{name}' must be {expected}, got {_short(got)}", name)

    def _numeric(
        self, name: str, default: Any, low: float, high: float, kind: type, what: str
    ) -> Any:
        value = self._values.get(name)
        if value is None:
            return default
        if self._as_text:
            try:
                value = kind(value)
            except (ValueError, TypeError):
                raise self.wrong(name, what, value) from None
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, what, value)
        if kind is int and not whole:
            raise self.wrong(name, what, value)
        if not low <= value <= high:
            raise self.wrong(name, f"from {low} to {high}", value)
        return kind(value)


def _short(value: Any) -> str:
    """What came, on one short line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) < 99 else text[:99] + " …"
