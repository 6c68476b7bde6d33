"""Functions with and without the recipes that rewrite a graph: what their tests share.

An INTRINSIC's `meaning` uses the same rounded numbers as its instructions. What an answer may
differ from it is the order of float32 additions; what it may differ from the function as written is
the rounding, where the recipe rounds at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings

from engine import Tensor, get_device, program
from engine import dtype as dt
from engine import tensor as tensors
from engine.graph import Node, Op, Storage, buffer, rebuild, spelled_out, toposort
from engine.prepare import prepare
from engine.program import PRECISIONS
from engine.recipes import tile_dots
from engine.recipes.amx import Tiles
from engine.recipes.tile_dots import TileDots
from engine.recipes.vnni import Dots
from engine.runtime.reference import load
from engine.schedule import Kernel, _rewritten, schedule
from engine.specialise import Recipes
from engine.symbolic import Expr, evaluate
from tests.engine.kernels import cpu
from tests.engine.oracle import tensor, to_bfloat16
from weights.quant import BY_NAME

# 2**-24 for each of the some hundred additions in a sum here, which mostly cancel
SAME_NUMBERS = 2e-6
# the rounding itself, in sums of products of normally distributed numbers
EXACT = {
    Dots: 2e-4,  # two int8 terms are 16 bits per block; a zero point of 128 costs some of them
    TileDots: 2e-4,  # the same terms
    Tiles: 2.0**-7,  # two factors of 8 bits, whose errors cancel as the products themselves do
}


def need(features: Iterable[str]) -> None:
    """Skip where the processor, or its OpenCL compiler, lacks a feature."""
    missing = sorted(frozenset(features) - cpu().target.features)
    if missing:
        pytest.skip(f"this processor, or its OpenCL compiler, lacks {', '.join(missing)}")


WIDER = ("avx512", "amx"), ("avx", "f16c", "fma")  # what vectors of 8, and of 4, go without


def with_lanes(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the device one with vectors of 16, 8 or 4 lanes, without what comes with wider ones."""
    device = cpu()
    without = sum(WIDER[: {16: 0, 8: 1, 4: 2}[count]], ())
    features = frozenset(f for f in device.target.features if not f.startswith(without))
    monkeypatch.setattr(device, "target", replace(device.target, lanes=count, features=features))
    return count


@dataclass
class Answers:
    """What a function gives: by the recipes, by what their INTRINSICs mean, and as written.

    kernels: what the recipes' program launches.
    """

    got: list[np.ndarray]
    meaning: list[np.ndarray]
    exact: list[np.ndarray]
    kernels: list[Kernel]

    def used(self, *kinds: type) -> Answers:
        """Fail unless the program uses exactly these INTRINSICs, each as often as it is given."""
        assert Counter(type(n.arg) for n, _ in self._intrinsics()) == Counter(kinds)
        return self

    def fused(self) -> bool:
        """Whether every INTRINSIC is in a kernel with what surrounds it, none in one of its own."""
        return not any(alone for _, alone in self._intrinsics())

    def close(self, to_meaning: float, to_exact: float, by_row: bool = False) -> None:
        """Fail where an error exceeds these parts of the largest number of its output, or row."""
        for got, meaning, exact in zip(self.got, self.meaning, self.exact):
            finite = np.where(np.isfinite(exact), np.abs(exact), 0)
            scale = finite.max(-1 if by_row else None, keepdims=True, initial=0)
            _near(got, meaning, to_meaning * scale)
            _near(got, exact, to_exact * scale)

    def _intrinsics(self) -> list[tuple[Node, bool]]:
        return [
            (n, n is k.root)
            for k in self.kernels
            for n in toposort([k.root])
            if n.op is Op.INTRINSIC
        ]


def _near(got: np.ndarray, want: np.ndarray, error: np.ndarray) -> None:
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    with np.errstate(invalid="ignore"):
        off = np.where((got == want) | np.isnan(want), 0, np.abs(got - want))
    assert (off <= error).all(), f"off by {off.max()}, where {error.flat[0]} is allowed"


def dots(rows: int) -> type:
    """The INTRINSIC that multiplies so many rows, 32 at most, by a quantised matrix."""
    tiles = rows >= tile_dots.FEWEST and tile_dots.NEEDED <= cpu().target.features
    return TileDots if tiles else Dots


