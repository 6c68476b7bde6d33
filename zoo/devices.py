"""`python -m zoo devices`: what this machine can run on, and whether it computes right and fast."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import engine.functional as F
from engine import DeviceError, Tensor, default_device, get_device, program
from engine import dtype as dt
from engine.dtype import float32_to_bfloat16
from engine.recipes import switched_on
from engine.runtime import BACKENDS, Device, Found, UnknownDevice, list_devices
from engine.runtime.limits import Limits, aligned
from engine.runtime.probe import TRIALS
from zoo import cli

EXAMPLES = """examples:
  python -m zoo devices                     what is there, and why the rest is not
  python -m zoo devices --test              right answers, GB/s and TFLOP/s of each
  python -m zoo devices --test opencl:0     of one
  python -m zoo devices --json              for programs"""

SECONDS = 0.5  # that a rate is measured for
# of a product's sides, and bytes of what is copied: kept small where it would take long
SMALL, CPU, GPU = (128, 1 << 20), (1024, 128 << 20), (4096, 512 << 20)

# (TFLOP/s in float32, in bf16 without sparsity, GB/s) of whole cards, by their makers' data sheets
PEAKS = {
    "H200": (67, 989, 4800),
    "H100 PCIe": (51, 756, 2000),
    "H100": (67, 989, 3350),
    "A100-SXM4-80GB": (19.5, 312, 2039),
    "A100": (19.5, 312, 1555),
    "L40S": (91.6, 362, 864),
    "L4": (30.3, 121, 300),
    "T4": (8.1, 8.1, 320),
    "RTX 4090": (82.6, 165, 1008),
    "RTX 3090": (35.6, 71, 936),
}


@dataclass
class Report:
    """A device, what it may use, and what its self-test found; absent: why it can't be used."""

    found: Found
    device: Device | None = None
    absent: str = ""
    test: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        f = self.found
        out: dict[str, Any] = {"name": f.name, "title": f.title, "driver": f.driver}
        out["memory"] = f.memory or None
        if self.absent:
            out["absent"] = self.absent
        elif self.device and (target := self.device.target):
            out |= {
                "dialect": target.dialect,
                "lanes": target.lanes,
                "cores": target.cores,
                "team": target.team,
                "features": sorted(target.features),
                "recipes": list(switched_on(target)),
            }
        return out | ({"test": self.test} if self.test else {})

    def lines(self) -> Iterator[str]:
        f = self.found
        yield f"{f.name}  {f.title}"
        memory = f"{f.memory / 2**30:.1f} GiB" if f.memory else "that of the machine"
        yield f"  driver    {f.driver}"
        yield f"  memory    {memory}"
        if self.absent:
            yield f"  not used  {self.absent}"
        elif self.device and (target := self.device.target):
            numbers = f"{target.lanes} lanes, {target.cores} cores, teams of {target.team}"
            yield f"  target    {target.dialect}, {numbers}"
            shown = sorted(
                f for f in target.features if f in TRIALS or f.startswith(("sm_", "apple"))
            )
            yield f"  features  {' '.join(shown) or 'none'}"
            yield f"  recipes   {', '.join(switched_on(target)) or 'the plain ones'}"
        for name, value in self.test.items():
            yield f"  {name:<24}{_shown(value)}"


def _shown(value: dict[str, Any]) -> str:
    if "error" in value:
        return f"{'right' if value['right'] else 'WRONG'} (off by {value['error']:.1e})"
    peak = value.get("peak")
    part = f", {100 * value['rate'] / peak:.0f}% of {peak:.4g}" if peak else ""
    return f"{value['rate']:.4g} {value['unit']}{part}"


def survey(which: str | None = None) -> tuple[list[Report], dict[str, str]]:
    """The devices, opened, and why each other backend has none; only `which` if it is given.

    Raises UnknownDevice for a name that nothing has, DeviceError if that one can't be used.
    """
    if which and which.partition(":")[0] not in BACKENDS:
        get_device(which)  # says what names there are
    reports, absent = [], {}
    for backend in [which.partition(":")[0]] if which else sorted(BACKENDS):
        try:
            there = list_devices(backend)
        except DeviceError as error:
            if which:
                raise
            absent[backend] = cli.one_line(error)
            continue
        reports += [Report(f) for f in there]
        if not there:
            absent[backend] = "no device"
    if which:
        reports = _chosen(reports, which)
    for report in reports:
        try:
            report.device = get_device(report.found.name)
        except DeviceError as error:
            report.absent = cli.one_line(error)
    return reports, absent


def _chosen(reports: list[Report], which: str) -> list[Report]:
    device = get_device(which)
    named = [r for r in reports if r.found.name == which]
    # without a number: the one that the backend takes by itself
    named = named or [r for r in reports if r.found.title in device.identity] or reports
    if not named:
        raise UnknownDevice(f"no device {which!r}")
    return named[:1]


