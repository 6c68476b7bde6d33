"""Many replies on one batch: none waits for another, none is another's, who goes frees the slot."""

from __future__ import annotations

import random

import pytest

from tests.zoo.serve.fake import TOKENIZER, FakeBatch, heard, scheduler
from zoo.llama.generate import PromptTooLong
from zoo.serve.metrics import Metrics
from zoo.serve.scheduler import Piece, Scheduler, Ticket


def ticket(chats: Scheduler, text: str, **options) -> tuple[Ticket, list[Piece]]:
    """A reply that is asked for, and the pieces that come of it."""
    pieces: list[Piece] = []
    ids = TOKENIZER.encode(f"<|im_start|>user\n{text}<|im_end|>", special=True)
    return Ticket(chats.llama.reply(ids, **options), pieces.append), pieces


def said(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def run(chats: Scheduler, most: int = 10_000) -> None:
    for _ in range(most):
        if not chats.step():
            return
    pytest.fail("there is no end")


def test_more_replies_than_slots_all_get_their_own_text():
    chats = scheduler(slots=4)
    asked = [ticket(chats, f"number {n} " + "fox " * (n % 5)) for n in range(23)]
    for one, _ in asked:
        chats.add(one)
    run(chats)
    for n, (one, pieces) in enumerate(asked):
        assert said(pieces) == f"You said: number {n} " + "fox " * (n % 5)
        assert pieces[-1].finish == "stop" and one.reply.finish == "stop"
        assert all(piece.finish is None for piece in pieces[:-1])
    assert chats.batch.most == 4 and not chats.batch.script


def test_a_reply_joins_while_others_go_on():
    chats = scheduler(slots=2)
    first, early = ticket(chats, "the fox " * 9)
    chats.add(first)
    while not early:
        chats.step()
    second, late = ticket(chats, "b")
    chats.add(second)
    while not late or late[-1].finish is None:
        assert chats.step()
    assert first.reply.finish is None  # the longer one, which came first, still goes on
    run(chats)
    assert said(early) == "You said: " + "the fox " * 9


def test_who_goes_frees_the_slot_within_one_step():
    chats = scheduler(slots=1)
    gone, pieces = ticket(chats, "the lazy dog " * 20)
    waits, others = ticket(chats, "next")
    chats.add(gone)
    chats.add(waits)
    while not pieces:
        chats.step()
    count = len(pieces)
    gone.cancelled = True
    chats.step()
    assert list(chats.active.values()) == [waits] and len(pieces) == count
    run(chats)
    assert said(others) == "You said: next"


def test_who_goes_while_waiting_is_never_begun():
    chats = scheduler(slots=1)
    for n in range(3):
        one, _ = ticket(chats, f"{n}")
        one.cancelled = n == 1
        chats.add(one)
    begun = []
    chats.batch.says = lambda prompt: begun.append(prompt) or heard(prompt)
    run(chats)
    assert len(begun) == 2


def test_a_reply_that_fails_leaves_the_others_alone():
    class Broken:
        finished = False

        def mask(self):
            raise RuntimeError("no mask")

    chats = scheduler()
    good, pieces = ticket(chats, "good")
    bad, failed = ticket(chats, "bad")
    bad.reply._constraint = Broken()
    chats.add(bad)
    chats.add(good)
    run(chats)
    assert [str(piece.error) for piece in failed] == ["no mask"]
    assert said(pieces) == "You said: good"


def test_a_step_that_fails_ends_those_under_way_and_later_ones_go_on():
    chats = scheduler(slots=2)
    asked = [ticket(chats, f"{n}") for n in range(3)]
    for one, _ in asked:
        chats.add(one)
    chats.batch.fails = RuntimeError("the device is lost")
    chats.step()
    assert [len(pieces) for _, pieces in asked] == [1, 1, 0]
    assert isinstance(asked[0][1][0].error, RuntimeError)
    chats.batch.fails = None
    run(chats)
    assert said(asked[2][1]) == "You said: 2"


def test_a_prompt_that_no_slot_takes_is_told_and_the_next_goes_on():
    chats = scheduler(slots=1)
    add, chats.batch.add = chats.batch.add, lambda ids: {}[0]
    bad, failed = ticket(chats, "bad")
    chats.add(bad)
    run(chats)
    assert isinstance(failed[0].error, KeyError)
    chats.batch.add = add
    good, pieces = ticket(chats, "good")
    chats.add(good)
    run(chats)
    assert said(pieces) == "You said: good"


def test_the_end_of_the_context_ends_a_reply():
    chats = scheduler(size=40)
    one, pieces = ticket(chats, "x" * 20)
    chats.add(one)
    run(chats)
    assert pieces[-1].finish == "context"
    assert len(one.reply.ids) == 41  # the last token drawn needs no place
    with pytest.raises(PromptTooLong):
        ticket(chats, "x" * 99)


def test_the_tokens_are_counted():
    metrics = Metrics()
    chats = scheduler(metrics=metrics)
    one, _ = ticket(chats, "abc", max_tokens=3)
    chats.add(one)
    run(chats)
    assert metrics.tokens.get("tiny", "prompt") == len(one.reply.ids) - 3
    assert metrics.tokens.get("tiny", "reply") == 3
    assert metrics.busy.get("tiny") == 0
    assert "zoo_first_token_seconds_count" in metrics.first_token.text()


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_coming_and_going(seed):
    draw = random.Random(seed)
    chats = scheduler(slots=draw.randint(1, 5))
    asked = []
    for n in range(200):
        if draw.random() < 0.3:
            one, pieces = ticket(chats, f"chat {n}", max_tokens=draw.choice([None, 1, 5]))
            asked.append((n, one, pieces))
            chats.add(one)
        if asked and draw.random() < 0.1:
            draw.choice(asked)[1].cancelled = True
        chats.step()
    run(chats)
    for n, one, pieces in asked:
        assert f"You said: chat {n}".startswith(said(pieces))
        assert one.cancelled or pieces[-1].finish in ("stop", "length")
    assert not chats.batch.script and isinstance(chats.batch, FakeBatch)
