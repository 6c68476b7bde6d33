"""Convolution by tiles of bfloat16 equals what its INTRINSIC means, and the function as written.

Tolerances are those of tests.engine.intrinsics: against `meaning`, which has the same rounded
numbers, only float32 additions come in another order; so it is against the function itself where
its numbers are bfloat16 already. A chain of two rounds the first result, and a number that is off
in its last bit may round the other way: by 2**-8 of itself, one of the some hundred terms of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Tensor
from engine.convolution import conv1d, conv2d
from engine.functional import silu
from engine.recipes import conv
from engine.recipes.amx import NEEDED, Tiles
from engine.recipes.conv import Conv
from engine.recipes.frames import Slide, frame_of
from tests.engine.intrinsics import EXACT, SAME_NUMBERS, Recipe, few, halves, need, normal
from tests.engine.kernels import cpu

ROUNDED = EXACT[Tiles]
CHAIN = 2.0**-8 / 10


@pytest.fixture(autouse=True)
def _features() -> None:
    need(NEEDED)


def sizes(draw: Callable, rank: int) -> tuple[list[int], list[int], list[int], dict[str, Any]]:
    """Space and kernel along each axis, channels (in, out), and the options of a convolution."""
    pick = st.sampled_from
    while True:
        space = [draw(pick((3, 5, 7, 8, 9, 14, 16, 17, 33))) for _ in range(rank)]
        kernel = [draw(pick((1, 2, 3, 3, 5))) for _ in range(rank)]
        how = {
            "stride": [draw(pick((1, 1, 2, 3))) for _ in range(rank)],
            "padding": [(draw(pick((0, 1, 2))), draw(pick((0, 1, 2)))) for _ in range(rank)],
            "dilation": [draw(pick((1, 1, 2))) for _ in range(rank)],
        }
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, how["dilation"])]
        whole = [n + sum(p) for n, p in zip(space, how["padding"])]
        outputs = [(n - s) // t + 1 for n, s, t in zip(whole, spans, how["stride"])]
        if np.prod(kernel) > 1 and min(outputs) > 0 and np.prod(outputs) >= conv.FEWEST:
            channels = [draw(pick((16, 20, 32, 40, 64))), draw(pick((1, 3, 32, 40)))]
            return space, kernel, channels, how


def call(rank: int, how: dict[str, Any]) -> Callable:
    """conv1d or conv2d with its options."""
    if rank == 1:
        options = {name: value[0] for name, value in how.items()}
        return lambda x, w, b: conv1d(x, w, b, **options)
    options = {name: tuple(value) for name, value in how.items()}
    return lambda x, w, b: conv2d(x, w, b, **options)


@pytest.mark.parametrize("rank", [1, 2])
def test_convolutions_of_any_geometry(rank: int) -> None:
    @few(8)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        space, kernel, (c, o), how = sizes(data.draw, rank)
        weight, bias = normal(o, c, *kernel, weight=True), normal(o, weight=True)
        function = call(rank, how)
        answers = Recipe(lambda x: function(x, weight, bias))(normal(2, c, *space))
        answers.used(Conv).close(2 * SAME_NUMBERS, ROUNDED)

    check()


@pytest.mark.parametrize("stride", [1, 2])
def test_halves_lose_nothing_when_float32_is_exact(stride: int) -> None:
    """Both factors are bfloat16, so that the answer is the function's, up to the order of sums."""
    x, weight = halves(2, 40, 13, 9), halves(33, 40, 3, 3, number=1)
    function = Recipe(
        lambda x: conv2d(x.float(), weight.float(), stride=stride, padding=1), precision="f32"
    )
    function(x).used(Conv).close(2 * SAME_NUMBERS, 2 * SAME_NUMBERS)


def test_channels_last_is_a_view_like_any_other() -> None:
    weight = normal(64, 64, 3, 3, weight=True)

    def function(x: Tensor) -> Tensor:
        return conv2d(x.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1)

    answers = Recipe(function)(normal(2, 10, 12, 64)).used(Conv)
    answers.close(2 * SAME_NUMBERS, ROUNDED)
    assert answers.fused()


@pytest.mark.parametrize("middle", [32, 40])
def test_a_convolution_writes_what_the_next_one_reads(middle: int) -> None:
    """Into the middle of zeros, with bias and activation: none of it is stored in float32."""
    first, second = normal(middle, 32, 3, 3, weight=True), normal(32, middle, 3, 3, weight=True)
    bias = normal(middle, weight=True)

    def function(x: Tensor) -> Tensor:
        return conv2d(silu(conv2d(x, first * 0.1, bias, padding=1)), second, padding=1)

    recipe = Recipe(function)
    for number in (0, 1):  # the second run finds what the first one left in memory
        answers = recipe(normal(2, 32, 15, 17, number=number)).used(Conv, Conv)
        answers.close(CHAIN, 2 * ROUNDED)
    assert answers.fused()


