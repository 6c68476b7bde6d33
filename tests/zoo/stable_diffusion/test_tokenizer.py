"""CLIP's tokenizer: known ids, a plain BPE, and transformers."""

from __future__ import annotations

import html
import json
import lzma
import random
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weights import WeightError
from zoo.stable_diffusion import tokenizer
from zoo.stable_diffusion.tokenizer import BEGIN, END, LENGTH, SUFFIX, from_folder

TOKENIZER = tokenizer.default()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a photo of a cat", [320, 1125, 539, 320, 2368]),
        ("a cat, dog", [320, 2368, 267, 1929]),
        ("1233", [272, 273, 274, 274]),
        ("12 33", [272, 273, 274, 274]),
        ("! !! !!!", [256, 748, 995]),
        ("it's café", [585, 568, 15304]),
        ("it's cafe\u0301", [585, 568, 15304]),
        ("rock &amp;amp; roll", [2172, 261, 3341]),
        ("🐱", [22979]),
        ("A\u3000PHOTO\n\tof a\u00a0CAT", [320, 1125, 539, 320, 2368]),
        ("a<|endoftext|>b", [320, 49407, 321]),
        ("x <|ENDOFTEXT|>!!", [343, 27, 347, 40786, 4160, 91, 285, 748]),
        ("", []),
        (" \n", []),
    ],
)
def test_known_ids(text, ids) -> None:
    assert TOKENIZER.encode(text) == ids


def test_the_vocabulary_is_clips() -> None:
    assert len(TOKENIZER.vocab) == len(set(TOKENIZER.vocab.values())) == 49408
    assert len(TOKENIZER.merges) == 49408 - 2 - 2 * 256
    assert (TOKENIZER.begin, TOKENIZER.end) == (49406, 49407)


@pytest.mark.parametrize(("pad", "expected"), [(None, 49407), (0, 0)])
def test_prompts_are_framed_and_padded(pad, expected) -> None:
    chosen = tokenizer.default(pad)
    assert chosen.framed([]) == [49406, 49407] + [expected] * 75
    assert chosen.framed([320]) == [49406, 320, 49407] + [expected] * 74


def test_a_long_prompt_is_cut_or_goes_on_in_chunks() -> None:
    ids = TOKENIZER.encode("a " * 100)
    assert TOKENIZER.framed(ids) == [49406] + [320] * 75 + [49407]
    first, second = TOKENIZER.chunks(ids)
    assert first == TOKENIZER.framed(ids[:75]) and second == TOKENIZER.framed(ids[75:])
    assert len(second) == LENGTH and second[-1] == 49407
    assert TOKENIZER.chunks([]) == [TOKENIZER.framed([])]


def test_words_of_textual_inversion_stand_for_their_ids() -> None:
    chosen = TOKENIZER.with_words({"<cat-toy>": [49408, 49409], "EasyNegative": [49410]})
    assert chosen.encode("a <cat-toy>, easynegative") == [320, 49408, 49409, 267, 49410]
    assert chosen.encode("uneasynegative") == TOKENIZER.encode("uneasynegative")
    assert chosen.with_words({"x": [5]}).encode("x <cat-toy>") == [5, 49408, 49409]
    assert TOKENIZER.encode("<cat-toy>") != [49408, 49409]


def test_decoding_gives_the_words_back() -> None:
    ids = TOKENIZER.encode("A photo of café 🐱")
    assert TOKENIZER.decode([49406, *ids, 49407]) == "a photo of café 🐱"
    assert TOKENIZER.decode([10**6]) == "\ufffd"


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert TOKENIZER.encode("a\udcff") == TOKENIZER.encode("a\ufffd")


