"""Single kernels under any plan and target: what tests of the code generator share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine import DeviceError, Tensor, get_device
from engine import dtype as dt
from engine.graph import Storage
from engine.ir import Target
from engine.lower import Plan, lower, plain
from engine.prepare import canonical
from engine.recipes import choose
from engine.render import Rendered, assemble, entry_points, render
from engine.runtime.opencl import OpenCLDevice
from engine.schedule import Kernel, schedule
from engine.spell import C_TYPES
from engine.symbolic import Expr, evaluate

GUARD = 256  # bytes behind each output that nothing may touch
LANES = (1, 4, 8, 16)


def cpu() -> OpenCLDevice:
    """The OpenCL CPU device, or a skip with the reason."""
    try:
        device = get_device("opencl")
    except DeviceError as error:
        pytest.skip(str(error))
    if not device.target.is_cpu:
        pytest.skip("lanes are for CPUs; this OpenCL device is a GPU")
    return device


def targets(device: OpenCLDevice) -> list[Target]:
    return [replace(device.target, lanes=lanes) for lanes in LANES]


def launch(
    device: OpenCLDevice,
    program: object,
    name: str,
    buffers: Sequence[object],
    ints: Sequence[int] | None,
    groups: int,
) -> None:
    """Run one entry point on device buffers and wait for it."""
    kernel = device.cl.Kernel(program, name)
    arguments = [b.buffer for b in buffers]
    if ints is not None:
        memory = device.allocate(max(4, 4 * len(ints)))
        device.write(memory, np.array(ints, np.int32))
        arguments += [memory.buffer, np.int32(0)]
    for i, argument in enumerate(arguments):
        kernel.set_arg(i, argument)
    if groups:
        device.cl.enqueue_nd_range_kernel(device.queue, kernel, (groups,), (1,))
    device.queue.finish()


class Variants:
    """One kernel under several plans, built together."""

    def __init__(self, device: OpenCLDevice, kernel: Kernel) -> None:
        self.device = device
        self.kernel, self.storages = canonical(kernel)
        plans = {"plain": (self.kernel, plain(self.kernel), device.target)}
        for target in targets(device):
            chosen, plan = choose(self.kernel, target)
            plans[f"{plan.recipe} in {target.lanes} lanes"] = (chosen, plan, target)
        self.plans: dict[str, Plan] = {name: plan for name, (_, plan, _) in plans.items()}
        self.functions = {name: lower(k, plan) for name, (k, plan, _) in plans.items()}
        self.rendered: dict[str, Rendered] = {
            name: render(self.functions[name], target) for name, (_, _, target) in plans.items()
        }
        fresh = list({r.name: r for r in self.rendered.values()}.values())
        source = assemble(fresh, device.target) + "\n" + entry_points(fresh, device.target)
        self.program = device.build(source).program

    def run(self, name: str, values: Mapping[Expr, int]) -> np.ndarray:
        """The bytes of the whole output buffer, and of the guard behind it, after a run."""
        out, *reads = self.storages
        target = self.device.allocate(out.nbytes + GUARD)
        self.device.write(target, np.full(out.nbytes + GUARD, 0xA5, np.uint8))
        if out.data is not None:
            self.device.copy(out.data, target, out.nbytes)
        function = self.functions[name]
        ints = [values[v] for v in function.variables] if function.variables else None
        launch(
            self.device,
            self.program,
            self.rendered[name].name + "_",
            [target, *(s.data for s in reads)],
            ints,
            evaluate(function.groups, values),
        )
        return self.device.read(target, out.nbytes + GUARD)


def check(
    device: OpenCLDevice,
    sinks: Sequence[Tensor],
    values: Mapping[Expr, int] | None = None,
    rtol: float = 0,
    atol: float = 0,
) -> list[Variants]:
    """Every kernel behind `sinks` gives the same under each recipe as under the plain plan.

    Equal bit for bit, or within a tolerance that the caller explains, over the whole buffer: also
    where the kernel has nothing to write.
    """
    done = []
    for kernel in schedule([t.node for t in sinks], device.name).kernels:
        variants = Variants(device, kernel)
        storage = variants.storages[0]
        want = variants.run("plain", values or {})
        for name in variants.plans:
            got = variants.run(name, values or {})
            _compare(f"{name}: {kernel.root}", storage, got, want, rtol, atol)
        storage.data = device.allocate(max(1, storage.nbytes))
        device.write(storage.data, want[: storage.nbytes])
        done.append(variants)
    return done


def _compare(
    what: str, storage: Storage, got: np.ndarray, want: np.ndarray, rtol: float, atol: float
) -> None:
    np.testing.assert_array_equal(got[storage.nbytes :], 0xA5, f"{what}: wrote past the end")
    kind = storage.dtype.numpy
    a, b = got[: storage.nbytes].view(kind), want[: storage.nbytes].view(kind)
    if rtol or atol:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=what)
    else:
        np.testing.assert_array_equal(a, b, what)


def run_source(
    device: OpenCLDevice,
    helpers: Mapping[str, str],
    body: str,
    inputs: Sequence[np.ndarray],
    out: np.ndarray,
    groups: int,
) -> np.ndarray:
    """`out` after a kernel with this body: p0 is out, p1 … are the inputs, i the work-group."""
    arrays = [out, *inputs]
    names = [C_TYPES[dt.from_numpy(a.dtype)] for a in arrays]
    taken = ", ".join(f"__global {kind}* p{i}" for i, kind in enumerate(names))
    text = "\n".join(helpers.values())
    source = f"{text}\n__kernel void run({taken}) {{ const int i = get_global_id(0); {body} }}"
    buffers = []
    for a in arrays:
        buffers.append(device.allocate(a.nbytes))
        device.write(buffers[-1], a.reshape(-1).view(np.uint8))
    launch(device, device.build(source).program, "run", buffers, None, groups)
    return device.read(buffers[0], out.nbytes).view(out.dtype).reshape(out.shape)
