"""Keys and values in blocks of int8: what is read back, and what it does to the logits."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from tests.zoo.llama import reference, tiny
from weights import Params
from zoo.errors import UsageError
from zoo.llama import cache, model
from zoo.llama.context import Context

VOCAB = 50
# Off by half a step of 1/127 of its block's largest at most, and by the rounding to a half.
STEP = 1 / 254 + 1e-3
# Rounding errors of 1/440 (root mean square, of the block's largest) on average in keys and values,
# through two layers, on logits of size 10.
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def parts(device):
    from engine import Tensor

    config = replace(tiny.config(VOCAB), head_dim=32)
    draw = np.random.default_rng(0)
    weights = {
        name: (draw.normal(size=shape) * 2 / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in model.expected_shapes(config).items()
    }
    tree = Params({k: Tensor.from_numpy(w, device=device) for k, w in weights.items()})
    contexts = {
        kind: Context(tree, config, 100, device, cache_type=kind) for kind in ("f32", "f16", "q8_0")
    }
    return weights, config, contexts


def test_blocks_are_read_back_within_half_a_step(device):
    from engine import Tensor

    kept = cache.Quantised((2, 10, 64), device)
    values = np.random.default_rng(1).normal(size=(2, 3, 64)).astype(np.float32)
    values[0, 0, :32] = 0  # a block without any largest value
    values[1, 2] *= 1000
    kept[:, 4:7] = Tensor(values, device=device)
    kept.put(Tensor([0, 19], device=device), Tensor(values[:, 1], device=device))
    got = kept[:, :10].float().numpy()
    largest = np.abs(values.reshape(2, 3, 2, 32)).max(-1, keepdims=True)
    error = np.abs(got[:, 4:7] - values).reshape(2, 3, 2, 32)
    assert (error <= largest * STEP).all() and error.max() > 0
    np.testing.assert_array_equal(got[0, 0], got[0, 5])
    np.testing.assert_array_equal(got[1, 9], got[1, 5])
    assert not got[:, 1:4].any() and not got[:, 7:9].any()


@pytest.mark.parametrize("count", [1, 2, 34, 70])
def test_logits_stay_near_those_of_an_exact_cache(parts, count):
    weights, config, contexts = parts
    ids = np.random.default_rng(count).integers(0, VOCAB, count + 3).tolist()
    right = reference.logits(weights, config, ids)
    for context, tolerance in ((contexts["f16"], 0.02), (contexts["q8_0"], TOLERANCE)):
        context.reset()
        for n in range(count, count + 3):
            np.testing.assert_allclose(context.next_logits(ids[:n]), right[n - 1], atol=tolerance)
        rows = context.each_next(ids[:count], ids[count : count + 2])
        np.testing.assert_allclose(rows, right[count - 1 : count + 2], atol=tolerance)


def test_it_takes_about_half_the_memory_of_halves(parts):
    def size(context) -> int:
        kept = [t for x in (*context.cache.k, *context.cache.v) for t in cache.tensors(x)]
        return sum(prod(t.shape) * t.dtype.itemsize for t in kept)

    _, _, contexts = parts
    assert size(contexts["q8_0"]) == size(contexts["f16"]) * 34 / 64
    assert size(contexts["f16"]) == size(contexts["f32"]) / 2


def test_heads_that_are_not_made_of_blocks_and_unknown_types_are_told():
    with pytest.raises(UsageError, match="multiple of 32 values, not of 4"):
        Context(None, tiny.config(VOCAB), 10, "reference", cache_type="q8_0")
    with pytest.raises(UsageError, match="cache_type must be one of f32, f16, q8_0, got 'q4'"):
        Context(None, tiny.config(VOCAB), 10, "reference", cache_type="q4")