def test_sound_goes_through_both_convolutions_of_an_encoder() -> None:
    first, second = normal(64, 80, 3, weight=True), normal(64, 64, 3, weight=True)

    def function(x: Tensor) -> Tensor:
        return conv1d(silu(conv1d(x, first * 0.1, padding=1)), second, stride=2, padding=1)

    answers = Recipe(function)(normal(1, 80, 203)).used(Conv, Conv)
    answers.close(CHAIN, 2 * ROUNDED)
    assert answers.fused()


@pytest.mark.parametrize("stride", [1, 2])
def test_what_is_infinite_stays_within_its_windows(stride: int) -> None:
    """Lines share their border, and rows between them are computed in vain: nothing may leak."""
    x = np.ones((1, 32, 9, 11), np.float32)
    x[0, :, 0, 0] = x[0, :, 4, 10] = x[0, :, 8, 10] = np.inf
    weight = Tensor.from_numpy(np.ones((32, 32, 3, 3), np.float32), cpu().name)
    function = Recipe(lambda x: conv2d(x, weight, stride=stride, padding=1))
    if stride == 2:  # 30 places are too few; twice as many are enough
        x = np.concatenate([x, x])
    answers = function(Tensor(x, device=cpu().name)).used(Conv)
    np.testing.assert_array_equal(answers.got[0], answers.exact[0])  # sums of ones are exact


Case = tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], str]
OTHERS: dict[str, Case] = {
    "groups": (lambda x, w: conv2d(x, w[:, :32], groups=2), (1, 64, 9, 9), "auto"),
    "depthwise": (lambda x, w: conv2d(x, w[:, :1], groups=64), (1, 64, 9, 9), "auto"),
    "few channels": (lambda x, w: conv2d(x, w[:, :3]), (1, 3, 9, 9), "auto"),
    "1x1": (lambda x, w: conv2d(x, w[:, :, :1, :1]), (1, 64, 9, 9), "auto"),
    "few places": (lambda x, w: conv2d(x, w), (1, 64, 5, 5), "auto"),
    "exact float32": (lambda x, w: conv2d(x, w), (1, 64, 9, 9), "f32"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_take_what_is_no_such_convolution(name: str) -> None:
    function, shape, precision = OTHERS[name]
    weight = normal(64, 64, 3, 3, weight=True)
    answers = Recipe(lambda x: function(x, weight), precision)(normal(*shape))
    assert not any(isinstance(n.arg, Conv) for n, _ in answers._intrinsics())
    answers.close(ROUNDED, ROUNDED)


@few(200)
@given(st.data())
def test_no_wanted_tap_meets_anything_but_its_pixel_or_zero(data: st.DataObject) -> None:
    """The addresses of a frame, one by one."""

    def axis() -> Slide:
        size, taps, stride, apart = (
            data.draw(st.integers(1, n), label=label)
            for n, label in ((12, "size"), (5, "taps"), (3, "stride"), (3, "apart"))
        )
        before = data.draw(st.integers(0, 5), label="before")
        room = size + before + data.draw(st.integers(0, 5), label="after") - apart * (taps - 1)
        return Slide(size, max(1, (room - 1) // stride + 1), taps, stride, apart, before)

    y, x = axis(), axis()
    strip, slack = data.draw(st.sampled_from((1, 48))), data.draw(st.integers(0, 64))
    frame = frame_of(y, x, strip, slack)
    lines = frame.above + y.size + frame.below
    pitch = frame.left + x.size + frame.right
    marks = np.zeros((lines, pitch), int)  # 0 outside of the picture, else which pixel it is
    inside = marks[frame.above : frame.above + y.size, frame.left : frame.left + x.size]
    inside[:] = np.arange(1, inside.size + 1).reshape(inside.shape)
    plane = marks.reshape(-1, frame.apart, pitch).swapaxes(0, 1).ravel()
    picture = inside.copy()
    for place in np.ndindex(y.places, x.places):
        row = place[0] * frame.width + place[1]
        for tap, at in enumerate(np.ndindex(y.taps, x.taps)):
            i, j = (p * s.stride + k * s.apart - s.before for p, k, s in zip(place, at, (y, x)))
            within = 0 <= i < y.size and 0 <= j < x.size
            got = plane[row * x.stride + frame.offsets[tap]]
            assert got == (picture[i, j] if within else 0)
    rows = -(-y.places * frame.width // strip) * strip
    assert (rows - 1) * x.stride + max(frame.offsets) < lines * pitch + slack
