"""LSTM, GRU and RNN: steps written out, so that a program holds all of them.

Shapes: x (T, B, I), or (B, T, I) with layout 1; weights (D, G H, I) and (D, G H, H), where G is the
number of gates and D of directions. Long sequences on the device cost a kernel or more per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from zoo.onnx import values as v
from zoo.onnx.operators import activations as e
from zoo.onnx.operators.elementwise import softplus
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value

_ACTIVATIONS = {
    "Relu": lambda x, a, b: v.maximum(x, 0),
    "Tanh": lambda x, a, b: v.tanh(x),
    "Sigmoid": lambda x, a, b: v.sigmoid(x),
    "Affine": lambda x, a, b: x * a + b,
    "LeakyRelu": lambda x, a, b: e.leaky_relu(x, alpha=0.01 if a is None else a),
    "ThresholdedRelu": lambda x, a, b: e.thresholded_relu(x, alpha=1.0 if a is None else a),
    "ScaledTanh": lambda x, a, b: v.tanh(x * b) * a,
    "HardSigmoid": lambda x, a, b: e.hard_sigmoid(
        x, alpha=0.2 if a is None else a, beta=0.5 if b is None else b
    ),
    "Elu": lambda x, a, b: e.elu(x, alpha=1.0 if a is None else a),
    "Softsign": lambda x, a, b: x / (1 + v.absolute(x)),
    "Softplus": lambda x, a, b: softplus(x),
}
Act = Callable[[Value], Value]
Step = Callable[..., tuple[Value, ...]]


def _activations(names, default, directions, alpha, beta, clip) -> list[list[Act]]:
    """For each direction its functions, each after clipping its input."""
    names = names or default * directions
    alphas, betas = iter(alpha or ()), iter(beta or ())
    takes_alpha = {"Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu"}
    out = []
    for name in names:
        function = _ACTIVATIONS.get(name)
        if function is None:
            raise ValueError(f"the activation {name} is unknown")
        a = next(alphas, None) if name in takes_alpha else None
        b = next(betas, None) if name in ("Affine", "ScaledTanh", "HardSigmoid") else None

        def run(x, function=function, a=a, b=b):
            if clip is not None:
                x = v.minimum(v.maximum(x, -clip), clip)
            return function(x, a, b)

        out.append(run)
    each = len(default)
    return [out[d * each : (d + 1) * each] for d in range(directions)]


def _run(
    x: Value,
    lengths: np.ndarray | None,
    direction: str,
    layout: int,
    states: Sequence[Sequence[Value]],
    steps: Sequence[Step],
) -> tuple[Value, ...]:
    """All steps in all directions -> (every state (T, D, B, H), then the last states (D, B, H)).

    states[d] are the first states (B, H) of a direction, of which the first is what is put out.
    """
    x = v.permute(x, (1, 0, 2)) if layout else x
    t, batch = x.shape[:2]
    outputs, lasts = [], []
    for d, (state, step) in enumerate(zip(states, steps)):
        state, rows = tuple(state), []
        backwards = direction == "reverse" or d == 1
        for i in range(t - 1, -1, -1) if backwards else range(t):
            new = step(v.reshape(v.part(x, 0, i, i + 1), x.shape[1:]), i, *state)
            if lengths is not None and (lengths <= i).any():
                inside = (i < lengths).reshape(batch, 1)
                new = tuple(v.where(inside, n, old) for n, old in zip(new, state))
                rows.append(v.where(inside, new[0], new[0] * v.number(new[0], 0)))
            else:
                rows.append(new[0])
            state = new
        outputs.append(v.stack(rows[::-1] if backwards else rows))
        lasts.append(state)
    y = v.stack(outputs, 1)  # (T, D, B, H)
    last = [v.stack([state[i] for state in lasts]) for i in range(len(lasts[0]))]
    if layout:
        return v.permute(y, (2, 0, 1, 3)), *(v.permute(s, (1, 0, 2)) for s in last)
    return y, *last


def _slab(x: Value, d: int) -> Value:
    """x[d]."""
    return v.reshape(v.part(x, 0, d, d + 1), x.shape[1:])


def _initial(state: Value | None, d: int, layout: int, like: Value, b: int, h: int) -> Value:
    if state is None:
        return v.full((b, h), 0, like)
    return _slab(v.permute(state, (1, 0, 2)) if layout else state, d)


def _ahead(x: Value, w: Value, bias: Value | None, layout: int) -> Value:
    """The inputs' share of all gates at all steps, one product: (T, B, G H)."""
    x = v.permute(x, (1, 0, 2)) if layout else x
    out = x @ v.permute(w, (1, 0))
    return out if bias is None else out + bias


def _gates(x: Value, n: int) -> list[Value]:
    h = x.shape[-1] // n
    return [v.part(x, x.ndim - 1, i * h, (i + 1) * h) for i in range(n)]


