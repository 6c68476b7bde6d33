"""Opening devices: what goes wrong is one line that names a way out. And memory that must stay."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from engine import DeviceError, Tensor, get_device, set_default_device
from engine import dtype as dt
from tests.engine.kernels import cpu
from tests.engine.oracle import each_device, need
from tests.engine.process import script

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="is about pocl's wheel for Linux")

OPEN = """
    import sys
    from engine import DeviceError, get_device
    try:
        get_device("opencl")
    except DeviceError as error:
        print(error)
        sys.exit(3)
"""


def message(env: dict, code: str = OPEN) -> str:
    """The one line of the DeviceError that a script ends with."""
    done = script(code, env)
    assert done.returncode == 3, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    (line,) = done.stdout.splitlines()
    return line


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nonsense", "opencll", " opencl", "Reference"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(DeviceError, match="opencl, reference") as caught:
        get_device(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("which", ["99", "x", "-1", "1.5"])
def test_an_unknown_number_lists_the_known_ones(which: str) -> None:
    cpu()
    with pytest.raises(DeviceError, match="opencl:0") as caught:
        get_device(f"opencl:{which}")
    assert "\n" not in str(caught.value)


def test_a_default_that_cannot_be_opened_changes_nothing() -> None:
    before = Tensor.zeros(1).device
    with pytest.raises(DeviceError):
        set_default_device("nonsense")
    assert Tensor.zeros(1).device == before


def test_the_default_comes_from_the_environment() -> None:
    code = "from engine import Tensor; print((Tensor([1.0]) + 1).device)"
    assert script(code, {"ZOO_DEVICE": "reference"}).stdout == "reference\n"


def test_an_unknown_default_is_named_when_it_is_used() -> None:
    code = OPEN.replace('get_device("opencl")', "get_device()")
    assert "'nonsense'" in message({"ZOO_DEVICE": "nonsense"}, code)


def test_the_reference_device_needs_no_driver() -> None:
    code = """
    import sys
    from engine import Tensor
    print((Tensor([1.0, 2.0], device="reference") * 2).tolist())
    print("pyopencl" in sys.modules)
    """
    assert script(code).stdout.split("\n")[:2] == ["[2.0, 4.0]", "False"]


# --- drivers ---------------------------------------------------------------------------------


@LINUX
def test_without_a_linker_the_ways_out_are_named(tmp_path: Path) -> None:
    """pocl would abort the process."""
    cpu()
    hidden = """
    import importlib.util
    original = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == "ziglang" else original(name, *a)
    """
    line = message({"PATH": str(tmp_path)}, hidden + OPEN)
    for word in ("`ld`", "binutils", "pip install ziglang", "reference"):
        assert word in line


@LINUX
def test_without_a_platform_the_ways_out_are_named(tmp_path: Path) -> None:
    hidden = """
    import pyopencl
    def nothing():
        raise pyopencl.LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")
    pyopencl.get_platforms = nothing
    """
    line = message({"OCL_ICD_VENDORS": str(tmp_path)}, hidden + OPEN)
    for word in ("no OpenCL device", "pyopencl[pocl]", "reference"):
        assert word in line


def test_without_pyopencl_the_ways_out_are_named() -> None:
    line = message({}, "\n    import sys; sys.modules['pyopencl'] = None" + OPEN)
    assert "pyopencl" in line
    assert "reference" in line


# --- several devices -------------------------------------------------------------------------


def test_tensors_on_two_devices_need_a_move() -> None:
    name = cpu().name
    a, b = Tensor([1.0, 2.0], device=name), Tensor([3.0, 4.0], device="reference")
    for mix in (
        lambda: a + b,
        lambda: Tensor.cat(a, b),
        lambda: Tensor.where(a < 2, a, b),
        lambda: a[Tensor([0], device="reference")].numpy(),
        lambda: a.realize(b * 2),
    ):
        with pytest.raises((DeviceError, ValueError), match=r"\.to\(\)"):
            mix()
    assert (a + b.to(name)).tolist() == [4, 6]
    assert (a.to("reference") + b).tolist() == [4, 6]


X_FIRST = {
    "right of +": lambda x: x + Tensor.arange(3),
    "condition": lambda x: Tensor.where(Tensor.arange(3) < 1, x, 0.0),
    "where": lambda x: Tensor.where(x < 2, Tensor.zeros(3), x),
    "cat behind": lambda x: Tensor.cat(x, Tensor.zeros(2)),
    "cat before": lambda x: Tensor.cat(Tensor.zeros(2), x),
    "index": lambda x: x[Tensor.arange(2)],
}
OTHER_FIRST = {
    "left of +": lambda x: Tensor.arange(3) + x,
    "matmul": lambda x: Tensor.ones(2, 3) @ x,
    "list": lambda x: x[[0, 2]],
    "indexed": lambda x: Tensor.arange(5)[x.cast(dt.int32)],
}


@each_device
@pytest.mark.parametrize("how", X_FIRST)
def test_what_has_no_buffer_goes_with_any_device(device: str, how: str) -> None:
    """arange, zeros and numbers belong nowhere, whatever the default device is."""
    out = X_FIRST[how](Tensor([1.0, 2.0, 3.0], device=device))
    assert out.device == device
    out.numpy()


@pytest.mark.parametrize("how", OTHER_FIRST)
def test_what_has_no_buffer_goes_with_any_device_also_in_front(how: str) -> None:
    device = "opencl" if Tensor.zeros(1).device == "reference" else "reference"
    need(device)
    out = OTHER_FIRST[how](Tensor([1.0, 2.0, 3.0], device=device))
    assert out.device == device
    out.numpy()


# --- memory ----------------------------------------------------------------------------------


@each_device
def test_an_array_may_go_while_kernels_still_read_it(device: str, tmp_path: Path) -> None:
    """Its memory is unmapped with the last reference: a kernel that reads it later would crash."""
    path = tmp_path / "weights"
    values = np.arange(1 << 18, dtype=np.float32)
    values.tofile(path)
    for i in range(50):
        x = Tensor.from_numpy(np.memmap(path, np.float32, "r"), device)
        y = (x + 1).realize() if i % 2 else x + 1
        del x
        gc.collect()
        np.testing.assert_array_equal(y.numpy()[::4096], values[::4096] + 1)
        z = Tensor(np.memmap(path, np.float32, "r"), device=device) * 2
        np.testing.assert_array_equal(z.numpy()[::4096], values[::4096] * 2)


@each_device
def test_temporaries_may_go_while_kernels_still_use_them(device: str) -> None:
    """The arena of a realize() whose results aren't read yet."""
    r = np.random.default_rng(0)
    for _ in range(60):
        a = r.integers(-4, 5, (9, 40)).astype(np.float32)
        x = Tensor(a, device=device)
        x[1:] = x[:-1] * 2  # by way of a temporary, since the two overlap
        x.realize()
        np.empty(9 * 40 + 1024, np.float32).fill(np.nan)  # takes the place of what was freed
        np.testing.assert_array_equal(x.numpy()[1:], a[:-1] * 2)


