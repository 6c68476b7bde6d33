"""Many sequences at once: each gets the logits that it gets alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import Tensor
from tests.zoo.llama import reference, tiny
from weights import Params
from zoo.errors import UserError
from zoo.llama.batch import Batch
from zoo.llama.context import Context

VOCAB, SIZE, SLOTS = 50, 96, 3
TOLERANCE = 1e-4  # float32 sums on logits of size 10, as in test_loading


@pytest.fixture(scope="module")
def parts(device):
    weights, config = tiny.tensors(VOCAB), tiny.config(VOCAB)
    tree = {k: Tensor.from_numpy(w, device=device) for k, w in weights.items()}
    return weights, config, Batch(Params(tree), config, SLOTS, SIZE, device)


@pytest.fixture
def batch(parts):
    _, _, batch = parts
    for n, slot in enumerate(batch.slots):
        if slot.taken:
            batch.free(n)
        batch.slots[n].done = 0
    return batch


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def right(parts, tokens: list[int]) -> np.ndarray:
    return reference.logits(parts[0], parts[1], tokens)[-1]


def run(parts, batch, texts: dict[int, list[int]], steps: int) -> int:
    """Step, check what comes and feed the likeliest token; how many logits came."""
    came = 0
    for _ in range(steps):
        for slot, logits in batch.step().items():
            np.testing.assert_allclose(logits, right(parts, texts[slot]), atol=TOLERANCE)
            texts[slot].append(int(logits.argmax()))
            batch.feed(slot, texts[slot][-1])
            came += 1
    return came


def test_sequences_that_join_and_leave_get_the_logits_that_they_get_alone(parts, batch):
    texts: dict[int, list[int]] = {}
    for n, count in enumerate((5, 1, 40)):
        texts[batch.add(ids(count, n))] = ids(count, n)
        run(parts, batch, texts, 3)
    left = next(iter(texts))
    batch.free(left)
    texts.pop(left)
    assert run(parts, batch, texts, 4) >= 6
    texts[batch.add(ids(70, 7))] = ids(70, 7)  # in the place of the one that left
    assert run(parts, batch, texts, 8) >= 12


def test_what_a_sequence_leaves_is_not_computed_again(parts, batch):
    first = ids(30)
    texts = {batch.add(first): list(first)}
    run(parts, batch, texts, 3)
    (slot,) = texts
    batch.free(slot)
    again = [*texts[slot][:31], 9, 8]
    assert batch.add(again) == slot
    assert batch.slots[slot].done == 31
    run(parts, batch, {slot: again}, 4)


def test_a_sequence_that_waits_keeps_its_place(parts, batch):
    one, two = batch.add(ids(4, 1)), batch.add(ids(4, 2))
    texts = {one: ids(4, 1), two: ids(4, 2)}
    seen: set[int] = set()
    while seen != {one, two}:
        seen |= batch.step().keys()
    batch.feed(one, 3)
    texts[one].append(3)
    run(parts, batch, texts, 3)  # two isn't fed, and gives nothing
    batch.feed(two, 5)
    texts[two].append(5)
    run(parts, batch, texts, 2)


def test_what_does_not_fit_is_told(batch):
    with pytest.raises(UserError, match="room for 1 to 96"):
        batch.add([1] * (SIZE + 1))
    with pytest.raises(UserError, match="room for 1 to 96"):
        batch.add([])
    for _ in range(SLOTS):
        batch.add([1] * SIZE)
    with pytest.raises(UserError, match="slots are taken"):
        batch.add([1])
    with pytest.raises(UserError, match="full"):
        batch.feed(0, 1)


def test_windows_and_limits_of_scores(parts):
    """As Mistral and Gemma have them; what Context gives for them equals transformers."""
    weights, config, batch = parts
    device = batch._device
    windows = (6, None, *[None] * config.n_layers)[: config.n_layers]
    config = replace(config, windows=windows, attention_cap=2.0, logit_cap=5.0)
    params = Params({k: Tensor.from_numpy(w, device=device) for k, w in weights.items()})
    together, alone = (make(params, config, *size, device) for make, *size in
                       ((Batch, SLOTS, SIZE), (Context, SIZE)))  # fmt: skip
    texts = {together.add(ids(count, count)): ids(count, count) for count in (3, 9, 20)}
    seen = dict.fromkeys(texts, 0)
    while min(seen.values()) < 4:
        for slot, logits in together.step().items():
            expected = alone.next_logits(texts[slot])
            np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
            texts[slot].append(int(logits.argmax()))
            together.feed(slot, texts[slot][-1])
            seen[slot] += 1
