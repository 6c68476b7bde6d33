"""Values and uses at the edge: each once gave a wrong number, a hang or a traceback."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from engine import ShapeError, Tensor, program
from engine import dtype as dt
from tests.engine.oracle import each_device, need
from tests.engine.process import output


@each_device
def test_numbers_beyond_32_bits_are_64_bits_wide(device: str) -> None:
    assert Tensor(2**40, device=device).item() == 2**40
    assert Tensor([2**40, 1], device=device).tolist() == [2**40, 1]
    assert Tensor([-(2**31), 1]).dtype is dt.int64  # |-2**31| is beyond, and never wraps
    assert Tensor([2**31 - 1]).dtype is dt.int32


@each_device
def test_a_small_index_type_reaches_the_end_of_a_long_axis(device: str) -> None:
    x = Tensor(np.arange(300, dtype=np.float32), device=device)
    assert x[Tensor(np.array([-1, 5], np.int8), device=device)].tolist() == [299, 5]


@each_device
@pytest.mark.parametrize("op", ["__and__", "__or__", "__xor__", "__lshift__", "__rshift__"])
def test_floats_have_no_bits(device: str, op: str) -> None:
    x = Tensor([1.0], device=device)
    with pytest.raises(TypeError, match="float32 numbers have no bits"):
        getattr(x, op)(Tensor([1], device=device))
    with pytest.raises(TypeError, match="no bits"):
        x.__invert__()


@each_device
@pytest.mark.parametrize("n", [1 << 59, 1 << 61, 1 << 70])
def test_more_than_any_memory_is_a_memory_error(device: str, n: int) -> None:
    with pytest.raises(MemoryError):
        Tensor.full((n,), 0.5, device=device).contiguous().realize()


@each_device
def test_argmax_finds_the_first_nan(device: str) -> None:
    x = Tensor([[1.0, np.nan, 3.0], [1.0, 5.0, 3.0], [np.nan, np.nan, 0.0]], device=device)
    assert x.argmax(1).tolist() == [1, 1, 0]


@each_device
@pytest.mark.parametrize("shape", [(1 << 22,), (1 << 20, 3), (70_001, 2)])
def test_a_long_sum_of_floats_stays_exact(device: str, shape: tuple[int, ...]) -> None:
    """One running float32 sum of 4 million 0.1 is off by percents; sums of parts by rounding."""
    total = Tensor(np.full(shape, 0.1, np.float32), device=device).sum(0).numpy()
    want = np.float32(0.1).astype(np.float64) * shape[0]
    np.testing.assert_allclose(total, want, rtol=2.5e-4)  # 4096 roundings of 2**-24 at most


@each_device
def test_symbolic_ints_below_zero_divide_as_in_python(device: str) -> None:
    step = program(lambda x, n: x * n + (n // 2) + (n % 3), n=(-10, 10))
    x = Tensor([1], device=device)
    assert [step(x, n=n).item() for n in range(-10, 11)] == [
        n + n // 2 + n % 3 for n in range(-10, 11)
    ]


@each_device
def test_a_failed_capture_leaves_its_state_as_it_was(device: str) -> None:
    state = Tensor.zeros(3, device=device).contiguous().realize()
    fail = True

    def step(x: Tensor) -> Tensor:
        state[:] = state + x
        if fail:
            raise KeyError("no")
        return state * 2

    run = program(step)
    one = Tensor([1.0, 1.0, 1.0], device=device)
    with pytest.raises(KeyError):
        run(one)
    assert state.tolist() == [0, 0, 0]
    fail = False
    assert run(one).tolist() == [2, 2, 2]
    assert state.tolist() == [1, 1, 1]


@each_device
def test_a_program_inside_a_program_becomes_part_of_it(device: str) -> None:
    inner = program(lambda x, n: x[:n].sum(), n=(1, 4))
    outer = program(lambda x, n: inner(x, n=n) * 2, n=(1, 4))
    x = Tensor([1.0, 2.0, 3.0, 4.0], device=device)
    assert [outer(x, n=n).item() for n in (1, 3)] == [2, 12]


@each_device
def test_a_program_of_empty_tensors(device: str) -> None:
    run = program(lambda x: x + 1)
    assert run(Tensor(np.zeros((0, 3), np.float32), device=device)).shape == (0, 3)


def test_what_a_program_takes_and_returns_is_checked() -> None:
    with pytest.raises(TypeError, match="returns no tensor"):
        program(lambda x: None)(Tensor([1.0]))
    with pytest.raises(TypeError, match="returns tensors, not int"):
        program(lambda x: 3)(Tensor([1.0]))
    with pytest.raises(ValueError, match="32 bits"):
        program(lambda x, n: x, n=(0, 1 << 40))
    with pytest.raises(TypeError):
        program(lambda x, n: x + n, n=(0, 4))(Tensor([1.0]), n=3.7)


def test_each_call_returns_its_own_tensor_and_an_old_one_is_refused() -> None:
    run = program(lambda x: x * 2)
    first = run(Tensor([1.0]))
    second = run(Tensor([2.0]))
    assert second.item() == 4
    with pytest.raises(ValueError, match="overwritten"):
        first.numpy()


def test_threads_take_turns() -> None:
    """A result may be refused as overwritten by another thread's call; it is never wrong."""
    run = program(lambda x: (x * 2).sum())
    wrong: list[float] = []

    def work(number: float) -> None:
        for _ in range(10):
            out = run(Tensor(np.full(100, number, np.float32)))
            try:
                if out.item() != 200 * number:
                    wrong.append(number)
            except ValueError:
                continue

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_forked_child_gets_an_error_instead_of_hanging() -> None:
    need("opencl")
    code = """
    import os
    import numpy as np
    from engine import DeviceError, Tensor
    x = Tensor(np.ones(4, np.float32), device="opencl")
    (x + 1).numpy()
    if os.fork() == 0:
        try:
            (x + 2).numpy()
        except DeviceError as error:
            print("fork" in str(error), flush=True)
        os._exit(0)
    os.wait()
    """
    assert output(code) == ["True"]


def test_shapes_that_make_no_sense_are_refused_at_once() -> None:
    for bad in (
        lambda: Tensor.zeros(-3),
        lambda: Tensor.arange(-3),
        lambda: Tensor.arange(2**31 + 1),
        lambda: Tensor.zeros(6).reshape(-2, -3),
        lambda: Tensor.zeros(2, 3).sum((0, 0)),
        lambda: Tensor.cat(),
    ):
        with pytest.raises(ShapeError):
            bad()
    assert Tensor.arange(5)[np.int64(1) : np.int64(3)].tolist() == [1, 2]


@each_device
def test_zeros_are_zero_also_where_memory_was_used_before(device: str) -> None:
    """Filling fresh memory with zeros is left out where it comes so; writing zeros never is."""
    for _ in range(20):
        Tensor(np.full(5000, 7, np.float32), device=device).contiguous().realize()
        zeros = Tensor.zeros(5000, device=device).contiguous().realize()
        assert not zeros.numpy().any()
    ones = Tensor(np.ones(6, np.float32), device=device).contiguous().realize()
    ones[1:3] = 0
    assert ones.tolist() == [1, 0, 0, 1, 1, 1]
    assert (Tensor.zeros(3, device=device).contiguous() + 1).tolist() == [1, 1, 1]
    run = program(lambda x: Tensor.zeros(3, device=device).contiguous() * x)
    assert run(Tensor([2.0], device=device)).tolist() == [0, 0, 0]
