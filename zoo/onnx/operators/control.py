"""Control flow: graphs within nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import Tensor
from zoo.onnx import values as v
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value, Weight

_UNROLLED = 64  # steps of a loop that become part of a program


@operator("If")
def if_(cond: Known, *, then_branch: Any, else_branch: Any, call):
    """One of two graphs."""
    branch = then_branch if bool(cond.reshape(-1)[0]) else else_branch
    return tuple(call.run(branch, ()))


@operator("Loop")
def loop(count: Known = None, cond: Known = None, *carried: Weight, body: Any, call):
    """A graph again and again: its first outputs are what it carries, the rest is collected."""
    limit = None if count is None else int(count.reshape(-1)[0])
    going = True if cond is None else bool(cond.reshape(-1)[0])
    state, rows, step = list(carried), [], 0
    if limit is None or limit > _UNROLLED:
        state = [call.numbers(x) for x in state]
    while going and (limit is None or step < limit):
        going_value, *results = call.run(body, (np.array(step), np.array(going), *state))
        going = bool(np.asarray(call.numbers(going_value)).reshape(-1)[0])
        state, row = results[: len(state)], results[len(state) :]
        rows.append(row)
        step += 1
    more = len(body.outputs) - 1 - len(state)
    return (*state, *_collected(rows, more))


def _collected(rows: list[list[Any]], count: int) -> list[Any]:
    if not rows:
        return [np.zeros(0, np.float32)] * count
    return [_stacked([row[i] for row in rows], 0) for i in range(count)]


def _stacked(parts: list[Any], axis: int) -> Any:
    if any(isinstance(x, Tensor) for x in parts):
        like = next(x for x in parts if isinstance(x, Tensor))
        parts = [x if isinstance(x, Tensor) else Tensor(x, device=like.device) for x in parts]
    return v.stack(parts, axis)


@operator("Scan", since=9)
def scan(*xs: Weight, body: Any, num_scan_inputs: int, scan_input_axes: tuple | None = None,
         scan_input_directions: tuple | None = None, scan_output_axes: tuple | None = None,
         scan_output_directions: tuple | None = None, call):  # fmt: skip
    """A graph for each slice of the last inputs, with a state in the first."""
    held = len(xs) - num_scan_inputs
    state, sources = list(xs[:held]), xs[held:]
    axes = [v.axis_in(a, x.ndim) for a, x in zip(scan_input_axes or (0,) * len(sources), sources)]
    backwards = scan_input_directions or (0,) * len(sources)
    steps = sources[0].shape[axes[0]]
    if steps > _UNROLLED:
        state, sources = [call.numbers(x) for x in state], [call.numbers(x) for x in sources]
    rows = []
    for i in range(steps):
        at = [steps - 1 - i if b else i for b in backwards]
        given = [_slice(x, axis, k) for x, axis, k in zip(sources, axes, at)]
        results = call.run(body, (*state, *given))
        state = results[:held]
        rows.append(results[held:])
    outputs = []
    for i in range(len(body.outputs) - held):
        column = [row[i] for row in rows]
        column = column[::-1] if (scan_output_directions or (0,) * (i + 1))[i] else column
        axis = (scan_output_axes or (0,) * (i + 1))[i]
        outputs.append(_stacked(column, v.axis_in(axis, column[0].ndim + 1)))
    return (*state, *outputs)


def _slice(x: Value, axis: int, place: int) -> Value:
    return v.reshape(v.part(x, axis, place, place + 1), [*x.shape[:axis], *x.shape[axis + 1 :]])


@operator("Scan")
def scan_8(lengths: Known = None, *xs: Weight, body: Any, num_scan_inputs: int,
           directions: tuple | None = None, call):  # fmt: skip
    """As in opset 8: each row of a batch by itself."""
    held = len(xs) - num_scan_inputs
    results = []
    for b in range(xs[0].shape[0]):
        row = [_slice(x, 0, b) for x in xs]
        results.append(
            scan(*row, body=body, num_scan_inputs=num_scan_inputs,
                 scan_input_directions=directions, call=call)
        )  # fmt: skip
    assert held >= 0
    return tuple(_stacked([row[i] for row in results], 0) for i in range(len(results[0])))
