"""A schedule made ready to run: recipes, lower, render, compile, place. The file joining them.

Generated functions are remembered per device by their kernel's canonical form (buffers numbered,
not named), so the layers of a network share code. On disk the backend remembers binaries by source,
and there are the cuts of loops that `tuning` found to be faster than the recipes' on this device.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import tune
from engine.graph import Node, Op, Storage, graph_variables, make, rebuild, toposort
from engine.lower import Plan, lower
from engine.memory import SLACK, plan_memory
from engine.recipes import choose
from engine.render import render
from engine.runtime import DEBUG, Device, DeviceError, Replay, Step, get_device
from engine.runtime.host import cache_folder, saved
from engine.schedule import Kernel, Schedule, cost
from engine.staged import StagedPlan, lower_staged
from engine.symbolic import Expr, upper
from engine.symbolic import variables as free
from engine.tiles import TilePlan, lower_tiles

LOWERINGS = {Plan: lower, TilePlan: lower_tiles, StagedPlan: lower_staged}

_steps: dict[tuple[str, Kernel], Step] = {}
_winners: dict[str, dict[str, str]] = {}  # device -> tune.cut by the `place` of a recipe's code


@dataclass
class Prepared:
    """A schedule with its memory and its compiled kernels, ready to run any number of times."""

    plan: Schedule
    replay: Replay
    variables: frozenset[Expr]

    def run(self, values: Mapping[Expr, int]) -> list[Node]:
        """Run it all; return the sinks' BUFFER nodes. Every variable needs a value."""
        missing = self.variables - values.keys()
        if missing:
            names = ", ".join(sorted(v.text for v in missing))
            raise ValueError(f"no value for {names}: symbolic ints get theirs from a program")
        self.replay(values)
        return self.plan.results


def prepare(plan: Schedule, repeated: bool) -> Prepared:
    """Allocate and compile everything a schedule needs; `repeated` if it will run often."""
    device = get_device(plan.device)
    kept = {n.arg[0] for n in plan.results}
    _place(plan, device, {s for s in plan.temporaries if s not in kept})
    kernels = plan.kernels
    if not repeated and device.fresh_is_zero:  # an empty cache then takes no memory till it fills
        kernels = [k for k in kernels if not (k.writes_zeros and k.target.arg[0] in kept)]
    slotted = [canonical(k) for k in kernels]
    steps = [
        replace(
            step_of(kernel, device, plan.device),
            buffers=[_handle(s, plan.device) for s in storages],
            sizes=tuple(s.nbytes for s in storages),
        )
        for kernel, storages in slotted
    ]
    variables = frozenset().union(*(s.variables for s in steps), *(free(s.groups) for s in steps))
    return Prepared(plan, device.replay(steps, repeated), variables)


def _place(plan: Schedule, device: Device, sharable: set[Storage]) -> None:
    """Give every temporary its memory: the sharable ones in one arena, the others their own."""
    offsets, size = plan_memory(plan.kernels, sharable)
    arena = device.allocate(size + SLACK)
    for storage in plan.temporaries:
        if storage in offsets:
            storage.data = device.part(arena, offsets[storage], max(1, storage.nbytes))
        else:
            storage.data = device.allocate(storage.nbytes + SLACK)


def _handle(storage: Storage, device_name: str) -> Any:
    if storage.device != device_name:
        raise DeviceError(
            f"a tensor on {storage.device} is used with one on {device_name}; move it with .to()"
        )
    if storage.data is None:
        raise DeviceError("a program's input has no value while the program is being captured")
    return storage.data


def canonical(kernel: Kernel) -> tuple[Kernel, list[Storage]]:
    """The kernel with its buffers numbered (the target is 0), and the storages in that order."""
    root, storages = numbered(kernel.root, 1)
    target = kernel.target
    slot0 = make(Op.BUFFER, (), (0, False), target.dtype, target.shape)
    rows = kernel.rows
    if rows is not None:
        storages.append(rows.arg[0])
        rows = make(Op.BUFFER, (), (len(storages), False), rows.dtype, rows.shape)
    return Kernel(root, slot0, kernel.box, rows), [target.arg[0], *storages]


def numbered(root: Node, first: int = 0) -> tuple[Node, list[Storage]]:
    """The node with its buffers numbered from `first`, and their storages in that order."""
    storages: list[Storage] = []
    new: dict[Node, Node] = {}
    for n in toposort([root]):
        if n.op is Op.BUFFER:
            slot = (first + len(storages), n.arg[0].constant)
            storages.append(n.arg[0])
            new[n] = make(Op.BUFFER, (), slot, n.dtype, n.shape)
        else:
            new[n] = rebuild(n, new)
    return new[root], storages


def step_of(kernel: Kernel, device: Device, name: str) -> Step:
    """The step that runs a canonical kernel, still without its buffers."""
    found = _steps.get((name, kernel))
    if found is None:
        if device.target is None:
            found = Step(kernel, [], 1, kernel.root.op.name.lower(), _variables(kernel))
        else:
            found = _generated(kernel, device)
        found.flops, found.nbytes = cost(kernel)
        _steps[name, kernel] = found
    return found


def _generated(kernel: Kernel, device: Device) -> Step:
    """The step by the recipe's plan, or by one that was faster on this device."""
    kernel, plan = choose(kernel, device.target)
    made = generated(kernel, plan, device)
    better = winners(device).get(place(made))
    faster = tune.restored(kernel, plan, better) if better else None
    if faster is not None:
        plan, made = faster, generated(kernel, faster, device)
    if DEBUG >= 3:
        print(plan, file=sys.stderr)
    if DEBUG >= 4:
        print(made.function.text, file=sys.stderr)
    return made


def generated(kernel: Kernel, plan: Plan, device: Device) -> Step:
    """The step that runs a kernel by a plan, its loops made and printed as source."""
    function = LOWERINGS[type(plan)](kernel, plan)
    rendered = render(function, device.target)
    return Step(rendered, [], function.groups, function.label, function.variables)


def place(step: Step) -> str:
    """What names a step in the table of winners: its code, and how often that runs at most."""
    return f"{step.function.name} x{upper(step.groups)}"


def winners(device: Device) -> dict[str, str]:
    """The better cuts known for a device, read once; whoever finds one adds it."""
    if device.name not in _winners:
        _winners[device.name] = tune.table(saved(winners_path(device)))
    return _winners[device.name]


def winners_path(device: Device) -> Path:
    """Where they are kept. What ran on other hardware, or fewer cores, doesn't count."""
    target = replace(device.target, features=frozenset())
    parts = [device.identity, repr(target), *sorted(device.target.features)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"tuned-{key}.json"


def forget(kernel: Kernel, name: str) -> None:
    """Make the step of a canonical kernel anew when it is next wanted."""
    _steps.pop((name, kernel), None)


def _variables(kernel: Kernel) -> tuple[Expr, ...]:
    ends = [n for pair in kernel.box or () for n in pair]
    found = graph_variables(toposort([kernel.root])).union(*(free(n) for n in ends))
    return tuple(sorted(found, key=lambda v: v.text))
