"""Other cuts of loops give the same numbers; the ones that won are kept, found and never trusted.

Nothing here depends on real times: runs get theirs from a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine import Tensor, prepare, program, tuned, tuning
from engine.graph import Op, Storage, toposort
from engine.lower import Plan, plain
from engine.prepare import canonical, generated, place, winners, winners_path
from engine.recipes import choose
from engine.runtime.host import save, saved
from engine.schedule import Kernel
from engine.symbolic import Expr, Var
from engine.tiles import TilePlan
from engine.tune import MARGIN, candidates, cut, fastest, restored, table
from tests.engine.intrinsics import halves, need, normal, quantised
from tests.engine.kernels import cpu

GUARD = 256  # bytes behind the output that nothing may touch
COUNT = Var("given_count", 1, 40)  # what a program makes of its int "count"


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: their sums are exact in any order."""
    array = np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)
    return Tensor(array, device=cpu().name)


def captured(function: Callable, *inputs: Tensor, **ints: int) -> list[tuple[Kernel, list]]:
    """The canonical kernels of a program that has run, and their storages, filled by it."""
    step = program(function, precision="auto", **({"count": (1, 40)} if ints else {}))
    step(*inputs, **ints)
    (capture,) = step.captures.values()
    return [canonical(kernel) for kernel in capture.prepared.plan.kernels]


def results(
    kernel: Kernel, plans: list[Plan], storages: list[Storage], values: Mapping[Expr, int]
) -> list[np.ndarray]:
    """The output's bytes, and the guard behind them, under each plan; compiled together."""
    device = cpu()
    out, *reads = storages
    targets = [device.allocate(out.nbytes + GUARD) for _ in plans]
    steps = []
    for plan, target in zip(plans, targets):
        device.write(target, np.full(out.nbytes + GUARD, 0xA5, np.uint8))
        buffers = [target, *(s.data for s in reads)]
        steps.append(replace(generated(kernel, plan, device), buffers=buffers))
    device.replay(steps, repeated=False)(values)
    return [device.read(target, out.nbytes + GUARD) for target in targets]


def around(kernel: Kernel, plan: Plan) -> list[Plan]:
    """The plan, all its neighbours, and some of theirs."""
    near = candidates(kernel, plan)
    assert near
    far = [c for p in near[::4] for c in candidates(kernel, p)[::5]]
    return list(dict.fromkeys([plan, *near, *far]))


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: x * 2 + x[:, :1],
    "transposed": lambda x: x.T.contiguous(),
    "streaming": lambda x: x.reshape(70, 1, 66).expand(70, 20, 66) + 1,  # fetches memory ahead
    "rows": lambda x: x - x.max(1, keepdim=True),
    "columns": lambda x: x.sum(0),
    "sums": lambda x: x.sum(1),
    "product": lambda x: x[:31] @ x[:31].T,  # too small for tiles of sums
}


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_equals_the_plain_lowering(name: str) -> None:
    for form, storages in captured(CASES[name], whole(70, 66)):
        (want,) = results(form, [plain(form)], storages, {})
        kernel, plan = choose(form, cpu().target)
        plans = around(kernel, plan)
        for other, got in zip(plans, results(kernel, plans, storages, {})):
            np.testing.assert_array_equal(got, want, cut(other))


def test_candidates_serve_every_value_of_a_symbolic_int() -> None:
    def function(x: Tensor, count: Expr) -> Tensor:
        return (x[:count] * 2).sum(1)

    ((form, storages),) = captured(function, whole(40, 66), count=40)
    kernel, plan = choose(form, cpu().target)
    plans = around(kernel, plan)
    for count in (1, 7, 40):
        (want,) = results(form, [plain(form)], storages, {COUNT: count})
        for other, got in zip(plans, results(kernel, plans, storages, {COUNT: count})):
            np.testing.assert_array_equal(got, want, cut(other))


TILES = {
    "bfloat16": (
        {"amx_bf16", "avx512_bf16", "avx512f", "f16c"},
        lambda: (halves(300, 64), halves(100, 64, number=1)),
        lambda a, b: (a @ b.T).float().relu() + 1,
    ),
    "int8": (
        {"avx512_vnni", "avx512f"},
        lambda: (normal(3, 64), quantised("Q4_1", 96, 64)),
        lambda x, w: (x @ w.T).relu(),
    ),
}


