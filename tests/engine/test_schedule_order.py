"""Writes into views: who runs before whom, who reads a copy. And the memory plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Tensor
from engine import dtype as dt
from engine.graph import Node, Storage, buffer
from engine.memory import ALIGNMENT, plan_memory
from engine.schedule import Kernel, schedule
from tests.engine.oracle import each_device

DEVICE = "reference"


def counting(*shape: int) -> tuple[Tensor, np.ndarray]:
    """0, 1, 2, … in a buffer that may be written to, and in NumPy."""
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return Tensor(array, device=DEVICE), array.copy()


def kernels(*tensors: Tensor) -> list[Kernel]:
    return schedule([t.node for t in tensors], DEVICE).kernels


def test_a_write_is_one_kernel_into_the_buffer_itself() -> None:
    x, _ = counting(4, 8)
    storage = x.node.arg[0]
    x[1:3, 2:] = Tensor.ones(2, 6, device=DEVICE) * 3
    (kernel,) = kernels(x)
    assert kernel.target.arg[0] is storage
    assert kernel.box == ((1, 3), (2, 8))


@pytest.mark.parametrize("first", ["read", "write"])
def test_a_reader_of_the_old_contents_runs_before_the_write(first: str) -> None:
    x, _ = counting(8)
    old = x * 10
    x[:] = 5
    order = kernels(*((old, x) if first == "read" else (x, old)))
    assert [k.box is None for k in order] == [True, False]


def test_a_reader_of_the_new_contents_runs_after_the_write() -> None:
    x, _ = counting(8)
    x[2:4] = 5
    new = x * 10
    order = kernels(new, x)
    assert [k.box is None for k in order] == [False, True]


def test_a_reader_of_old_and_new_contents_gets_a_copy() -> None:
    x, a = counting(8)
    old = x * 1  # folded into whoever reads it
    x[2:5] = 50
    both = x + old * 100
    order = kernels(both, x)
    assert len(order) == 3, "a copy of the old contents, the write, the reader"
    both.realize(x)
    b = a.copy()
    b[2:5] = 50
    np.testing.assert_array_equal(both.numpy(), b + a * 100)
    np.testing.assert_array_equal(x.numpy(), b)


def test_a_chain_of_writes_is_seen_in_order() -> None:
    x, a = counting(6)
    for i in range(5):
        x[i + 1 : i + 2] = x[i : i + 1] + 100
        a[i + 1] = a[i] + 100
    np.testing.assert_array_equal(x.numpy(), a)


def test_readers_between_many_writes_see_each() -> None:
    x, a = counting(4)
    for i in range(4):
        x[i] = 10
        a[i] = 10
        np.testing.assert_array_equal((x * 2).numpy(), a * 2)


SHIFTS = (
    (slice(1, None), slice(None, -1)),
    (slice(None, -1), slice(1, None)),
    (slice(2, 6), slice(3, 7)),
    (slice(None), slice(None)),
)


@pytest.mark.parametrize(("to", "of"), SHIFTS, ids=str)
@each_device
def test_an_overlapping_self_assignment_reads_the_old_values(
    to: slice, of: slice, device: str
) -> None:
    a = np.arange(9 * 40, dtype=np.float32).reshape(9, 40)
    x = Tensor(a, device=device)
    x[to] = x[of] * 2
    b = a.copy()
    b[to] = a[of] * 2
    np.testing.assert_array_equal(x.numpy(), b)


@each_device
def test_a_self_assignment_through_a_transposition_reads_the_old_values(device: str) -> None:
    a = np.arange(40 * 40, dtype=np.float32).reshape(40, 40)
    x = Tensor(a, device=device)
    x[:] = x.transpose()
    np.testing.assert_array_equal(x.numpy(), a.T)


def test_two_buffers_may_be_swapped() -> None:
    x, a = counting(8)
    y, b = counting(8)
    b += 100
    y = (y + 100).contiguous().realize()
    old = x * 1
    x[:] = y
    y[:] = old
    x.realize(y)
    np.testing.assert_array_equal(x.numpy(), b)
    np.testing.assert_array_equal(y.numpy(), a)


def test_a_stale_read_is_refused() -> None:
    x, _ = counting(8)
    old = x * 2
    view = x.reshape(2, 4)
    x[0] = 7
    x.realize()
    for stale in (old, view * 1):
        with pytest.raises(ValueError, match="overwritten"):
            stale.realize()
    with pytest.raises(ValueError, match="overwritten"):
        view.numpy()


def test_a_failed_schedule_leaves_versions_alone() -> None:
    x, _ = counting(8)
    stale = x * 2
    x[0] = 7
    x.realize()
    y, a = counting(8)
    y[0] = 9
    with pytest.raises(ValueError, match="overwritten"):
        y.realize(stale)
    a[0] = 9
    np.testing.assert_array_equal(y.numpy(), a)


def test_an_empty_write_changes_nothing() -> None:
    x, a = counting(8)
    x[3:3] = 5
    np.testing.assert_array_equal((x * 1).numpy(), a)


def test_a_weight_is_copied_before_it_is_written_to() -> None:
    a = np.arange(8, dtype=np.float32)
    x = Tensor.from_numpy(a, DEVICE)
    x[2] = 50
    assert x.numpy()[2] == 50
    assert a[2] == 2


# --- memory ----------------------------------------------------------------------------------


def _chain(sizes: list[int], reads: list[set[int]]) -> tuple[list[Kernel], list[Storage]]:
    """Kernel i writes storage i and reads the storages in reads[i]."""
    storages = [Storage(DEVICE, dt.uint8, n) for n in sizes]
    made: list[Node] = [buffer(s, (s.size,)) for s in storages]
    kernels = []
    for i, sources in enumerate(reads):
        root = Tensor.zeros(sizes[i], dtype=dt.uint8, device=DEVICE)
        for j in sources:
            first = Tensor(made[j], device=DEVICE)[0:1]
            root = root + first.expand(sizes[i])
        kernels.append(Kernel(root.node, made[i]))
    return kernels, storages


@st.composite
def programs(draw: Any) -> tuple[list[int], list[set[int]], set[int]]:
    n = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(1, 3000), min_size=n, max_size=n))
    reads = [draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set() for i in range(n)]
    shared = draw(st.sets(st.integers(0, n - 1)))
    return sizes, reads, shared


@settings(max_examples=200, deadline=None)
@given(programs())
def test_buffers_alive_at_once_share_no_byte(drawn: tuple) -> None:
    sizes, reads, shared = drawn
    kernels, storages = _chain(sizes, reads)
    placed, size = plan_memory(kernels, {storages[i] for i in shared})
    assert set(placed) == {storages[i] for i in shared}
    last = {i: max([i, *(k for k, r in enumerate(reads) if i in r)]) for i in shared}
    for i in shared:
        begin, end = placed[storages[i]], placed[storages[i]] + sizes[i]
        assert begin % ALIGNMENT == 0
        assert end <= size
        for j in shared - {i}:
            apart = last[i] < j or last[j] < i
            other = placed[storages[j]]
            assert apart or end <= other or other + sizes[j] <= begin, (i, j)
    assert size <= sum(-(-sizes[i] // ALIGNMENT) * ALIGNMENT for i in shared)


def test_a_chain_needs_two_places_however_long_it_is() -> None:
    kernels, storages = _chain([1024] * 10, [set(), *({i} for i in range(9))])
    _, size = plan_memory(kernels, set(storages))
    assert size == 2 * 1024


def test_only_temporaries_that_nobody_keeps_are_shared() -> None:
    """A result never lies in the arena: a second run with other inputs leaves the first alone."""
    x, a = counting(4, 64)
    first = (x.sum(-1, keepdim=True) * 2).realize()
    y = Tensor(a + 1, device=DEVICE)
    second = (y.sum(-1, keepdim=True) * 2).realize()
    np.testing.assert_array_equal(first.numpy(), a.sum(-1, keepdims=True) * 2)
    np.testing.assert_array_equal(second.numpy(), (a + 1).sum(-1, keepdims=True) * 2)
