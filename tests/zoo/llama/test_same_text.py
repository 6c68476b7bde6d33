"""Temperature 0: one text, however it is computed.

By itself, after a prefix that was there already, with guesses, beside others in a batch, from a
saved session, and with the keys and values of all of it made in one go.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import zoo.llama
from tests.zoo.llama import tiny
from zoo.llama.batch import Batch

SLOTS, SIZE = 4, 512


class Both:
    """A model with a context, and with a batch over the same weights."""

    def __init__(self, path, device: str | None, size: int) -> None:
        self.batch = None

        def make(params, config, _, device, dtype):
            self.batch = Batch(params, config, SLOTS, size, device, dtype)
            return self.batch

        zoo.llama.load(path, device=device, ctx=size, make=make)
        self.model = zoo.llama.load(path, device=device, ctx=size)

    def alone(self, ids: Sequence[int], count: int, **options) -> list[int]:
        reply = self.model.generate(ids, max_tokens=count, **options)
        list(reply)
        return reply.stats.ids

    def anew(self, ids: Sequence[int], count: int, **options) -> list[int]:
        self.model.context.reset()
        return self.alone(ids, count, **options)

    def beside_others(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy replies of all, decoded together; they begin one after the other."""
        stops, waiting = self.model.tokenizer.stop_ids, list(enumerate(prompts))
        running: dict[int, int] = {}
        said: list[list[int]] = [[] for _ in prompts]
        while waiting or running:
            if waiting and len(running) < SLOTS:
                n, ids = waiting.pop(0)
                running[self.batch.add(ids)] = n
            for slot, logits in self.batch.step().items():
                text = said[running[slot]]
                text.append(int(logits.argmax()))
                if text[-1] in stops or len(text) == count:
                    self.batch.free(slot)
                    del running[slot]
                else:
                    self.batch.feed(slot, text[-1])
        return said

    def in_one_go(self, ids: Sequence[int], reply: Sequence[int]) -> list[int]:
        """What the likeliest tokens are, after the prompt and after each of the reply's."""
        text = [*ids, *reply[:-1]]
        return np.argmax(self.model.logits(text)[len(ids) - 1 :], -1).tolist()


def check(both: Both, prompts: list[list[int]], count: int, path) -> None:
    texts = [both.anew(ids, count) for ids in prompts]
    assert len({tuple(text) for text in texts}) > 1
    for ids, text in zip(prompts, texts):
        both.anew([*ids[: len(ids) // 2], 7, 8, 9], 2)
        assert both.alone(ids, count) == text  # half of the prompt was there
        assert both.alone(ids, count) == text  # all of it, and of the reply
        for guesses in (3, 9):
            assert both.anew(ids, count, lookup=guesses) == text
        both.anew(ids, max(1, len(text) // 2), lookup=3)
        both.model.save_session(path)
        both.anew(prompts[0][:1], 2)
        both.model.load_session(path)
        assert both.alone(ids, count, lookup=4) == text
        assert both.in_one_go(ids, text) == text
    assert both.beside_others(prompts, count) == texts


def test_a_random_model_says_the_same_however_it_is_computed(device, tmp_path):
    both = Both(tiny.write_gguf(tmp_path / "tiny.gguf"), device, 200)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 400, n).tolist() for n in (1, 5, 33, 50)]
    prompts += [(draw.integers(0, 400, 6).tolist() * 9)[:40]]
    check(both, prompts, 40, tmp_path / "a.session")


PROMPTS = (
    "What is the capital of France?",
    "Repeat this ten times: the quick brown fox jumps over the lazy dog.",
    "Count from one to thirty, in words.",
    "Tell me a story about a llama and a river.",
    "Write a Python function that adds two numbers, and then one that multiplies them.",
    "List the days of the week, and then list them again.",
)


@pytest.mark.slow
def test_the_real_model_says_the_same_however_it_is_computed(smollm2, tmp_path):
    both = Both(smollm2, None, SIZE)
    prompts = [both.model.template.ids([{"role": "user", "content": p}]) for p in PROMPTS]
    check(both, prompts, 200, tmp_path / "a.session")


@pytest.mark.slow
def test_the_real_models_logits_are_the_same_to_the_last_bit(smollm2):
    """Where int8 products are sums of whole numbers; elsewhere another order rounds otherwise."""
    from engine import get_device

    target = get_device(None).target
    if target is None or not {"avx512_vnni", "avx512f", "f16c"} <= target.features:
        pytest.skip("needs AVX-512 VNNI")
    both = Both(smollm2, None, SIZE)
    context, batch = both.model.context, both.batch
    ids = both.model.template.ids([{"role": "user", "content": PROMPTS[3]}])
    reply = both.anew(ids, 60)
    text = ids + reply
    at = len(ids)
    context.reset()
    alone = np.stack([context.next_logits(text[: n + 1]) for n in range(at - 1, at + 50)])
    context.reset()
    rows = [
        context.each_next(text[: n + 1], text[n + 1 : n + 17]) for n in range(at - 1, at + 50, 17)
    ]
    np.testing.assert_array_equal(np.concatenate(rows), alone)
    one_go = both.model.logits(text)[at - 1 : at + 50]
    np.testing.assert_array_equal(one_go, alone)
    others = [batch.add(ids[:n]) for n in (5, 20)]
    slot, beside = batch.add(ids), []
    while len(beside) < len(alone):
        for n, logits in batch.step().items():
            if n == slot:
                beside.append(logits)
                batch.feed(slot, text[at + len(beside) - 1])
            elif n in others:
                batch.feed(n, int(logits.argmax()))
    np.testing.assert_array_equal(np.stack(beside), alone)
