"""Tokenizers against published ids and an independent implementation of BPE."""

from __future__ import annotations

import random
import sys
import unicodedata
from functools import cache

import pytest
import regex

from tests.zoo.llama import vocab
from weights import WeightError
from zoo.llama.gguf_tokenizer import from_gguf

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each pre-tokenizer as the stages that its published definition has, applied one after another.
STAGES = {
    "gpt-2": (GPT2_WORDS,),
    "smollm": (r"\p{N}", GPT2_WORDS),
    "llama-bpe": (LLAMA3_WORDS,),
    "qwen2": (LLAMA3_WORDS.replace("{1,3}", ""),),
}


def split(text: str, stages: tuple[str, ...]) -> list[str]:
    """Cut `text` into words stage by stage; what a stage does not match stays whole."""
    parts = [text]
    for stage in stages:
        cut = []
        for part in parts:
            at = 0
            for match in regex.finditer(stage, part):
                cut += [part[at : match.start()], match.group()]
                at = match.end()
            cut.append(part[at:])
        parts = [part for part in cut if part]
    return parts


class Reference:
    """BPE as first published: join the pair whose merge comes earliest, until none is left."""

    def __init__(self, metadata: dict) -> None:
        self.tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.stages = STAGES[metadata["tokenizer.ggml.pre"]]

    def encode(self, text: str) -> list[int]:
        parts = [part for word in split(text, self.stages) for part in self.word(word)]
        return [self.ids[part] for part in parts]

    def word(self, word: str) -> list[str]:
        known = [vocab.ALPHABET[byte] for byte in word.encode()]
        return self.join([part for part in known if part in self.ids])

    def join(self, parts: list[str]) -> list[str]:
        while True:
            known = [pair for pair in zip(parts, parts[1:]) if pair in self.ranks]
            if not known:
                return parts
            parts = vocab.merge(parts, min(known, key=self.ranks.__getitem__))


@cache
def characters() -> dict[str, list[str]]:
    """Characters by Unicode category, those that can be encoded and are assigned."""
    found: dict[str, list[str]] = {}
    for point in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(point))
        if category not in ("Cs", "Cn"):
            found.setdefault(category, []).append(chr(point))
    return found


def strange_texts(count: int, seed: int) -> list[str]:
    """Random strings in which every category of Unicode occurs, and spaces often."""
    draw = random.Random(seed)
    categories = sorted(characters())
    texts = []
    for i in range(count):
        usual = draw.choices("aeT 0'\n.\t", k=draw.randint(0, 6))
        forced = [draw.choice(characters()[categories[i % len(categories)]])]
        mixed = [draw.choice(characters()[draw.choice(categories)]) for _ in range(4)]
        parts = usual + forced + mixed + ["  "] * draw.randint(0, 2)
        draw.shuffle(parts)
        texts.append("".join(parts))
    return texts


@cache
def llama2():
    return from_gguf(vocab.llama2())


@cache
def llama3():
    return from_gguf(vocab.llama3())


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15043, 3186]),
        (" Hello", [29871, 15043]),
        ("    Hello\n    Hello", [268, 15043, 13, 1678, 15043]),
        ("", []),
    ],
)
def test_llama2_ids_are_the_published_ones(text, ids):
    assert llama2().encode(text) == ids
    assert llama2().encode(text, add_bos=True) == [1, *ids]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [9906, 1917]),
        ("3333", [8765, 18]),
        ("33333333", [8765, 8765, 1644]),
        ("\n", [198]),
        ("\n\n", [271]),
        ("\n\n\n", [1432]),
        (" this is 🦙.cpp", [420, 374, 11410, 99, 247, 13, 11055]),
    ],
)
def test_llama3_ids_are_the_published_ones(text, ids):
    assert llama3().encode(text) == ids
    assert llama3().decode(ids) == text


def test_emoji_comes_whole_with_its_last_byte():
    stream = llama3().stream()
    pieces = [stream.feed(i) for i in (420, 374, 11410, 99, 247, 13, 11055)]
    assert pieces == [" this", " is", " ", "", "🦙", ".", "cpp"]
    assert stream.finish() == ""


def test_character_that_never_ends_becomes_a_replacement_character():
    stream = llama3().stream()
    assert stream.feed(11410) == " "
    assert stream.finish() == "\ufffd"
    assert llama3().decode([11410]) == " \ufffd"


def test_bos_comes_once():
    tokenizer = llama3()
    assert tokenizer.add_bos
    once = tokenizer.encode("<|begin_of_text|>Hello", special=True, add_bos=True)
    assert once == [128000, 9906]
    assert tokenizer.encode("Hello", special=True, add_bos=True) == [128000, 9906]


