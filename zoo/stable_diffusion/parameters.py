"""What a picture was made with, as text in the form of A1111's webui.

a prompt
Negative prompt: what not to show
Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 42, Size: 512x512
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from zoo.errors import UserError

_NEGATIVE = "Negative prompt:"
# Set where reading a prompt back from its lines would not give it exactly.
_EXACT = ("Exact prompt", "Exact negative prompt")
_LABEL = re.compile(r"\s*(\w[\w /-]{0,60}):\s*")
_QUOTED = re.compile(r'("(?:[^"\\]|\\.)*")\s*(?:,|$)')
_PLAIN = re.compile(r"([^,]*)(?:,|$)")
# Label in the text, name of the flag, its type.
_FIELDS = (
    ("Steps", "steps", int),
    ("Sampler", "sampler", str),
    ("Schedule type", "sigmas", str),
    ("CFG scale", "cfg_scale", float),
    ("Seed", "seed", int),
    ("Size", "size", str),
    ("Model", "model", str),
    ("Clip skip", "clip_skip", int),
    ("Denoising strength", "strength", float),
    ("Eta", "eta", float),
    ("RNG", "rng", str),
    ("Guidance rescale", "guidance_rescale", float),
    ("Hires upscale", "hires_scale", float),
    ("Hires steps", "hires_steps", int),
)


@dataclass
class Parameters:
    """Prompt, negative prompt, and the other settings by A1111's labels, as text."""

    prompt: str = ""
    negative_prompt: str = ""
    settings: dict[str, str] = field(default_factory=dict)


def write(parameters: Parameters) -> str:
    """The text that `parse` reads back, whatever the prompts and values are."""
    text = _written(parameters, parameters.settings)
    if parse(text) == parameters:
        return text
    exact = dict(zip(_EXACT, (parameters.prompt, parameters.negative_prompt)))
    return _written(parameters, {**parameters.settings, **exact})


def _written(parameters: Parameters, settings: Mapping[str, str]) -> str:
    lines = [parameters.prompt]
    if parameters.negative_prompt:
        lines.append(f"{_NEGATIVE} {parameters.negative_prompt}")
    if settings:
        lines.append(", ".join(f"{label}: {_quoted(value)}" for label, value in settings.items()))
    return "\n".join(lines)


def _quoted(value: str) -> str:
    plain = value and value == value.strip() and not re.search(r'[,:"\\\x00-\x1f]', value)
    return value if plain else json.dumps(value, ensure_ascii=False)


def parse(text: str) -> Parameters:
    """The parameters in a text of this form; any text has some, if only a prompt."""
    *lines, last = text.split("\n")
    settings = _settings(last)
    # A prompt's last line may have labels too.
    if not settings or not (settings.get("Steps", "").isdigit() or _EXACT[0] in settings):
        lines, settings = [*lines, last], {}
    begin = next((i for i, line in enumerate(lines) if line.strip().startswith(_NEGATIVE)), None)
    prompt = "\n".join(lines[:begin]).strip()
    negative = "" if begin is None else "\n".join(lines[begin:]).strip()[len(_NEGATIVE) :].strip()
    prompt, negative = (
        settings.pop(label, found) for label, found in zip(_EXACT, (prompt, negative))
    )
    return Parameters(prompt, negative, settings)


def _settings(line: str) -> dict[str, str] | None:
    """The labels and values that a line consists of, or None if it is something else."""
    found: dict[str, str] = {}
    at, quotes = 0, True
    while at < len(line):
        label = _LABEL.match(line, at)
        if label is None:
            return None
        at = label.end()
        value = _QUOTED.match(line, at) if quotes else None
        # After a quotation mark without an end, none is looked for again: that takes long.
        quotes = quotes and (value is not None or line[at : at + 1] != '"')
        value = value or _PLAIN.match(line, at)
        found[label[1]] = _unquoted(value[1])
        at = value.end()
    return found


def _unquoted(value: str) -> str:
    if value[:1] == '"':
        try:
            return json.loads(value, strict=False)
        except ValueError:
            pass  # a value that only looks quoted is taken as it is
    return value.strip()


def describe(flags: Mapping[str, object]) -> dict[str, str]:
    """Settings from the flags of a command: `steps`, `width`, …; those that are None are left out.

    Flags that have no label of A1111's are left out too.
    """
    size = {"size": f"{flags['width']}x{flags['height']}"} if flags.get("width") else {}
    known = {**flags, **size}
    pairs = ((label, known.get(name)) for label, name, _ in _FIELDS)
    return {
        label: f"{value:.10g}" if isinstance(value, float) else str(value)
        for label, value in pairs
        if value is not None
    }


def flags_of(parameters: Parameters, file: object) -> dict[str, object]:
    """The inverse of `describe`: flags by name. UserError, naming `file`, for what is no number."""
    found: dict[str, object] = {}
    for label, name, kind in _FIELDS:
        text = parameters.settings.get(label)
        if text is None:
            continue
        try:
            if name == "size":
                found["width"], found["height"] = (_number(int, part) for part in text.split("x"))
            else:
                found[name] = _number(kind, text)
        except ValueError:
            raise UserError(f"{file}: its parameters have no usable {label}: {text!r}") from None
    return found


def _number(kind: type, text: str) -> object:
    if kind is str:
        return text
    if len(text) > 30:
        raise ValueError(text)
    return kind(text)