@pytest.mark.parametrize("name", TILES)
def test_candidates_of_a_kernel_around_tiles_equal_its_plan(name: str) -> None:
    """To the bit, since every tile is made by the same instructions."""
    features, made, function = TILES[name]
    need(features)
    x, w = made()
    found = []
    for form, storages in captured(lambda x: function(x, w), x):
        kernel, plan = choose(form, cpu().target)
        if not any(n.op is Op.INTRINSIC for n in toposort([kernel.root])):
            continue
        assert isinstance(plan, TilePlan)
        plans = around(kernel, plan)
        want, *got = results(kernel, plans, storages, {})
        for other, bytes_ in zip(plans[1:], got):
            np.testing.assert_array_equal(bytes_, want, cut(other))
        found.append(len(plans))
    assert found


def test_a_plan_is_found_again_by_its_cut_and_only_near_the_default() -> None:
    ((form, _),) = captured(CASES["rows"], whole(70, 66))
    kernel, plan = choose(form, cpu().target)
    for other in around(kernel, plan):
        assert restored(kernel, plan, cut(other)) == other
    far = replace(plan, block=tuple(10**6 for _ in plan.block))
    for text in (cut(far), "", "block 1"):
        assert restored(kernel, plan, text) is None


# --- the contest ------------------------------------------------------------------------------


def contest(times: list[float], seconds: float = 1.0) -> tuple[int, list[int]]:
    """Who wins when every run takes its own time, and in which order they ran."""
    order: list[int] = []

    def run(i: int) -> Callable[[], float]:
        return lambda: (order.append(i), times[i])[1]

    return fastest([run(i) for i in range(len(times))], seconds), order


def test_the_fastest_wins_if_it_gains_enough() -> None:
    assert contest([1e-2, 9e-3, 5e-3, 7e-3, 2e-2])[0] == 2
    assert contest([1e-2, 2e-2, 3e-2])[0] == 0
    assert contest([1e-2, 1e-2 * MARGIN * 1.01])[0] == 0
    assert contest([1e-2, 1e-2 * MARGIN * 0.99])[0] == 1
    assert contest([1e-2])[0] == 0
    assert contest([])[0] == 0


def test_runs_take_turns_and_keep_to_their_time() -> None:
    times = [1e-2, 2e-2, 3e-2, 4e-2, 5e-2, 6e-2, 7e-2, 8e-2]
    _, order = contest(times, 1.0)
    assert order[:8] == list(range(8))
    assert sum(times[i] for i in order) < 1 + 3 * sum(times)
    _, order = contest(times, 0.0001)  # too little: once each in every round of the contest
    assert [order.count(i) for i in (0, 1, 7)] == [3, 3, 1]


def test_one_slow_moment_decides_nothing() -> None:
    turns = iter([10.0])  # the first turn of the better run is disturbed
    runs = [lambda: 1e-2, lambda: next(turns, 5e-3), lambda: 2e-2]
    assert fastest(runs, 100) == 1


# --- the table --------------------------------------------------------------------------------


