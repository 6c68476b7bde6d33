"""The messages of a saved conversation: JSON that somebody may have changed."""

from __future__ import annotations

import json
from pathlib import Path

from zoo.errors import UserError

LARGEST = 1 << 26  # bytes
ROLES = ("system", "user", "assistant", "tool")


def read_messages(file: Path) -> list[dict[str, str]]:
    """The messages of a file; UserError when it holds none."""
    if file.stat().st_size > LARGEST:
        raise UserError(f"{file}: larger than {LARGEST} bytes, so no saved conversation")
    try:
        text = file.read_text("utf-8")
    except ValueError:
        raise UserError(f"{file}: no saved conversation") from None
    return parse_messages(file, text)


def parse_messages(file: Path, text: str) -> list[dict[str, str]]:
    """The messages that a file's text is; UserError when it is anything else."""
    try:
        data = json.loads(text)
        messages = data["messages"] if isinstance(data, dict) else data
        for message in messages:
            role, content = message["role"], message["content"]
            if set(message) != {"role", "content"} or role not in ROLES or type(content) is not str:
                raise TypeError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UserError(f"{file}: no saved conversation") from None
    return list(messages)
