"""`python -m bench kernels`: single operations, beside other libraries and the machine's limits.

Before a case is timed, each side's result is compared with NumPy's. Ratios are the peer's time
over ours: above 1, we are faster. What a case moves and computes, divided by what the machine can
do at most (measured in the same run), gives the time that nobody can beat.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bench.kernels_cases import BF16, BF16_PACKED, CASES, F32, NUMPY, OURS, Case
from bench.kernels_text import text, to_json
from bench.limits import roofline
from bench.measure import SideError, Summary, Worker, in_turn, machine, ratios, say, usable_cores

__all__ = ["add_arguments", "run", "text", "to_json"]

LIMITS = "engine.runtime.limits:Limits"
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("bench.kernels_sides:Menagerie", {}),
    F32: ("bench.kernels_peers:Torch", {"dtype": "float32"}),
    BF16: ("bench.kernels_peers:Torch", {"dtype": "bfloat16"}),
    BF16_PACKED: ("bench.kernels_peers:Torch", {"dtype": "bfloat16", "packed": True}),
    NUMPY: ("bench.kernels_peers:Numpy", {}),
}
TURN_S = 0.05  # that a side measures for, when it is its turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", type=matching, default=CASES, metavar="PATTERN", dest="cases",
        help="cases with this in their name (such as gemm or conv/bf16), or like this: '*-b2'",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument(
        "--seconds", type=float, default=60, metavar="S", help="for a case, and for a side's start"
    )
    parser.add_argument("--device", help="of our side; the peers run on the CPU")


def matching(pattern: str) -> tuple[Case, ...]:
    """The cases whose name contains the pattern, or is like it where it has wildcards."""
    like = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    found = tuple(case for case in CASES if fnmatchcase(case.name, like))
    if not found:
        families = ", ".join(dict.fromkeys(case.family for case in CASES))
        raise argparse.ArgumentTypeError(f"no case is like {pattern!r}; there are {families}")
    return found


class Sides:
    """The workers by name: each is started when it is first needed, or again after it failed."""

    def __init__(self, threads: int, device: str | None) -> None:
        self.threads = threads
        self.options = {OURS: {"device": device}}
        self.workers: dict[str, Worker] = {}

    def __getitem__(self, name: str) -> Worker:
        if name not in self.workers:
            side, options = SIDES[name]
            options = {**options, **self.options.get(name, {})}
            self.workers[name] = Worker(name, side, self.threads, **options)
        return self.workers[name]

    def drop(self, name: str) -> None:
        if name in self.workers:
            self.workers.pop(name).close()

    def close(self) -> None:
        for name in list(self.workers):
            self.drop(name)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the report; progress goes to stderr. Raises SideError if ours can't start.

    report["wrong"] names the cases where our result differs from NumPy's.
    """
    threads = usable_cores()
    if (load := machine().get("load", 0)) > 0.5 * threads:
        say(f"the machine is busy (load {load} on {threads} cores): figures will be low and uneven")
    say("limits of the machine")
    limits = _limits(threads, arguments.device)
    missing = {F32, BF16, BF16_PACKED} if importlib.util.find_spec("torch") is None else set()
    sides = Sides(threads, arguments.device)
    records = []
    try:
        start = sides[OURS].call("start_us")
        with tempfile.TemporaryDirectory() as folder:
            for i, case in enumerate(arguments.cases):
                say(f"{i + 1} of {len(arguments.cases)}: {case.name}")
                peers = [p for p in case.peers if arguments.peers and p not in missing]
                expected = str(Path(folder) / "expected.npy")
                records.append(_record(case, sides, [OURS, *peers], expected, arguments))
    finally:
        sides.close()
    say("limits of the machine, once more")
    for name, value in _limits(threads, arguments.device).items():
        limits[name] = max(limits[name], value)
    for record, case in zip(records, arguments.cases):
        _compare_to_limit(record, roofline(limits, case))
    return {
        "subject": "kernels",
        "rounds": arguments.rounds,
        "machine": machine(),
        "limits": limits,
        "start_us": round(start, 1),
        "cases": records,
        "geometric_means": geometric_means(records),
        "wrong": [r["case"] for r in records if OURS in r["wrong"]],
        "skipped": {name: "not installed: torch" for name in sorted(missing) if arguments.peers},
    }


