"""Every recipe equals the plain lowering, on targets with 1, 4, 8 and 16 lanes.

Most data are small whole numbers: their sums are exact in any order, so results must be equal. The
rest says where its tolerance comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from engine import Tensor, Var
from engine import dtype as dt
from engine.functional import layer_norm, linear, rms_norm, rope, softmax
from tests.engine.kernels import LANES, check, cpu
from weights.quant import BY_NAME

# Sides that divide the lanes, ones that don't, ones below them.
SIDES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 50, 64)


class Tree(dict):
    """Parameters by attribute, as the functions of engine.functional want them."""

    __getattr__ = dict.__getitem__


def examples(few: int) -> Callable:
    """Run `check(data)` on a few examples, always the same; the `slow` run draws many new ones."""
    many = pytest.param(25 * few, True, id="many", marks=pytest.mark.slow)

    def decorate(check: Callable[[st.DataObject], None]) -> Callable:
        @pytest.mark.parametrize(("count", "fresh"), [pytest.param(few, False, id="few"), many])
        def test(count: int, fresh: bool) -> None:
            options = settings(
                max_examples=count,
                deadline=None,  # each kernel is compiled
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            run = options(given(st.data())(check))
            (run if fresh else seed(2024)(run))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


class Draw:
    """Tensors and sizes drawn for one example."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
        self.device = cpu()
        self.values: dict = {}

    def side(self, label: str = "side") -> int:
        return self.draw(st.sampled_from(SIDES), label=label)

    def choice(self, *of: Any, label: str = "choice") -> Any:
        return self.draw(st.sampled_from(of), label=label)

    def tensor(self, *shape: int, dtype: dt.DType = dt.float32, weight: bool = False) -> Tensor:
        """Whole numbers -4 … 4, or 0 … 4."""
        low = 0 if dtype.kind in "ub" else -4
        array = self.random.integers(low, 5, shape)
        if dtype is dt.bfloat16:
            bits = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            return Tensor.from_numpy(bits, self.device.name, dtype)
        array = array.astype(dtype.numpy)
        make = Tensor.from_numpy if weight else Tensor
        return make(array, device=self.device.name)

    def quantised(self, name: str, rows: int, columns: int) -> Tensor:
        """Random blocks with scale 1/2 (and minimum -1): all products are multiples of 1/2."""
        form = BY_NAME[name]
        raw = self.random.integers(0, 256, form.size((rows, columns)), np.uint8)
        blocks = raw.reshape(-1, form.nbytes)
        blocks[:, :2] = np.array([0.5], np.float16).view(np.uint8)
        if name.endswith("_1"):
            blocks[:, 2:4] = np.array([-1.0], np.float16).view(np.uint8)
        return form.decode(raw, (rows, columns), self.device.name)

    def maybe_symbolic(self, x: Tensor, axis: int, name: str) -> Tensor:
        """x, or its first `name` elements along an axis, for a symbolic int that gets a value."""
        if not self.draw(st.booleans(), label=f"symbolic {name}"):
            return x
        var = Var(name, 1, x.shape[axis])
        self.values[var] = self.draw(st.integers(1, x.shape[axis]), label=name)
        return x[(slice(None),) * axis + (slice(0, var),)]

    def check(self, *sinks: Tensor, rtol: float = 0, atol: float = 0) -> list:
        return check(self.device, sinks, self.values, rtol, atol)


@examples(6)
def test_contractions(data: st.DataObject) -> None:
    """Batched, transposed, broadcast, of every float type, with what is fused behind them."""
    d = Draw(data)
    m, k, n = d.side("m"), d.side("k"), d.side("n")
    batch = d.choice((), (2,), (3, 2), (1,), label="batch")
    kind = d.choice(dt.float32, dt.float32, dt.float16, dt.bfloat16, label="type")
    transposed = d.choice("neither", "left", "right", "both", label="transposed")
    left = (k, m) if transposed in ("left", "both") else (m, k)
    right = (n, k) if transposed in ("right", "both") else (k, n)
    a = d.tensor(*batch, *left)
    b = d.tensor(*(batch if d.choice(True, False, label="batched") else ()), *right, dtype=kind)
    a = a.transpose() if transposed in ("left", "both") else a
    b = b.transpose() if transposed in ("right", "both") else b
    a = d.maybe_symbolic(a, a.ndim - 2, "rows")
    out = a @ b
    match d.choice("nothing", "bias", "residual", "gate", label="epilogue"):
        case "bias":
            out = (out + d.tensor(n)).maximum(0)
        case "residual":
            out = d.tensor(*batch, m, n)[(..., slice(0, a.shape[-2]), slice(None))] + out
        case "gate":
            out = out * (a @ (b * 2))
    d.check(out)


