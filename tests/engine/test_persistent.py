"""Programs as one kernel: right results with fewer threads than workers, and never a hang.

Each test runs in a process of its own with a time limit, so that a hang fails.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from engine import Tensor, program
from engine.runtime import Step
from engine.runtime.runs import plan_runs
from tests.engine.kernels import cpu
from tests.engine.process import output, script

# A network of many dependent steps, some of one group only, with an in-place state. Whole numbers:
# every sum is exact, so any order of work must give just these results.
NETWORK = """
    import sys
    import numpy as np
    from engine import Tensor, get_device, program
    device = get_device("opencl")
    if not device.target.is_cpu:
        print("gpu")
        sys.exit()
    r = np.random.default_rng(0)
    w = [r.integers(-1, 2, (256, 256)).astype(np.float32) for _ in range(6)]
    weights = [Tensor.from_numpy(a, "opencl") for a in w]
    state = Tensor.zeros(8, 256, device="opencl").contiguous().realize()
    seen = np.zeros((8, 256), np.float32)

    def network(x, row):
        for a in weights:
            x = (x @ a).maximum(-9).minimum(9)
            x = x + x.max()  # one group: the others wait for it
        state[row : row + 1] = x[0:1]
        return x, state.sum(-1)

    def expected(x, row):
        for a in w:
            x = np.clip(x @ a, -9, 9)
            x = x + x.max()
        seen[row] = x[0]
        return x, seen.sum(-1)

    def replay(times):
        step = program(network, row=(0, 7))
        for i in range(times):
            x = r.integers(-3, 4, (4, 256)).astype(np.float32)
            y, sums = step(Tensor(x, device="opencl"), row=i % 8)
            a, b = expected(x, i % 8)
            np.testing.assert_array_equal(y.numpy(), a, f"replay {i}")
            np.testing.assert_array_equal(sums.numpy(), b, f"replay {i}")
        (capture,) = step.captures.values()
        runs = capture.prepared.replay.runs
        if device.target.cores > 1:  # or nobody would have waited for anybody
            assert sum(run.lanes > 1 for run in runs) >= 6, runs
        print("right")
"""


def run(before: str, after: str, timeout: float = 60) -> None:
    lines = output(before + NETWORK + after, timeout=timeout)
    if lines == ["gpu"]:
        pytest.skip("programs are one kernel on CPUs only")
    assert lines == ["right"]


@pytest.mark.skipif(sys.platform != "linux", reason="sets the process's cores")
def test_a_program_on_one_core() -> None:
    run(
        "\n    import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
        """
    assert device.target.cores == 1
    replay(20)
    """,
    )


def test_a_program_on_every_core() -> None:
    run("", "    replay(20)")


def test_replays_under_load_stay_right() -> None:
    """Other processes keep every core busy, so workers are stopped at any moment."""
    run(
        "",
        """
    import subprocess
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(device.target.cores)]
    try:
        replay(2000)
    finally:
        for p in busy:
            p.kill()
            p.wait()
    """,
        timeout=300,
    )


def test_more_workers_than_threads() -> None:
    """Workers beyond the machine's threads start late, or when all is done: no one waits."""
    run(
        "",
        """
    from dataclasses import replace
    device.target = replace(device.target, cores=8)
    replay(30)
    """,
    )


def test_many_programs_take_turns() -> None:
    run(
        "",
        """
    from contextlib import redirect_stdout
    with redirect_stdout(sys.stderr):
        for _ in range(3):
            replay(3)
    replay(3)
    """,
    )


def test_a_wait_that_takes_too_long_is_an_error_in_one_line() -> None:
    """A run that someone claimed and never finished: waiting for it must fail, not hang."""
    code = """
    import sys
    from dataclasses import replace
    import numpy as np
    from engine import DeviceError, Tensor, get_device, program
    from engine.runtime import persistent
    persistent.STUCK = 1 << 13  # some 20 ms, and as many turns of others
    device = get_device("opencl")
    if not device.target.is_cpu:
        print("skip")
        sys.exit()
    device.target = replace(device.target, cores=2)  # one worker alone never waits
    step = program(lambda x: ((x * 2).contiguous() + 1).sum())
    x = Tensor(np.ones((512, 512), np.float32), device="opencl")
    assert step(x).item() == 3 * 512 * 512

    class Kept:
        def __setitem__(self, key, value):
            pass  # what the program clears before a run stays as it is

    (capture,) = step.captures.values()
    replay = capture.prepared.replay
    replay.claimed[persistent.LINE] = 1  # the second lane's first run: somebody's
    replay.claimed = Kept()
    try:
        step(x)
    except DeviceError as error:
        print(len(str(error).splitlines()))
    """
    lines = output(code)
    if lines == ["skip"]:
        pytest.skip("needs a CPU")
    assert lines == ["1"]


