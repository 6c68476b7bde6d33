"""CLIP's tokenizer: lower-cased words, merged pair by pair, the last letter marked `</w>`.

Source: openai/CLIP's `simple_tokenizer.py`; text is cleaned as by transformers's CLIPTokenizer,
after HTML entities have been resolved twice, as OpenAI's does.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from pathlib import Path

from weights import WeightError, open_file
from weights.jsonfile import read_object
from zoo.bpe import byte_alphabet, packaged_lines, scrub, to_letters

BEGIN, END = "<|startoftext|>", "<|endoftext|>"
LENGTH = 77  # positions of the text encoder: begin, 75 tokens, end
ROOM = LENGTH - 2
SUFFIX = "</w>"
_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>"
    r"|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
)


class Tokenizer:
    """Text <-> token ids; holds nothing but tables.

    `pad` fills a prompt up: the end token for SD 1, 0 for SD 2. `words` are texts that stand for
    ids of their own, as the names of textual inversions do; letters' case doesn't matter in them.
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        pad: int | None = None,
        words: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.vocab, self.merges = vocab, merges
        self.begin, self.end = vocab[BEGIN], vocab[END]
        self.pad = self.end if pad is None else pad
        self.words = {name.lower(): tuple(ids) for name, ids in (words or {}).items()}
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        longest_first = sorted(filter(None, self.words), key=len, reverse=True)
        names = "|".join(_as_word(name) for name in longest_first)
        special = f"{re.escape(BEGIN)}|{re.escape(END)}"
        self._special = re.compile(f"({special}|(?i:{names}))" if names else f"({special})")

    def with_words(self, words: Mapping[str, Sequence[int]]) -> Tokenizer:
        """This tokenizer with further `words`."""
        return Tokenizer(self.vocab, self.merges, self.pad, {**self.words, **words})

    def encode(self, text: str) -> list[int]:
        """Token ids of a text of any length, without those of begin and end."""
        return [id for group in self.groups(text) for id in group]

    def groups(self, text: str) -> Iterator[tuple[int, ...]]:
        """The same, one by one but for the ids of one of `words`, which belong together."""
        # Every second part is a word with ids of its own.
        for i, part in enumerate(self._special.split(html.unescape(html.unescape(scrub(text))))):
            if i % 2 == 0:
                yield from ((id,) for word in _words(part) for id in self._ids(word))
            elif part in (BEGIN, END):
                yield (self.vocab[part],)
            else:
                yield self.words[part.lower()]

    def framed(self, ids: Sequence[int]) -> list[int]:
        """Exactly 77 ids: begin, the first 75 of `ids`, end, padding."""
        framed = [self.begin, *ids[:ROOM], self.end]
        return framed + [self.pad] * (LENGTH - len(framed))

    def chunks(self, ids: Sequence[int]) -> list[list[int]]:
        """All of `ids`, 75 at a time, each framed; one for no ids at all."""
        return [self.framed(ids[i : i + ROOM]) for i in range(0, len(ids) or 1, ROOM)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, as far as lower-casing and split words left it."""
        letters = byte_alphabet()
        names = self._names()
        tokens = [names.get(i, "\ufffd") for i in ids if i not in (self.begin, self.end)]
        text = "".join(tokens).replace(SUFFIX, " ").strip()
        raw = b"".join(bytes([letters[ord(c)]]) if ord(c) in letters else c.encode() for c in text)
        return raw.decode("utf-8", "replace")

    def _names(self) -> dict[int, str]:
        return {id: token for token, id in self.vocab.items()}

    def _ids(self, word: str) -> Iterator[int]:
        letters = [*to_letters(word.encode())]
        letters[-1] += SUFFIX
        return (self.vocab.get(part, self.end) for part in _merged(letters, self._ranks))


def _as_word(name: str) -> str:
    """A pattern that finds `name`, but not inside a longer word."""
    before = r"(?<!\w)" if re.match(r"\w", name) else ""
    return before + re.escape(name) + (r"(?!\w)" if re.search(r"\w\Z", name) else "")


def _words(text: str) -> Iterator[str]:
    import regex  # tiktoken's own dependency

    text = regex.sub(r"\s+", " ", unicodedata.normalize("NFC", text))
    # Letter by letter: a word's last sigma is no other letter here.
    for word in regex.findall(_WORDS, "".join(map(str.lower, text))):
        # A special token that only lower-casing made is none.
        yield from (word[:2], word[2:-2], word[-2:]) if word in (BEGIN, END) else (word,)


def _merged(parts: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Join neighbours, those of the lowest rank first; n log n steps for n parts."""
    size = len(parts)
    before, after = list(range(-1, size - 1)), list(range(1, size + 1))

    def candidate(i: int) -> Iterator[tuple[int, int, str, str]]:
        if i >= 0 and after[i] < size:
            pair = parts[i], parts[after[i]]
            if pair in ranks:
                yield ranks[pair], i, *pair

    heap = [found for i in range(size) for found in candidate(i)]
    heapify(heap)
    while heap:
        _, i, left, right = heappop(heap)
        j = after[i]
        if parts[i] != left or j >= size or parts[j] != right:
            continue  # one of the two has been joined to another meanwhile
        parts[i], parts[j] = left + right, ""
        after[i] = after[j]
        if after[i] < size:
            before[after[i]] = i
        for found in (*candidate(before[i]), *candidate(i)):
            heappush(heap, found)
    return [part for part in parts if part]


@lru_cache(maxsize=1)
def _package_data() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """CLIP's own vocabulary: letters, letters that end a word, merges, special tokens."""
    lines = packaged_lines("zoo.stable_diffusion", "clip_merges")
    merges = [tuple(line.split(" ")) for line in lines if line]
    letters = [chr(point) for point in byte_alphabet()]
    ends = [letter + SUFFIX for letter in letters]
    tokens = [*letters, *ends, *(left + right for left, right in merges), BEGIN, END]
    return {token: id for id, token in enumerate(tokens)}, merges


def default(pad: int | None = None) -> Tokenizer:
    """CLIP's tokenizer, 49408 tokens, from the package's own data."""
    return Tokenizer(*_package_data(), pad)


def from_folder(folder: Path, pad: int | None = None) -> Tokenizer:
    """The tokenizer in a folder: vocab.json with merges.txt, or else tokenizer.json.

    Without `pad` it is the token that the folder's tokenizer_config.json or
    special_tokens_map.json names. WeightError for files that are missing or no such tokenizer.
    """
    vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
    if vocab_file.is_file() and merges_file.is_file():
        vocab, where = read_object(vocab_file), vocab_file
        merges = [line for line in _lines(merges_file) if line and line[:8] != "#version"]
    else:
        where = folder / "tokenizer.json"
        if not where.is_file():
            expected = "vocab.json and merges.txt, or tokenizer.json"
            raise WeightError("the folder has no tokenizer", file=folder, expected=expected)
        vocab, merges = _from_json(where)
    pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in merges if _is_merge(m)]
    if len(pairs) < len(merges):
        got = next(m for m in merges if not _is_merge(m))
        raise WeightError("a merge is not two tokens", file=where, got=got)
    _check(where, vocab)
    return Tokenizer(vocab, pairs, _pad_of(folder, vocab) if pad is None else pad)


