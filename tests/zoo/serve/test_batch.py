"""A batch of a real small model: each reply is what a context of its own would give."""

from __future__ import annotations

import numpy as np
import pytest

from tests.zoo.llama import tiny
from zoo.llama.loading import load
from zoo.serve.metrics import Metrics
from zoo.serve.models import LOADERS, Options
from zoo.serve.scheduler import Piece, Scheduler, Ticket

PROMPTS = ["the fox", "the lazy dog jumps", "code()", "the fox jumps over", "naïve café", "12, 345"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_gguf(tmp_path_factory.mktemp("llama") / "tiny.gguf"))


@pytest.fixture
def chats(path: str) -> Scheduler:
    options = Options(slots=2, device="reference", dtype="f32")
    return LOADERS["chat"](path, "tiny", options, Metrics())


def run(chats: Scheduler, prompts: list[str], **options) -> list[str]:
    pieces: list[list[Piece]] = [[] for _ in prompts]
    for prompt, got in zip(prompts, pieces):
        ids = chats.llama.prompt_ids(prompt)
        chats.add(Ticket(chats.llama.reply(ids, **options), got.append))
    while chats.step():
        pass
    assert all(got[-1].finish for got in pieces)
    return ["".join(piece.text for piece in got) for got in pieces]


def test_replies_that_share_slots_equal_those_that_are_alone(path, chats):
    alone = load(path, "reference", "f32")
    expected = ["".join(alone.generate(prompt, max_tokens=9)) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    assert run(chats, PROMPTS, max_tokens=9) == expected
    assert run(chats, PROMPTS[::-1], max_tokens=9) == expected[::-1]  # with what slots have kept


def test_a_prompt_goes_to_the_slot_that_has_most_of_it(chats):
    run(chats, PROMPTS[:2], max_tokens=2)
    ids = chats.llama.prompt_ids(PROMPTS[1])
    slot = chats.batch.add([*ids, 5])
    assert chats.batch.slots[slot].done == len(ids)
    chats.batch.free(slot)


def test_an_embedding_is_the_mean_of_the_normalised_states(chats):
    one = chats.embed(list(range(2, 70)))
    assert one.shape == (24,) and np.linalg.norm(one) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(chats.embed(list(range(2, 70))), one)
    # a prefix has the same states as in the longer text: means are put together of parts
    first, second = (chats.embed(list(range(2, n))) for n in (34, 35))
    assert 0.9 < float(first @ second) < 1
