"""Text normalisation and the word error rate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import wer as normalizer
from bench.wer import basic, edit_distance, english, wer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("two point five million", "2500000"),
        ("Two and a half million dollars", "$2500000"),
        ("a hundred and twenty three", "a 123"),
        ("one oh one", "101"),
        ("nineteen ninety nine", "1999"),
        ("twenty-first", "21st"),
        ("the nineteen sixties", "the 1960s"),
        ("double oh seven", "007"),
        ("minus forty per cent", "-40%"),
        ("three dollars and seven cents", "$3.07"),
        ("$20 million", "$20000000"),
        ("seven cents", "¢7"),
        ("1,234.50", "1234.50"),
        ("the 1st one, and two", "the 1st one and 2"),
        ("one hundred and two", "102"),
        ("one two point one two", "12.12"),
        ("Mr. Brien won't colour it, he's been busy [laughs] (sighs)",
         "mister brien will not color it he has been busy"),
        ("Um, I'd've gone to St. John's.", "i would have gone to saint john is"),
        ("Café œuvre naïve", "cafe oeuvre naive"),
        ("10% sure. % $!", "10% sure $"),
        ("", ""),
    ],
)  # fmt: skip
def test_english_text_is_made_comparable(text: str, normal: str) -> None:
    assert english(text).split() == normal.split()


@pytest.mark.parametrize(
    ("text", "options", "normal"),
    [
        ("Ça va, Zoë? [rires]", {}, "ça va zoë"),
        ("Ça va, Zoë?", {"remove_diacritics": True}, "ca va zoe"),
        ("日本、語", {"split_letters": True}, "日 本 語"),
    ],
)
def test_text_of_any_language_is_made_comparable(text: str, options: dict, normal: str) -> None:
    assert basic(text, **options).split() == normal.split()


def test_the_word_error_rate_counts_words_of_the_reference() -> None:
    assert wer("two cats, and a dog", "2 cats and a dog!") == 0
    assert wer("a b c d", "a x c") == 0.5
    assert wer("a b", "a b c d e") == 1.5
    assert wer("", "") == 0
    assert wer("", "a") == 1
    assert wer("A b", "a b", normalize=None) == 0.5


def distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    change = distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(change, distance(a[1:], b) + 1, distance(a, b[1:]) + 1)


@settings(max_examples=100, deadline=None)
@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_the_edit_distance_is_the_least(a: str, b: str) -> None:
    assert edit_distance(list(a), list(b)) == distance(a, b)


NUMBERS = [*normalizer._WORDS, "2", "3.5", "0", "$4", "-7", "£3.0", "¢5", "20", "1", "100", "x",
           "and a half", "1st", "5th", "1960s", "3,000", "12:30", "$1.50", "per cent", "10%", "٣",
           "1.2.3"]  # fmt: skip
OTHERS = [*normalizer._WHOLE_WORDS, *(f"he{e}" for e in normalizer._ENDINGS), "um", "colour",
          "'tis", "don't", "[x]", "(y z)", "Ærø", "a.b", "e.g.", "%", "$", "...", "MR.", "St.",
          "naïve", "theatre", "<a>", "mm-hmm", "I", "it's", "—", "\u2019s"]  # fmt: skip


@pytest.mark.peers
def test_english_equals_openai_s() -> None:
    from whisper.normalizers import EnglishTextNormalizer

    theirs = EnglishTextNormalizer()
    words = st.sampled_from(NUMBERS) | st.sampled_from(NUMBERS) | st.sampled_from(OTHERS)
    phrases = st.lists(words, max_size=9).map(" ".join)

    @settings(max_examples=4000, deadline=None)
    @given(phrases | st.text(max_size=40) | st.text("1 0,.$%'ost¢n-", max_size=20))
    def check(text: str) -> None:
        assert english(text) == theirs(text)

    check()


@pytest.mark.peers
@pytest.mark.parametrize("letters", [False, True])
@pytest.mark.parametrize("diacritics", [False, True])
def test_basic_equals_openai_s(diacritics: bool, letters: bool) -> None:
    from whisper.normalizers import BasicTextNormalizer

    theirs = BasicTextNormalizer(diacritics, letters)

    @settings(max_examples=500, deadline=None)
    @given(st.text(max_size=40) | st.text("aé<(>)[] ]ßœ日", max_size=20))
    def check(text: str) -> None:
        assert basic(text, diacritics, letters) == theirs(text)

    check()
