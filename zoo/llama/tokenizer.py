"""Tokenizer: text to token ids and back, with special tokens kept apart from what people type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zoo.bpe import Utf8Stream, scrub


class Encoder(Protocol):
    """What turns a stretch of plain text into ids: byte-level BPE or SentencePiece."""

    def encode(self, text: str, after_special: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that stand for no text of their own, and the rules for them.

    `control` are parsed only on request; `added` (an ordinary string that the vocabulary was
    extended by) always are. Both map text to id. `stop` are the ids that end a reply.
    """

    control: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    bos: int | None = None
    eos: int | None = None
    stop: frozenset[int] = frozenset()
    add_bos: bool = False


class Tokenizer:
    """Text <-> ids by a checkpoint's own vocabulary; see `zoo.llama.vocabulary` for the reading.

    `strip_space`: the encoder puts a space before text, so `decode` takes it off again;
    `prefix_once`: only where all text begins, not after a special token too.
    """

    def __init__(
        self,
        encoder: Encoder,
        token_bytes: Sequence[bytes],
        special: SpecialTokens,
        strip_space: bool = False,
        chat_template: str | None = None,
        prefix_once: bool = False,
    ) -> None:
        self.special, self.chat_template = special, chat_template
        self.strip_space, self._prefix_once = strip_space, prefix_once
        self._encoder, self._bytes = encoder, token_bytes
        self._control_ids = frozenset(special.control.values())
        self._added = _alternatives(special.added)
        self._all = _alternatives({**special.added, **special.control})

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def bos_id(self) -> int | None:
        return self.special.bos

    @property
    def eos_id(self) -> int | None:
        return self.special.eos

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a reply (end of sequence, of turn, of message)."""
        return self.special.stop

    @property
    def add_bos(self) -> bool:
        """Whether the file asks for the beginning-of-sequence token before a prompt."""
        return self.special.add_bos

    def encode(
        self, text: str, special: bool = False, add_bos: bool = False, guard: str = ""
    ) -> list[int]:
        """Token ids of `text`.

        `special` reads "<|im_end|>" as the token, otherwise it is text like any other. `add_bos`
        puts the beginning-of-sequence token first unless it is there already. `guard` is a
        character that the plain text is rid of after the special tokens have been found.
        """
        ids: list[int] = []
        pattern = self._all if special else self._added
        after_special = True
        for part in pattern.split(scrub(text)) if pattern else [scrub(text)]:
            token = self._token(part, special)
            if token is not None:
                ids.append(token)
                after_special = not self._prefix_once
                continue
            plain = part.replace(guard, "") if guard else part
            if plain:
                ids += self._encoder.encode(plain, after_special)
                after_special = False
        bos = self.special.bos
        if add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_on(self, text: str) -> list[int]:
        """Token ids of plain text that goes on where other text ended; no special token is read."""
        return self._encoder.encode(scrub(text), after_special=False) if text else []

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """The text of `ids`; `special` says whether control tokens are spelt out or left out.

        Bytes that are not UTF-8 become U+FFFD. IndexError for an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        raw = b"".join(self.token_bytes(i) for i in ids if special or i not in self._control_ids)
        text = raw.decode("utf-8", "replace")
        starts_plain = bool(ids) and (ids[0] not in self._control_ids or not special)
        return text[1:] if self.strip_space and starts_plain and text[:1] == " " else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; IndexError outside the vocabulary."""
        if not 0 <= token < len(self._bytes):
            raise IndexError(f"token id {token} is outside the vocabulary of {len(self._bytes)}")
        return self._bytes[token]

    def is_control(self, token: int) -> bool:
        return token in self._control_ids

    def stream(self, lstrip: bool = False) -> TextStream:
        """A decoder for tokens that come one by one; `lstrip` drops the prefix space."""
        return TextStream(self, lstrip and self.strip_space)

    def _token(self, part: str, special: bool) -> int | None:
        token = self.special.added.get(part)
        return self.special.control.get(part) if token is None and special else token


class TextStream:
    """Tokens in, text out as soon as it is whole UTF-8; control tokens give nothing."""

    def __init__(self, tokenizer: Tokenizer, lstrip: bool) -> None:
        self._tokenizer, self._lstrip, self._utf8 = tokenizer, lstrip, Utf8Stream()

    def feed(self, token: int) -> str:
        """The text that `token` completes, often none."""
        if self._tokenizer.is_control(token):
            return ""
        text = self._utf8.feed(self._tokenizer.token_bytes(token))
        if text and self._lstrip:
            self._lstrip = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """U+FFFD for a character whose last bytes never came, else nothing."""
        return self._utf8.finish()


def _alternatives(tokens: dict[str, int]) -> re.Pattern[str] | None:
    """A pattern that splits text at the tokens and keeps them, the longest first."""
    texts = sorted((text for text in tokens if text), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None
