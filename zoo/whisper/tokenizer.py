"""Whisper's tokenizer: byte-level BPE, then tokens for language, task and time.

Sources: Radford et al. 2022, section 2.3; openai/whisper, `tokenizer.py`.
"""

from __future__ import annotations

import lzma
import string
from collections.abc import Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from weights import Checkpoint, WeightError, hf_vocabulary
from weights.config import FILES, tokenizer_files
from weights.jsonfile import read_object
from weights.pretokenizers import GPT2
from zoo.bpe import BytePairEncoder, byte_alphabet, to_bytes
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
    """

    def __init__(self, tokens: Sequence[str], n_vocab: int) -> None:
        count, fixed = len(tokens), 2 + len(_AFTER_LANGUAGES) + _TIMES
        languages = n_vocab - count - fixed
        if not 0 < languages <= len(LANGUAGES):
            expected = f"{fixed + 1} to {fixed + len(LANGUAGES)} tokens fewer than the {n_vocab}"
            raise WeightError("not Whisper's vocabulary", expected=expected, got=count)
        self.n_vocab, self.multilingual = n_vocab, n_vocab >= MULTILINGUAL_FROM
        self.languages = tuple(LANGUAGES)[:languages]
        names = (_END, _START, *map("<|{}|>".format, self.languages))
        names += tuple(map("<|{}|>".format, _AFTER_LANGUAGES))
        self.eot, self.sot, first = count, count + 1, count + 2
        self.language_ids = tuple(range(first, first + languages))
        after = iter(range(first + languages, n_vocab))
        self.translate, self.transcribe = next(after), next(after)
        self.sot_lm, self.sot_prev = next(after), next(after)
        self.no_speech, self.no_timestamps = next(after), next(after)
        self.timestamp_begin = self.no_timestamps + 1
        times = (f"<|{i * 0.02:.2f}|>" for i in range(_TIMES))
        text = to_bytes(tokens)
        self._bytes = [*text, *(name.encode() for name in (*names, *times))]
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
    def blank(self) -> list[int]:
        """The ids of a space."""
        return self.encode(" ")

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
    ) -> tuple[list[str], list[list[int]]]:
        """The words of a text, punctuation apart, and the ids of each."""
        words, word_ids = self._split_to_characters(ids)
        if language in UNSPACED and self.multilingual:
            return words, word_ids
        out: tuple[list[str], list[list[int]]] = [], []
        for word, own in zip(words, word_ids):
            apart = own[0] >= self.eot or word.startswith(" ") or word.strip() in string.punctuation
            if apart or not out[0]:
                out[0].append(word)
                out[1].append(own)
            else:
                out[0][-1] += word
                out[1][-1] += own
        return out

    def _split_to_characters(self, ids: Sequence[int]) -> tuple[list[str], list[list[int]]]:
        """The smallest groups of ids that are whole characters, or whose bytes never are."""
        whole = self.decode_with_timestamps(ids)
        words: list[str] = []
        groups: list[list[int]] = []
        start, group = 0, []
        for i in ids:
            group.append(i)
            text = self.decode_with_timestamps(group)
            broken = text.find("\ufffd")
            if broken < 0 or whole[start + broken : start + broken + 1] in ("", "\ufffd"):
                words.append(text)
                groups.append(group)
                start, group = start + len(text), []
        return words, groups


def tokenizer_of(checkpoint: Checkpoint, n_vocab: int) -> Tokenizer:
    """The tokenizer of a checkpoint of any format: its own vocabulary, or else OpenAI's.

    WeightError, naming the file, when there is a vocabulary that isn't one of Whisper.
    """
    tokens = _own_tokens(checkpoint)
    if tokens is None:
        tokens = packaged(n_vocab >= MULTILINGUAL_FROM)
    if _END in tokens:
        tokens = tokens[: tokens.index(_END)]
    if byte_alphabet().keys() - {ord(token) for token in tokens if len(token) == 1}:
        raise WeightError("the vocabulary lacks some bytes", file=checkpoint.path)
    if len(set(tokens)) < len(tokens):
        raise WeightError("the vocabulary has a token twice", file=checkpoint.path)
    try:
        return Tokenizer(tokens, n_vocab)
    except WeightError as error:
        facts = {"expected": error.expected, "got": error.got}
        raise WeightError(error.problem, file=checkpoint.path, **facts) from None


def packaged(multilingual: bool) -> list[str]:
    """One of OpenAI's two vocabularies, for files that hold none."""
    name = "multilingual" if multilingual else "gpt2"
    file = resources.files("zoo.whisper") / "data" / f"{name}.txt.xz"
    return lzma.decompress(file.read_bytes()).decode().split("\n")


def _own_tokens(checkpoint: Checkpoint) -> list[str] | None:
    """The tokens that come with a checkpoint, those of text first; None when it has none."""
    listed = checkpoint.metadata.get("vocabulary")
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(token, str) for token in listed):
            raise WeightError("the vocabulary isn't a list of texts", file=checkpoint.path)
        return _to_alphabet(listed) if " " in listed else listed  # ggml's are bytes
    files = tokenizer_files(checkpoint)
    if "tokenizer.json" in files:
        tokens = hf_vocabulary.read(files, checkpoint.path).tokens
        # A file beside the checkpoint may belong to another model.
        if checkpoint.path.is_dir() or FILES in checkpoint.metadata or _START in tokens:
            return ["" if token.startswith("\0") else token for token in tokens]  # an id unused
    if (file := checkpoint.path / "vocab.json").is_file():
        return _by_id(read_object(file), file)
    return None


def _by_id(ids: dict[str, Any], file: Path) -> list[str]:
    """The tokens of vocab.json in the order of their ids."""
    if all(type(i) is int for i in ids.values()):
        tokens = sorted(ids, key=ids.__getitem__)
        if [ids[token] for token in tokens] == list(range(len(ids))):
            return tokens
    raise WeightError("not a vocabulary: its ids aren't 0, 1, 2, …", file=file)


def _to_alphabet(tokens: list[str]) -> list[str]:
    """Tokens of a ggml file, which are bytes, in GPT-2's printable alphabet."""
    printable = {byte: point for point, byte in byte_alphabet().items()}
    raw = (token.encode("utf-8", "surrogateescape") for token in tokens)
    return [token.decode("latin-1").translate(printable) for token in raw]
