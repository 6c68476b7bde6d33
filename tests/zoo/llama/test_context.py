"""The cached context: the same logits whatever was computed before, and in whatever chunks."""

from __future__ import annotations

import numpy as np
import pytest

import zoo.llama
from tests.zoo.llama import reference, tiny
from zoo.llama import context as contexts

# float32 sums on logits of size 10, as in test_loading; with "auto" a prompt of more than 32
# tokens may be multiplied in bfloat16, 8 bits, which costs this narrow model 0.02
TOLERANCE = {"f32": 1e-4, "auto": 0.06}
PREFILL = 64  # so that several calls fit into the tiny model's context


@pytest.fixture(
    scope="module",
    params=[("reference", "f32"), ("opencl", "f32"), ("opencl", "auto")],
    ids="-".join,
)
def model(request, tmp_path_factory):
    from engine import DeviceError, get_device

    device, dtype = request.param
    try:
        get_device(device)
    except DeviceError as error:
        pytest.skip(f"no {device} here: {error}")
    path = tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contexts, "PREFILL", PREFILL)
        model = zoo.llama.load(path, device=device, dtype=dtype)
        model.tolerance = TOLERANCE[dtype]
        yield model


@pytest.fixture
def context(model):
    model.context.reset()
    return model.context


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 400, count).tolist()


def expected(model, tokens: list[int]) -> np.ndarray:
    weights = tiny.tensors(model.config.vocab_size)
    return reference.logits(weights, model.config, tokens)


def test_every_length_around_a_chunk_gives_the_right_logits(model, context):
    tokens = ids(2 * PREFILL + 3)
    right = expected(model, tokens)
    for count in (1, 2, 3, PREFILL - 1, PREFILL, PREFILL + 1, PREFILL + 2, 2 * PREFILL + 3):
        context.reset()
        got = context.next_logits(tokens[:count])
        np.testing.assert_allclose(got, right[count - 1], atol=model.tolerance)


def test_tokens_one_by_one_equal_a_whole_prompt(model, context):
    tokens = ids(40, seed=1)
    right = expected(model, tokens)
    for count in range(1, 41):
        got = context.next_logits(tokens[:count])
        np.testing.assert_allclose(got, right[count - 1], atol=model.tolerance)


def test_logits_of_all_positions(model, context):
    tokens = ids(70, seed=2)
    np.testing.assert_allclose(
        context.all_logits(tokens), expected(model, tokens), atol=model.tolerance
    )
    # They leave a cache that can be gone on from.
    more = [*tokens, 7]
    np.testing.assert_allclose(
        context.next_logits(more), expected(model, more)[-1], atol=model.tolerance
    )


def test_reused_prefix_gives_the_same_logits(model, context):
    one, other = ids(30, seed=3), ids(30, seed=4)
    mixed = one[:20] + other[20:]
    context.next_logits(one)
    np.testing.assert_allclose(
        context.next_logits(mixed), expected(model, mixed)[-1], atol=model.tolerance
    )
    context.next_logits(other)
    np.testing.assert_allclose(
        context.next_logits(one), expected(model, one)[-1], atol=model.tolerance
    )
    shorter = one[:12]
    np.testing.assert_allclose(
        context.next_logits(shorter), expected(model, shorter)[-1], atol=model.tolerance
    )


def test_asking_again_computes_one_token_and_agrees(model, context):
    tokens = ids(25, seed=5)
    first = context.next_logits(tokens).copy()
    np.testing.assert_allclose(context.next_logits(tokens), first, atol=model.tolerance)


def test_last_position_of_the_context_works(model, context):
    tokens = ids(context.size, seed=6)
    got = context.next_logits(tokens)
    np.testing.assert_allclose(got, expected(model, tokens)[-1], atol=model.tolerance)


def test_greedy_text_is_the_same_with_and_without_a_reused_prefix(model, context):
    def reply() -> list[int]:
        generation = model.generate("the quick brown fox", max_tokens=30)
        list(generation)
        return generation.stats.ids

    fresh = reply()
    assert reply() == fresh
    list(model.generate("the quick red hen", max_tokens=5))
    assert reply() == fresh


def test_interrupted_step_leaves_a_true_cache(model, context, monkeypatch):
    tokens = ids(50, seed=7)
    context.next_logits(tokens[:20])

    def interrupted(*args, **ints):
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "_few", interrupted)
    with pytest.raises(KeyboardInterrupt):
        context.next_logits(tokens[:10] + tokens[20:50])
    monkeypatch.undo()
    np.testing.assert_allclose(
        context.next_logits(tokens), expected(model, tokens)[-1], atol=model.tolerance
    )


def test_two_devices_choose_the_same_greedy_tokens(model, tmp_path):
    oracle = zoo.llama.load(tiny.write_gguf(tmp_path / "tiny.gguf"), device="reference")
    generations = [m.generate("12 lazy dogs", max_tokens=40) for m in (model, oracle)]
    for generation in generations:
        list(generation)
    assert generations[0].stats.ids == generations[1].stats.ids
