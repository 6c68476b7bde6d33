"""engine.runtime.cuda through a driver that runs on the CPU."""

from __future__ import annotations

import gc
import importlib
import inspect
import re
import sys
import threading

import numpy as np
import pytest

import engine.functional as F
from engine import Tensor, program, runtime
from engine.ir import Target
from engine.render import Rendered
from engine.runtime import DeviceError, Step, UnknownDevice, cuda, get_device
from tests.engine.gpu.fake_cuda import CUdevice_attribute, CUresult, Driver, Nvrtc
from tests.engine.gpu.shim import COMPILER

REAL = ("cuda.bindings.driver", "cuda.bindings.nvrtc")
runs_kernels = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A list of opened devices, and a cache, of this test's own."""
    monkeypatch.setattr(runtime, "_opened", {})
    monkeypatch.setattr(cuda, "TEAM", 4)  # fibers are slow
    monkeypatch.setattr(cuda.atexit, "register", lambda function: None)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))


def _opened(monkeypatch, name: str = "cuda", **limits) -> cuda.CudaDevice:
    driver, nvrtc = Driver(**limits), Nvrtc()
    monkeypatch.setattr(cuda, "import_cuda", lambda: (driver, nvrtc))
    return get_device(name)


def test_target_and_name(monkeypatch):
    device = _opened(monkeypatch, "cuda:1", devices=2)
    assert device.name == "cuda:1"
    assert device.target == Target("cuda", False, 1, 4, frozenset({"sm_75", "sm_80"}), 4)
    assert device.identity == "Pretended GPU sm_80 driver 13050 nvrtc 13.5"


def test_memory_is_read_as_it_was_written(monkeypatch):
    device = _opened(monkeypatch)
    for size in (0, 1, 1000, cuda.SMALL + 1):
        data = np.arange(size).astype(np.uint8)
        memory, other = device.wrap(data), device.allocate(size)
        device.copy(memory, other, size)
        wanted = data.copy()
        data[:] = 0  # it is the caller's
        np.testing.assert_array_equal(device.read(other, size), wanted)
    part = device.part(other, 7, 5)
    np.testing.assert_array_equal(device.read(part, 5), wanted[7:12])


def test_many_small_writes_keep_few_copies(monkeypatch):
    device = _opened(monkeypatch)
    memory = device.allocate(4)
    for i in range(1000):
        device.write(memory, np.array([i], np.int32))
    assert len(device.kept) <= cuda.MOST_KEPT
    assert device.read(memory, 4).view(np.int32) == 999


def test_memory_is_freed_behind_what_uses_it(monkeypatch):
    device = _opened(monkeypatch)
    memory, out = device.wrap(np.arange(9, dtype=np.uint8)), device.allocate(9)
    part = device.part(memory, 0, 9)
    del memory
    device.copy(part, out, 9)
    del part
    gc.collect()
    np.testing.assert_array_equal(device.read(out, 9), np.arange(9))
    assert list(device.cuda.allocations) == [out.address]
    left = [out]
    del out
    thread = threading.Thread(target=left.clear)  # collected on a thread without a context
    thread.start()
    thread.join()
    device.wait()
    assert not device.cuda.allocations


def test_too_much_memory_is_one_line(monkeypatch):
    device = _opened(monkeypatch, memory=1000)
    kept = device.allocate(600)
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        device.allocate(600)
    assert "\n" not in str(caught.value)
    del kept
    device.allocate(600)  # after waiting for what is being freed


def test_what_the_gpu_did_wrong_is_told_by_who_waits(monkeypatch):
    device = _opened(monkeypatch)
    memory = device.allocate(9)
    device.copy(memory, cuda.Memory(8, memory.owner), 9)
    with pytest.raises(DeviceError, match="cuStreamSynchronize failed with CUDA_ERROR_ILLEGAL_ADD"):
        device.read(memory, 9)


@pytest.mark.parametrize(
    ("limits", "name", "message"),
    (
        ({"devices": 0}, "cuda", "no CUDA device: install .*CUDA_ERROR_NO_DEVICE"),
        ({"version": 12040}, "cuda", "of CUDA 12.4, too old .*CUDA 13: update the driver"),
        ({}, "cuda:1", "no device cuda:1; there are cuda:0"),
        ({}, "cuda:x", "no device cuda:x; there are cuda:0"),
    ),
)
def test_devices_that_cannot_be_had(limits, name, message, monkeypatch):
    with pytest.raises(DeviceError, match=message) as caught:
        _opened(monkeypatch, name, **limits)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UnknownDevice) == (":" in name)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"pip install 'menagerie\[cuda\]'"):
        get_device("cuda")