def _each_direction(x: Value, w: Value, r: Value, b: Value | None, layout: int, gates: int):
    """(inputs' share, recurrent weights turned, recurrent bias or None) of each direction."""
    for d in range(w.shape[0]):
        wb, rb = (None, None) if b is None else _gates(_slab(b, d), 2)
        yield _ahead(x, _slab(w, d), wb, layout), v.permute(_slab(r, d), (1, 0)), rb


def _sum(a: Value, b: Value | None) -> Value:
    return a if b is None else a + b


@operator("RNN")
def rnn(x: Value, w: Value, r: Value, b: Value = None, lengths: Known = None,
        initial_h: Value = None, *, activation_alpha: tuple | None = None,
        activation_beta: tuple | None = None, activations: tuple | None = None,
        clip: float | None = None, direction: str = "forward", hidden_size: int = 0,
        layout: int = 0):  # fmt: skip
    """h = f(x Wᵀ + h Rᵀ + b)."""
    count, batch, h = w.shape[0], x.shape[0 if layout else 1], r.shape[-1]
    acts = _activations(activations, ("Tanh",), count, activation_alpha, activation_beta, clip)
    steps, states = [], []
    for d, (ahead, turned, bias) in enumerate(_each_direction(x, w, r, b, layout, 1)):

        def step(_, i, hidden, ahead=ahead, turned=turned, bias=bias, f=acts[d][0]):
            return (f(_sum(_slab(ahead, i) + hidden @ turned, bias)),)

        steps.append(step)
        states.append([_initial(initial_h, d, layout, x, batch, h)])
    return _run(x, lengths, direction, layout, states, steps)


@operator("GRU")
def gru(x: Value, w: Value, r: Value, b: Value = None, lengths: Known = None,
        initial_h: Value = None, *, activation_alpha: tuple | None = None,
        activation_beta: tuple | None = None, activations: tuple | None = None,
        clip: float | None = None, direction: str = "forward", hidden_size: int = 0,
        layout: int = 0, linear_before_reset: int = 0):  # fmt: skip
    """Update, reset and new gates (Cho et al. 2014)."""
    count, batch, h = w.shape[0], x.shape[0 if layout else 1], r.shape[-1]
    default = ("Sigmoid", "Tanh")
    acts = _activations(activations, default, count, activation_alpha, activation_beta, clip)
    steps, states = [], []
    for d, (ahead, turned, bias) in enumerate(_each_direction(x, w, r, b, layout, 3)):

        def step(_, i, hidden, ahead=ahead, turned=turned, bias=bias, f=acts[d]):
            xz, xr, xn = _gates(_slab(ahead, i), 3)
            rz, rr, rn = _gates(turned, 3)
            bz, br, bn = (None,) * 3 if bias is None else _gates(bias, 3)
            update = f[0](_sum(xz + hidden @ rz, bz))
            reset = f[0](_sum(xr + hidden @ rr, br))
            if linear_before_reset:
                new = f[1](xn + reset * _sum(hidden @ rn, bn))
            else:
                new = f[1](_sum(xn + (reset * hidden) @ rn, bn))
            return (new + update * (hidden - new),)

        steps.append(step)
        states.append([_initial(initial_h, d, layout, x, batch, h)])
    return _run(x, lengths, direction, layout, states, steps)


@operator("LSTM")
def lstm(x: Value, w: Value, r: Value, b: Value = None, lengths: Known = None,
         initial_h: Value = None, initial_c: Value = None, p: Value = None, *,
         activation_alpha: tuple | None = None, activation_beta: tuple | None = None,
         activations: tuple | None = None, clip: float | None = None,
         direction: str = "forward", hidden_size: int = 0, input_forget: int = 0,
         layout: int = 0):  # fmt: skip
    """Input, output, forget and cell gates, with peepholes if given (Gers et al. 2002)."""
    count, batch, h = w.shape[0], x.shape[0 if layout else 1], r.shape[-1]
    default = ("Sigmoid", "Tanh", "Tanh")
    acts = _activations(activations, default, count, activation_alpha, activation_beta, clip)
    steps, states = [], []
    for d, (ahead, turned, bias) in enumerate(_each_direction(x, w, r, b, layout, 4)):
        peep = (None,) * 3 if p is None else _gates(_slab(p, d), 3)

        def step(_, i, hidden, cell, ahead=ahead, turned=turned, bias=bias, f=acts[d], peep=peep):
            gates = _gates(_sum(_slab(ahead, i) + hidden @ turned, bias), 4)
            gi, go, gf, gc = gates
            pi, po, pf = peep
            enters = f[0](gi if pi is None else gi + pi * cell)
            stays = 1 - enters if input_forget else f[0](gf if pf is None else gf + pf * cell)
            cell = stays * cell + enters * f[1](gc)
            leaves = f[0](go if po is None else go + po * cell)
            return leaves * f[2](cell), cell

        steps.append(step)
        first = [_initial(s, d, layout, x, batch, h) for s in (initial_h, initial_c)]
        states.append(first)
    return _run(x, lengths, direction, layout, states, steps)
