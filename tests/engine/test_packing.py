"""Weights packed for recipes: the same numbers, once per weight, for as long as it lives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from engine import Tensor, program, specialise
from engine import graph as g
from engine.graph import Node, Op, Storage, toposort
from engine.recipes import amx, blocks, vnni
from tests.engine.intrinsics import need, normal, on_reference, quantised
from tests.engine.kernels import cpu
from weights.quant import BY_NAME

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture(autouse=True)
def _device() -> None:
    cpu()


def storage_of(weight: Tensor) -> Storage:
    (found,) = (n.arg[0] for n in toposort([weight.node]) if n.op is Op.BUFFER)
    return found


def copies(weight: Tensor) -> list[Storage]:
    """What was packed of a weight."""
    return [n.arg[0] for n in specialise._packed.get(storage_of(weight), {}).values()]


def packed_on_device(factor: Node) -> Node:
    recipes = specialise.Recipes(cpu(), cpu().name, terms=1)
    place = recipes.settings.pack(factor, blocks.pack)
    recipes.finish()
    return place


def times(weight: Tensor, factor: float = 1.0) -> Callable:
    step = program(lambda x: x @ weight.transpose() * factor, precision="auto")
    return lambda rows: step(normal(rows, weight.shape[1])).numpy()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 64), (50, 96), (1, 32)])
def test_blocks_hold_the_very_numbers_of_the_weight(name: str, shape: tuple[int, int]) -> None:
    """To the bit, but for the sign of a zero: minus the zero point's share, none is negative."""
    weight = quantised(name, *shape)
    factor = g.reshape(weight.node, (1, *shape))
    kind = blocks.layout(factor)
    packed = packed_on_device(factor) if shape == (50, 96) else blocks.pack(factor)
    scaled, offset = blocks.values(packed, kind, shape[0])
    got, want = on_reference([g.binary(Op.ADD, scaled, offset), weight.node])
    np.testing.assert_array_equal(got, want)
    assert kind.bits == (4 if name.startswith("Q4") else 8)
    assert kind.has_least == name.endswith("_1")


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_take_every_pattern_of_bits(name: str) -> None:
    """All values of all bytes of the small ints, and halves of every exponent."""
    form, random = BY_NAME[name], np.random.default_rng(0)
    raw = random.integers(0, 256, form.size((64, 512)), np.uint8).reshape(-1, form.nbytes)
    halves = np.arange(0, 1 << 15, 7, dtype=np.uint16)  # all finite ones and some infinities
    halves = np.resize(halves[halves < 0x7C00], len(raw)).astype(np.uint16)
    raw[:, :2] = halves[:, None].view(np.uint8)
    if name.endswith("_1"):
        raw[:, 2:4] = (halves[::-1] | 0x8000)[:, None].view(np.uint8)
    weight = form.decode(raw.reshape(-1), (64, 512), cpu().name)
    factor = g.reshape(weight.node, (1, 64, 512))
    scaled, offset = blocks.values(blocks.pack(factor), blocks.layout(factor), 64)
    got, want = on_reference([g.binary(Op.ADD, scaled, offset), weight.node])
    np.testing.assert_array_equal(got, want)


def test_programs_share_a_packed_copy() -> None:
    need(vnni.NEEDED)
    weight = quantised("Q4_1", 64, 96)
    first = times(weight)
    assert not copies(weight)
    one = first(2)
    (place,) = copies(weight)
    np.testing.assert_array_equal(times(weight, 2.0)(2), one * 2)
    if amx.NEEDED <= cpu().target.features:
        times(weight)(40)  # in tiles: from the same blocks
    assert copies(weight) == [place]


def test_weights_of_one_form_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    need(vnni.NEEDED)
    planned = []
    plan = specialise.plan_packing
    monkeypatch.setattr(specialise, "plan_packing", lambda *a: planned.append(1) or plan(*a))
    specialise._packings.clear()
    a, b = (quantised("Q5_0", 64, 160, number=i) for i in (0, 1))
    both = program(lambda x: x @ a.transpose() + x @ b.transpose(), precision="auto")
    got = both(normal(3, 160)).numpy()
    times(quantised("Q5_0", 64, 160, number=2))(3)
    assert len(planned) == 1
    want = normal(3, 160).numpy() @ (a.numpy() + b.numpy()).T
    np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())  # two int8 terms


def test_a_packed_copy_is_freed_with_its_weight() -> None:
    need(vnni.NEEDED)
    weight = quantised("Q8_0", 64, 64)
    step = times(weight)
    step(1)
    place = weakref.ref(copies(weight)[0])
    del weight
    gc.collect()
    assert place() is not None  # the program has it
    step(1)
    del step
    gc.collect()
    assert place() is None


def test_what_is_no_weight_is_packed_at_each_call() -> None:
    """A tensor that is written to between two calls."""
    state = Tensor(np.zeros((64, 64), np.float32), device=cpu().name)
    step = program(lambda x: x @ state.transpose(), precision="auto")
    assert not step(normal(40, 64)).numpy().any()
    state[:] = Tensor(np.eye(64, dtype=np.float32), device=cpu().name)
    np.testing.assert_allclose(step(normal(40, 64)).numpy(), normal(40, 64).numpy(), rtol=1e-6)
