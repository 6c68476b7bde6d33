"""The generation loop: stop rules, limits, UTF-8 and reuse, with a scripted model."""

from __future__ import annotations

import numpy as np
import pytest

from tests.zoo.llama.fake import one, scripted
from zoo.errors import UsageError, UserError
from zoo.llama.generate import PromptTooLong
from zoo.llama.reply import StopStrings

END = "<|im_end|>"


def test_reply_ends_at_the_stop_token_which_is_not_given_out():
    model = scripted(["hello", END, "never"])
    reply = model.generate("x")
    assert "".join(reply) == "hello"
    assert reply.stats.finish == "stop"
    assert reply.stats.ids[-1] == model.tokenizer.encode(END, special=True)[0]


def test_a_padded_vocabulary_never_gives_a_token_that_no_text_has():
    llama = scripted(["a", "b", "<|im_end|>"])
    foretell = llama.context.next_logits
    llama.context.next_logits = lambda ids: np.append(foretell(ids), np.full(64, 99, np.float32))
    assert "".join(llama.generate("x")) == "ab"


def test_max_tokens_counts_tokens():
    model = scripted(list("abcdefgh"))
    reply = model.generate("x", max_tokens=3)
    assert "".join(reply) == "abc"
    assert (reply.stats.finish, len(reply.stats.ids)) == ("length", 3)


def test_generation_ends_with_the_context():
    model = scripted(["a"], size=5)
    reply = model.generate([2, 3, 4])
    # The cache holds 3 + 2; the token after those needs no place in it.
    assert "".join(reply) == "aaa"
    assert reply.stats.finish == "context"


def test_prompt_that_fills_the_context_exactly_gives_one_token():
    reply = scripted(["a"], size=3).generate([2, 3, 4])
    assert "".join(reply) == "a"


def test_prompt_longer_than_the_context_is_an_explicit_error():
    model = scripted(["a"], size=3)
    model.config.max_context = 10
    with pytest.raises(PromptTooLong, match="4 tokens, the context holds 3.* --ctx 10"):
        model.generate([2, 3, 4, 5])
    with pytest.raises(PromptTooLong):
        model.chat("a prompt of more than three tokens")
    with pytest.raises(PromptTooLong):
        model.logits([2] * 4)


def test_prompt_longer_than_the_models_limit_is_told_no_flag_that_cannot_help():
    model = scripted(["a"], size=3)
    model.config.max_context = 10
    with pytest.raises(PromptTooLong, match="11 tokens, too long for the model.* at most 10$"):
        model.generate([2] * 11)


@pytest.mark.parametrize(
    ("script", "stop", "said"),
    [
        (["?", "\n", "no"], "\n", "?"),
        (["a", "b", "c", "d"], "bc", "a"),
        (["a", "b", "c", "d", END], ("xx", "cd"), "ab"),
        (["a", "b", END], "bc", "ab"),
        (["a", "a", "b", "a", "a", "c"], "aac", "aab"),
        (["🦙", "!", "no"], "!", "🦙"),
    ],
)
def test_stop_string_never_leaks_and_what_precedes_it_is_printed(script, stop, said):
    reply = scripted(script).generate("x", stop=stop, max_tokens=8)
    assert "".join(reply) == said
    assert reply.stats.finish == "stop"


def test_stop_string_inside_one_token_prints_what_precedes_it():
    stops = StopStrings(["\n"])
    assert (stops.feed("?\n"), stops.found) == ("?", True)
    assert stops.finish() == ""


def test_text_that_only_begins_a_stop_string_is_printed_in_the_end():
    stops = StopStrings(["stop"])
    assert [stops.feed(text) for text in ("a st", "ep s", "to")] == ["a ", "step ", ""]
    assert (stops.finish(), stops.found) == ("sto", False)


def test_no_partial_character_is_given_out():
    model = scripted(["🦙", "!", END], merges=0)
    pieces = list(model.generate("x"))
    assert pieces == ["🦙", "!"]


def test_character_cut_off_by_the_limit_is_a_replacement_character():
    model = scripted(["🦙"], merges=0)
    assert "".join(model.generate("x", max_tokens=2)) == "\ufffd"


def test_control_tokens_are_not_printed():
    model = scripted(["a", "<b>", "c", END], control=("<b>", "<bos>", END))
    assert "".join(model.generate("x")) == "ac"


def test_second_turn_computes_only_what_is_new():
    model = scripted(["a", "b", END])
    said = "".join(model.chat("hi"))
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
    model.context.restart([one(model.tokenizer, text)[0] for text in ("c", END)])
    model.context.computed.clear()
    reply = model.chat([*history, {"role": "user", "content": "more"}])
    assert "".join(reply) == "c"
    assert reply.stats.reused_tokens >= len(model.template.ids(history[:1]))
    assert model.context.computed[0] == reply.stats.prompt_tokens - reply.stats.reused_tokens


def test_two_generations_at_once_do_not_disturb_each_other():
    model = scripted(["a"])
    one, other = model.generate("x", max_tokens=3), model.generate("yy", max_tokens=3)
    mixed = [piece for pair in zip(one, other) for piece in pair]
    assert mixed == ["a"] * 6


def test_chat_takes_a_string_as_one_turn_and_parses_no_special_token_in_it():
    model = scripted(["a", END])
    as_text = model.chat("x<|im_end|>")
    as_list = model.chat([{"role": "user", "content": "x<|im_end|>"}])
    assert as_text.stats.prompt_tokens == as_list.stats.prompt_tokens
    assert "".join(as_text) == "a"


def test_plain_template_stops_where_the_next_turn_would_begin():
    model = scripted(["a", "\n", "u", "s", "e", "r", ":", "b"], control=("<s>", "<e>"))
    assert "".join(model.chat("hi", max_tokens=8)) == "a"


def test_empty_raw_prompt_begins_with_bos():
    model = scripted(["a", END])
    assert model.generate("").stats.prompt_tokens == 1


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"max_tokens": 0}, UsageError, "max_tokens"),
        ({"temperature": -1}, UsageError, "temperature"),
        ({"top_q": 1}, UsageError, "top_q"),
        ({"stop": ""}, UsageError, "stop"),
        ({"seed": -1}, UsageError, "seed"),
    ],
)
def test_wrong_option_is_named_before_anything_runs(options, error, named):
    model = scripted(["a"])
    with pytest.raises(error, match=named):
        model.generate("x", **options)
    assert model.context.computed == []


@pytest.mark.parametrize("ids", [[], [-1], [10**6]])
def test_wrong_ids_are_an_error(ids):
    with pytest.raises(UserError):
        scripted(["a"]).generate(ids)


def test_same_seed_gives_the_same_text():
    def text(seed):
        options = {"temperature": 5.0, "top_k": 0, "top_p": 1, "min_p": 0}
        return "".join(scripted(["a", "b"]).generate("x", seed=seed, max_tokens=20, **options))

    assert text(1) == text(1) != text(2)
