"""Texts made comparable: two transcripts that say the same become the same words.

Source: Radford et al. 2022, appendix C; results equal those of openai/whisper's `normalizers`, its
oddities included, since published word error rates are counted after it.
"""

from __future__ import annotations

import lzma
import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from importlib import resources

import numpy as np

# Letters that Unicode doesn't take apart.
_LETTERS = {
    "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "æ": "ae", "Æ": "AE", "ß": "ss", "ẞ": "SS",
    "đ": "d", "Đ": "D", "ð": "d", "Ð": "D", "þ": "th", "Þ": "th", "ł": "l", "Ł": "L",
}  # fmt: skip


def basic(text: str, remove_diacritics: bool = False, split_letters: bool = False) -> str:
    """Text of any language in small letters, without punctuation and what stands in brackets."""
    text = _without_brackets(text.lower())
    if remove_diacritics:
        text = _plain_letters(text).lower()
    else:
        composed = unicodedata.normalize("NFKC", text)
        text = "".join(" " if unicodedata.category(c)[0] in "MSP" else c for c in composed).lower()
    if split_letters:
        import regex  # tiktoken's own dependency

        text = " ".join(regex.findall(r"\X", text))
    return re.sub(r"\s+", " ", text)


def _without_brackets(text: str) -> str:
    text = re.sub(r"[<\[][^>\]]*[>\]]", "", text)
    return re.sub(r"\(([^)]+?)\)", "", text)


def _plain_letters(text: str, keep: str = "") -> str:
    """Letters without marks; symbols and punctuation become spaces."""

    def plain(c: str) -> str:
        if c in keep:
            return c
        category = unicodedata.category(c)
        return _LETTERS.get(c, "" if category == "Mn" else " " if category[0] in "MSP" else c)

    return "".join(map(plain, unicodedata.normalize("NFKD", text)))


_WHOLE_WORDS = {
    "won't": "will not", "can't": "can not", "let's": "let us", "ain't": "aint",
    "y'all": "you all", "wanna": "want to", "gotta": "got to", "gonna": "going to",
    "i'ma": "i am going to", "imma": "i am going to", "woulda": "would have",
    "coulda": "could have", "shoulda": "should have", "ma'am": "madam",
    "mr": "mister ", "mrs": "missus ", "st": "saint ", "dr": "doctor ", "prof": "professor ",
    "capt": "captain ", "gov": "governor ", "ald": "alderman ", "gen": "general ",
    "sen": "senator ", "rep": "representative ", "pres": "president ", "rev": "reverend ",
    "hon": "honorable ", "asst": "assistant ", "assoc": "associate ", "lt": "lieutenant ",
    "col": "colonel ", "jr": "junior ", "sr": "senior ", "esq": "esquire ",
}  # fmt: skip
_ENDINGS = {
    "'d been": " had been", "'s been": " has been", "'d gone": " had gone", "'s gone": " has gone",
    "'d done": " had done", "'s got": " has got", "n't": " not", "'re": " are", "'s": " is",
    "'d": " would", "'ll": " will", "'t": " not", "'ve": " have", "'m": " am",
}  # fmt: skip
_ANY_WHOLE_WORD = re.compile(rf"\b({'|'.join(_WHOLE_WORDS)})\b")


def english(text: str) -> str:
    """English text: no contractions, American spelling, numbers in digits, no punctuation."""
    text = _without_brackets(text.lower())
    text = re.sub(r"\b(hmm|mm|mhm|mmm|uh|um)\b", "", text)
    text = re.sub(r"\s+'", "'", text)
    text = _ANY_WHOLE_WORD.sub(lambda match: _WHOLE_WORDS[match[0]], text)
    for ending, words in _ENDINGS.items():
        text = re.sub(rf"{ending}\b", words, text)
    text = re.sub(r"(\d),(\d)", r"\1\2", text)
    text = re.sub(r"\.([^0-9]|$)", r" \1", text)
    text = digits(_plain_letters(text, keep=".%$¢€£"))
    text = " ".join(_american().get(word, word) for word in text.split())
    # signs that no number follows, or precedes
    text = re.sub(r"[.$¢€£]([^0-9])", r" \1", text)
    text = re.sub(r"([^0-9])%", r"\1 ", text)
    return re.sub(r"\s+", " ", text)