@examples(3)
def test_contractions_over_a_symbolic_length(data: st.DataObject) -> None:
    d = Draw(data)
    heads, k, n = d.choice(1, 3), d.side("k"), d.side("n")
    a, b = d.tensor(heads, d.choice(1, 4), k), d.tensor(heads, k, n)
    var = Var("length", 1, k)
    d.values[var] = data.draw(st.integers(1, k), label="length")
    d.check(a[:, :, :var] @ b[:, :var])


@examples(5)
def test_linear_on_quantised_weights(data: st.DataObject) -> None:
    d = Draw(data)
    name = d.choice("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", label="format")
    rows, columns = d.side("rows"), 32 * d.choice(1, 2, 3, 5, label="blocks")
    p = Tree(weight=d.quantised(name, rows, columns))
    x = d.tensor(d.choice(1, 1, 2, 5), columns)
    x = d.maybe_symbolic(x, 0, "length")
    d.check(linear(p, x))


@examples(3)
def test_rows_of_a_table_are_gathered(data: st.DataObject) -> None:
    d = Draw(data)
    table = d.choice(d.quantised("Q4_1", 9, 64), d.tensor(9, d.side()), label="table")
    ids = d.tensor(d.choice(1, 5, 16), dtype=dt.int32) + 2  # -2 and -1 count from the end
    d.check(table[d.maybe_symbolic(ids, 0, "length")] * 2)


@examples(7)
def test_norms_and_softmax(data: st.DataObject) -> None:
    """Sums of at most 320 rounded terms in another order: 320 * 2^-24 = 2e-5, relative to a sum of
    positive ones; a mean of mixed signs cancels, so the absolute part is for terms of size 4."""
    d = Draw(data)
    width = d.choice(1, 3, 8, 16, 17, 31, 64, 100, 320, label="width")
    x = d.tensor(*d.choice((), (1,), (5,), (2, 3), label="rows"), width) * 0.37
    if x.ndim > 1:
        x = d.maybe_symbolic(x, 0, "length")
    p = Tree(weight=d.tensor(width, weight=True), bias=d.tensor(width, weight=True))
    match d.choice("softmax", "softmax", "rms_norm", "layer_norm", "first axis", label="what"):
        case "softmax":
            out = softmax(x if d.choice(True, False) else d.maybe_symbolic(x, x.ndim - 1, "row"))
        case "rms_norm":
            out = rms_norm(p, x, 1e-5)
        case "layer_norm":
            out = layer_norm(p, x, 1e-2)
        case _:
            out = softmax(x, 0)
    d.check(out, rtol=2e-5, atol=2e-5)


@examples(9)
def test_reductions_over_any_axes(data: st.DataObject) -> None:
    d = Draw(data)
    shape = [d.choice(1, 2, 5, 8, 17, 33) for _ in range(d.choice(1, 2, 3, label="rank"))]
    kind = d.choice(dt.float32, dt.float16, dt.int32, dt.uint8, dt.int64, dt.bool_, label="type")
    x = d.tensor(*shape, dtype=kind)
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1), label="axes")
    x = d.maybe_symbolic(x, d.choice(*range(len(shape))), "length")
    x = x.permute(*data.draw(st.permutations(range(len(shape))), label="order"))
    what = d.choice("sum", "max", "min", label="what")
    out = getattr(x, what)(tuple(axes), keepdim=True)
    d.check(out if d.choice(True, False, label="alone") else x + out)


