"""Whisper's tokenizer: byte-level BPE, then tokens for language, task and time.

Sources: Radford et al. 2022, section 2.3; openai/whisper, `tokenizer.py`.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

from weights import Checkpoint, WeightError, hf_vocabulary
from weights.config import FILES, tokenizer_files
from weights.jsonfile import read_object
from weights.pretokenizers import GPT2
from zoo.bpe import BytePairEncoder, byte_alphabet, packaged_lines, to_bytes, to_letters
from zoo.whisper.languages import LANGUAGES, UNSPACED

MULTILINGUAL_FROM = 51865  # tokens; English-only models have one less
_END, _START = "<|endoftext|>", "<|startoftranscript|>"
_AFTER_LANGUAGES = ("translate", "transcribe", "startoflm", "startofprev", "nospeech",
                    "notimestamps")  # fmt: skip
_TIMES = 1501  # 0.00 to 30.00 s in steps of 0.02 s
_SYMBOLS = (
    '" # ( ) * + / : ; < = > @ [ \\ ] ^ _ ` { | } ~ 「 」 『 』 '
    "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"
).split()
_NOTES = "♩♪♫♬♭♮♯"  # several tokens each; the first one stands for symbols only


class Tokenizer:
    """Text to ids and back, and the ids that steer the model.

    `tokens`: the text tokens in the order of their ids, in GPT-2's printable alphabet; the id is
    the rank of the merge that makes a token. The special ids follow, as many as `n_vocab` leaves.
    WeightError, naming the file, for tokens that aren't Whisper's.
    """

    def __init__(self, tokens: Sequence[str], n_vocab: int, file: Path | None = None) -> None:
        count, fixed = len(tokens), 2 + len(_AFTER_LANGUAGES) + _TIMES
        languages = n_vocab - count - fixed
        if byte_alphabet().keys() - {ord(token) for token in tokens if len(token) == 1}:
            raise WeightError("the vocabulary lacks some bytes", file=file)
        if len(set(tokens)) < count:
            raise WeightError("the vocabulary has a token twice", file=file)
        if not 0 < languages <= len(LANGUAGES):
            expected = f"{fixed + 1} to {fixed + len(LANGUAGES)} tokens fewer than the {n_vocab}"
            raise WeightError("not Whisper's vocabulary", file=file, expected=expected, got=count)
        self.n_vocab, self.multilingual = n_vocab, n_vocab >= MULTILINGUAL_FROM
        self.languages = tuple(LANGUAGES)[:languages]
        names = [_END, _START, *map("<|{}|>".format, (*self.languages, *_AFTER_LANGUAGES))]
        names += [f"<|{i * 0.02:.2f}|>" for i in range(_TIMES)]
        ids = iter(range(count, n_vocab))
        self.eot, self.sot = next(ids), next(ids)
        self.language_ids = tuple(islice(ids, languages))
        self.translate, self.transcribe, self.sot_lm, self.sot_prev = islice(ids, 4)
        self.no_speech, self.no_timestamps, self.timestamp_begin = islice(ids, 3)
        text = to_bytes(tokens)
        self._bytes = [*text, *(name.encode() for name in names)]
        self._encoder = BytePairEncoder(tokens, text, (), GPT2, whole_words=True)

    def language_id(self, code: str) -> int:
        """The token of a language; ValueError when the model has none for it."""
        return self.language_ids[self.languages.index(code)]

    def sequence(
        self, language: str | None = None, task: str | None = None, timestamps: bool = True
    ) -> tuple[int, ...]:
        """What a transcription begins with; language (a code) and task of multilingual models."""
        ids = (self.sot,)
        if self.multilingual:
            task_id = self.translate if task == "translate" else self.transcribe
            ids += (self.language_id(language or "en"), task_id)
        return ids if timestamps else (*ids, self.no_timestamps)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: what looks like a special token stays text."""
        return self._encoder.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; timestamps are left out."""
        return self.decode_with_timestamps([i for i in ids if i < self.timestamp_begin])

    def decode_with_timestamps(self, ids: Sequence[int]) -> str:
        """Text of ids, timestamps as <|1.08|>; bytes that aren't UTF-8 become U+FFFD."""
        return b"".join([self._bytes[i] for i in ids]).decode("utf-8", "replace")

    @cached_property
    def non_speech_tokens(self) -> tuple[int, ...]:
        """Ids of what isn't spoken (brackets, notes), which decoding suppresses by default.

        Hyphens and quotes are among them only where they begin a word.
        """
        ids = {self.encode(" -")[0], self.encode(" '")[0]}
        for symbol in (*_SYMBOLS, *_NOTES):
            for found in (self.encode(symbol), self.encode(f" {symbol}")):
                if len(found) == 1 or symbol in _NOTES:
                    ids.add(found[0])
        return tuple(sorted(ids))

    def split_to_words(
        self, ids: Sequence[int], language: str | None = None
    ) -> list[tuple[str, list[int]]]:
        """The words of a text, punctuation apart, each with its ids."""
        characters = self._characters(ids)
        if language in UNSPACED and self.multilingual:
            return characters
        words: list[tuple[str, list[int]]] = []
        for text, own in characters:
            apart = own[0] >= self.eot or text.startswith(" ") or text.strip() in string.punctuation
            before = ("", []) if apart or not words else words.pop()
            words.append((before[0] + text, before[1] + own))
        return words

    def _characters(self, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """The smallest groups of ids that are whole characters, or whose bytes never are."""
        whole, start = self.decode_with_timestamps(ids), 0
        groups: list[tuple[str, list[int]]] = []
        group: list[int] = []
        for i in ids:
            group.append(i)
            text = self.decode_with_timestamps(group)
            broken = text.find("\ufffd")
            if broken < 0 or whole[start + broken : start + broken + 1] in ("", "\ufffd"):
                groups.append((text, group))
                start, group = start + len(text), []
        return groups


def tokenizer_of(checkpoint: Checkpoint, n_vocab: int) -> Tokenizer:
    """The tokenizer of a checkpoint of any format: its own vocabulary, or else OpenAI's.

    WeightError, naming the file, when there is a vocabulary that isn't one of Whisper.
    """
    tokens = _own_tokens(checkpoint)
    if tokens is None:
        tokens = packaged(n_vocab >= MULTILINGUAL_FROM)
    if _END in tokens:
        tokens = tokens[: tokens.index(_END)]
    return Tokenizer(tokens, n_vocab, checkpoint.path)


def packaged(multilingual: bool) -> list[str]:
    """One of OpenAI's two vocabularies, for files that hold none."""
    return packaged_lines("zoo.whisper", "multilingual" if multilingual else "gpt2")


def _own_tokens(checkpoint: Checkpoint) -> list[str] | None:
    """The tokens that come with a checkpoint, those of text first; None when it has none."""
    listed = checkpoint.metadata.get("vocabulary")
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(token, str) for token in listed):
            raise WeightError("the vocabulary isn't a list of texts", file=checkpoint.path)
        if " " not in listed:
            return listed
        return [to_letters(token.encode("utf-8", "surrogateescape")) for token in listed]  # ggml's
    files = tokenizer_files(checkpoint)
    if "tokenizer.json" in files:
        tokens = hf_vocabulary.read(files, checkpoint.path).tokens
        # A file beside the checkpoint may belong to another model.
        if checkpoint.path.is_dir() or FILES in checkpoint.metadata or _START in tokens:
            return ["" if token.startswith("\0") else token for token in tokens]  # an id unused
    if (file := checkpoint.path / "vocab.json").is_file():
        ids = read_object(file)
        if {*map(type, ids.values())} - {int} or sorted(ids.values()) != [*range(len(ids))]:
            raise WeightError("not a vocabulary: its ids aren't 0, 1, 2, …", file=file)
        return sorted(ids, key=ids.__getitem__)
    return None