def test_a_part_keeps_the_whole_alive() -> None:
    """64 MB go back to the system when they are freed, so using them then would crash."""
    cpu()
    code = """
    import gc
    import numpy as np
    from engine import get_device
    device = get_device("opencl")
    part = device.part(device.allocate(1 << 26), 1 << 25, 4096)
    gc.collect()
    device.write(part, np.full(4096, 7, np.uint8))
    print(int(device.read(part, 4096).sum()))
    """
    done = script(code)
    assert done.returncode == 0, f"exit code {done.returncode}"
    assert done.stdout.split() == [str(7 * 4096)]


@LINUX
def test_large_pages_are_asked_for_where_the_kernel_can_give_them() -> None:
    """It gives none to shared memory by default, whatever it was asked."""
    device = cpu()
    handle = device.allocate(5 << 21, large_pages=True)
    area = Path("/proc/self/smaps").read_text().splitlines()
    inside = flags = None
    for line in area:
        start, dash, rest = line.partition(" ")[0].partition("-")
        if dash and all(c in "0123456789abcdef" for c in start + rest):
            inside = int(start, 16) <= handle.address < int(rest, 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert flags is not None, "the memory is in no mapping"
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("a kernel without large pages")
    assert "hg" in flags, flags
    assert "sh" not in flags, flags
    assert handle.address % (1 << 21) == 0


@each_device
def test_many_unread_results_stay_right(device: str) -> None:
    values = np.arange(100, dtype=np.float32)
    x = Tensor(values, device=device)
    outs = [(x * 2 + Tensor([float(i)], device=device)).sum().realize() for i in range(150)]
    assert [o.item() for o in outs] == [9900 + 100 * i for i in range(150)]


@each_device
def test_a_callers_array_is_copied_by_tensor(device: str) -> None:
    a = np.ones(4, np.float32)
    x = Tensor(a, device=device)
    a[:] = 5
    assert x.tolist() == [1, 1, 1, 1]


def test_leaving_while_kernels_run_does_not_crash() -> None:
    """The interpreter frees memory at its end that a kernel under way still reads."""
    code = """
    import numpy as np
    from engine import Tensor
    x = Tensor(np.ones((700, 700), np.float32), device="opencl")
    (x @ x).realize()
    """
    need("opencl")
    assert [script(code).returncode for _ in range(6)] == [0] * 6


def test_an_unknown_device_is_a_usage_error() -> None:
    with pytest.raises(DeviceError, match="there are cuda, metal, opencl, reference") as caught:
        get_device("cpu")
    assert caught.value.exit_code == 2