@examples(12)
def test_elementwise_with_movement_and_broadcasting(data: st.DataObject) -> None:
    d = Draw(data)
    shape = [d.choice(1, 2, 5, 16, 17, 33) for _ in range(d.choice(1, 2, 3, label="rank"))]
    kind = d.choice(*dt.ALL, label="type")
    x = d.tensor(*shape, dtype=kind)
    other = d.tensor(
        *(n if d.choice(True, False) else 1 for n in shape), dtype=d.choice(kind, dt.float32)
    )
    for _ in range(d.choice(0, 1, 2, label="moves")):
        match d.choice("permute", "flip", "pad", "shrink", "reshape", label="move"):
            case "permute":
                order = data.draw(st.permutations(range(x.ndim)), label="order")
                x, other = x.permute(*order), other.permute(*order)
            case "flip":
                x = x.flip(d.choice(*range(x.ndim)))
            case "pad":
                x = x.pad([(0, 0)] * (x.ndim - 1) + [(1, 2)]).shrink(
                    [(0, n) for n in x.shape[:-1]] + [(1, x.shape[-1] + 1)]
                )
            case "shrink":
                last = x.shape[-1]
                x = Tensor.cat(x[..., last // 2 :], x[..., : last // 2], axis=-1)
            case _:
                x = x.reshape(x.numel).reshape(*x.shape)
    x, other = (d.maybe_symbolic(x, 0, "length"), other) if other.shape[0] == 1 else (x, other)
    out = x + other
    d.check(Tensor.where(out < 2, out, other) if d.choice(True, False) else out * x)


@examples(4)
def test_writes_into_a_box(data: st.DataObject) -> None:
    """Nothing outside of the box is touched: the whole buffer is compared."""
    d = Draw(data)
    heads, length, width = d.choice(1, 3), d.choice(5, 24), d.side("width")
    cache = d.tensor(heads, length, width).contiguous().realize()
    new = d.choice(1, 4, label="new")
    start = Var("start", 0, length - new)
    d.values[start] = data.draw(st.integers(0, length - new), label="start")
    if d.choice(True, False, label="transposed"):
        cache[:, start : start + new] = d.tensor(heads, width, new).transpose() * 2
    else:
        cache[:, start : start + new] = d.tensor(new, heads, width).permute(1, 0, 2) * 2
    d.check(cache)


def test_rotary_positions_and_interleaved_lanes() -> None:
    """Sine and cosine tables enter with two products and one sum: half a unit each, if fused."""
    device = cpu()
    r = np.random.default_rng(0)
    x = Tensor(r.normal(size=(3, 5, 32)).astype(np.float32), device=device.name)
    table = Tensor(r.normal(size=(2, 5, 16)).astype(np.float32), device=device.name)
    check(device, [rope(x, table[0], table[1])], rtol=2e-6, atol=1e-6)


@examples(4)
def test_values_chosen_by_number(data: st.DataObject) -> None:
    """Short axes by whose number something is chosen are unrolled: each copy has its own value."""
    d = Draw(data)
    count, columns = d.choice(2, 5, 9, 80), d.side()
    x = d.maybe_symbolic(d.tensor(d.side(), 1, columns), 0, "rows")
    at = Tensor.arange(count, device=d.device.name).reshape(count, 1)
    rest = Tensor.where(at < 4, x * 2, x.maximum(1) + at.float())
    chosen = Tensor.where(at < 1, x, rest)
    d.check(chosen)
    d.check(chosen.permute(1, 0, 2))


@pytest.mark.parametrize("shape", [(1, 70, 90), (3, 33, 5, 64), (2, 4, 130)])
def test_copies_that_cross_axes(shape: tuple[int, ...]) -> None:
    """They go by squares, some of which don't fill; also of a part, and reversed."""
    device = cpu()
    x = Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), device=device.name)
    last = (0, *range(2, len(shape)), 1)
    for out in (x.permute(*last), x[:, 1:].flip(1).permute(*last), x[..., 3:].permute(*last)):
        check(device, [out.contiguous()])


@pytest.mark.parametrize("shape", [(7, 64), (1, 64)])
def test_recipes_use_the_lanes_they_are_given(shape: tuple[int, ...]) -> None:
    """The plans compared above aren't all the plain one."""
    device = cpu()
    x = Tensor(np.ones(shape, np.float32), device=device.name)
    w = Tensor(np.ones((96, 64), np.float32), device=device.name)
    for out in (x * 2, softmax(x), x @ w.transpose()):
        (variants,) = check(device, [out], rtol=1e-6)
        used = {max(p.lanes, p.reduce_lanes) for p in variants.plans.values()}
        assert used == set(LANES)