def _lines(path: Path) -> list[str]:
    try:
        with open_file(path) as file:
            # Not splitlines: a token may hold any of the other characters that end a line.
            return file.read().decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    except OSError as error:
        raise WeightError(f"can't be read: {error.strerror or error}", file=path) from None


def _is_merge(merge: object) -> bool:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return (
        isinstance(parts, list)
        and len(parts) == 2
        and all(isinstance(part, str) and part for part in parts)
    )


def _from_json(path: Path) -> tuple[dict, list]:
    data = read_object(path)
    model = data.get("model")
    vocab, merges = (model.get("vocab"), model.get("merges")) if isinstance(model, dict) else (0, 0)
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise WeightError("not a BPE tokenizer: no vocabulary with merges", file=path)
    if model.get("end_of_word_suffix") != SUFFIX:
        got = model.get("end_of_word_suffix")
        raise WeightError("not CLIP's: how words end", file=path, expected=SUFFIX, got=repr(got))
    added = data.get("added_tokens")
    rows = [row for row in added if isinstance(row, dict)] if isinstance(added, list) else []
    return {**vocab, **{str(row.get("content")): row.get("id") for row in rows}}, merges


def _check(path: Path, vocab: Mapping) -> None:
    if not all(type(id) is int and 0 <= id < 2**31 for id in vocab.values()):
        raise WeightError("an id is not a whole number from 0 on", file=path)
    for token in (BEGIN, END):
        if token not in vocab:
            raise WeightError(f"not CLIP's: the vocabulary lacks {token}", file=path)


def _pad_of(folder: Path, vocab: Mapping[str, int]) -> int | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            token = read_object(folder / name).get("pad_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token in vocab:
                return vocab[token]
    return None