# --- the self-test ------------------------------------------------------------------------------


def self_test(report: Report) -> None:
    """Fill a report's `test`: three results beside NumPy's, and three rates."""
    name = report.found.name
    target = report.device.target
    side, nbytes = SMALL if target is None else CPU if target.is_cpu else GPU
    peaks = _peaks(report, nbytes)
    report.test |= dict(_answers(name))
    for title, unit, rate in (
        ("copy", "GB/s", lambda: _copy(name, nbytes)),
        ("product in float32", "TFLOP/s", lambda: _product(name, side, dt.float32)),
        ("product by bf16 weights", "TFLOP/s", lambda: _product(name, side, dt.bfloat16)),
    ):
        value = {"rate": rate(), "unit": unit}
        if title in peaks:
            value["peak"] = peaks[title]
        report.test[title] = value


def _answers(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a product, a softmax and a sum are off by, at most, as a part of the largest value."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((65, 130), (130, 97)))
    powers = np.exp(a - a.max(-1, keepdims=True))
    for title, compute, expected in (
        ("product", lambda x: x @ Tensor(b, device=name), a @ b),
        ("softmax", F.softmax, powers / powers.sum(-1, keepdims=True)),
        ("sum", lambda x: x.sum(-1), a.sum(-1)),
    ):
        difference = np.abs(compute(Tensor(a, device=name)).numpy() - expected).max()
        error = float(difference / np.abs(expected).max())
        yield title, {"error": error, "right": bool(error < 1e-5)}


def _copy(name: str, nbytes: int) -> float:
    """GB/s read and written by a kernel that changes each number a little."""
    given = Tensor(np.ones(nbytes // 8, np.float32), device=name).realize()
    return nbytes / 1e9 / _seconds(program(lambda x: x + 1.0), given)


def _product(name: str, side: int, kind: dt.DType) -> float:
    """TFLOP/s of a square product with a weight; by bf16, as precise as models are by default."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((side, side)).astype(np.float32)
    if kind is dt.bfloat16:
        weight = float32_to_bfloat16(weight)
    constant = Tensor.from_numpy(weight, device=name, dtype=kind)
    given = Tensor(random.standard_normal((side, side)).astype(np.float32), device=name).realize()
    precision = "f32" if kind is dt.float32 else "auto"
    run = program(lambda x: x @ constant.cast(dt.float32).transpose(), precision=precision)
    return 2 * side**3 / 1e12 / _seconds(run, given)


def _seconds(run: Callable[[Tensor], Tensor], given: Tensor) -> float:
    """What a run takes, on average: several are under way before one is waited for."""

    def last(runs: int) -> float:
        begun = time.perf_counter()
        for _ in range(runs):
            result = run(given)
        result[(slice(0, 1),) * len(result.shape)].numpy()
        return time.perf_counter() - begun

    last(2)  # compiles
    once = last(1)
    runs = max(1, min(1000, int(SECONDS / max(once, 1e-6))))
    return min(last(runs) / runs, once)


def _peaks(report: Report, nbytes: int) -> dict[str, float]:
    """The limits of a device by title of what is measured: tried on a CPU, known of some cards."""
    target = report.device.target
    known = next((p for card, p in PEAKS.items() if card in report.found.title), None)
    if known:
        return {"product in float32": known[0], "product by bf16 weights": known[1],
                "copy": known[2]}  # fmt: skip
    if target is None or target.dialect != "opencl-cpu":
        return {}
    limits = Limits()
    limits.load(target.cores, report.found.name)
    single = limits.fma() / 1e3
    halves = limits.tiles() / 1e3 if "amx_bf16" in target.features else single
    return {
        "product in float32": single,
        "product by bf16 weights": halves,
        "copy": limits.read(aligned(nbytes), nbytes),
    }


# --- the command --------------------------------------------------------------------------------


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m zoo devices",
        description="What models can run on: each device's driver, memory, limits and recipes.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--test",
        nargs="?",
        const="",
        metavar="DEVICE",
        help="also check answers and measure rates, about 10 seconds a device (default: each)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """0; 1 if an answer was wrong or a device failed its test."""
    reports, absent = survey(arguments.test)
    failed = False
    for report in reports:
        if arguments.test is not None and report.device:
            try:
                self_test(report)
            except DeviceError as error:
                report.absent, failed = cli.one_line(error), True
            failed |= any(value.get("right") is False for value in report.test.values())
        if not arguments.json:
            print(*report.lines(), sep="\n", flush=True)
    if arguments.json:
        found = [report.as_dict() for report in reports]
        print(json.dumps({"default": default_device(), "devices": found, "absent": absent}))
        return int(failed)
    for backend, why in absent.items():
        print(f"{backend}  none: {why}")
    print(f"default: {default_device()}")
    return int(failed)


def main(args: Sequence[str] | None = None) -> int:
    return cli.main(_parser(), args, _run)