def test_without_a_library(monkeypatch):
    """cuda-bindings raises these errors where it finds no libcuda, or no libnvrtc."""

    def missing(*_):
        raise RuntimeError("lib not found\nby any means")

    for part, name, message in (
        (Driver, "cuInit", "install NVIDIA's driver"),
        (Nvrtc, "nvrtcVersion", "NVRTC can't be loaded: pip install"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, missing)
            with pytest.raises(DeviceError, match=f"{message}.*lib not found") as caught:
                _opened(patch)
            assert "\n" not in str(caught.value)


CASES = {
    "add": (lambda a, b: a + b, (37, 53), (37, 53)),
    "matmul": (lambda a, b: a @ b, (37, 53), (53, 41)),
    "softmax": (lambda a: F.softmax(a), (7, 331)),
}


@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, monkeypatch):
    _opened(monkeypatch)
    function, *shapes = CASES[case]
    draw = np.random.default_rng(0)
    arrays = [draw.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
    got, wanted = (
        function(*(Tensor(a, device=d) for a in arrays)).numpy() for d in ("cuda", "reference")
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 if case == "softmax" else 0)


@runs_kernels
def test_a_program_is_one_graph_for_all_lengths(monkeypatch):
    device = _opened(monkeypatch)
    cache, twice = (Tensor(np.zeros((40, 8), np.float32), device="cuda").realize() for _ in "ab")

    def step(x, start):
        cache[start : start + 1] = x
        twice[:start] = cache[:start] * 2.0  # as many groups as there are rows; none at first
        return cache[: start + 1].sum(0)

    run = program(step, start=(0, 39))
    rows = np.random.default_rng(3).integers(-9, 10, (40, 8)).astype(np.float32)
    filled, doubled = np.zeros((2, 40, 8), np.float32)
    for i in (*range(12), 3, 0, 39):
        total = run(Tensor(rows[i : i + 1], device="cuda"), start=i)
        filled[i] = rows[i]
        doubled[:i] = 2 * filled[:i]
        np.testing.assert_array_equal(total.numpy(), filled[: i + 1].sum(0))
        np.testing.assert_array_equal(twice.numpy(), doubled)
    calls = device.cuda.calls
    assert calls["cuGraphInstantiate"] == 1
    assert calls["cuGraphLaunch"] >= 10
    assert calls["cuGraphExecKernelNodeSetParams"]
    assert calls["cuGraphNodeSetEnabled"] >= 2  # off at 0 rows, on again with some
    del run, total
    gc.collect()
    assert calls["cuGraphExecDestroy"] == calls["cuGraphDestroy"] == 1


@runs_kernels
def test_binaries_are_kept_on_the_disk(monkeypatch):
    def compiled() -> int:
        runtime._opened.clear()
        device = _opened(monkeypatch)
        x = Tensor(np.ones(9, np.float32), device="cuda")
        np.testing.assert_array_equal((x + 1.0).numpy(), np.full(9, 2))
        return device.nvrtc.compiled

    assert [compiled(), compiled()] == [1, 0]
    (path,) = (cuda.cache_folder()).glob("*.cubin")
    cuda.save(path, b"of another driver")
    assert compiled() == 1


@runs_kernels
def test_debug_tells_each_step(monkeypatch, capfd):
    _opened(monkeypatch)
    monkeypatch.setattr(cuda, "DEBUG", 1)
    (Tensor(np.ones(9, np.float32), device="cuda") + 1.0).numpy()
    assert re.search(r"500\.0 us +\d+ groups", capfd.readouterr().err)


@runs_kernels
def test_a_source_that_does_not_compile(monkeypatch):
    device = _opened(monkeypatch)
    wrong = Rendered(
        "k1", "static void k1(float* p0, int group) { nonsense }", ("float",), False, frozenset()
    )
    with pytest.raises(
        DeviceError, match="cuda can't compile a kernel: .*error.*nonsense"
    ) as caught:
        device.prepare([Step(wrong, [], 1, "wrong")])
    assert "\n" not in str(caught.value)


@pytest.mark.peers
def test_the_pretended_driver_is_called_as_the_real_one():
    """Functions of cuda-bindings tell their parameters in the first line of their docstrings."""
    package = pytest.importorskip("cuda.bindings", reason="needs the cuda extra")
    assert package.__version__.startswith("13.")
    for pretended, real in zip((Driver, Nvrtc), map(importlib.import_module, REAL)):
        for name, function in vars(pretended).items():
            if not name.startswith(("cu", "nvrtc")) or not inspect.isfunction(function):
                continue
            head = getattr(real, name).__doc__.splitlines()[0]
            inside = head[head.index("(") + 1 : head.rindex(")")]
            inside = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", inside))
            count = len(inside.split(",")) if inside else 0
            assert count == len(inspect.signature(function).parameters) - 1, head
    for kind in (CUresult, CUdevice_attribute):
        for member in kind:
            numbers = getattr(importlib.import_module(REAL[0]), kind.__name__)
            assert getattr(numbers, member.name) == member


@pytest.mark.peers
def test_the_real_compiler_makes_a_binary_or_says_why_not(monkeypatch):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the cuda extra")
    driver = Driver()
    monkeypatch.setattr(cuda, "import_cuda", lambda: (driver, nvrtc))
    device = get_device("cuda")
    binary = device._compile('extern "C" __global__ void k(float* p) { p[threadIdx.x] = 1; }')
    assert binary.startswith(b"\x7fELF")
    with pytest.raises(
        DeviceError, match=r"can't compile a kernel: zoo.cu\(1\): error: .*nonsense"
    ):
        device._compile("void k() { nonsense; }")


def test_devices_are_listed_without_opening_one(monkeypatch):
    monkeypatch.setattr(cuda, "import_cuda", lambda: (Driver(), Nvrtc()))
    found = cuda.devices()
    assert found[0].name == "cuda:0" and found[0].title and found[0].memory == 8 << 30
    assert found[0].driver.startswith("CUDA ") and not runtime._opened