def test_a_program_works_again_after_it_failed() -> None:
    code = """
    import sys
    import numpy as np
    from engine import DeviceError, Tensor, get_device, program
    device = get_device("opencl")
    if not device.target.is_cpu:
        print("skip")
        sys.exit()
    step = program(lambda x: ((x * 2).contiguous() + 1).sum())
    x = Tensor(np.ones((64, 64), np.float32), device="opencl")
    assert step(x).item() == 3 * 64 * 64
    (capture,) = step.captures.values()
    capture.prepared.replay.failed[0] = 1  # as a run that failed leaves it
    print(step(x).item() == 3 * 64 * 64)
    """
    assert output(code) in (["True"], ["skip"])


# --- the runs: which steps wait, and for whom ------------------------------------------------


class _Piece:
    def __init__(self, address: int) -> None:
        self.address = address


def _step(written: int, *read: int, work: int = 1 << 20) -> Step:
    places = (written, *read)
    pieces = [_Piece(64 * p) for p in places]
    return Step(None, pieces, 8, "", (), (64,) * len(places), flops=work)


def needs(*steps: Step) -> list[list[int]]:
    """Of each run of two workers: how many runs of each must be done before."""
    return [run.needs.tolist() for run in plan_runs(steps, 2)]


@pytest.mark.parametrize(
    ("earlier", "step"),
    [
        (_step(1, 0), _step(2, 1)),  # reads what was written
        (_step(1, 0), _step(1, 2)),  # writes the same place
        (_step(1, 0), _step(0, 2)),  # writes what is still being read
    ],
)
def test_a_step_waits_for_those_it_depends_on(earlier: Step, step: Step) -> None:
    assert needs(earlier, step) == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("earlier", "step"), [(_step(1, 0), _step(2, 0)), (_step(1, 0), _step(3, 2))]
)
def test_steps_that_share_nothing_written_are_one_run(earlier: Step, step: Step) -> None:
    assert needs(earlier, step) == [[0, 0]]


def test_a_chain_of_small_steps_is_one_run_of_one_lane() -> None:
    large, small = _step(1, 0), [_step(n + 1, n, work=9) for n in (1, 2, 3)]
    first, chain, last = plan_runs([large, *small, _step(9, 4)], 2)
    assert (chain.first, chain.end, chain.lanes) == (1, 4, 1)
    assert chain.needs.tolist() == [0, 1]  # lane 0 did its own share of the large step itself
    assert (last.lanes, last.needs.tolist()) == (2, [2, 0])  # both wait for lane 0 alone


def test_overlapping_pieces_of_any_size_wait() -> None:
    whole = Step(None, [_Piece(0)], 8, "", (), (1 << 20,), flops=1 << 20)
    part = Step(None, [_Piece(1 << 21), _Piece(4096)], 8, "", (), (64, 64), flops=1 << 20)
    beyond = Step(None, [_Piece(1 << 22), _Piece(1 << 20)], 8, "", (), (64, 64), flops=1 << 20)
    assert needs(whole, part) == [[0, 0], [1, 1]]
    assert needs(whole, beyond) == [[0, 0]]


def test_independent_steps_wait_once_together() -> None:
    """q, k and v need no wait between them; what reads all three waits for all three."""
    device = cpu()
    w = [Tensor(np.full((512, 512), i + 1.0, np.float32), device=device.name) for i in range(3)]

    def network(x: Tensor) -> Tensor:
        q, k, v = ((x @ a).contiguous() for a in w)
        return (q + k + v).contiguous()

    step = program(network)
    x = Tensor(np.ones((2, 512), np.float32), device=device.name)
    assert step(x).numpy()[0, 0] == 512 * 6
    (capture,) = step.captures.values()
    runs = capture.prepared.replay.runs
    assert [(run.first, run.end) for run in runs] == [(0, 3), (3, 4)]


def test_scripts_that_hang_fail() -> None:
    """The time limit that the tests above rely on."""
    import subprocess

    with pytest.raises(subprocess.TimeoutExpired):
        script("while True: pass", timeout=0.5)
