"""Tensors that a captured program writes to: updated in place, shared, written to in between."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import Tensor, program
from tests.engine.oracle import each_device
from tests.engine.test_program import cache, numbers, tensor


@each_device
def test_state_is_updated_in_place(device: str) -> None:
    state, want = cache(device, 8, 16), np.zeros((8, 16), np.float32)

    def network(x: Tensor, at: Any) -> Tensor:
        before = state.sum()
        state[at : at + 1] = x * 2
        return before + state[: at + 1].sum() * 1000

    step = program(network, at=(0, 7))
    for at in (0, 1, 2, 7, 1, 0):
        x = numbers(1, 16, start=at)
        got = step(tensor(x, device), at=at).item()
        before = want.sum()
        want[at] = x * 2
        assert got == before + want[: at + 1].sum() * 1000
        np.testing.assert_array_equal(state.numpy(), want)
    state[:] = 1  # and it may be written to outside of the program
    state.realize()
    got = step(tensor(numbers(1, 16), device), at=0).item()
    assert got == 8 * 16 + numbers(1, 16).sum() * 2 * 1000


def _count_up(x: Tensor, at: Any, state: Tensor) -> Tensor:
    state[at : at + 1] = x
    return state.sum()


@each_device
def test_a_state_that_was_lazy_keeps_what_is_written(device: str) -> None:
    state = Tensor.zeros(4, device=device).contiguous()
    step = program(lambda x, at: _count_up(x, at, state), at=(0, 3))
    assert [step(tensor([1], device), at=at).item() for at in range(4)] == [1, 2, 3, 4]


@each_device
def test_a_write_from_before_the_first_call_happens_once(device: str) -> None:
    state = cache(device, 4)
    state[:] = 5
    step = program(lambda x, at: _count_up(x, at, state), at=(0, 3))
    assert [step(tensor([0], device), at=at).item() for at in range(4)] == [15, 10, 5, 0]


@each_device
def test_a_write_between_two_calls_is_seen(device: str) -> None:
    state = cache(device, 4)
    step = program(lambda x, at: _count_up(x, at, state), at=(0, 3))
    step(tensor([0], device), at=0)
    state[:] = 5
    assert step(tensor([0], device), at=0).item() == 15


@each_device
def test_a_program_may_only_write(device: str) -> None:
    state = cache(device, 4)

    def network(x: Tensor) -> tuple:
        state[1:3] = x
        return ()

    step = program(network)
    assert step(tensor([5, 6], device)) == ()
    assert step(tensor([7, 8], device)) == ()
    assert state.tolist() == [0, 7, 8, 0]


@each_device
def test_programs_share_state(device: str) -> None:
    """Prefill and decode are two programs over one cache."""
    state = cache(device, 8)

    def many(x: Tensor) -> Tensor:
        state[:4] = x
        return state.sum()

    def one(x: Tensor, at: Any) -> Tensor:
        state[at : at + 1] = x
        return state.sum()

    prefill, decode = program(many), program(one, at=(0, 7))
    assert prefill(tensor([1, 2, 3, 4], device)).item() == 10
    assert decode(tensor([10], device), at=4).item() == 20
    assert decode(tensor([20], device), at=5).item() == 40
    assert prefill(tensor([0, 0, 0, 0], device)).item() == 30
    assert decode(tensor([0], device), at=4).item() == 20
