"""How the nodes of a graph run: stretches of them as captured programs, the others by NumPy.

A node stays on the host (NumPy) if it must see numbers that the device computes, or if all that
it reads comes from such nodes. The nodes between are stretches, each one program per set of input
shapes. Inputs that some node must see as numbers, such as shapes, are part of what a capture is
made for; all others are the program's inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from engine import Tensor, program
from zoo.onnx.node import LIFTED, BoundNode, Device, NeedsNumbers, to_host

CAPTURES = 16  # of one stretch that are kept
_FEW = 8  # floating-point numbers (scales) that may be part of what a capture is made for
_SIZES = frozenset({"Shape", "Size"})  # they see no numbers
Env = dict[str, Any]


class Plan:
    """A bound graph. `reads` are names from the graphs around it."""

    def __init__(
        self,
        nodes: tuple[BoundNode, ...],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        constants: Mapping[str, Any],
        device: Device,
    ) -> None:
        self.nodes, self.inputs, self.outputs = nodes, inputs, outputs
        self.constants, self.device = constants, device
        made = {name for node in nodes for name in node.outputs} | set(inputs) | set(constants)
        used = {name for node in nodes for name in node.reads} | set(outputs)
        self.reads = tuple(sorted(used - made))
        self.wanted = _wanted(nodes)
        self.seeing: set[BoundNode] = set()  # nodes found to need numbers
        self.stretches: list[Stretch] | None = None
        self.known: dict[tuple[BoundNode, ...], Stretch] = {}

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs, arrays, for arrays by name (the inputs', and those of `reads`)."""
        while True:
            if self.stretches is None:
                self.stretches = self._arranged(values)
            try:
                env: Env = {**self.constants, **values}
                for stretch in self.stretches:
                    stretch.run(env)
                return [to_host(env[name]) for name in self.outputs]
            except NeedsNumbers as stop:
                self.seeing.add(self._own(stop.node))
                self.stretches = None

    def _own(self, node: BoundNode) -> BoundNode:
        """The node of this graph that is, or holds in a graph of its own, the one that stopped."""
        if node in self.nodes:
            return node
        return next(n for n in self.nodes if any(b.holds(node) for b in n.bodies.values()))

    def holds(self, node: BoundNode) -> bool:
        """Whether a node is in this graph or one within."""
        return any(n is node or any(b.holds(node) for b in n.bodies.values()) for n in self.nodes)

    def within(self, outer: Mapping[str, Any], inputs: Sequence[Any], device: Device) -> list[Any]:
        """Run as a graph in a node: a part of the capture that is under way, or by itself."""
        values = {**outer, **dict(zip(self.inputs, inputs))}
        if not device.capturing:
            return self.run({name: to_host(value) for name, value in values.items()})
        env = {**self.constants, **values}
        evaluate(self.nodes, env, device)
        return [env[name] for name in self.outputs]

    def _arranged(self, values: Mapping[str, Any]) -> list[Stretch]:
        """The nodes in stretches; those of the host come as soon as they can."""
        # What comes in is the device's, unless it can't go there.
        host = {name for name, value in values.items() if not _goes_to_device(value)}
        host |= self.constants.keys()
        level: dict[str, int] = dict.fromkeys((*values, *self.constants), 0)
        rows: dict[int, list[BoundNode]] = {}
        for node in self.nodes:
            own = [name for name in node.reads if name not in self.constants]
            alone = bool(own) and host.issuperset(own) and not node.operator.heavy
            stays = node in self.seeing or alone
            if stays:
                host.update(node.outputs)
            at = max((level[name] for name in node.reads), default=0)
            at += (at % 2 == 0) if stays else (at % 2 == 1)  # even rows are stretches
            level.update(dict.fromkeys(node.outputs, at))
            rows.setdefault(at, []).append(node)
        used = set(self.outputs)
        out = []
        for at in sorted(rows, reverse=True):
            nodes = tuple(rows[at])
            needed = tuple(sorted({n for node in nodes for n in node.outputs if n} & used))
            used.update(name for node in nodes for name in node.reads)
            out.append(self._stretch(nodes, needed, on_host=at % 2 == 1))
        return out[::-1]

    def _stretch(self, nodes: tuple[BoundNode, ...], outputs: tuple, on_host: bool) -> Stretch:
        found = self.known.get(nodes)
        if found is None or found.outputs != outputs or found.on_host != on_host:
            found = Stretch(nodes, outputs, on_host, self)
            self.known[nodes] = found
        return found


