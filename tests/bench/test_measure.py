"""Workers answer, fail in one line, and take turns; summaries are what they say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from bench.measure import SideError, Summary, Worker, in_turn, machine, ratios, usable_cores

COUNTING = "tests.bench.fake_side:Counting"


@pytest.fixture
def worker() -> Iterator[Worker]:
    started = Worker("counting", COUNTING, 3, path="x", step_by=2)
    yield started
    started.close()


def test_worker_runs_methods_in_its_own_process(worker: Worker) -> None:
    assert worker.call("greedy", ids=[5], count=4) == [7, 9, 11, 13]
    assert worker.call("prefill", ids=[1]) >= 0
    assert worker.call("decode", ids=[1], count=3) >= 0
    assert worker.call("peak_memory_mb") > 1
    assert worker.ready_s > 0


def test_worker_gives_the_side_its_threads(worker: Worker) -> None:
    assert worker.call("environment") == ["3", 3]


def test_failure_in_a_side_is_one_line(worker: Worker) -> None:
    with pytest.raises(SideError, match=r"^counting: ValueError: no such thing$"):
        worker.call("fail")


def test_crash_of_a_side_names_its_exit_code(worker: Worker) -> None:
    with pytest.raises(SideError, match="ended with 7 in crash"):
        worker.call("crash")


def test_side_that_takes_too_long_is_ended() -> None:
    slow = Worker("slow", "tests.bench.fake_kernels:Slow", 1)
    with pytest.raises(SideError, match=r"^slow: prepare takes more than 0\.2 s$"):
        slow.call("prepare", 0.2, name="any")
    slow.close()


def test_limit_leaves_a_quick_side_alone(worker: Worker) -> None:
    assert worker.call("greedy", 60, ids=[5], count=1) == [7]
    with pytest.raises(SideError, match=r"^counting: ValueError: no such thing$"):
        worker.call("fail", 60)


def test_side_that_cannot_load_is_an_error_at_the_start() -> None:
    with pytest.raises(SideError, match="missing.gguf: no such file"):
        Worker("broken", "tests.bench.fake_side:Unloadable", 1, path="missing.gguf")


def test_rounds_interleave_and_change_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.SETTLE_S", 0)

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    seen = []
    figures = in_turn([Named("a"), Named("b")], lambda w, n: seen.append((n, w.name)) or n, 3)
    assert seen == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert figures == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_no_round_begins_when_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.SETTLE_S", 0)
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)  # a second each look
    one = SimpleNamespace(name="a")
    assert in_turn([one], lambda w, n: n, 9, seconds=2) == {"a": [0, 1, 2]}


def test_summary_and_ratios() -> None:
    summary = Summary.of([3.0, 1.0, 2.0])
    assert (summary.median, summary.low, summary.high, summary.spread) == (2, 1, 3, 1)
    assert ratios([2.0, 6.0, 9.0], [1.0, 2.0, 3.0]).json() == {"median": 3, "low": 2, "high": 3}


def test_machine_facts() -> None:
    facts = machine()
    assert facts["cores"] == usable_cores() >= 1
    assert {"system", "architecture", "python"} <= facts.keys()
