"""Chat templates: a conversation rendered as the checkpoint asks, then tokenised.

What people write can never become a special token: their text is marked before the template sees
it, and the marks are removed after the special tokens have been found.
Source: the template conventions of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from zoo.errors import UserError
from zoo.llama.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
PLAIN_STOP = "\nuser:"  # how the plain form's next turn would begin

LONGEST = 1 << 20  # characters that a template may write beyond four times its messages
_GUARDS = [*map(chr, range(0xFDD0, 0xFDF0))]  # Unicode's noncharacters: never in real text


class TemplateError(UserError):
    """A template that can't be compiled, or that refuses the conversation."""


class ChatTemplate:
    """A checkpoint's chat template, ready to turn messages into prompt ids.

    `note` says so when the checkpoint has none and a stand-in serves; `stop` lists the strings
    that end a reply of that stand-in.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.source, self.note, self.stop = _choose(tokenizer)
        self._guard = Guard(tokenizer.special.control)
        self._template: Any = None  # compiled on first use

    def ids(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Prompt ids of a conversation; TemplateError when the template refuses it.

        `tools`: functions that the model may call, as OpenAI describes them.
        """
        guard = _unused(self.source, [*messages, *(tools or ())])
        marked = self._guard.mark(list(messages), guard), self._guard.mark(tools, guard)
        text = self._render(marked[0], add_generation_prompt, marked[1])
        add_bos = self.tokenizer.add_bos
        return self.tokenizer.encode(text, special=True, add_bos=add_bos, guard=guard)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt as text, for people to read."""
        return self._render(list(messages), add_generation_prompt)

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Any = None
    ) -> str:
        import jinja2

        try:
            if self._template is None:
                self._template = _environment().from_string(_plain_tags(self.source))
            pieces = self._template.generate(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._text(self.tokenizer.bos_id),
                eos_token=self._text(self.tokenizer.eos_id),
                tools=tools,
                documents=None,
            )
            return _joined(pieces, most=LONGEST + 4 * sum(map(len, _strings([messages, tools]))))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses this: {error}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateError(f"the chat template fails: {error}") from None
        except RecursionError:
            raise TemplateError("the chat template fails: it is nested too deeply") from None

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.tokenizer.decode([token])


def _joined(pieces: Iterable[str], most: int) -> str:
    """The rendered text; a template that writes without end is stopped."""
    out, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > most:
            raise TemplateError(f"the chat template writes more than {most} characters")
        out.append(piece)
    return "".join(out)


def _choose(tokenizer: Tokenizer) -> tuple[str, str | None, tuple[str, ...]]:
    """(template, note, stop strings): the file's own, or a stand-in."""
    if tokenizer.chat_template:
        return tokenizer.chat_template, None, ()
    if {"<|im_start|>", "<|im_end|>"} <= set(tokenizer.special.control):
        return CHATML, "the model has no chat template; using ChatML, whose tokens it knows", ()
    note = "the model has no chat template; using plain 'user:' and 'assistant:' lines"
    return PLAIN, note, (PLAIN_STOP,)


def _environment() -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kw: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kw)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _plain_tags(source: str) -> str:
    """`{% generation %}` marks what a model is trained on; for a prompt it does nothing."""
    source = re.sub(r"(\{%[-+]?)\s*generation\s*([-+]?%\})", r"\1 if true \2", source)
    return re.sub(r"(\{%[-+]?)\s*endgeneration\s*([-+]?%\})", r"\1 endif \2", source)


def _unused(source: str, messages: Sequence[Message]) -> str:
    """A character that neither the template nor any message contains."""
    used = set(source).union(*map(set, _strings(messages)))
    for char in _GUARDS:
        if char not in used:
            return char
    raise TemplateError("the messages use every noncharacter of Unicode")


def _strings(value: Any) -> Iterable[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield str(key)
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)


class Guard:
    """Breaks up special tokens in what people write, by a character put inside each.

    A template may put its own text, or another message, right beside a message: the beginning of a
    token at the end of the text and the end of a token at its start are broken up too. White
    space at the ends does not hide them, because templates strip it, and no guard is put beyond
    it, so that stripping still works.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = [token for token in tokens if token]
        self._tokens = (
            re.compile("(?=" + "|".join(map(re.escape, tokens)) + ")") if tokens else None
        )
        self._starts = {token[:size] for token in tokens for size in range(1, len(token))}
        self._ends = {token[-size:] for token in tokens for size in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)

    def mark(self, value: Any, guard: str) -> Any:
        """`value` with every string in it marked by `guard`."""
        match value:
            case str():
                return self._text(value, guard)
            case Mapping():
                return {
                    self.mark(key, guard): self.mark(item, guard) for key, item in value.items()
                }
            case list() | tuple():
                return [self.mark(item, guard) for item in value]
        return value

    def _text(self, text: str, guard: str) -> str:
        if self._tokens is None:
            return text
        cuts = {match.start() + 1 for match in self._tokens.finditer(text)}
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for size in range(1, min(self._longest, end - start + 1)):
            if text[end - size : end] in self._starts:
                cuts.add(end - size + 1)
            if text[start : start + size] in self._ends:
                cuts.add(start + size - 1)
        marks = sorted(cuts)
        return guard.join(text[a:b] for a, b in zip([0, *marks], [*marks, len(text)]))
