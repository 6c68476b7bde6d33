"""The Metal runtime, over a stand-in for pyobjc that runs what it is given on the CPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import engine.functional as F
from engine import DeviceError, Tensor, program, runtime
from engine.runtime import get_device, list_devices, metal
from tests.engine.gpu import fake_metal, shim


@pytest.fixture
def gpu(monkeypatch) -> metal.MetalDevice:
    """Opened anew for each test, and gone after it."""
    monkeypatch.setattr(metal, "import_metal", lambda: (fake_metal, fake_metal))
    monkeypatch.setattr(metal, "TEAM", 32)  # fibers take their time
    monkeypatch.setattr(runtime, "_opened", {})
    return get_device("metal")


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(np.float32)


@shim.needs_compiler
@pytest.mark.parametrize(
    ("compute", "shapes"),
    [
        (lambda a, b: a + b, [(37, 53), (37, 53)]),
        (lambda a, b: a @ b, [(37, 53), (53, 41)]),
        (lambda a: F.softmax(a), [(7, 300)]),
    ],
    ids=["add", "matmul", "softmax"],
)
def test_results_are_those_of_the_reference(gpu, compute, shapes):
    given = [_numbers(*shape) for shape in shapes]
    found, expected = (
        compute(*(Tensor(a, device=name) for a in given)).numpy() for name in ("metal", "reference")
    )
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


@shim.needs_compiler
def test_programs_with_symbolic_ints_run_again_with_others(gpu):
    cache = Tensor(np.zeros((40, 8), np.float32), device="metal").realize()

    def step(x, start):
        cache[start : start + 1] = x
        return cache[: start + 1].sum(0)

    run, total = program(step, start=(0, 39)), np.zeros(8, np.float32)
    for i in range(5):
        row = np.full((1, 8), i + 1, np.float32)
        total += row[0]
        np.testing.assert_array_equal(run(Tensor(row, device="metal"), start=i).numpy(), total)
    assert len(gpu.running) == 0


@shim.needs_compiler
def test_a_run_is_one_command_buffer_that_nobody_waits_for(gpu):
    x = Tensor(_numbers(20, 30), device="metal").realize()
    run = program(lambda x: F.softmax(x @ x.transpose()))
    run(x).numpy()
    made = gpu.device.compilations
    results = [run(x) for _ in range(3)]
    runs = [c for c in gpu.running if len(c.work) > 1]  # the others copy results
    assert len(runs) == 3 and not any(c.done for c in gpu.running)
    expected = F.softmax(Tensor(_numbers(20, 30) @ _numbers(20, 30).T, device="reference"))
    np.testing.assert_allclose(results[2].numpy(), expected.numpy(), rtol=2e-6, atol=1e-7)
    assert gpu.device.compilations == made and not gpu.running


@shim.needs_compiler
def test_a_failed_kernel_is_told_once(gpu):
    x = (Tensor(_numbers(3), device="metal") + 1.0).realize()
    gpu.running[-1].failure = fake_metal.Error("Caused GPU Timeout Error\nmore")
    with pytest.raises(DeviceError, match="^metal: a kernel failed: Caused GPU Timeout Error$"):
        x.numpy()
    gpu.wait()


@shim.needs_compiler
def test_steps_are_timed(gpu, monkeypatch, capsys):
    monkeypatch.setattr(metal, "DEBUG", 1)
    (Tensor(_numbers(3), device="metal") + 1.0).numpy()
    assert " 500000.0 us " in capsys.readouterr().err


@shim.needs_compiler
def test_a_source_that_does_not_compile_is_told_in_one_line(gpu, monkeypatch):
    monkeypatch.setattr(metal, "entry_points", lambda functions, target: "int f() { return x; }")
    with pytest.raises(DeviceError, match=r"^metal can't compile a kernel: .*error: .*x.*$"):
        (Tensor(_numbers(3), device="metal") + 1.0).numpy()


@shim.needs_compiler
def test_a_kernel_that_takes_too_many_registers_is_told(gpu, monkeypatch):
    monkeypatch.setattr(fake_metal.Pipeline, "most", 32)
    with pytest.raises(DeviceError, match="^metal runs only 32 threads of a kernel together"):
        (Tensor(_numbers(3), device="metal") + 1.0).numpy()


def test_memory_is_read_and_written_in_place_and_by_parts(gpu):
    data = np.arange(64, dtype=np.uint8)
    handle = gpu.wrap(data)
    part = gpu.part(handle, 16, 8)
    gpu.write(part, np.full(2, 7.0, np.float32))
    assert gpu.read(handle, 24).tolist() == [*range(16), *np.full(2, 7, np.float32).tobytes()]
    gpu.copy(part, handle, 4)
    assert gpu.read(handle, 4).view(np.float32) == 7
    assert data[16] == 16
    assert gpu.read(gpu.allocate(0), 0).size == 0


def test_too_much_memory_is_told(gpu):
    with pytest.raises(DeviceError, match="^metal: no memory for 2048 MiB: "):
        gpu.allocate(2 << 30)


def test_devices_are_listed_and_chosen_by_number(gpu):
    assert [(d.name, d.title) for d in list_devices("metal")] == [
        ("metal:0", "Fake M1"),
        ("metal:1", "Fake M2"),
    ]
    assert get_device("metal:1").identity == "Metal Fake M2"
    with pytest.raises(DeviceError, match=r"^no device metal:2; there are metal:0 \(Fake M1\), "):
        get_device("metal:2")


def test_no_device(gpu, monkeypatch):
    monkeypatch.setattr(fake_metal, "DEVICES", [])
    for look in (lambda: get_device("metal:0"), lambda: list_devices("metal")):
        with pytest.raises(DeviceError, match="^this Mac has no Metal device: "):
            look()


def test_no_macos_and_no_pyobjc(monkeypatch):
    monkeypatch.setattr(metal, "sys", SimpleNamespace(platform="linux"))
    with pytest.raises(DeviceError, match="^metal needs macOS"):
        metal.import_metal()
    monkeypatch.setattr(metal, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setitem(sys.modules, "Metal", None)
    with pytest.raises(DeviceError, match=r"^Metal can't be loaded: pip install 'menagerie\[metal"):
        metal.import_metal()
