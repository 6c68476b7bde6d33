"""Captured programs: right for every input and position, compiled once, in-place state, errors."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from engine import DeviceError, Tensor, Var, get_device, program
from engine import dtype as dt
from engine.functional import softmax
from tests.engine.oracle import each_device, need

WEIGHT = np.random.default_rng(0).integers(-3, 4, (16, 16)).astype(np.float32)


def tensor(array: Any, device: str) -> Tensor:
    return Tensor(np.asarray(array, np.float32), device=device)


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape) % 7


def cache(device: str, *shape: int) -> Tensor:
    return Tensor.zeros(*shape, device=device).contiguous().realize()


@each_device
def test_replays_take_new_inputs(device: str) -> None:
    w = tensor(WEIGHT, device)
    calls = []

    def network(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return (x @ w).maximum(0) @ w + y

    step = program(network)
    for i in range(4):
        x, y = numbers(2, 16, start=i), numbers(16, start=5 * i)
        got = step(tensor(x, device), tensor(y, device)).numpy()
        np.testing.assert_array_equal(got, np.maximum(x @ WEIGHT, 0) @ WEIGHT + y)
    assert len(calls) == 1


@each_device
def test_replays_take_new_ints(device: str) -> None:
    """In shapes, as positions and as numbers, all at once."""
    table = tensor(numbers(20, 16), device)

    def network(x: Tensor, start: Any, length: Any) -> Tensor:
        return (x + table[start : start + length].sum(0)) * Tensor(start, device=device) + length

    step = program(network, start=(0, 10), length=(1, 10))
    x = numbers(16)
    for start, length in ((0, 1), (10, 10), (3, 4), (3, 4), (0, 10)):
        got = step(tensor(x, device), start=start, length=length).numpy()
        want = (x + numbers(20, 16)[start : start + length].sum(0)) * start + length
        np.testing.assert_array_equal(got, want)


@each_device
def test_several_outputs(device: str) -> None:
    step = program(lambda x: (x * 2, x.sum(), x, x.reshape(4, 2)))
    for i in range(3):
        x = numbers(2, 4, start=i)
        double, total, same, folded = step(tensor(x, device))
        np.testing.assert_array_equal(double.numpy(), x * 2)
        assert total.item() == x.sum()
        np.testing.assert_array_equal(same.numpy(), x)
        np.testing.assert_array_equal(folded.numpy(), x.reshape(4, 2))


@each_device
def test_one_output_twice(device: str) -> None:
    def network(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    a, b = program(network)(tensor([1, 2], device))
    assert a.tolist() == b.tolist() == [2, 4]


@each_device
def test_an_output_may_be_the_next_input(device: str) -> None:
    step = program(lambda x: x * 2 + 1)
    x = tensor([0, 1], device)
    for _ in range(4):
        x = step(x)
    assert x.tolist() == [15, 31]


@each_device
def test_outputs_are_overwritten_by_the_next_call(device: str) -> None:
    step = program(lambda x: x * 2)
    first = step(tensor([1, 2], device))
    lazy = first + 1
    kept = first.numpy()
    second = step(tensor([3, 4], device))
    assert second.tolist() == [6, 8]
    assert kept.tolist() == [2, 4]
    with pytest.raises(ValueError, match="overwritten"):
        lazy.numpy()


@each_device
def test_each_input_shape_and_type_has_its_capture(device: str) -> None:
    step = program(lambda x: x * 2)
    for array in (numbers(3), numbers(4), numbers(2, 2), np.arange(4, dtype=np.int32), numbers(4)):
        got = step(Tensor(array, device=device))
        np.testing.assert_array_equal(got.numpy(), array * 2)
        assert got.dtype is dt.from_numpy(array.dtype)
    assert len(step.captures) == 4


@each_device
def test_lazy_and_typed_inputs_are_computed_first(device: str) -> None:
    step = program(lambda x: x.float() + 1)
    x = tensor([1, 2, 3], device)
    assert step((x * 3).cast(dt.float16)).tolist() == [4, 7, 10]
    assert step((x * 5).cast(dt.float16)).tolist() == [6, 11, 16]
    assert step(x[1:]).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("ints", "error", "words"),
    [
        ({}, TypeError, "at"),
        ({"at": 1, "other": 2}, TypeError, "other"),
        ({"at": -1}, ValueError, "at = -1"),
        ({"at": 8}, ValueError, "0 … 7"),
    ],
)
def test_wrong_ints_are_named(ints: dict, error: type, words: str) -> None:
    step = program(lambda x, at: x + Tensor(at, device="reference"), at=(0, 7))
    with pytest.raises(error, match=words):
        step(tensor([1], "reference"), **ints)
    assert step(tensor([1], "reference"), at=np.int64(7)).item() == 8


@each_device
def test_any_name_will_do_for_an_int(device: str) -> None:
    w = tensor(numbers(16, 16), device)
    names = ("first", "last", "row", "i0", "w", "int")

    def network(x: Tensor, **n: Any) -> Tensor:
        return softmax(x[: n["first"]] @ w).sum(0) + Tensor(sum(n.values()), device=device)

    step = program(network, **dict.fromkeys(names, (1, 8)))
    x = tensor(numbers(8, 16), device)
    expected = [softmax(x[:n] @ w).sum(0).numpy() + 6 * n for n in (8, 3)]
    for n, wanted in zip((8, 3), expected):
        got = step(x, **dict.fromkeys(names, n)).numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-5)  # another order of sums


def test_symbolic_values_outside_a_program_are_refused() -> None:
    x = tensor(numbers(8), "reference")
    n = Var("n", 1, 8)
    with pytest.raises(ValueError, match="no value for n"):
        x[:n].sum().realize()


def test_inputs_have_no_value_during_capture() -> None:
    step = program(lambda x: x * x.sum().item())
    with pytest.raises(DeviceError, match="captured"):
        step(tensor([1, 2], "reference"))


def test_a_capture_that_failed_leaves_no_trace() -> None:
    state = cache("reference", 4)
    broken = [True]

    def network(x: Tensor) -> Tensor:
        if broken[0]:
            raise KeyError("once")
        state[:2] = x
        return state.sum()

    step = program(network)
    with pytest.raises(KeyError):
        step(tensor([1, 2], "reference"))
    broken[0] = False
    assert step(tensor([1, 2], "reference")).item() == 3


def test_captures_in_several_threads_do_not_mix() -> None:
    """A server's models are captured while others run, each in a thread of its own."""
    problems = []

    def work(n: int) -> None:
        cache = Tensor.zeros(2, 4).contiguous()
        cache.realize()

        @program
        def written_and_summed(x: Tensor) -> Tensor:
            cache[0:1] = x
            time.sleep(0.02)  # the others get their turn in the midst of it
            return cache.sum(0)

        try:
            for value in (1, 2):
                given = np.full((1, 4), 10 * n + value, np.float32)
                got = written_and_summed(Tensor(given) + 1).numpy()
                np.testing.assert_array_equal(got, given[0] + 1)
        except (AssertionError, ValueError) as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@each_device