class Recipe:
    """A function as a program on the OpenCL device, compared with itself on the reference device.

    Tensors that it writes to are left as the program leaves them.
    """

    def __init__(
        self, function: Callable, precision: str = "auto", **limits: tuple[int, int]
    ) -> None:
        self.device, self.function, self.terms = cpu(), function, PRECISIONS[precision]
        self.program = program(function, precision=precision, **limits)
        self.variables = self.program.variables

    def __call__(self, *inputs: Tensor, **ints: int) -> Answers:
        values = {self.variables[name]: n for name, n in ints.items()}
        nodes = self._nodes(inputs)
        exact = on_reference(nodes, values)
        recipes = Recipes(self.device, self.device.name, self.terms)
        new = nodes
        for rewrite in recipes.passes:
            new = _rewritten(new, {}, rewrite)
        recipes.finish()
        meaning = on_reference([spelled_out(n) for n in new], values)
        out = self.program(*inputs, **ints)
        got = [_values(t.node, values) for t in (out if isinstance(out, tuple) else (out,))]
        *_, capture = self.program.captures.values()
        return Answers(got, meaning, exact, capture.prepared.plan.kernels)

    def _nodes(self, inputs: Sequence[Tensor]) -> list[Node]:
        """The outputs' graph; what the function wrote is as before."""
        recorder = tensors.Recorder()
        tensors.captures.recorders.append(recorder)
        try:
            out = self.function(*inputs, **self.variables)
            return [t.node for t in (out if isinstance(out, tuple) else (out,))]
        finally:
            tensors.captures.recorders.remove(recorder)
            recorder.undo()


def on_reference(sinks: Sequence[Node], values: Mapping[Expr, int] | None = None) -> list:
    """The values of nodes over any device's buffers, computed on the reference device."""
    copies: dict[Storage, Storage] = {}
    new: dict[Node, Node] = {}
    for n in toposort(sinks):
        if n.op is Op.BUFFER:
            storage = n.arg[0]
            if storage not in copies:
                copies[storage] = Storage("reference", storage.dtype, storage.size)
                raw = get_device(storage.device).read(storage.data, storage.nbytes)
                copies[storage].data = raw.copy()  # a write stays here
            new[n] = buffer(copies[storage], n.shape)
        else:
            new[n] = rebuild(n, new)
    plan = schedule([new[s] for s in sinks], "reference")
    results = prepare(plan, repeated=False).run(values or {})
    return [_values(n, values or {}) for n in results]


def _values(node: Node, values: Mapping[Expr, int]) -> np.ndarray:
    """A BUFFER's numbers, also of a symbolic shape."""
    shape = tuple(evaluate(n, values) for n in node.shape)
    storage = node.arg[0]
    raw = get_device(storage.device).read(storage.data, math.prod(shape) * node.dtype.itemsize)
    return load(raw.view(node.dtype.numpy).reshape(shape), node.dtype).copy()


# --- data -----------------------------------------------------------------------------------


def few(count: int) -> Callable:
    """Run a check on `count` drawn examples, always the same ones."""

    def decorate(check: Callable) -> Callable:
        options = settings(
            max_examples=count,
            deadline=None,  # the first compiles
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        return seed(3)(options(check))

    return decorate


def random(*shape: int, number: int = 0) -> np.ndarray:
    """Normally distributed float32, other ones for each number."""
    return np.random.default_rng([number, *shape]).standard_normal(shape, np.float32)


def normal(*shape: int, number: int = 0, weight: bool = False) -> Tensor:
    array = random(*shape, number=number)
    return Tensor.from_numpy(array, cpu().name) if weight else Tensor(array, device=cpu().name)


def halves(*shape: int, number: int = 0) -> Tensor:
    """bfloat16 numbers."""
    return tensor(to_bfloat16(random(*shape, number=number)), cpu().name, dt.bfloat16)


def quantised(name: str, rows: int, columns: int, number: int = 0) -> Tensor:
    """A weight of random blocks, with scales of either sign."""
    form, random = BY_NAME[name], np.random.default_rng([number, rows, columns])
    raw = random.integers(0, 256, form.size((rows, columns)), np.uint8)
    blocks = raw.reshape(-1, form.nbytes)
    scale = random.uniform(0.02, 0.04, len(blocks)) * random.choice([-1, 1], len(blocks))
    blocks[:, :2] = scale.astype(np.float16)[:, None].view(np.uint8)
    if name.endswith("_1"):
        least = random.uniform(-0.5, 0.1, len(blocks))
        blocks[:, 2:4] = least.astype(np.float16)[:, None].view(np.uint8)
    return form.decode(raw, (rows, columns), cpu().name)
