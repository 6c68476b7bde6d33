"""Weights in prompts, chunks of 75 tokens, and what weights do to an embedding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.stable_diffusion import tokenizer
from zoo.stable_diffusion.prompts import BREAK, chunks, emphasise, level, parse

TOKENIZER = tokenizer.default()
A, B, COMMA, END = 320, 321, 267, 49407


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("normal text", [("normal text", 1)]),
        ("an (important) word", [("an ", 1), ("important", 1.1), (" word", 1)]),
        ("an [unimportant] word", [("an ", 1), ("unimportant", 1 / 1.1), (" word", 1)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        ("un[bal(anced", [("un", 1), ("bal", 1 / 1.1), ("anced", 1)]),
        ("unbalanced) too]", [("unbalanced) too]", 1)]),
        (r"\(literal\]", [("(literal]", 1)]),
        (r"a \\ b \ c", [("a \\ b \\ c", 1)]),
        (r"\\(a)", [("\\", 1), ("a", 1.1)]),
        ("(unnecessary)(parens)", [("unnecessaryparens", 1.1)]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [
                ("a ", 1),
                ("house", 1.3 * 1.1**2),
                (" ", 1.1),
                ("on", 1),
                (" a ", 1.1),
                ("hill", 0.55),
                (", sun, ", 1.1),
                ("sky", 1.1**4),
                (".", 1.1),
            ],
        ),
        ("a (b:0) (c:-1.5) (d:+.5)", [("a ", 1), ("b", 0), (" ", 1), ("c", -1.5), (" ", 1),
                                      ("d", 0.5)]),
        ("ratio 3:4, (time: 12:30)", [("ratio 3:4, ", 1), ("time: 12", 30)]),
        ("(a:1.2.3) (b:x) :1.5)", [("a:1.2.3", 1.1), (" ", 1), ("b:x", 1.1), (" :1.5)", 1)]),
        ("(a [b) c]", [("a ", 1.1), ("b", 1), (" c", 1 / 1.1)]),
        ("a BREAK b", [("a", 1), (BREAK, 1), ("b", 1)]),
        ("(a BREAK b:1.2)", [("a", 1.2), (BREAK, 1), ("b", 1.2)]),
        ("BREAKING NOBREAK", [("BREAKING NOBREAK", 1)]),
        ("()[](:1.2)", []),
        ("", []),
    ],
)  # fmt: skip
def test_pieces_and_their_weights(prompt, expected) -> None:
    found = parse(prompt)
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in expected])


@settings(deadline=None)
@given(st.text(st.sampled_from("()[]\\:1.2- ,abBREAK\n"), max_size=60))
def test_any_text_parses_to_finite_weights(prompt) -> None:
    pieces = parse(prompt)
    assert all(text and np.isfinite(weight) for text, weight in pieces)
    # Nothing is invented: what is left is the prompt's own letters in their order.
    letters = iter(prompt)
    assert all(any(c == letter for letter in letters) for text, _ in pieces for c in text)


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="()[]\\:", exclude_categories=["Cs"])))
def test_text_without_brackets_is_one_piece(prompt) -> None:
    if BREAK not in prompt:
        assert parse(prompt) == ([(prompt, 1.0)] if prompt else [])


@pytest.mark.parametrize(
    "prompt",
    ["(" * 20_000 + "a" + ")" * 20_000, "((a:99999)" * 5_000, "[a" * 20_000, "(a]" * 10_000],
)
def test_absurd_brackets_stay_finite(prompt) -> None:
    assert all(abs(weight) <= 100 for _, weight in parse(prompt))


def test_a_short_prompt_is_one_framed_chunk() -> None:
    (chunk,) = chunks(TOKENIZER, "a (cat:1.5), dog")
    assert chunk.ids[:6] == (49406, A, 2368, COMMA, 1929, END)
    assert chunk.ids[6:] == (END,) * 71
    assert chunk.weights[:6] == (1.0, 1.0, 1.5, 1.0, 1.0, 1.0)
    assert len(chunk.weights) == 77 and set(chunk.weights[6:]) == {1.0}


def test_no_prompt_is_one_empty_chunk() -> None:
    (chunk,) = chunks(TOKENIZER, "")
    assert chunk.ids == (49406,) + (END,) * 76


def test_long_prompts_go_on_in_further_chunks() -> None:
    three = chunks(TOKENIZER, "a " * 160)
    assert [chunk.ids.count(A) for chunk in three] == [75, 75, 10]
    assert all(len(chunk.ids) == 77 and chunk.ids[-1] == END for chunk in three)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (60, [61, 75, 15]),  # the comma is among the last 20: the chunk ends with it
        (40, [75, 56]),  # too far back
        (75, [75, 75, 1]),  # the comma itself comes too late
    ],
)
def test_a_full_chunk_ends_after_a_late_comma(before, expected) -> None:
    prompt = "a " * before + ", " + "b " * (150 - before if before != 40 else 90)
    found = chunks(TOKENIZER, prompt)
    assert [sum(i < 49406 for i in chunk.ids) for chunk in found] == expected


def test_the_vectors_of_one_word_stay_in_one_chunk() -> None:
    chosen = TOKENIZER.with_words({"<toy>": range(50_000, 50_008)})
    first, second = chunks(chosen, "a " * 70 + "<toy> b")
    assert first.ids[71] == END and second.ids[1:11] == (*range(50_000, 50_008), B, END)
    first, second = chunks(chosen, "a " * 67 + "(<toy>:1.5)" + " b")
    assert first.weights[68:76] == (1.5,) * 8 and second.ids[1:3] == (B, END)


def test_break_begins_a_chunk() -> None:
    first, second = chunks(TOKENIZER, "a BREAK b")
    assert first.ids[1:3] == (A, END) and second.ids[1:3] == (B, END)


def test_plain_prompts_take_brackets_for_text() -> None:
    (chunk,) = chunks(TOKENIZER, "(a:1.5) BREAK", weighted=False)
    assert set(chunk.weights) == {1.0}
    assert list(chunk.ids) == TOKENIZER.framed(TOKENIZER.encode("(a:1.5) BREAK"))


def test_prompt_and_negative_prompt_get_equally_many_chunks() -> None:
    prompt, negative = chunks(TOKENIZER, "a " * 160), chunks(TOKENIZER, "ugly")
    longer, filled = level(TOKENIZER, prompt, negative)
    assert longer == prompt and len(filled) == 3
    assert filled[0] == negative[0] and filled[1] == filled[2] == chunks(TOKENIZER, "")[0]


def test_weights_scale_vectors_and_keep_the_mean() -> None:
    embedding = np.random.RandomState(0).standard_normal((77, 8)).astype(np.float32) + 1
    weights = [1.0, 1.5, 0.5] + [1.0] * 74
    out = emphasise(embedding, weights)
    assert out.dtype == np.float32
    # one rounding to float32 apart
    assert out.mean(dtype=np.float64) == pytest.approx(embedding.mean(dtype=np.float64), rel=1e-6)
    ratio = out / embedding
    np.testing.assert_allclose(ratio[1] / ratio[0], 1.5, rtol=1e-6)
    np.testing.assert_allclose(ratio[2] / ratio[0], 0.5, rtol=1e-6)


def test_no_weights_change_nothing_and_zero_weights_stay_finite() -> None:
    embedding = np.random.RandomState(0).standard_normal((77, 8)).astype(np.float32)
    assert emphasise(embedding, [1.0] * 77) is embedding
    assert not emphasise(embedding, [0.0] * 77).any()