def _limits(threads: int, device: str | None) -> dict[str, float]:
    worker = Worker("limits", LIMITS, threads, device=device)
    try:
        return worker.call("measure")
    finally:
        worker.close()


def _record(
    case: Case,
    sides: Sides,
    names: list[str],
    expected: str,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One case's line of the report. A side that fails is in `skipped`, with its reason."""
    record: dict[str, Any] = {
        "case": case.name,
        "family": case.family,
        "flops": case.flops,
        "bytes": int(case.nbytes),
        "steps": case.copies,
        "tolerance": case.tolerance.value,
        "reason": case.tolerance.reason,
        "sides": {},
        "ratios": {},
        "skipped": {},
        "wrong": [],
    }
    errors = _agreed(case, sides, names, expected, arguments.seconds, record)
    if OURS not in errors:
        return record

    def timed(worker: Worker, number: int) -> float:
        return worker.call("measure", arguments.seconds, seconds=TURN_S)

    try:
        workers = [sides[name] for name in errors]
        times = in_turn(workers, timed, arguments.rounds, arguments.seconds)
    except SideError as error:
        name, _, reason = str(error).partition(": ")
        record["skipped"][name] = reason
        sides.drop(name)
        return record
    record["rounds"] = len(times[OURS])
    for name, error in errors.items():
        record["sides"][name] = {
            "us": Summary.of(times[name]).json(),
            "error": float(f"{error:.2g}"),
        }
        if name != OURS:
            record["ratios"][name] = ratios(times[name], times[OURS]).json()
    return record


def _compare_to_limit(record: dict[str, Any], limit: tuple[float, str] | None) -> None:
    if limit is not None and record["sides"]:
        record["limit_us"], record["limit"] = float(f"{limit[0]:.4g}"), limit[1]
        record["of_limit"] = round(limit[0] / record["sides"][OURS]["us"]["median"], 3)


def _agreed(
    case: Case,
    sides: Sides,
    names: list[str],
    expected: str,
    limit_s: float,
    record: dict[str, Any],
) -> dict[str, float]:
    """The error of each side whose result is NumPy's within the case's tolerance.

    The others go to the record: to `wrong` what differs, to `skipped` what failed and all reasons.
    """
    errors: dict[str, float] = {}
    for name in (NUMPY, *(n for n in names if n != NUMPY)):
        try:
            worker = sides[name]
            worker.call("prepare", limit_s, name=case.name)
            if name == NUMPY:
                worker.call("save", path=expected)
            error = worker.call("error", path=expected)
        except SideError as failure:
            sides.drop(name)
            kind = "not supported yet: " if name == OURS else ""
            record["skipped"][name] = kind + _reason(failure)
            if name == NUMPY:
                record["skipped"][OURS] = "there is nothing to compare with"
                return {}
            continue
        if not error <= case.tolerance.value:  # NaN neither
            record["wrong"].append(name)
            record["skipped"][name] = f"off by {error:.2g}, more than {case.tolerance.value:g}"
        elif name in names:
            errors[name] = error
    return {name: errors[name] for name in names if name in errors}


def _reason(error: SideError) -> str:
    """A side's message without its name."""
    return str(error).partition(": ")[2]


def geometric_means(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """family -> peer -> the geometric mean of its cases' median ratios."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for peer, ratio in record["ratios"].items():
            found.setdefault(record["family"], {}).setdefault(peer, []).append(ratio["median"])
    return {
        family: {
            peer: round(math.exp(sum(map(math.log, values)) / len(values)), 3)
            for peer, values in peers.items()
        }
        for family, peers in found.items()
    }
