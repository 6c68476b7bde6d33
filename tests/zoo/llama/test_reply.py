"""A reply by itself: pieces, reasons to end, logprobs, constraints; no model is near."""

from __future__ import annotations

import numpy as np
import pytest

from tests.zoo.llama import vocab
from tests.zoo.llama.fake import one
from zoo.errors import UsageError
from zoo.llama.gguf_tokenizer import from_gguf
from zoo.llama.reply import Reply
from zoo.llama.sampling import SamplingOptions


def fed(reply: Reply, tokenizer, *tokens: str) -> list[str]:
    """The pieces that a reply gives out when logits foretell `tokens`, until it ends."""
    pieces = []
    for token in (i for text in tokens for i in one(tokenizer, text)):
        logits = np.zeros(tokenizer.vocab_size + 3, np.float32)  # padded, as embeddings are
        logits[token] = 10
        logits[-1] = 20  # what no token owns is never drawn
        assert reply.feed(logits) == reply.ids[-1] == token
        pieces.append(reply.piece)
        if reply.finish:
            break
    return pieces


def test_reply_needs_no_model():
    tokenizer = from_gguf(vocab.tiny())
    reply = Reply(tokenizer, [5, 6], stop=["stop"], max_tokens=50)
    assert fed(reply, tokenizer, "a", " s", "t", "a", "s", "top", "b")[:3] == ["a", " ", ""]
    assert reply.finish == "stop" and reply.stats.prompt_tokens == 2
    assert reply.ids[:2] == [5, 6] and reply.ids[2:] == reply.stats.ids
    for options, finish in (({"max_tokens": 2}, "length"), ({}, None)):
        reply = Reply(tokenizer, [5], stop=["abc"], **options)
        pieces = fed(reply, tokenizer, "a", "b")
        assert (pieces, reply.finish) == (["", "ab" if finish else ""], finish)
    reply.end("context")
    assert (reply.piece, reply.finish) == ("ab", "context")


def test_logprobs_are_the_models_own_whatever_the_options():
    tokenizer = from_gguf(vocab.tiny())
    options = SamplingOptions(temperature=3.0, top_k=1, repeat_penalty=2.0)
    reply = Reply(tokenizer, [5], options, logprobs=2)
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    logits[[7, 9]] = 4, 3
    reply.feed(logits)
    (found,) = reply.logprobs
    total = np.log(np.exp(4) + np.exp(3) + len(logits) - 2)
    assert found.token == 7 and found.logprob == pytest.approx(4 - total)
    assert [token for token, _ in found.top] == [7, 9]
    assert [p for _, p in found.top] == pytest.approx([4 - total, 3 - total])
    assert Reply(tokenizer, [5]).logprobs == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"max_tokens": "5"}, "max_tokens must be a whole number"),
        ({"logprobs": -1}, "logprobs must be 0 or more"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"options": SamplingOptions(logit_bias={10**6: 1})}, "token 1000000 is outside"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(options, told):
    with pytest.raises(UsageError, match=told):
        Reply(from_gguf(vocab.tiny()), [5], **options)


class Only:
    """Lets a reply be one of two texts of one-character tokens."""

    def __init__(self, tokenizer, *texts: str) -> None:
        self.left, self.tokenizer = texts, tokenizer

    @property
    def finished(self) -> bool:
        return self.left == ("",)

    def mask(self) -> np.ndarray:
        mask = np.zeros(self.tokenizer.vocab_size, bool)
        for text in self.left:
            mask[one(self.tokenizer, text[0]) if text else list(self.tokenizer.stop_ids)] = True
        return mask

    def advance(self, token: int) -> None:
        char = self.tokenizer.decode([token])
        self.left = tuple(text[1:] for text in self.left if text[:1] == char)


def drawn(constraint: Only, tokenizer, *favourites: str) -> Reply:
    """A reply whose logits foretell `favourites`, one in each step, as far as it goes."""
    reply = Reply(tokenizer, [5], constraint=constraint)
    for text in favourites:
        logits = np.zeros(tokenizer.vocab_size, np.float32)
        logits[one(tokenizer, text)] = 10
        reply.feed(logits)
    return reply


def test_constrained_reply_takes_the_likeliest_of_what_is_allowed():
    tokenizer = from_gguf(vocab.tiny())
    reply = drawn(Only(tokenizer, "abab", "ab"), tokenizer, "x", "b", "a", "b")
    assert tokenizer.decode(reply.stats.ids) == "abab"
    assert reply.finish == "stop"  # nothing may follow, so nothing more needs to be computed
    reply = drawn(Only(tokenizer, "abab", "ab"), tokenizer, "<|im_end|>", "b")
    assert tokenizer.decode(reply.stats.ids) == "ab" and reply.finish is None
    reply = drawn(Only(tokenizer, "abab", "ab"), tokenizer, "<|im_end|>", "b", "<|im_end|>")
    assert reply.finish == "stop" and reply.stats.ids[-1] in tokenizer.stop_ids
