"""What every subject shares: workers in processes of their own, rounds in turn, summaries.

Each side of a comparison lives in its own process, so that neither its memory nor its threads
weigh on another's figures, and rounds take turns, so that a slow minute of the machine hits all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTLE_S = 0.3  # between turns: lets the threads of the last side stop spinning


class SideError(RuntimeError):
    """A side that can't run or failed, in one line."""


class Worker:
    """One side in its own process, called through JSON lines on its pipes.

    `ready_s` is the time from starting the process to a loaded side, imports included. Raises
    SideError with the side's own last line when it can't start or a call fails.
    """

    def __init__(self, name: str, side: str, threads: int, **options: Any) -> None:
        self.name = name
        settings = {v: str(threads) for v in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        settings["TQDM_DISABLE"] = "1"  # a peer's progress bars would hide our own lines
        begun = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **settings},
        )
        self.call("load", threads=threads, **options)
        self.ready_s = time.perf_counter() - begun

    def call(self, method: str, limit_s: float | None = None, **arguments: Any) -> Any:
        """The result of one method of the side; its process is ended when that takes too long."""
        if limit_s is None:
            return self._answer(method, arguments)
        ended = threading.Event()
        timer = threading.Timer(limit_s, lambda: (ended.set(), self._process.kill()))
        timer.start()
        try:
            return self._answer(method, arguments)
        except SideError as error:
            if not ended.is_set():
                raise
            raise SideError(f"{self.name}: {method} takes more than {limit_s:g} s") from error
        finally:
            timer.cancel()

    def _answer(self, method: str, arguments: dict[str, Any]) -> Any:
        try:
            self._process.stdin.write(json.dumps({"method": method, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise SideError(f"{self.name}: the process ended with {code} in {method}")
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise SideError(f"{self.name}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the process; harmless when it is over already."""
        with suppress(BrokenPipeError):  # a crashed side left a line unread
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class Peer:
    """A side to compare with: `MODULE:CLASS`, what it needs installed, whether it must agree."""

    name: str
    side: str
    needs: tuple[str, ...]
    exact: bool
    options: dict[str, Any] = field(default_factory=dict)


def start_peers(
    workers: list[Worker], peers: Sequence[Peer], threads: int, **options: Any
) -> dict[str, str]:
    """Add a worker for each peer that can run; return why the others can't."""
    skipped = {}
    for peer in peers:
        missing = [name for name in peer.needs if importlib.util.find_spec(name) is None]
        if missing:
            skipped[peer.name] = f"not installed: {', '.join(missing)}"
            continue
        say(f"{peer.name}: loading")
        try:
            workers.append(Worker(peer.name, peer.side, threads, **options, **peer.options))
        except SideError as error:
            skipped[peer.name] = str(error)
    return skipped


def peak_memory_mb() -> float | None:
    """The most memory this process has held, in MB (10^6 bytes); None where that isn't known."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


@dataclass(frozen=True)
class Summary:
    """Figures of some rounds: their median, smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(median(values), min(values), max(values))

    @property
    def spread(self) -> float:
        """The width of the range as a part of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def json(self) -> dict[str, float]:
        return {k: float(f"{getattr(self, k):.4g}") for k in ("median", "low", "high")}


def spelled(summary: dict[str, float]) -> str:
    """What `Summary.json` gives, for people."""
    return f"{summary['median']:.4g} ({summary['low']:.4g} … {summary['high']:.4g})"


def in_turn(
    workers: Sequence[Worker],
    measure: Callable[[Worker, int], float],
    rounds: int,
    seconds: float = float("inf"),
) -> dict[str, list[float]]:
    """`measure(worker, round)` for each worker in each round, the order reversed every other.

    No round begins after `seconds` have passed.
    """
    figures: dict[str, list[float]] = {worker.name: [] for worker in workers}
    begun = time.perf_counter()
    for number in range(rounds):
        if number and time.perf_counter() - begun > seconds:
            break
        for worker in workers if number % 2 == 0 else reversed(workers):
            time.sleep(SETTLE_S)
            figures[worker.name].append(measure(worker, number))
    return figures


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Ours divided by theirs, round by round: both halves of a pair met the same machine."""
    return Summary.of([a / b for a, b in zip(ours, theirs)])


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its cgroup's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        limit = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores or 1
    return min(cores or 1, limit)


NOTED_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni")
NOTED_FLAGS += ("amx_int8", "amx_bf16", "amx_tile")


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, usable cores, the instruction sets that matter."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "python": platform.python_version(),
    }
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return facts
    info: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        info.setdefault(key.strip(), value.strip())
    facts["processor"] = info.get("model name", "unknown")
    facts["flags"] = [f for f in NOTED_FLAGS if f in info.get("flags", "").split()]
    facts["load"] = round(os.getloadavg()[0], 2)
    return facts


def say(line: str) -> None:
    """A line of progress, on stderr: stdout carries results only."""
    print(line, file=sys.stderr, flush=True)
