"""The default model under both settings of --dtype: the same words, and nearly the same logits."""

from __future__ import annotations

import numpy as np
import pytest

import zoo.llama
from tests.zoo.llama.test_smollm2 import PROMPT_IDS, QUESTION, REPLY, REPLY_IDS, TOP

IDS = PROMPT_IDS + REPLY_IDS[:-1]
# Two int8 terms in products and halves in the cache are off by 0.035 at most on these tokens; one
# int8 term is off by 1.3, bfloat16 by 0.18, and the best two are 0.08 apart.
CLOSE = 0.05


@pytest.fixture(scope="module", params=["auto", "f32"])
def either(request, smollm2):
    return zoo.llama.load(smollm2, dtype=request.param)


@pytest.fixture(scope="module")
def exact(smollm2) -> np.ndarray:
    return zoo.llama.load(smollm2, dtype="f32").logits(IDS)


def test_greedy_reply(either):
    either.context.reset()
    reply = either.chat(QUESTION)
    assert "".join(reply) == REPLY
    assert reply.stats.ids == REPLY_IDS


def test_order_of_the_best_five_and_every_logit_token_by_token(either, exact):
    either.context.reset()
    stepped = np.stack([either.context.next_logits(IDS[: n + 1]) for n in range(len(IDS))])
    best = np.argsort(-stepped[len(PROMPT_IDS) - 1])[:5]
    assert best.tolist() == list(TOP)
    np.testing.assert_allclose(stepped, exact, atol=CLOSE)


def test_every_logit_of_a_whole_sequence(either, exact):
    logits = either.logits(IDS)
    assert np.argsort(-logits[len(PROMPT_IDS) - 1])[:5].tolist() == list(TOP)
    np.testing.assert_allclose(logits, exact, atol=CLOSE)


def test_the_prompt_at_once_is_as_exact_as_its_tokens_one_by_one(either, exact):
    either.context.reset()
    logits = either.context.next_logits(PROMPT_IDS)
    np.testing.assert_allclose(logits, exact[len(PROMPT_IDS) - 1], atol=CLOSE)


def test_an_8_bit_cache_says_the_same_and_is_near(smollm2, exact):
    model = zoo.llama.load(smollm2, cache_type="q8_0")
    reply = model.chat(QUESTION)
    assert "".join(reply) == REPLY
    assert reply.stats.ids == REPLY_IDS
    # Keys and values are off by up to 1/254 of the largest of their 32, which is 0.2 on average in
    # the logits (root mean square), and some times that at most.
    logits = model.logits(IDS)
    assert np.sqrt(np.mean((logits - exact) ** 2)) < 0.3
    np.testing.assert_allclose(logits, exact, atol=2)