def test_one_compile_serves_every_position(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the second call nothing is built, planned or traced again."""
    counts = dict.fromkeys(("build", "prepare", "schedule", "trace"), 0)

    def counted(name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    for owner in (sys.modules["engine.program"], sys.modules["engine.realize"]):
        monkeypatch.setattr(owner, "prepare", counted("prepare", owner.prepare))
        monkeypatch.setattr(owner, "specialised", counted("schedule", owner.specialised))
    if device != "reference":
        backend = get_device(device)
        monkeypatch.setattr(backend, "build", counted("build", backend.build))
    keys, w = cache(device, 32, 16), tensor(WEIGHT, device)

    def network(x: Tensor, at: Any) -> Tensor:
        counts["trace"] += 1
        keys[at : at + 1] = x @ w
        seen = keys[: at + 1]
        return softmax(x @ seen.transpose() * 0.01) @ seen

    step = program(network, at=(0, 31))
    after = None
    for at in range(12):
        step(tensor(numbers(1, 16, start=at), device), at=at).numpy()
        if at == 1:
            after = dict(counts)
    assert counts == after
    assert counts["trace"] == 1


@each_device
def test_a_program_equals_the_same_calls_without_one(device: str) -> None:
    """A fixed length may lay its sums out in another order: some units of 2^-24, relative."""

    def make() -> Callable:
        keys, w = cache(device, 16, 16), tensor(WEIGHT, device)

        def network(x: Tensor, at: Any) -> Tensor:
            keys[at : at + 1] = x @ w
            if isinstance(at, int):
                keys.realize()
            seen = keys[: at + 1]
            return softmax(x @ seen.transpose() * 0.05) @ seen

        return network

    eager, step = make(), program(make(), at=(0, 15))
    for at in range(6):
        x = tensor(numbers(1, 16, start=3 * at), device)
        np.testing.assert_allclose(step(x, at=at).numpy(), eager(x, at).numpy(), rtol=1e-6)


@seed(5)
@settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_opencl_and_reference_agree_on_any_sequence_of_calls(data: st.DataObject) -> None:
    """Whole numbers, so exact: calls of random positions, lengths and inputs, with a state."""
    need("opencl")
    rows = data.draw(st.sampled_from((1, 3, 8)))
    steps = []
    for device in ("opencl", "reference"):
        state, w = cache(device, 24, 16), tensor(WEIGHT, device)

        def network(
            x: Tensor, at: Any, seen: Any, state: Tensor = state, w: Tensor = w
        ) -> tuple[Tensor, Tensor]:
            state[at : at + rows] = (x @ w).maximum(-20)
            return state[:seen].sum(0), state[:seen].transpose() @ state[:seen].max(1)

        steps.append((device, program(network, at=(0, 24 - rows), seen=(1, 24))))
    for _ in range(data.draw(st.integers(1, 5))):
        at, seen = data.draw(st.integers(0, 24 - rows)), data.draw(st.integers(1, 24))
        x = numbers(rows, 16, start=data.draw(st.integers(0, 6)))
        got, want = (step(tensor(x, device), at=at, seen=seen) for device, step in steps)
        for a, b in zip(got, want):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
