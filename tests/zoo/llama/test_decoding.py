"""A full context that goes on, and guesses: what the model is shown, and that no text changes."""

from __future__ import annotations

import numpy as np
import pytest

import zoo.llama
from tests.zoo.llama import tiny
from tests.zoo.llama.fake import scripted
from zoo.errors import UsageError
from zoo.llama.decoding import Decoding
from zoo.llama.generate import PromptTooLong
from zoo.llama.lookup import Lookup


def shown(model) -> list[list[int]]:
    """What each call of the context is asked for, from now on."""
    calls, foretell = [], model.context.next_logits
    model.context.next_logits = lambda ids: (calls.append(list(ids)), foretell(ids))[1]
    return calls


def test_a_full_context_goes_on_without_the_older_half_of_what_is_not_kept():
    model = scripted(["a"], size=8)
    (a,) = model.tokenizer.encode("a")
    calls = shown(model)
    reply = model.generate([5, 6, 7, 8], max_tokens=12, context_shift=True, keep=2)
    assert "".join(reply) == "a" * 12 and reply.stats.finish == "length"
    assert calls[4] == [5, 6, 7, 8, a, a, a, a]
    assert calls[5] == [5, 6, a, a, a, a]  # of seven behind the kept two, three are gone
    assert max(map(len, calls)) == 8 and all(ids[:2] == [5, 6] for ids in calls)
    assert reply.stats.dropped_tokens == 3 * len([c for c in calls[1:] if len(c) == 6]) - 3
    assert "tokens forgotten" in str(reply.stats)


def test_keep_is_the_whole_prompt_or_nothing_but_the_beginning_token():
    whole, none = Decoding(context_shift=True, keep=-1), Decoding(context_shift=True)
    for decoding, first, left in ((whole, 0, [1, 2, 3, 6, 7, 8]), (none, 1, [1, 5, 6, 7, 8])):
        ids = [1, 2, 3, 4, 5, 6, 7, 8]
        assert decoding.shift(ids, 3, first) == 8 - len(left)
        assert ids == left
    for count in range(2, 12):  # a prompt that fills the context leaves room in the end
        ids = list(range(count))
        assert whole.shift(ids, count - 1, 0) >= 1 and ids[-1] == count - 1


def test_a_context_that_may_not_shift_ends_the_reply_and_a_long_prompt_is_an_error_either_way():
    reply = scripted(["a"], size=5).generate([2, 3, 4])
    assert ("".join(reply), reply.stats.finish, reply.stats.dropped_tokens) == ("aaa", "context", 0)
    with pytest.raises(PromptTooLong):
        scripted(["a"], size=3).generate([2] * 4, context_shift=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lookup": 32}, "lookup must be from 0 to 31"),
        ({"lookup": 1.5}, "lookup must be a whole number"),
        ({"keep": -2}, "keep must be -1 or more"),
        ({"context_shift": 1}, "context_shift must be True or False"),
    ],
)
def test_wrong_options_are_told(options, told):
    with pytest.raises(UsageError, match=told):
        scripted(["a"]).generate("x", **options)


def test_a_guess_is_what_followed_last_time():
    lookup = Lookup(3)
    assert lookup.guess([1, 2, 3]) == []
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2]) == []
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6]
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 1, 2, 3]) == [9, 1, 2]
    assert Lookup(5).guess([7, 8, 7, 8, 7, 8]) == [7, 8, 7, 8, 7]  # it goes on with itself
    assert Lookup(4).guess([5, 5, 5, 5]) == [5, 5, 5, 5]
    assert Lookup(0).guess([7, 8, 7, 8, 7, 8]) == []


@pytest.fixture(scope="module")
def model(device, tmp_path_factory):
    path = tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return zoo.llama.load(path, device=device)


def said(model, prompt: str, **options) -> tuple[list[int], object]:
    reply = model.generate(prompt, max_tokens=60, **options)
    list(reply)
    return reply.stats.ids, reply.stats


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.3, "top_k": 5, "seed": 4}], ids=str)
@pytest.mark.parametrize("prompt", ["the fox the fox the fox", "12 dogs", "a b a b a b a"])
def test_guesses_change_no_text(model, prompt, sampling):
    model.context.reset()
    plain, _ = said(model, prompt, **sampling)
    model.context.reset()
    guessed, stats = said(model, prompt, lookup=7, **sampling)
    assert guessed == plain
    assert stats.guessed_tokens % 7 == 0
    again, _ = said(model, prompt, lookup=2, **sampling)  # from what the other one left
    assert again == plain


def test_right_guesses_save_calls_and_wrong_ones_are_forgotten(model):
    calls, rows = [], model.context.each_next
    model.context.each_next = lambda ids, guess=(): (calls.append(len(guess)), rows(ids, guess))[1]
    try:
        ids, stats = said(model, "the fox the fox the fox the fox", lookup=5)
    finally:
        del model.context.each_next
    assert 0 < stats.right_guesses <= stats.guessed_tokens == sum(calls)
    assert len(calls) == len(ids) - stats.right_guesses
    assert "guesses right" in str(stats)


def test_guesses_and_the_end_of_the_context_go_together(model):
    size = model.context.size
    prompt = (model.prompt_ids("the fox ") * size)[: size - 20]
    for shift in (False, True):
        texts = []
        for lookup in (0, 6):
            model.context.reset()
            reply = model.generate(prompt, lookup=lookup, context_shift=shift, max_tokens=70)
            list(reply)
            texts.append((reply.stats.ids, reply.stats.finish, reply.stats.dropped_tokens))
        assert texts[0] == texts[1]
        assert texts[0][1] == ("length" if shift else "context")


def test_what_a_shifted_context_says_is_what_the_rest_of_the_text_says(model):
    """Nothing of the forgotten tokens stays: the rest is computed anew."""
    size = model.context.size
    prompt = (model.prompt_ids("a quick brown fox ") * size)[:size]
    reply = model.generate(prompt, context_shift=True, keep=3, max_tokens=2)
    list(reply)
    dropped = reply.stats.dropped_tokens
    left = prompt[:3] + prompt[3 + dropped :] + reply.stats.ids[:1]
    model.context.reset()
    assert int(np.argmax(model.context.next_logits(left))) == reply.stats.ids[1]
