"""Writing into views, reads around the writes, several outputs at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from engine import Tensor, program
from engine import dtype as dt
from tests.engine.oracle import each_device, property_test, rng, same, shapes, small, tensor


def box(data: st.DataObject, shape: tuple[int, ...]) -> tuple:
    """Ints and slices that select at least one element."""
    key: list = []
    for n in shape:
        first = data.draw(st.integers(0, n - 1))
        last = data.draw(st.integers(first, n - 1))
        key.append(first if data.draw(st.integers(0, 3)) == 0 else slice(first, last + 1))
    return tuple(key)


def buffer(data: st.DataObject, device: str, dtype: dt.DType = dt.float32) -> tuple:
    a = small(rng(data), data.draw(shapes(max_rank=3, min_side=1)) + (5,), dtype)
    return Tensor(a, device=device).contiguous().realize(), a.copy()


@property_test(reference=100, opencl=10)
def test_writes_are_seen_by_later_reads(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((dt.float32, dt.float16, dt.int32, dt.uint8)))
    x, a = buffer(data, device, dtype)
    r = rng(data)
    for _ in range(data.draw(st.integers(1, 4))):
        key = box(data, a.shape)
        value = small(r, a[key].shape, dtype)
        x[key] = tensor(value, device) + 1
        a[key] = value + np.array(1, value.dtype)
        if data.draw(st.booleans()):
            same(x * 2, a * np.array(2, a.dtype))
        if data.draw(st.booleans()):
            x.realize()
    same(x, a)


@each_device
def test_reads_between_writes(device: str) -> None:
    """Each read carries out the writes so far, whether or not the tensor itself is realized."""
    x = Tensor.zeros(4, device=device).contiguous().realize()
    x[0] = 1
    same(x * 2, np.array([2, 0, 0, 0], np.float32))
    same(x * 3, np.array([3, 0, 0, 0], np.float32))
    x[1] = 1
    same(x * 2, np.array([2, 2, 0, 0], np.float32))
    x[2] = 1
    same(x.sum(), np.float32(3))
    same(x + 0, np.array([1, 1, 1, 0], np.float32))
    same(x, np.array([1, 1, 1, 0], np.float32))


@property_test(reference=60, opencl=8)
def test_a_value_broadcasts_and_casts_into_the_view(device: str, data: st.DataObject) -> None:
    x, a = buffer(data, device)
    key = box(data, a.shape)
    number = data.draw(st.integers(-5, 5))
    x[key] = number
    a[key] = number
    same(x, a)
    value = small(rng(data), a.shape[-1:], dt.int32)
    x[...] = tensor(value, device)
    a[...] = value
    same(x, a)


@property_test(reference=100, opencl=13)
def test_a_read_from_before_a_write_never_sees_it(device: str, data: st.DataObject) -> None:
    """Realized with the write, or before it, the old values; after it, an error but no new ones."""
    x, a = buffer(data, device)
    key = box(data, a.shape)
    before = data.draw(st.sampled_from([lambda t: t * 2, lambda t: t[..., 1:] + t[..., :-1]]))
    old, want = before(x), before(a.copy())
    x[key] = 100
    a[key] = 100
    order = data.draw(st.sampled_from(["together", "read first", "write first"]))
    if order == "together":
        x.realize(old)
    elif order == "read first":
        old.realize()
    else:
        x.realize()
        try:
            old.realize()
        except ValueError:
            return
    same(old, want)
    same(x, a)


@property_test(reference=60, opencl=8)
def test_a_write_computed_from_its_own_buffer(device: str, data: st.DataObject) -> None:
    """The value reads other elements of the buffer than the ones it replaces."""
    x, a = buffer(data, device)
    x[...] = x.flip(-1) + 1
    a[...] = a[..., ::-1].copy() + 1
    same(x, a)
    x[..., 1:] = x[..., :-1] * 2
    a[..., 1:] = a[..., :-1].copy() * 2
    same(x, a)
    x[..., :-1] = x[..., 1:] - x.sum(-1, keepdim=True)
    a[..., :-1] = a[..., 1:].copy() - a.sum(-1, keepdims=True)
    same(x, a)


@property_test(reference=40, opencl=10)
def test_writes_between_reads_in_one_program(device: str, data: st.DataObject) -> None:
    x, a = buffer(data, device)
    key = box(data, a.shape)

    def step(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = x.sum(-1)
        x[key] = value.expand(*a[key].shape)
        second = x * 3
        x[...] = x + 1
        return first, second, x.max(-1)

    run = program(step)
    for number in (7, -3, 20):
        got = run(Tensor(np.float32(number), device=device))
        first = a.sum(-1)
        a[key] = number
        second = a * 3
        a += 1
        for tensor_, want in zip(got, (first, second, a.max(-1))):
            same(tensor_, want)
    same(x, a)


@each_device
def test_writing_does_not_change_what_was_copied_or_wrapped(device: str) -> None:
    a = np.arange(6, dtype=np.float32)
    weight = Tensor.from_numpy(a, device)
    x = Tensor.from_numpy(a, device)
    x[1:3] = 50
    same(weight, np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(a, np.arange(6))
    same(x, np.array([0, 50, 50, 3, 4, 5], np.float32))


@each_device
def test_zero_size_write_changes_nothing(device: str) -> None:
    x = Tensor.zeros(4, 3, device=device).contiguous().realize()
    x[2:2] = 5
    same(x, np.zeros((4, 3), np.float32))


@each_device
def test_writing_with_a_step_or_an_index_tensor_is_refused(device: str) -> None:
    x = Tensor.zeros(4, 3, device=device).contiguous()
    with pytest.raises(TypeError):
        x[::2] = 1
    with pytest.raises(TypeError):
        x[Tensor([0, 1], device=device)] = 1


@property_test(reference=60, opencl=10)
def test_several_outputs_share_their_work(device: str, data: st.DataObject) -> None:
    a = small(rng(data), data.draw(shapes(max_rank=2, min_side=1)) + (6,))
    x = tensor(a, device)
    shared = x.sum(-1, keepdim=True) + 1
    outputs = [shared * 2, x + shared, shared.max(), x.flip(0) - 1, x]
    outputs[0].realize(*outputs[1:])
    total = a.sum(-1, keepdims=True) + 1
    for got, want in zip(outputs, (total * 2, a + total, total.max(), np.flip(a, 0) - 1, a)):
        same(got, want)


@each_device
def test_memory_plan_keeps_values_that_are_still_needed(device: str) -> None:
    """A long chain of reductions, whose buffers may share memory, with early values read last."""
    a = small(np.random.default_rng(1), (24, 24))
    x, want = tensor(a, device), a
    kept, expected = [], []
    for i in range(12):
        x = (x - x.max(i % 2, keepdim=True)) % 32
        want = (want - want.max(i % 2, keepdims=True)) % 32
        kept.append(x)
        expected.append(want)
    out = sum((k * (i + 1) for i, k in enumerate(kept)), start=x)
    total = sum((e * (i + 1) for i, e in enumerate(expected)), start=want)
    same(out, total.astype(np.float32))


@each_device
def test_to_another_device_and_back(device: str) -> None:
    a = small(np.random.default_rng(2), (3, 5))
    there = tensor(a, device) + 1
    same(there.to("reference") * 2, (a + 1) * 2)
    same(there.to("reference").to(device) * 2, (a + 1) * 2)