def slow_merges(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """BPE as the paper has it: again and again join the pair of the lowest rank everywhere."""
    parts = [*word[:-1], word[-1] + SUFFIX]
    while True:
        pairs = [pair for pair in zip(parts, parts[1:]) if pair in ranks]
        if not pairs:
            return parts
        best, joined = min(pairs, key=ranks.__getitem__), []
        while parts:
            if tuple(parts[:2]) == best:
                joined.append(parts[0] + parts[1])
                parts = parts[2:]
            else:
                joined.append(parts.pop(0))
        parts = joined


@settings(deadline=None)
@given(st.text("abcdehilnorst", min_size=1, max_size=40))
def test_merging_equals_a_plain_bpe(word) -> None:
    ranks = {pair: rank for rank, pair in enumerate(TOKENIZER.merges)}
    expected = [TOKENIZER.vocab[part] for part in slow_merges(word, ranks)]
    assert TOKENIZER.encode(word) == expected


@settings(deadline=None)
@given(st.text(max_size=80))
def test_any_text_has_ids_of_the_vocabulary(text) -> None:
    assert all(0 <= i < 49408 for i in TOKENIZER.encode(text))


def test_a_word_of_100000_letters_takes_no_quadratic_time() -> None:
    letters = random.Random(0).choices("abcdefghij", k=100_000)
    assert len(TOKENIZER.encode("".join(letters))) > 10_000  # joining list by list takes minutes


def write_folder(folder, layout: str):
    """The package's own vocabulary, as a folder of Hugging Face's has it."""
    folder.mkdir(exist_ok=True)
    merges = [" ".join(pair) for pair in TOKENIZER.merges]
    if layout == "json":
        plain = {t: i for t, i in TOKENIZER.vocab.items() if t not in (BEGIN, END)}
        model = {"type": "BPE", "end_of_word_suffix": SUFFIX, "vocab": plain, "merges": merges}
        added = [{"content": token, "id": TOKENIZER.vocab[token]} for token in (BEGIN, END)]
        whole = {"added_tokens": added, "model": model}
        (folder / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    else:
        (folder / "vocab.json").write_text(json.dumps(dict(TOKENIZER.vocab)), "utf-8")
        lines = ["#version: 0.2", *merges]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.mark.parametrize("layout", ["json", "txt"])
def test_folders_hold_the_same_tokenizer(tmp_path, layout) -> None:
    loaded = from_folder(write_folder(tmp_path, layout))
    assert loaded.vocab == TOKENIZER.vocab and loaded.merges == TOKENIZER.merges
    assert loaded.encode("it's a café 🐱!!!") == TOKENIZER.encode("it's a café 🐱!!!")


@pytest.mark.parametrize("token", ["!", {"content": "!", "lstrip": False}])
def test_a_folder_says_what_it_pads_with(tmp_path, token) -> None:
    write_folder(tmp_path, "txt")
    assert from_folder(tmp_path).pad == 49407
    config = {"pad_token": token, "model_max_length": int(1e30)}  # transformers's "no end"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert from_folder(tmp_path).pad == 0
    assert from_folder(tmp_path, pad=5).pad == 5


def test_a_small_vocabulary_reads_what_it_lacks_as_the_end_token(tmp_path) -> None:
    vocab = {"a": 0, "a</w>": 1, "aa</w>": 2, BEGIN: 3, END: 4}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na a</w>\n")
    assert from_folder(tmp_path).encode("aaa ab") == [0, 2, 0, 4]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", "[]", "not an object"),
        ("vocab.json", '{"a": 1}', "lacks <.startoftext.>"),
        ("vocab.json", '{"a": "1"}', "not a whole number"),
        ("vocab.json", '{"a": -1}', "not a whole number"),
        ("merges.txt", "a b c\n", "a merge is not two tokens"),
        ("tokenizer.json", "{}", "no vocabulary with merges"),
        ("tokenizer.json", '{"model": {"vocab": {}, "merges": 5}}', "no vocabulary with merges"),
        ("tokenizer.json", '{"model": {"vocab": {}, "merges": []}}', "expected </w>"),
        ("tokenizer.json", '{"model": {"vocab": {"a": {}}, "merges": [5], '
                           '"end_of_word_suffix": "</w>"}}', "not two tokens"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_one_line(tmp_path, name, content, message) -> None:
    if name != "tokenizer.json":
        small = {"a": 0, BEGIN: 1, END: 2}
        (tmp_path / "vocab.json").write_text(json.dumps(small))
        (tmp_path / "merges.txt").write_text("")
    (tmp_path / name).write_text(content)
    with pytest.raises(WeightError, match=message) as error:
        from_folder(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_an_empty_folder_has_no_tokenizer(tmp_path) -> None:
    with pytest.raises(WeightError, match="has no tokenizer"):
        from_folder(tmp_path)


def test_package_data_is_the_merges_and_nothing_else() -> None:
    from importlib import resources

    packed = (
        resources.files("zoo.stable_diffusion").joinpath("data", "clip_merges.txt.xz").read_bytes()
    )
    lines = lzma.decompress(packed).decode().splitlines()
    assert len(lines) == 48894 and lines[0] == "i n" and all(line.count(" ") == 1 for line in lines)


def drawn(source: random.Random) -> str:
    """A piece of text: printable letters, others of all planes, words that need care."""
    words = ["it's", "1233", "café", "ΟΔΟΣ", "İ", END, END.upper(), "!!!", "🐱", "e\u0301", "don't"]
    kind = source.random()
    if kind < 0.1:
        return source.choice(words) + source.choice(["", " "])
    low, high = ((32, 127), (0, 0x500), (0, 0xD800), (0xE000, 0x20000))[int(kind * 4)]
    while True:
        char = chr(source.randrange(low, high))
        # Characters that this Python doesn't know may have got a meaning since.
        if unicodedata.category(char) != "Cn":
            return char


@pytest.mark.peers
def test_two_thousand_strings_have_the_ids_that_transformers_gives_them(tmp_path) -> None:
    from transformers import CLIPTokenizer

    theirs = CLIPTokenizer.from_pretrained(write_folder(tmp_path, "txt"))
    source = random.Random(0)
    for _ in range(2000):
        text = "".join(drawn(source) for _ in range(source.randrange(30)))
        # transformers leaves entities as they are
        plain = html.unescape(html.unescape(text))
        assert TOKENIZER.encode(text) == theirs(plain)["input_ids"][1:-1], ascii(text)
