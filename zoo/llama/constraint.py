"""Constrained output: replies that match a JSON schema or a regular expression, byte by byte.

The grammar is run by llguidance, which parses what has come so far and walks a trie of all tokens'
bytes for those that may come next. Source: https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.errors import UsageError, UserError
from zoo.llama.tokenizer import Tokenizer

# A small model at a loss fills pages with white space that JSON allows between any two tokens: at
# most a space, or a line and its indentation.
_SPACE = r"( |\n[ \t]{0,40})"
_JSON_OPTIONS = {"whitespace_pattern": _SPACE, "lenient": False, "coerce_one_of": False}


class Constraints:
    """Makes constraints for one tokenizer; keeps the trie of its tokens, which takes 0.1 s."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._library = _llguidance()
        self._stop_ids = sorted(tokenizer.stop_ids)
        if not self._stop_ids:
            raise UserError("constrained output needs a tokenizer that knows a stop token")
        table = self._library.TokenizerWrapper(_Table(tokenizer, self._stop_ids[0]))
        self._tokens = self._library.LLTokenizer(table, eos_token=self._stop_ids)

    def json(self, schema: Mapping[str, Any] | bool | str = "object") -> Constraint:
        """A reply that is JSON and valid by a schema (or its text); "object" is any JSON object.

        UsageError for a schema that is none, that nothing satisfies, or whose keywords are not
        supported: not, if, uniqueItems, contains, propertyNames, dependent…, unevaluated…, a oneOf
        whose branches may overlap, minProperties or maxProperties beside optional properties.
        """
        if isinstance(schema, str):
            schema = {"type": "object"} if schema == "object" else _parsed(schema)
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise UsageError(f"a JSON schema must be an object, got {json.dumps(schema)[:60]}")
        try:
            text = json.dumps(schema)
            make = self._library.LLMatcher.grammar_from_json_schema
            grammar = make(text, overrides=_JSON_OPTIONS)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the JSON schema can't be used: {_reason(str(error))}") from None
        return self._constraint(grammar, "JSON schema")

    def regex(self, pattern: str) -> Constraint:
        """A reply that `pattern` matches from its beginning to its end.

        The syntax is Rust's: Python's without look-around and back-references. UsageError for a
        pattern that is none.
        """
        if not isinstance(pattern, str):
            raise UsageError(f"a regular expression must be a text, got {pattern!r}")
        return self._constraint(self._library.LLMatcher.grammar_from_regex(pattern), "regex")

    def _constraint(self, grammar: str, what: str) -> Constraint:
        matcher = self._library.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(f"the {what} can't be used: {_reason(matcher.get_error())}")
        return Constraint(matcher, self._stop_ids)


class Constraint:
    """What one reply may still become; starts with none of it there."""

    def __init__(self, matcher: Any, stop_ids: list[int]) -> None:
        self._matcher, self._stop_ids = matcher, stop_ids

    @property
    def finished(self) -> bool:
        """It is complete, and nothing may follow."""
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """(vocab,) bool: the tokens that may come next, stop tokens where it is complete.

        UserError when there is none, or when the search for them goes out of bounds.
        """
        mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) != 0
        self._check()
        mask[self._stop_ids] = self._matcher.is_accepting()
        return mask

    def advance(self, token: int) -> None:
        """`token`, which `mask` allowed and is no stop token, has come."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            if reason == "NoExtensionBias":
                reason = "no token of the vocabulary continues what the reply must look like"
            raise UserError(f"constrained output fails: {reason}")


class _Table:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        self.eos_token_id, self.bos_token_id = eos, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        # a token of no bytes would be allowed without end
        self.special_token_ids = [
            i for i, raw in enumerate(self.tokens) if not raw or tokenizer.is_control(i)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids of text that the grammar leaves no choice about: it gets its usual tokens."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode_on(text)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        remedy = "pip install 'menagerie[constrain]'"
        raise UserError(f"constrained output needs the package llguidance: {remedy}") from None
    return llguidance


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None


def _reason(error: str) -> str:
    """The line of an error of llguidance's that says what is wrong."""
    line = re.search(r"^error: (.+)$", error, re.MULTILINE) or re.search(r"\S.*", error)
    text = line.group(line.lastindex or 0) if line else "unknown error"
    text = re.sub(r"^at \d+\(\d+\): ", "", text)
    return re.sub(
        r"^Unimplemented keys: \[(.*)\]$",
        lambda keys: "unsupported: " + keys.group(1).replace('"', ""),
        text,
    )
