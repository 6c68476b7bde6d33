"""`python -m bench onnx MODEL.onnx`: one run of an exported model, beside onnxruntime and torch.

Torch runs the graph as eager code; it knows the operators of convolutional networks only. Before
anything is timed, results must agree.
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
CLOSE = 1e-2  # of the largest number: random inputs go through dozens of layers in another order
PEERS = (
    Peer("onnxruntime", "bench.onnx_sides:OnnxRuntime", ("onnxruntime",), True),
    Peer("torch eager", "bench.onnx_sides:Torch", ("torch",), True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument(
        "--shape", type=shape, action="append", default=[], metavar="NAME=N,N,…", dest="shapes",
        help="of an input whose shape the model leaves open",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, metavar="N")


def shape(text: str) -> tuple[str, list[int]]:
    """An input's name and sizes of `NAME=N,N,…`."""
    name, _, sizes = text.rpartition("=")
    if not name or not all(size.isdigit() for size in sizes.split(",")):
        raise argparse.ArgumentTypeError(f"expected NAME=N,N,…, got {text!r}")
    return name, [int(size) for size in sizes.split(",")]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the report; progress goes to stderr. Raises SideError if ours fails."""
    threads = usable_cores()
    options = {"path": str(arguments.model.resolve()), "shapes": dict(arguments.shapes)}
    say(f"{OURS}: loading")
    workers = [Worker(OURS, "bench.onnx_sides:Menagerie", threads, **options)]
    skipped: dict[str, str] = {}
    try:
        if arguments.peers:
            skipped = start_peers(workers, PEERS, threads, **options)
        return measure(workers, skipped, arguments)
    finally:
        for worker in workers:
            worker.close()


def measure(
    workers: list[Worker], skipped: dict[str, str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The report of sides that agree."""
    results = {worker.name: np.array(worker.call("result")) for worker in workers}
    largest = np.abs(results[OURS]).max(initial=1e-30)
    apart = {name: float(np.abs(r - results[OURS]).max() / largest) for name, r in results.items()}
    for name, far in apart.items():
        if not far < CLOSE:  # NaN isn't
            raise SideError(f"{name}: results differ from ours by {far:.2g} of the largest number")
    times = in_turn(workers, lambda worker, _: worker.call("seconds"), arguments.rounds)
    return {
        "subject": "onnx",
        "model": arguments.model.name,
        "rounds": arguments.rounds,
        "machine": machine(),
        "sides": {
            name: {"run_s": Summary.of(taken).json(), "apart": float(f"{apart[name]:.2g}")}
            for name, taken in times.items()
        },
        "speedup": {
            name: ratios(taken, times[OURS]).json() for name, taken in times.items() if name != OURS
        },
        "skipped": skipped,
    }


def text(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    facts = report["machine"]
    lines = [
        f"{report['model']}: median of {report['rounds']} rounds (smallest … largest)",
        f"{facts.get('processor', facts['architecture'])}, {facts['cores']} usable cores",
        "",
    ]
    for name, side in report["sides"].items():
        lines.append(f"{name:12} {spelled(side['run_s']):>30} s  apart {side['apart']:.1g}")
    for name, ratio in report["speedup"].items():
        lines.append(f"{OURS} is {spelled(ratio)} times as fast as {name}")
    return "\n".join(lines + [f"{n}: skipped, {why}" for n, why in report["skipped"].items()])


def to_json(report: dict[str, Any]) -> str:
    """The report as one line of JSON."""
    return json.dumps(report)
