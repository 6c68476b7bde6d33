"""Convolutions of each channel by itself, channels last, equal the direct ones in every width.

Data are small whole numbers: sums are exact in any order, so results must be equal.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from engine import Tensor, program
from engine import graph as g
from engine.convolution import conv, conv2d
from engine.graph import Node, Op, toposort
from engine.recipes import depthwise
from engine.recipes.settings import Settings
from tests.engine.intrinsics import on_reference
from tests.engine.kernels import check, cpu
from tests.engine.test_recipes import Draw, examples


def rewritten(out: Tensor, lanes: int = 4) -> Node | None:
    """What the recipe makes of the one reduction of a convolution."""
    (node,) = (n for n in toposort([out.node]) if n.op is Op.REDUCE)
    target = replace(cpu().target, lanes=lanes)
    settings = Settings(target, 0, lambda w, layout: g.packed(layout(w)), lambda w: w)
    return depthwise.rewrite(node, settings)


@examples(3)
def test_it_equals_the_direct_convolution(data: st.DataObject) -> None:
    d = Draw(data)
    rank, few = d.choice(1, 2, 2, 3, label="rank"), st.integers(1, 3)
    axes = range(rank)
    kernel = [d.choice(1, 2, 3, 5 if rank < 3 else 2) for _ in axes]
    if set(kernel) == {1}:
        kernel[0] = 3
    stride, dilation = ([data.draw(few) for _ in axes] for _ in range(2))
    sides = [(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))) for _ in axes]
    space = [d.choice(2, 4, 9, 17) + (k - 1) * t for k, t in zip(kernel, dilation)]
    channels = d.choice(4, 7, 16, 24, 33, label="channels")
    batch = d.choice(1, 2, label="batch")
    if d.choice(True, False, label="channels last"):
        x = d.tensor(batch, *space, channels).permute(0, 1 + rank, *range(1, 1 + rank))
    else:
        x = d.tensor(batch, channels, *space)
    weight = d.tensor(channels, 1, *kernel, weight=True)
    out = conv(x, weight, None, stride, sides, dilation, channels)
    made = rewritten(out)
    assert made is not None
    d.check(Tensor(made, device=d.device.name))
    np.testing.assert_array_equal(*(on_reference([n])[0].ravel() for n in (made, out.node)))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5])
def test_a_program_runs_what_surrounds_it_in_the_same_kernels(stride: int, kernel: int) -> None:
    """A product of pixels, its bias and activation, the convolution and its own activation: the
    first writes into a border of zeros, and both are all that goes through the picture."""
    r = np.random.default_rng(kernel)
    x, w1, w2, b = (
        r.integers(-4, 5, shape).astype(np.float32)
        for shape in ((1, 20, 20, 32), (48, 32), (48, 1, kernel, kernel), (48,))
    )
    device = cpu().name
    t1, t2, tb = (Tensor.from_numpy(a, device) for a in (w1, w2, b))

    def net(x: Tensor) -> Tensor:
        y = (x.reshape(400, 32) @ t1.T + tb).relu().reshape(1, 20, 20, 48)
        y = conv2d(y.permute(0, 3, 1, 2), t2, None, stride, kernel // 2, 1, 48)
        return (y.permute(0, 2, 3, 1) + tb).relu()

    run = program(net)
    got = run(Tensor(x, device=device)).numpy()
    y = np.maximum(x.reshape(400, 32) @ w1.T + b, 0).reshape(1, 20, 20, 48)
    half = kernel // 2
    padded = np.pad(y, ((0, 0), (half, half), (half, half), (0, 0)))
    view = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), (1, 2))
    want = np.einsum("byxcij,cij->byxc", view[:, ::stride, ::stride], w2[:, 0]) + b
    np.testing.assert_array_equal(got, np.maximum(want, 0))
    (capture,) = run.captures.values()
    large = [k for k in capture.prepared.plan.kernels if k.root.numel > 48 * 24 * 2]
    assert len(large) == 2


OTHERS = {
    "fewer channels than lanes": (8, 8, 16),
    "two outputs of each channel": (16, 32, 4),
    "channels in groups": (32, 16, 4),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_convolutions_are_left_alone(what: str) -> None:
    channels, outputs, lanes = OTHERS[what]
    groups = min(channels, outputs)
    x, w = Tensor.zeros(1, channels, 9, 9), Tensor.zeros(outputs, channels // groups, 3, 3)
    out = conv2d(x.contiguous(), w.contiguous(), groups=groups)
    assert rewritten(out, lanes) is None


def test_lanes_lie_along_channels() -> None:
    d = cpu()
    x = Tensor(np.zeros((1, 12, 12, 32), np.float32), device=d.name).permute(0, 3, 1, 2)
    made = rewritten(conv2d(x, Tensor.zeros(32, 1, 3, 3).contiguous(), groups=32))
    (variants,) = [v for v in check(d, [Tensor(made, device=d.name)]) if "REDUCE" in _ops(v)]
    plan = variants.plans["contraction in 16 lanes"]
    assert variants.kernel.root.shape[plan.vector] == 32


def _ops(variants: object) -> set[str]:
    return {n.op.name for n in toposort([variants.kernel.root])}