@lru_cache(1)
def _american() -> dict[str, str]:
    """British spelling -> American."""
    file = resources.files("bench") / "data" / "spelling.txt.xz"
    lines = lzma.decompress(file.read_bytes()).decode().split("\n")
    return dict(line.split(" ") for line in lines)


# Numbers. A word has a kind, a number and, where it ends one ("twenties", "fifth"), a suffix.

_ONES = ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
         "sixteen seventeen eighteen nineteen").split()  # fmt: skip
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_POWERS = ("thousand million billion trillion quadrillion quintillion sextillion septillion "
           "octillion nonillion decillion").split()  # fmt: skip
_ODD_ORDINALS = {"zeroth": (0, "th"), "first": (1, "st"), "second": (2, "nd"), "third": (3, "rd"),
                 "fifth": (5, "th"), "twelfth": (12, "th")}  # fmt: skip
_SIGNS = {"minus": "-", "negative": "-", "plus": "+", "positive": "+"}
_CURRENCIES = {"pound": "£", "euro": "€", "dollar": "$", "cent": "¢"}
_CURRENCIES |= {f"{name}s": sign for name, sign in _CURRENCIES.items()}
_PREFIXES = {*_SIGNS.values(), *_CURRENCIES.values()}
_NUMERIC = re.compile(r"\d+(\.\d+)?")


def _number_words() -> dict[str, tuple[str, int, str]]:
    words = dict.fromkeys(("o", "oh", "zero"), ("zero", 0, ""))
    for value, name in enumerate(_ONES, 1):
        words[name] = ("ones", value, "")
        words["sixes" if name == "six" else f"{name}s"] = ("ones", value, "s")
        if value > 3 and value not in (5, 12):
            words[f"{name}{'h' if name.endswith('t') else 'th'}"] = ("ones", value, "th")
    words |= {name: ("ones", *ordinal) for name, ordinal in _ODD_ORDINALS.items()}
    for value, name in enumerate(_TENS, 2):
        for ending, suffix in (("y", ""), ("ies", "s"), ("ieth", "th")):
            words[f"{name[:-1]}{ending}"] = ("tens", 10 * value, suffix)
    powers = {"hundred": 100} | {name: 1000**n for n, name in enumerate(_POWERS, 1)}
    for name, value in powers.items():
        for suffix in ("", "s", "th"):
            words[f"{name}{suffix}"] = ("power", value, suffix)
    others = {"sign": _SIGNS, "currency": _CURRENCIES, "percent": ("per", "percent"),
              "and": ("and",), "repeat": ("double", "triple"), "point": ("point",)}  # fmt: skip
    return words | {name: (kind, 0, "") for kind, names in others.items() for name in names}


_WORDS = _number_words()


def _is(word: str | None, *kinds: str) -> bool:
    """Whether a word is of one of the kinds, and goes on with a number rather than ending it."""
    kind, _, suffix = _WORDS.get(word, ("", 0, ""))
    return kind in kinds and not suffix


def digits(text: str) -> str:
    """Text with its spelled numbers in digits: "two point five million dollars" -> "$2500000"."""
    halves = re.split(r"\band\s+a\s+half\b", text)
    parts: list[str] = []
    for part in filter(str.strip, halves[:-1]):
        number = _is(part.split()[-1], "zero", "ones", "tens", "power")
        parts += [part, "point five" if number else "and a half"]
    text = " ".join([*parts, halves[-1]])
    text = re.sub(r"([a-z])([0-9])", r"\1 \2", text)
    text = re.sub(r"([0-9])([a-z])", r"\1 \2", text)
    text = re.sub(r"([0-9])\s+(st|nd|rd|th|s)\b", r"\1\2", text)
    text = " ".join(_Reader().read(text.split()))
    text = re.sub(
        r"([€£$])([0-9]+) (?:and )?¢([0-9]{1,2})\b", lambda m: f"{m[1]}{m[2]}.{int(m[3]):02}", text
    )
    text = re.sub(r"[€£$]0.([0-9]{1,2})\b", lambda m: f"¢{int(m[1])}", text)
    return re.sub(r"\b1(s?)\b", r"one\1", text)


