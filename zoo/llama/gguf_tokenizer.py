"""The tokenizer of a GGUF file, from its `tokenizer.*` metadata.

Source: the GGUF specification, section "Tokenizer".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weights import WeightError
from weights.hf_vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from weights.pretokenizers import PRE_TOKENIZERS
from zoo import bpe
from zoo.llama.tokenizer import SpecialTokens, Tokenizer
from zoo.llama.vocabulary import byte_level, sentencepiece, special_tokens

_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "tekken", "pixtral", "falcon3", "lfm2")
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken", "pixtral", "falcon3", "lfm2", "glm4")
_PREFIX = "tokenizer.ggml."


def from_gguf(metadata: Mapping[str, Any], file: Path | str | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file's `tokenizer.*` keys."""
    reader = _Keys(metadata, file)
    kind = reader.get("model", str)
    tokens = reader.strings("tokens")
    if not tokens:
        raise WeightError(f"{_PREFIX}tokens is empty", file=file)
    types = reader.numbers("token_type", len(tokens), NORMAL)
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    match kind:
        case "gpt2":
            pre = reader.get("pre", str, "default")
            special = reader.special(tokens, types, pre in _BOS_BY_DEFAULT)
            encoder, token_bytes = _byte_level(reader, tokens, special, pre)
            return Tokenizer(encoder, token_bytes, special, False, template)
        case "llama":
            special = reader.special(tokens, types, True)
            prefix = reader.get("add_space_prefix", bool, True)
            scores = reader.numbers("scores", len(tokens), None)
            encoder, token_bytes = sentencepiece(
                tokens, scores, types, reader.token_id("unknown_token_id"), prefix, file
            )
            return Tokenizer(encoder, token_bytes, special, prefix, template)
    expected = "gpt2 (byte-level BPE) or llama (SentencePiece)"
    raise WeightError("unknown vocabulary type", file=file, expected=expected, got=kind)


def _byte_level(
    reader: _Keys, tokens: list[str], special: SpecialTokens, pre: str
) -> tuple[bpe.BytePairEncoder, list[bytes]]:
    merges = reader.strings("merges")
    if pre not in PRE_TOKENIZERS:
        expected = f"one of {', '.join(PRE_TOKENIZERS)}"
        problem = f"unknown pre-tokenizer in {_PREFIX}pre"
        raise WeightError(problem, file=reader.file, expected=expected, got=pre)
    return byte_level(
        tokens, merges, special, PRE_TOKENIZERS[pre], pre in _WHOLE_WORDS, reader.file
    )


class _Keys:
    """Typed access to `tokenizer.ggml.*`; WeightError names file and key."""

    def __init__(self, metadata: Mapping[str, Any], file: Path | str | None) -> None:
        self.metadata, self.file = metadata, file

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(_PREFIX + key, default)
        if type(value) is not kind:
            self.fail(key, kind.__name__, "nothing" if value is None else type(value).__name__)
        return value

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(_PREFIX + key)
        if not isinstance(value, list) or not all(type(item) is str for item in value):
            self.fail(key, "a list of strings", type(value).__name__)
        return value

    def numbers(self, key: str, count: int, default: float | None) -> list:
        value = self.metadata.get(_PREFIX + key)
        if value is None and default is not None:
            return [default] * count
        if not isinstance(value, list) or not all(type(n) in (int, float) for n in value):
            self.fail(key, "a list of numbers", type(value).__name__)
        if len(value) != count:
            self.fail(key, f"{count} entries, one per token", len(value))
        return value

    def token_id(self, key: str) -> int | None:
        value = self.metadata.get(_PREFIX + key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.metadata[_PREFIX + "tokens"]):
            self.fail(key, "the id of a token", value)
        return value

    def special(self, tokens: list[str], types: list[int], add_bos: bool) -> SpecialTokens:
        control, added = {}, {}
        for i, kind in enumerate(types):
            if kind in (CONTROL, UNKNOWN):
                control[tokens[i]] = i
            elif kind == USER_DEFINED:
                added[tokens[i]] = i
        ids = {key: self.token_id(key) for key in (*_STOP_KEYS, "bos_token_id")}
        for i in ids.values():
            # A converter may have left the type out; what begins or ends text is never text.
            if i is not None and added.pop(tokens[i], i) == i:
                control[tokens[i]] = i
        stop = {ids[key] for key in _STOP_KEYS} - {None}
        bos, eos = ids["bos_token_id"], ids["eos_token_id"]
        add_bos = self.get("add_bos_token", bool, add_bos)
        return special_tokens(control, added, stop, bos, eos, add_bos)

    def fail(self, key: str, expected: str, got: object) -> None:
        problem = f"bad metadata '{_PREFIX}{key}'"
        raise WeightError(problem, file=self.file, expected=expected, got=got)
