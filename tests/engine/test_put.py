"""Tensor.put: slices go where ints say."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Tensor, program
from engine import dtype as dt
from engine.graph import ShapeError


@pytest.mark.parametrize("kind", [dt.float32, dt.float16])
@pytest.mark.parametrize("size", [3, 8, 37])
def test_slices_are_written_where_the_index_says_and_nowhere_else(device, kind, size):
    random = np.random.default_rng(0)
    before = random.normal(size=(2, 3, 4, size)).astype(np.float16).astype(np.float32)
    state = Tensor(before, device=device).cast(kind).contiguous().realize()
    put = program(lambda index, value: state.put(index, value * 2))
    for index in ([3, 0, 23, 7, 8], [22, 21, 20, 19, 1]):
        value = random.normal(size=(5, size)).astype(np.float16).astype(np.float32)
        put(Tensor(index, dtype=dt.int32, device=device), Tensor(value, device=device))
        before.reshape(24, size)[index] = value * 2
        np.testing.assert_array_equal(state.cast(dt.float32).numpy(), before)


def test_an_index_outside_is_clamped(device):
    state = Tensor.zeros(4, 16, device=device).contiguous().realize()
    ones = Tensor(np.ones((2, 16), np.float32), device=device)
    state.put(Tensor([-5, 99], dtype=dt.int32, device=device), ones)
    assert state.numpy()[:, 0].tolist() == [1, 0, 0, 1]


def test_readers_before_see_the_old_values_and_readers_after_the_new_ones(device):
    state = Tensor.zeros(4, 16, device=device).contiguous().realize()
    before = state.sum()
    state.put(Tensor([1], device=device), Tensor(np.ones((1, 16), np.float32), device=device))
    after = state.sum()
    assert (before.item(), after.item()) == (0, 16)


def test_shapes_that_do_not_fit_are_told(device):
    state = Tensor.zeros(4, 16, device=device).contiguous()
    with pytest.raises(ShapeError, match="scatter"):
        state.put(Tensor([1, 2], device=device), Tensor.zeros(1, 16, device=device))
