"""What a chat request says: its messages, tools and the form of the reply."""

from __future__ import annotations

import json
from typing import Any

from zoo.serve.errors import ApiError
from zoo.serve.fields import Fields

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES, MOST_TOOLS = 4096, 128


def messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation, with the text of each message as one string."""
    given = fields.get("messages")
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise ApiError(400, f"'messages' must be a list of 1 to {MOST_MESSAGES}", "messages")
    return [_message(message, f"messages[{n}]") for n, message in enumerate(given)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ApiError(400, f"'{where}' needs a role: {', '.join(ROLES)}", where)
    role, content = message["role"], message.get("content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise ApiError(400, f"'{where}' has no content", where)
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str | None):
        raise ApiError(400, f"'{where}.content' must be a string or a list of parts", where)
    rest = {key: message[key] for key in ("name", "tool_call_id") if key in message}
    if message.get("tool_calls"):
        rest["tool_calls"] = _tool_calls(message["tool_calls"], where)
    # Templates know the older name.
    return {"role": "system" if role == "developer" else role, "content": content or ""} | rest


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ApiError(400, f"'{where}.content' can only have parts of type text here", where)
    return text


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """Calls as templates expect them: with arguments as an object rather than as JSON in text."""
    if not isinstance(calls, list) or len(calls) > MOST_TOOLS:
        raise ApiError(400, f"'{where}.tool_calls' must be a list of up to {MOST_TOOLS}", where)
    out = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ApiError(400, f"'{where}.tool_calls' need a function each", where)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                pass  # a model may have said what is no JSON; the template gets it as it is
        out.append(call | {"function": function | {"arguments": arguments}})
    return out


def tools(fields: Fields) -> list[dict[str, Any]] | None:
    """The tools that the template is told of."""
    given, choice = fields.get("tools"), fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(400, "'tool_choice' can only be 'auto' or 'none' here", "tool_choice")
    if given is None:
        return None
    is_list = isinstance(given, list) and 0 < len(given) <= MOST_TOOLS
    if not is_list or not all(isinstance(tool, dict) and "function" in tool for tool in given):
        raise ApiError(400, f"'tools' must be a list of 1 to {MOST_TOOLS} functions", "tools")
    return None if choice == "none" else given


def schema(fields: Fields) -> dict[str, Any] | None:
    """The JSON schema that the reply must meet, if there is one."""
    given = fields.get("response_format", {"type": "text"})
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
    message = "'response_format' must be of type text, json_object or json_schema, with its schema"
    raise ApiError(400, message, "response_format")
