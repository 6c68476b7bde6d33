"""The options of replies as they are changed by name within a conversation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from zoo import cli
from zoo.errors import UsageError
from zoo.llama import flags
from zoo.llama.sampling import SamplingOptions

NOTHING = "none"  # what takes an option away that may be absent


def _stops(text: str) -> list[str]:
    r"""A stop string as it is typed, or a JSON text or list of them ("\n")."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    values = value if isinstance(value, list) else [value]
    return values if all(isinstance(v, str) and v for v in values) else [text]


def _biases(text: str) -> dict[int, float]:
    return dict(flags.bias(each) for each in text.split())


# What may be absent, and what it then is.
_OPTIONAL: dict[str, Any] = {
    "seed": None, "regex": None, "json_schema": None, "max_tokens": None, "stop": [],
    "logit_bias": {},
}  # fmt: skip
_KINDS: dict[str, Callable[[str], Any]] = {
    **{flags.name(row): row[2] for row in flags.SAMPLING + flags.DECODING},
    "logit_bias": _biases,
    "max_tokens": cli.integer(1),
    "seed": cli.integer(0),
    "stop": _stops,
    "regex": str,
    "json_schema": flags.schema,
}


def parsed(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`NAME VALUE` as the option it sets, nothing for a name alone; UsageError if it can't be."""
    name, _, value = text.partition(" ")
    name, value = name.replace("-", "_").strip("_"), value.strip()
    if not name:
        return {}
    if name not in _KINDS:
        raise UsageError(f"no option {name}; there are {', '.join(sorted(_KINDS))}")
    if not value:
        return {}
    if value == NOTHING and name in _OPTIONAL:
        return {name: _OPTIONAL[name]}
    try:
        new = {name: _KINDS[name](value)}
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from None
    sampling = {**options, **new}
    known = SamplingOptions.__dataclass_fields__
    SamplingOptions(**{key: sampling[key] for key in sampling if key in known})  # or UsageError
    return new


def shown(options: Mapping[str, Any], only: str = "") -> dict[str, str]:
    """Options as they are typed; `only` picks one."""
    only = only.replace("-", "_").strip("_")
    names = [only] if only else sorted(_KINDS)
    return {name: _text(options.get(name)) for name in names}


def _text(value: Any) -> str:
    if value is None or value in ([], {}):
        return NOTHING
    if isinstance(value, dict):
        return " ".join(f"{token}{bias:+g}" for token, bias in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