def evaluate(nodes: Sequence[BoundNode], env: Env, device: Device) -> None:
    """Run nodes one after the other; on the device that only builds what is to be run."""
    for node in nodes:
        env.update(zip(node.outputs, node(env, device)))


class _OnlyHost(Exception):
    pass


class Stretch:
    """Nodes that run as one program, or (`on_host`) each by NumPy."""

    def __init__(
        self, nodes: tuple[BoundNode, ...], outputs: tuple[str, ...], on_host: bool, plan: Plan
    ) -> None:
        self.nodes, self.outputs, self.on_host, self.plan = nodes, outputs, on_host, plan
        made = {name for node in nodes for name in node.outputs}
        read = {name for node in nodes for name in node.reads}
        self.inputs = tuple(sorted(read - made - plan.constants.keys()))
        self.captures: OrderedDict[tuple, tuple[Callable | None, Env]] = OrderedDict()

    def run(self, env: Env) -> None:
        """Add the outputs, as arrays, to the environment."""
        if self.on_host:
            evaluate(self.nodes, env, self.plan.device)
            for name in {name for node in self.nodes for name in node.outputs}:
                env[name] = to_host(env[name])
            return
        tensors, fixed = {}, {}
        for name in self.inputs:
            value = env[name]
            (tensors if self._varies(name, value) else fixed)[name] = value
        key = (
            tuple((name, x.shape, x.dtype.name) for name, x in tensors.items()),
            tuple((name, _contents(x)) for name, x in fixed.items()),
        )
        if key not in self.captures:
            self._capture(key, tuple(tensors), fixed)
        self.captures.move_to_end(key)
        function, host = self.captures[key]
        try:
            lifted = [self.plan.device.lift(x) for x in tensors.values()]
            results = function(*lifted) if function else ()
        except _OnlyHost:
            results = ()
            self.captures[key] = None, host
        except BaseException:
            del self.captures[key]
            raise
        env.update(host)
        env.update(zip((n for n in self.outputs if n not in host), map(to_host, results)))

    def _varies(self, name: str, value: Any) -> bool:
        """Whether a value is an input of the program, and no part of what it is captured for."""
        if not _goes_to_device(value):
            return False
        small = value.size <= _FEW or value.dtype.kind not in "f"
        return not (name in self.plan.wanted and small)

    def _capture(self, key: tuple, names: tuple[str, ...], fixed: Env) -> None:
        host: Env = {}
        device, plan = self.plan.device, self.plan

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            env = {**plan.constants, **fixed, **dict(zip(names, tensors))}
            device.capturing = True
            try:
                evaluate(self.nodes, env, device)
            finally:
                device.capturing = False
            found = {name: env[name] for name in self.outputs}
            made = {name: x for name, x in found.items() if _on_device(x)}
            host.update({name: to_host(x) for name, x in found.items() if name not in made})
            if not made:
                raise _OnlyHost
            return tuple(made.values())

        self.captures[key] = program(function, precision=plan.device.precision), host
        if len(self.captures) > CAPTURES:
            self.captures.popitem(last=False)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and 0 not in value.shape


def _goes_to_device(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype.name in LIFTED
        and value.dtype != np.float64
        and value.size > 0
    )


def _contents(value: Any) -> Any:
    """What tells a value of the host from another."""
    if isinstance(value, list):
        return tuple(map(_contents, value))
    if not isinstance(value, np.ndarray):
        return value
    raw = tuple(value.ravel()) if value.dtype == object else value.tobytes()
    return value.shape, value.dtype.name, raw


def _wanted(nodes: Sequence[BoundNode]) -> frozenset[str]:
    """The names of values that some node must see as numbers, or that such ones are made of."""
    wanted: set[str] = set()
    for node in reversed(nodes):
        if node.operator.name in _SIZES:
            continue
        for position, name in enumerate(node.inputs):
            if node.operator.comes(position) == "Known":
                wanted.add(name)
        for body in node.bodies.values():
            wanted.update(set(body.reads) & body.wanted)
        if any(name in wanted for name in node.outputs if name):
            wanted.update(node.reads)
    return frozenset(wanted - {""})
