"""Byte-level BPE: a file's own vocabulary and merges, run by tiktoken.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2;
the printable stand-ins for bytes are those of GPT-2's encoder.
"""

from __future__ import annotations

import codecs
import lzma
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tiktoken

# tiktoken's matcher overflows its stack on some 500,000 spaces in a row and takes the process
# down with it, so such a run is cut.
_LONG_SPACE = re.compile(r"\s{100000}")


def byte_alphabet() -> dict[int, int]:
    """Code point of GPT-2's printable stand-in -> the byte it stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return dict(zip(printable, printable)) | {256 + i: byte for i, byte in enumerate(others)}


_LETTERS = [chr(point) for point, _ in sorted(byte_alphabet().items(), key=lambda pair: pair[1])]
_FOREIGN = re.compile("[^" + re.escape("".join(map(chr, byte_alphabet()))) + "]")


def to_bytes(tokens: Sequence[str]) -> list[bytes]:
    """The bytes of each token that is written in the stand-in alphabet.

    A token with any other character (an added token, say) stands for its own UTF-8.
    """
    text = "".join(tokens)
    cuts = list(accumulate(map(len, tokens), initial=0))
    # One pass over one string: the vocabulary is read at every start.
    packed = text.translate(byte_alphabet()).encode("latin-1", "replace")
    out = [packed[a:b] for a, b in pairwise(cuts)]
    for match in _FOREIGN.finditer(text):
        token = bisect_right(cuts, match.start()) - 1
        out[token] = tokens[token].encode("utf-8", "replace")
    return out


def to_letters(raw: bytes) -> str:
    """Bytes in the stand-in alphabet."""
    return "".join([_LETTERS[byte] for byte in raw])


def packaged_lines(package: str, name: str) -> list[str]:
    """The lines of a text that is part of a package, compressed by xz."""
    file = resources.files(package) / "data" / f"{name}.txt.xz"
    return lzma.decompress(file.read_bytes()).decode().split("\n")


class BytePairEncoder:
    """Text -> token ids by pair merges in the file's order; holds nothing but tables.

    tiktoken merges the neighbours whose joint bytes have the lowest rank, so a token's rank is the
    place of its first merge, whatever its id is. Tokens that no merge makes get no rank, unless
    `whole_words` says that a piece which is itself a token is taken as it is.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        token_bytes: Sequence[bytes],
        merges: Sequence[str],
        pattern: str,
        whole_words: bool = False,
    ) -> None:
        ids = dict(zip(tokens, range(len(tokens))))
        alphabet = {chr(point): bytes([byte]) for point, byte in byte_alphabet().items()}
        ranks = {raw: raw[0] for raw in alphabet.values()}
        order = [ids.get(char, -1) for char, raw in sorted(alphabet.items(), key=lambda x: x[1])]
        merged = "\n".join(merges).replace(" ", "").split("\n") if merges else []
        candidates = [*dict.fromkeys(merged), *(tokens if whole_words else ())]
        for token in candidates:
            raw = token_bytes[ids[token]]
            if raw not in ranks:
                ranks[raw] = len(order)
                order.append(ids[token])
        # Whatever a foreign pattern leaves unmatched would vanish: take it character by character.
        self._pattern = rf"{pattern}|(?s:.)"
        self._id_of_rank = order
        self._lacking = bytes(byte for byte in range(256) if order[byte] < 0)
        self._core = _encoding(self._pattern, ranks)

    def encode(self, text: str, after_special: bool = True) -> list[int]:
        """Token ids of `text`.

        A byte that the vocabulary lacks is dropped after the text has been cut into words and
        before they are merged, as the tokenizers library does.
        """
        if len(text) > 100_000 and _LONG_SPACE.search(text):
            cuts = [0, *(match.end() for match in _LONG_SPACE.finditer(text)), len(text)]
            parts = [text[a:b] for a, b in pairwise(cuts)]
            return [i for part in parts for i in self._encode(part)]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if self._lacking and not set(self._lacking).isdisjoint(text.encode()):
            ranks = [rank for word in self._words(text) for rank in self._merge(word)]
        else:
            ranks = self._core.encode_ordinary(text)
        return [self._id_of_rank[rank] for rank in ranks]

    def _words(self, text: str) -> list[bytes]:
        """The pre-tokenizer's words, rid of the bytes that the vocabulary lacks."""
        import regex  # tiktoken's own dependency

        words = regex.findall(self._pattern, text)
        return [word.encode().translate(None, self._lacking) for word in words]

    def _merge(self, word: bytes) -> list[int]:
        return self._core._encode_single_piece(word) if word else []


def _encoding(pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    import tiktoken

    return tiktoken.Encoding("file", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


class Utf8Stream:
    """Bytes in, text out: a character is given out once its last byte has come.

    Bytes that can't be UTF-8 become U+FFFD, at the latest at `finish`.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, raw: bytes) -> str:
        return self._decoder.decode(raw)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def scrub(text: str) -> str:
    """`text` with lone surrogates (bytes of an argument that were not UTF-8) made U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raw = text.encode("utf-8", "surrogateescape" if _is_escaped(text) else "surrogatepass")
        return raw.decode("utf-8", "replace")
    return text


def _is_escaped(text: Iterable[str]) -> bool:
    return all("\udc80" <= char <= "\udcff" for char in text if "\ud800" <= char <= "\udfff")