class _Reader:
    """Reads words and writes numbers: `value` is the one so far, with `prefix` before it.

    It is a whole number, or text where digits are told one by one ("one oh one") or have a point.
    """

    def __init__(self) -> None:
        self.out: list[str] = []
        self.value: int | str | None = None
        self.prefix = ""

    def read(self, words: Sequence[str]) -> list[str]:
        skip = False
        for before, word, after in zip([None, *words], words, [*words[1:], None]):
            skip = not skip and bool(self._word(before, word, after))
        self._end()
        return self.out

    def _write(self, text: int | str) -> None:
        self.out.append(f"{self.prefix}{text}")
        self.value, self.prefix = None, ""

    def _end(self, *then: str) -> None:
        """Write the number so far, if there is one, and then words that are none."""
        for text in ((self.value,) if self.value is not None else ()) + then:
            self._write(text)

    def _word(self, before: str | None, word: str, after: str | None) -> bool | None:
        """Take in one word; True when the one after it is done too."""
        goes_on = after in _WORDS or bool(after and _NUMERIC.fullmatch(after))
        if _NUMERIC.fullmatch(word[1:] if word[0] in _PREFIXES else word):
            return self._digits(word)
        kind, number, suffix = _WORDS.get(word, ("", 0, ""))
        match kind:
            case "zero":
                self.value = f"{self.value or ''}0"
            case "ones" | "tens":
                add = self._ones if kind == "ones" else self._tens
                self.value = add(number, before)
                if suffix:
                    self._write(f"{self.value}{suffix}")
            case "power":
                self._power(number)
                if suffix:
                    self._write(f"{self.value}{suffix}")
            case "sign" if goes_on:
                self._end()
                self.prefix = _SIGNS[word]
            case "currency" if self.value is not None:
                self.prefix = _CURRENCIES[word]
                self._end()
            case "percent" if self.value is not None and (word == "percent" or after == "cent"):
                self._write(f"{self.value}%")
                return word == "per"
            case "and" if goes_on and _is(before, "power"):
                pass
            case "repeat" if _is(after, "zero", "ones"):
                times = 2 if word == "double" else 3
                self.value = f"{self.value or ''}{str(_WORDS[after][1]) * times}"
                return True
            case "point" if goes_on:
                if after not in _WORDS or _is(after, "zero", "ones", "tens"):
                    self.value = f"{self.value or ''}."
            case _:
                self._end(word)

    def _digits(self, word: str) -> None:
        if isinstance(self.value, str) and self.value.endswith("."):
            self.value += word
            return
        self._end()
        if word[0] in _PREFIXES:
            self.prefix, word = word[0], word[1:]
        number = Fraction(word)
        self.value = number.numerator if number.denominator == 1 else word

    def _ones(self, number: int, before: str | None) -> int | str:
        value = self.value
        if value is None:
            return number
        if isinstance(value, str) and _is(before, "tens") and number < 10:
            return value[:-1] + str(number)
        if isinstance(value, int) and not _is(before, "ones"):
            if value % (10 if number < 10 else 100) == 0:
                return value + number
        return f"{value}{number}"

    def _tens(self, number: int, before: str | None) -> int | str:
        if self.value is None:
            return number
        if isinstance(self.value, int) and self.value % 100 == 0:
            return self.value + number
        return f"{self.value}{number}"

    def _power(self, number: int) -> None:
        value = self.value
        if isinstance(value, int):
            self.value = value // 1000 * 1000 + value % 1000 * number
            return
        product = None
        if value is not None:
            try:
                product = Fraction(value) * number
            except ValueError:  # "1.2.3"
                pass
        if product is not None and product.denominator == 1:
            self.value = product.numerator
        else:
            self._end()
            self.value = number


def wer(reference: str, hypothesis: str, normalize: Callable[[str], str] | None = english) -> float:
    """Words wrong, missing or too many, as a part of the reference's words."""
    if normalize:
        reference, hypothesis = normalize(reference), normalize(hypothesis)
    return edit_distance(reference.split(), hypothesis.split()) / max(1, len(reference.split()))


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """The fewest changes, insertions and deletions that make one list of words the other."""
    numbers = {word: n for n, word in enumerate({*a, *b})}
    other, place = np.array([numbers[word] for word in b], np.int64), np.arange(len(b) + 1)
    row = place
    for n, word in enumerate(a, 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (other != numbers[word]))
        # an insertion costs one more than the place to the left
        row = np.minimum.accumulate(np.array([n, *best]) - place) + place
    return int(row[-1])
