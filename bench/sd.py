"""`python -m bench sd`: a step of Stable Diffusion and a decoded picture, beside torch.

A step is one call of the UNet for 512x512 pixels with both halves of the guidance. All sides read
the same file, by default random weights of full size. Before anything is timed, results must agree.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import (
    Peer,
    SideError,
    Summary,
    Worker,
    in_turn,
    machine,
    ratios,
    say,
    spelled,
    start_peers,
    usable_cores,
)

OURS = "menagerie"
PARTS = {"unet": "step_s", "vae": "decode_s"}
MEMORY_MB = 5000  # that our side may take with SD 1.5


# How far ours may be from each: random weights keep what rounding to bfloat16 adds in a hundred
# layers, percents of the root mean square.
CLOSE = {"torch bf16": 0.1, "torch f32": 0.05}
_NEEDS = ("torch", "diffusers", "transformers")
PEERS = (
    Peer("torch bf16", "bench.sd_sides:Torch", _NEEDS, False, {"dtype": "bfloat16"}),
    Peer("torch f32", "bench.sd_sides:Torch", _NEEDS, True, {"dtype": "float32"}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="name or path; default: random weights of SD 1.5's size")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--device", help="of our side; the peers run on the CPU")
    parser.add_argument("--dtype", default="auto", choices=("auto", "f32"), help="of our side")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the report; progress goes to stderr. Raises SideError if ours fails."""
    import weights
    from bench.sd_weights import random_file

    if arguments.model is None:
        say("random weights: looking for them, or making them")
    path = str(weights.resolve(arguments.model) if arguments.model else random_file("1"))
    threads = usable_cores()
    if (load := machine().get("load", 0)) > 0.5 * threads:
        say(f"the machine is busy (load {load} on {threads} cores): figures will be low and uneven")
    say(f"{OURS}: loading")
    options = {"path": path, "device": arguments.device, "dtype": arguments.dtype}
    workers = [Worker(OURS, "bench.sd_sides:Menagerie", threads, **options)]
    skipped: dict[str, str] = {}
    try:
        if arguments.peers:
            version = workers[0].call("version")
            skipped = start_peers(workers, PEERS, threads, path=path, version=version)
        return _measure(workers, skipped, arguments, path)
    finally:
        for worker in workers:
            worker.close()


def _measure(
    workers: list[Worker], skipped: dict[str, str], arguments: argparse.Namespace, path: str
) -> dict[str, Any]:
    version = workers[0].call("version")
    apart = _check(workers, skipped)
    times: dict[str, dict[str, list[float]]] = {}
    for part in PARTS:

        def timed(worker: Worker, number: int, part: str = part) -> float:
            say(f"{part}, round {number + 1} of {arguments.rounds}: {worker.name}")
            return worker.call("seconds", what=part)

        times[part] = in_turn(workers, timed, arguments.rounds)
    sides = {
        w.name: {
            **{name: Summary.of(times[part][w.name]).json() for part, name in PARTS.items()},
            "load_s": round(w.ready_s, 4),
            "peak_memory_mb": w.call("peak_memory_mb"),
            "apart": apart[w.name],
        }
        for w in workers
    }
    memory = sides[OURS]["peak_memory_mb"] or 0
    too_much = version == "1" and memory > MEMORY_MB
    return {
        "subject": "sd",
        "model": Path(path).name,
        "version": version,
        "rounds": arguments.rounds,
        "machine": machine(),
        "sides": sides,
        "speedup": {
            name: {p: ratios(times[p][name], times[p][OURS]).json() for p in PARTS}
            for name in sides
            if name != OURS
        },
        "skipped": skipped,
        "wrong": [f"{OURS}: {memory:.0f} MB of memory, not {MEMORY_MB}"] if too_much else [],
    }


def _check(workers: list[Worker], skipped: dict[str, str]) -> dict[str, dict[str, float]]:
    """How far each side's results are from ours: root mean squares, as parts of ours.

    A peer that fails here goes to `skipped`. Raises SideError when ours fails or one disagrees.
    """
    ours: dict[str, np.ndarray] = {}
    apart: dict[str, dict[str, float]] = {}
    for worker in list(workers):
        say(f"{worker.name}: first results")
        try:
            results = {part: np.array(worker.call("result", what=part)) for part in PARTS}
        except SideError as error:
            if worker.name == OURS:
                raise
            skipped[worker.name] = str(error)
            workers.remove(worker)
            worker.close()
            continue
        ours = ours or results
        far = {part: float(f"{distance(ours[part], results[part]):.3g}") for part in PARTS}
        apart[worker.name] = far
        # A comparison with NaN is false.
        if worker.name != OURS and not max(far.values()) < CLOSE[worker.name]:
            raise SideError(f"{worker.name}: results differ from ours: {far}")
    return apart


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The root mean square of the difference, as a part of a's."""
    if a.shape != b.shape:
        return float("inf")
    return float(np.sqrt(np.square(a - b).mean() / np.square(a).mean()))


def text(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    facts = report["machine"]
    lines = [
        f"{report['model']}: 512x512, median of {report['rounds']} rounds (smallest … largest)",
        f"{facts.get('processor', facts['architecture'])}, {facts['cores']} usable cores, "
        f"{' '.join(facts.get('flags', []))}",
        "",
        f"{'':12} {'UNet step, s':>26} {'decode, s':>26} {'load':>9} {'memory':>9} {'apart':>15}",
    ]
    for name, side in report["sides"].items():
        memory, apart = side["peak_memory_mb"], side["apart"]
        lines.append(
            f"{name:12} {spelled(side['step_s']):>26} {spelled(side['decode_s']):>26} "
            f"{side['load_s']:>7.2f} s {'?' if memory is None else f'{memory:.0f} MB':>9} "
            f"{apart['unet']:>7.2g} {apart['vae']:>7.2g}"
        )
    for name, ratio in report["speedup"].items():
        lines.append(
            f"{OURS} is so many times as fast as {name}: UNet {spelled(ratio['unet'])}, "
            f"decode {spelled(ratio['vae'])}"
        )
    lines += [f"{name}: skipped, {reason}" for name, reason in report["skipped"].items()]
    return "\n".join([*lines, *report["wrong"]])


def to_json(report: dict[str, Any]) -> str:
    """The report as one line of JSON."""
    return json.dumps(report)
