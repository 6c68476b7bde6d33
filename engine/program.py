"""Capture the kernels of a call once, replay them with new inputs and new symbolic ints."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any

from engine import graph as g
from engine import tensor as tensors
from engine import tuning
from engine.graph import Node, Op, Storage, make
from engine.prepare import Prepared, prepare
from engine.runtime import LOCK, get_device
from engine.specialise import specialised
from engine.symbolic import Expr, Var, upper
from engine.tensor import Tensor

PRECISIONS = {"f32": 0, "high": 2, "auto": 1}  # terms of Settings


@dataclass
class _Capture:
    """What one combination of input shapes was captured as."""

    prepared: Prepared
    inputs: list[Storage]
    device: str
    single: bool
    written: list[Tensor]
    states: list[Storage]  # where each of them lies
    growth: dict[Storage, int]  # how many versions one run adds to each storage written


class Program:
    """A function of Tensors and named ints whose kernels are captured on the first call.

    Later calls with inputs of the same shapes and types replay them: no Python of the function
    runs again, so it must do the same work for every value. The output tensors are the program's
    own and are overwritten by the next call: read them before. Tensors that the function writes to
    (`cache[...] = x`) are updated in place.
    """

    def __init__(
        self, function: Callable[..., Any], limits: dict[str, tuple[int, int]], precision: str
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
        self.function = function
        self.terms = PRECISIONS[precision]
        for name, ends in limits.items():
            if not all(-(1 << 31) <= n < 1 << 31 for n in ends):
                raise ValueError(f"the bounds {ends} of {name} don't fit into 32 bits")
        # In generated code they must not meet the names that kernels give to things.
        self.variables = {name: Var(f"given_{name}", *ends) for name, ends in limits.items()}
        self.captures: dict[tuple, _Capture] = {}

    def __call__(self, *inputs: Tensor, **ints: int) -> Any:
        """Run it. TypeError for a missing or unknown int, ValueError for one out of bounds."""
        if tensors.captures.recorders:  # inside another program's capture: become a part of it
            return self.function(*inputs, **ints)
        values = self._values(ints)
        with LOCK:
            return self._replay(inputs, values)

    def _replay(self, inputs: tuple[Tensor, ...], values: dict[Expr, int]) -> Any:
        tensors.flush()
        key = tuple((t.shape, t.dtype, t.device) for t in inputs)
        capture = self.captures.get(key)
        if capture is None:
            capture = self.captures[key] = self._capture(inputs, values)
        else:
            for tensor, storage in zip(capture.written, capture.states):
                if not tensor.lies_in(storage):
                    _restore(tensor, storage)
        for storage, given in zip(capture.inputs, inputs):
            source = given.realize().node.arg[0]
            get_device(storage.device).copy(source.data, storage.data, storage.nbytes)
        outputs = self._run(capture, values)
        return outputs[0] if capture.single else tuple(outputs)

    def _values(self, ints: dict[str, int]) -> dict[Expr, int]:
        if ints.keys() != self.variables.keys():
            raise TypeError(f"the program takes {sorted(self.variables)}, not {sorted(ints)}")
        for name, value in ints.items():
            index(value)  # TypeError for what is no whole number
            var = self.variables[name]
            if not var.min <= value <= var.max:
                raise ValueError(f"{name} = {value} is outside {var.min} … {var.max}")
        return {self.variables[name]: int(value) for name, value in ints.items()}

    def _capture(self, inputs: tuple[Tensor, ...], values: dict[Expr, int]) -> _Capture:
        storages = []
        held = []
        for t in inputs:
            storage = Storage(t.device, t.dtype, upper(t.numel))
            storages.append(storage)
            held.append(Tensor(g.buffer(storage, t.shape), device=t.device))
        recorder = tensors.Recorder()
        tensors.captures.recorders.append(recorder)
        collects = gc.isenabled()
        gc.disable()  # thousands of nodes are made and none is garbage: looking takes 0.2 s
        try:
            result = self.function(*held, **self.variables)
            return self._prepared(held, storages, result, recorder, values)
        except BaseException:
            recorder.undo()
            raise
        finally:
            tensors.captures.recorders.remove(recorder)
            if collects:
                gc.enable()

    def _prepared(
        self,
        held: list[Tensor],
        storages: list[Storage],
        result: Any,
        recorder: tensors.Recorder,
        values: dict[Expr, int],
    ) -> _Capture:
        single = isinstance(result, Tensor)
        outputs = [result] if single or not isinstance(result, (tuple, list)) else list(result)
        outputs = [] if result is None else outputs
        if not all(isinstance(t, Tensor) for t in outputs):
            raise TypeError(f"a program's function returns tensors, not {type(result).__name__}")
        states = [t for t in recorder.written if t.born < recorder.begun]
        written = list({id(t): t for t in states}.values())
        if not outputs and not written:
            raise TypeError("a program's function returns no tensor and writes to none")
        device = (outputs or written)[0].device
        for storage in storages:
            storage.data = get_device(device).allocate(max(1, storage.nbytes))
        own = [g.copy(t.node) if t.node.op is Op.BUFFER else t.node for t in outputs]
        plan = specialised([*own, *(t.node for t in written)], device, self.terms)
        growth = {s: v - s.version for s, v in plan.versions.items()}
        tuning.improve(plan, values)
        prepared = prepare(plan, repeated=True)
        places = [n.arg[0] for n in plan.results[len(outputs) :]]
        return _Capture(prepared, storages, device, single, written, places, growth)

    @staticmethod
    def _run(capture: _Capture, values: dict[Expr, int]) -> list[Tensor]:
        results = capture.prepared.run(values)
        for storage, added in capture.growth.items():
            storage.version += added
        count = len(results) - len(capture.written)
        own = {n.arg[0] for n in results[:count]} - capture.growth.keys()
        for storage in own:  # what an earlier call returned is gone
            storage.version += 1
        for tensor, node in zip(capture.written, results[count:]):
            tensor.left_in(node)
        return [Tensor(_present(n), device=capture.device) for n in results[:count]]


def _restore(tensor: Tensor, storage: Storage) -> None:
    """Bring a state back to where the program's kernels expect it: it was given other values."""
    given = tensor.realize().node.arg[0]
    if given is not storage:
        get_device(storage.device).copy(given.data, storage.data, storage.nbytes)


def _present(node: Node) -> Node:
    storage = node.arg[0]
    return make(Op.BUFFER, (), (storage, storage.version), node.dtype, node.shape)


def program(
    function: Callable[..., Any], *, precision: str = "f32", **limits: tuple[int, int]
) -> Program:
    """`function` as a Program; each keyword names a symbolic int and its inclusive bounds.

    precision "f32" multiplies float32 numbers as they are; "auto" lets products with weights be
    taken in what the device is fast at (bfloat16, or int8 twice), summed in float32; "high" takes
    each of many rows as two bfloat16 terms, which is nearly as exact as float32.

    step = program(forward, start_pos=(0, 2047)); logits = step(ids, start_pos=17)
    """
    return Program(function, limits, precision)