def test_stop_ids_of_llama3():
    assert llama3().stop_ids == {128001, 128008, 128009}


def test_special_token_that_somebody_types_stays_text():
    metadata = vocab.tiny(control=("<|bos|>", "<|im_end|>"))
    tokenizer = from_gguf(metadata)
    typed = tokenizer.encode("a<|im_end|>b")
    assert not {0, 1} & set(typed)
    assert tokenizer.decode(typed) == "a<|im_end|>b"
    parsed = tokenizer.encode("a<|im_end|>b", special=True)
    assert parsed == [*tokenizer.encode("a"), 1, *tokenizer.encode("b")]
    assert tokenizer.decode(parsed) == "a<|im_end|>b"
    assert tokenizer.decode(parsed, special=False) == "ab"


def test_longest_special_token_wins():
    tokenizer = from_gguf(vocab.tiny(control=("<s>", "<s>>", "<b>", "<e>")))
    assert tokenizer.encode("<s>>", special=True) == [1]


def test_added_token_is_parsed_even_in_plain_text():
    tokenizer = from_gguf(vocab.tiny(added=("<think>",)))
    assert tokenizer.encode("<think>") == [2]


@pytest.mark.parametrize("pre", sorted(STAGES))
def test_bpe_equals_the_reference_on_every_unicode_category(pre):
    metadata = vocab.tiny(pre)
    tokenizer, reference = from_gguf(metadata), Reference(metadata)
    for text in [vocab.CORPUS, *strange_texts(3000, seed=1)]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), ascii(text)
        assert tokenizer.decode(ids) == text


def test_ids_in_another_order_than_the_merges_make_no_difference():
    one, other = vocab.tiny(seed=1), vocab.tiny(seed=2)
    assert one["tokenizer.ggml.tokens"] != other["tokenizer.ggml.tokens"]
    texts = [
        [metadata["tokenizer.ggml.tokens"][i] for i in from_gguf(metadata).encode(vocab.CORPUS)]
        for metadata in (one, other)
    ]
    assert texts[0] == texts[1]


def test_byte_that_the_vocabulary_lacks_is_dropped():
    tokenizer = from_gguf(vocab.tiny(missing=bytes([4, 241])))
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"
    # Its neighbours in the word come together, and may merge.
    assert tokenizer.encode(" t\x04he") == tokenizer.encode(" t") + tokenizer.encode("he")
    assert tokenizer.encode(" (\x04)") == tokenizer.encode(" ()")
    assert tokenizer.encode("\x04") == []


def test_bpe_with_lacking_bytes_equals_the_reference():
    metadata = vocab.tiny(missing=bytes([4, 6, 19, 0xC0, 0xE3, 0xF1]))
    tokenizer, reference = from_gguf(metadata), Reference(metadata)
    for text in strange_texts(1000, seed=9):
        assert tokenizer.encode(text) == reference.encode(text), ascii(text)


def test_llama2_round_trip_of_every_unicode_category():
    tokenizer = llama2()
    for text in strange_texts(1000, seed=2):
        # A tab or a piece of space at the start is kept; only the prefix space is taken off.
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")


def test_lone_surrogates_become_replacement_characters():
    tokenizer = from_gguf(vocab.tiny())
    assert tokenizer.decode(tokenizer.encode("a\udcff\udcfeb")) == "a\ufffd\ufffdb"
    assert "b" in tokenizer.decode(tokenizer.encode("\ud800b"))


@pytest.mark.parametrize("char", [" ", "\n", "a", "^", "é"])
def test_very_long_runs_are_encoded(char):
    tokenizer = from_gguf(vocab.tiny())
    assert tokenizer.decode(tokenizer.encode(char * 600_000)) == char * 600_000


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model", "wordpiece", "wordpiece"),
        ("pre", "no-such-regex", "no-such-regex"),
        ("tokens", [], "tokens"),
        ("tokens", [1, 2], "tokens"),
        ("tokens", None, "tokens"),
        ("merges", None, "merges"),
        ("merges", ["zz qq"], "zzqq"),
        ("token_type", [1], "token_type"),
        ("eos_token_id", 10**9, "eos_token_id"),
        ("bos_token_id", "x", "bos_token_id"),
        ("add_bos_token", 3, "add_bos_token"),
    ],
)
def test_broken_vocabulary_is_one_line_naming_file_and_key(key, value, named):
    metadata = vocab.tiny() | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(WeightError) as caught:
        from_gguf(metadata, "model.gguf")
    message = str(caught.value)
    assert "model.gguf" in message and named in message and "\n" not in message


def test_id_outside_the_vocabulary_is_an_error():
    with pytest.raises(IndexError, match="outside the vocabulary"):
        from_gguf(vocab.tiny()).decode([10**6])