def test_what_is_no_table_is_an_empty_one() -> None:
    for data in (None, b"", b"nonsense", b"[1, 2]", b"3", b"\xff\xfe", b'{"a": 1, "b": null}'):
        assert table(data) == {}
    assert table(b'{"a": 1, "b": "block 1"}') == {"b": "block 1"}


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """An empty cache; called, it forgets what this process knows, as if another one started."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))

    def start() -> None:
        monkeypatch.setattr(prepare, "_winners", {})
        monkeypatch.setattr(prepare, "_steps", {})

    cpu()
    start()
    yield start


def preferring(better: Callable[[Plan], bool]) -> tuning.Timer:
    """A timer by which some plans take half as long as the others; each of them runs."""

    def timer(plan: Plan, run: Callable[[], None]) -> float:
        run()
        return 0.1 if better(plan) else 0.2

    return timer


def doubled(x: Tensor) -> Tensor:
    return (x * 2).contiguous().sum(1)


def plans_of(step: program) -> list[str]:
    """The names of the code that a program runs."""
    (capture,) = step.captures.values()
    return [s.function.name for s in capture.prepared.replay.steps]


def run_once(x: Tensor) -> tuple[np.ndarray, list[str]]:
    step = program(doubled)
    return step(x).numpy().copy(), plans_of(step)


def test_winners_are_used_saved_and_loaded(fresh: Callable[[], None]) -> None:
    x = whole(70, 66)
    want, default = run_once(x)
    fresh()
    with tuned(cpu().name, timer=preferring(lambda plan: plan.reduce_unroll == 3)) as found:
        got, faster = run_once(x)
    assert (found.faster, len(found.tried)) == (1, 2)
    assert found.path == winners_path(cpu())
    assert default[0] == faster[0] and default[1] != faster[1]
    np.testing.assert_array_equal(got, want)
    (text,) = table(saved(found.path)).values()
    assert "reduce 3" in text
    fresh()
    assert run_once(x)[1] == faster
    fresh()
    with tuned(cpu().name, timer=preferring(lambda plan: False)):
        assert run_once(x)[1] == default  # a new look finds nothing, and says so
    assert table(saved(winners_path(cpu()))) == {}


def test_without_tuning_nothing_is_timed_or_saved(fresh: Callable[[], None]) -> None:
    with tuned("reference", timer=preferring(lambda plan: True)) as found:
        run_once(whole(70, 66))
    assert (found.faster, len(found.tried)) == (0, 0)
    assert not winners_path(cpu()).exists()


def test_a_damaged_or_foreign_table_is_ignored(fresh: Callable[[], None]) -> None:
    x = whole(70, 66)
    want, default = run_once(x)
    with tuned(cpu().name, timer=preferring(lambda plan: plan.reduce_unroll == 3)) as found:
        run_once(x)
    whole_file = found.path.read_bytes()
    name = next(iter(table(saved(found.path))))
    absurd = json.dumps({name: "block 0, 0 unroll 9, 9 reduce 0 ahead -1"}).encode()
    for damage in ("cut short", "one bit", "absurd"):
        if damage == "cut short":
            found.path.write_bytes(whole_file[:-3])
        elif damage == "one bit":
            found.path.write_bytes(whole_file[:40] + bytes([whole_file[40] ^ 1]) + whole_file[41:])
        else:
            save(found.path, absurd)
        fresh()
        got, names = run_once(x)
        assert names == default, damage
        np.testing.assert_array_equal(got, want)


def test_an_interrupt_keeps_what_was_found(fresh: Callable[[], None]) -> None:
    def broken_off(kernels: list) -> Iterator:
        yield kernels[-1]
        raise KeyboardInterrupt

    prefers = preferring(lambda plan: plan.reduce_unroll == 3)
    with pytest.raises(KeyboardInterrupt), tuned(cpu().name, broken_off, prefers) as found:
        run_once(whole(70, 66))
    assert (found.faster, len(found.tried)) == (1, 1)
    assert len(table(saved(found.path))) == 1
    assert not tuning._running


def test_a_candidate_that_does_not_compile_is_left_out() -> None:
    device = cpu()
    ((form, storages),) = captured(CASES["sums"], whole(70, 66))
    kernel, plan = choose(form, device.target)
    plans = [plan, *candidates(kernel, plan)][:4]
    steps = [generated(kernel, p, device) for p in plans]
    broken = replace(steps[2].function, name="broken", text="static void broken(no code;")
    steps[2] = replace(steps[2], function=broken)
    ready = tuning.Bench(device, form, [storages], {}).ready(steps)
    assert [run is None for run in ready] == [False, False, True, False]


def test_a_place_tells_apart_how_often_the_same_code_runs() -> None:
    ((form, _),) = captured(CASES["sums"], whole(70, 66))
    kernel, plan = choose(form, cpu().target)
    step = generated(kernel, plan, cpu())
    assert place(step) != place(replace(step, groups=step.groups + 1))
    assert winners(cpu()) is winners(cpu())
