"""`tuned`: time the kernels of programs under other plans, and keep what is faster on this device.

Each kernel runs on its own, on the weights that it will read and on scratch memory otherwise, for
the ints of the call that captures its program. Later programs and processes use what was found.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.dtype import bool_
from engine.graph import Storage
from engine.lower import Plan
from engine.memory import SLACK
from engine.prepare import canonical, forget, generated, place, winners, winners_path
from engine.recipes import choose
from engine.runtime import Device, DeviceError, Step, default_device, get_device
from engine.runtime.host import save
from engine.schedule import Kernel, Schedule, cost
from engine.symbolic import Expr, evaluate
from engine.tune import CLIMBS, candidates, cut, fastest

SECONDS = 0.3  # of timing per kernel; compiling its variants takes longer
PATIENCE = 4  # seconds for both, after which no further variants are compiled
WORK = 1 << 24  # bytes, or eighths of float operations, that take long enough to be timed
MOST_RUNS = 256  # of a kernel, one after the other, while the clock runs
FILL = 0x3C  # in every byte: small positive numbers, whatever the type

Timer = Callable[[Plan, Callable[[], None]], float]
Progress = Callable[[Sequence[Kernel]], Iterable[Kernel]]


def timed(plan: Plan, run: Callable[[], None]) -> float:
    """Seconds that a run takes."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


@dataclass
class Tuning:
    """What is being tuned, and what came of it: `faster` of the kernels `tried`."""

    name: str
    progress: Progress
    timer: Timer
    tried: set[Kernel] = field(default_factory=set)
    faster: int = 0

    @property
    def device(self) -> Device:
        return get_device(self.name)

    @property
    def path(self) -> Path:
        """The file of what is known of this device."""
        return winners_path(self.device)

    def improve(self, kernels: Sequence[Kernel], values: Mapping[Expr, int]) -> None:
        """Time variants of the kernels that weren't yet; an interrupt keeps what is done."""
        if self.device.target is None:
            return
        places: dict[Kernel, list[list[Storage]]] = defaultdict(list)
        for kernel in kernels:
            form, storages = canonical(kernel)
            places[form].append(storages)
        try:
            for form in self.progress([form for form in places if form not in self.tried]):
                self._improve(form, Bench(self.device, form, places[form], values))
                self.tried.add(form)
        finally:
            save(self.path, json.dumps(winners(self.device), indent=1).encode())

    def _improve(self, form: Kernel, bench: Bench) -> None:
        """Climb from the recipe's plan to better ones, and note where that ends."""
        kernel, first = choose(form, self.device.target)
        best, begun = first, time.monotonic()
        for _ in range(CLIMBS):
            plans, runs = self._entered(kernel, [best, *candidates(kernel, best)], bench)
            chosen = fastest(runs, SECONDS / CLIMBS)
            if chosen == 0:
                break
            best = plans[chosen]
            if time.monotonic() - begun > PATIENCE:
                break
        name = place(generated(kernel, first, self.device))
        winners(self.device).pop(name, None)
        if best is not first:
            winners(self.device)[name] = cut(best)
            self.faster += 1
        forget(form, self.name)

    def _entered(
        self, kernel: Kernel, plans: Sequence[Plan], bench: Bench
    ) -> tuple[list[Plan], list[Callable[[], float]]]:
        """Those of the plans whose code differs and compiles, and what times a run of each.

        None at all if the first can't be compiled.
        """
        steps: dict[str, tuple[Plan, Step]] = {}
        for plan in plans:
            step = generated(kernel, plan, self.device)
            steps.setdefault(place(step), (plan, step))
        ready = bench.ready([step for _, step in steps.values()])
        pairs = [(plan, run) for (plan, _), run in zip(steps.values(), ready) if run]
        if not pairs or pairs[0][0] is not plans[0]:
            return [], []
        return [p for p, _ in pairs], [partial(self.timer, p, run) for p, run in pairs]


class Bench:
    """Where variants of a kernel run: memory like that of its launches, and ints."""

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        places: Sequence[Sequence[Storage]],
        values: Mapping[Expr, int],
    ) -> None:
        """places: the storages of each launch, the one written first."""
        self.device = device
        self.values = values
        work = [max(1, evaluate(n, values)) for n in cost(kernel)]
        runs = WORK // (work[0] // 8 + work[1])
        scratch = [_scratch(device, storage) for storage in places[0]]
        self.sizes = tuple(storage.nbytes for storage in places[0])
        self.buffers = [
            [s.data if s.constant and s.data is not None else own for s, own in zip(used, scratch)]
            for used in places
        ]
        self.runs = min(max(runs, 1), MOST_RUNS)

    def ready(self, steps: Sequence[Step]) -> list[Callable[[], None] | None]:
        """A run of each step, again and again so that it takes a while; None if it can't be
        compiled. They are compiled together, which is several times as quick."""
        try:
            return [self._run(steps, step) for step in steps]
        except DeviceError:
            if len(steps) == 1:
                return [None]
            half = len(steps) // 2
            return [*self.ready(steps[:half]), *self.ready(steps[half:])]

    def _run(self, steps: Sequence[Step], chosen: Step) -> Callable[[], None]:
        """One of the steps in a list of its own; the others are there, so that it shares their
        source, but do nothing. Each time it reads the weights of another launch: in a program
        they don't lie in the caches either."""
        idle = [(step, 0, 0) for step in steps]
        groups = evaluate(chosen.groups, self.values)
        turns = [(chosen, groups, turn) for turn in range(self.runs)]
        replay = self.device.replay(
            [
                replace(
                    step,
                    groups=groups,
                    buffers=self.buffers[turn % len(self.buffers)],
                    sizes=self.sizes,
                )
                for step, groups, turn in [*idle, *turns]
            ],
            repeated=True,
        )

        def run() -> None:
            replay(self.values)
            self.device.read(self.buffers[0][0], 1)  # which waits for all that was launched

        run()  # only now are they compiled, and the binary kept for the others' lists
        return run


def _scratch(device: Device, storage: Storage) -> Any:
    handle = device.allocate(storage.nbytes + SLACK)
    fill = 1 if storage.dtype is bool_ else FILL
    device.write(handle, np.full(storage.nbytes, fill, np.uint8))
    return handle


_running: list[Tuning] = []


@contextmanager
def tuned(
    device: str | None = None, progress: Progress = iter, timer: Timer = timed
) -> Iterator[Tuning]:
    """While this is open, the kernels of programs captured on a device (None: the default one) are
    timed in other cuts of their loops; the faster ones are used, and kept for later processes.

    progress goes through a list, and may show how far it is.
    """
    found = Tuning(device or default_device(), progress, timer)
    _running.append(found)
    try:
        yield found
    finally:
        _running.remove(found)


def improve(plan: Schedule, values: Mapping[Expr, int]) -> None:
    """Tune the kernels of a program that is about to be prepared, if that is wanted."""
    for tuning in _running:
        if tuning.name == plan.device:
            tuning.improve(plan.kernels, values)
