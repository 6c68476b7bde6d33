"""Statistics of groups of neighbouring channels are taken over whole vectors of channels."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Tensor
from engine import dtype as dt
from engine.functional import group_norm
from engine.prepare import canonical
from engine.recipes import choose
from engine.specialise import specialised
from tests.engine.kernels import cpu


class Tree(dict):
    """Parameters by attribute, as the functions of engine.functional want them."""

    __getattr__ = dict.__getitem__


def expected(x: np.ndarray, groups: int) -> np.ndarray:
    """x (B, pixels, channels), each group of channels normalised over all pixels."""
    grouped = x.astype(np.float64).reshape(*x.shape[:2], groups, -1)
    centred = grouped - grouped.mean((1, 3), keepdims=True)
    variance = np.square(centred).mean((1, 3), keepdims=True)
    return (centred / np.sqrt(variance + 1e-5)).reshape(x.shape)


def recipes(out: Tensor) -> list[str]:
    """Which recipe makes each kernel."""
    target = cpu().target
    kernels = specialised([out.node], cpu().name).kernels
    return [choose(canonical(k)[0], target)[1].recipe for k in kernels]


@pytest.mark.parametrize(
    ("batch", "pixels", "groups", "channels"),
    [(2, 256, 4, 40), (1, 67, 3, 18), (1, 64, 32, 64), (3, 90, 5, 5 * 63), (1, 1000, 1, 10)],
)
@pytest.mark.parametrize("kind", [dt.float32, dt.bfloat16], ids=str)
def test_group_norm_with_the_channels_last(
    kind: dt.DType, batch: int, pixels: int, groups: int, channels: int
) -> None:
    """Sums of n numbers in float32, most of them in 16 parts: below 1e-5 of their size here, which
    is 20 (the mean's part of the error is what is left after it was subtracted)."""
    r = np.random.default_rng(0)
    x = Tensor(
        (r.normal(size=(batch, pixels, channels)) + 20).astype(np.float32), device=cpu().name
    )
    x = x.cast(kind).contiguous().realize()
    got = group_norm(Tree(), x.permute(0, 2, 1), groups).permute(0, 2, 1).numpy()
    np.testing.assert_allclose(got, expected(x.float().numpy(), groups), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_a_reduction_that_skips_an_axis_is_exact(kind: str) -> None:
    """Whole numbers: every order gives the same."""
    a = np.random.default_rng(1).integers(-9, 9, (2, 5, 77, 6, 7)).astype(np.float32)
    x = Tensor(a, device=cpu().name)
    for axes in ((1, 2, 4), (2, 4)):
        got = getattr(x, kind)(axes).numpy()
        np.testing.assert_array_equal(got, getattr(a, kind)(axes))


@pytest.mark.parametrize("batch", [1, 2])
def test_groups_are_summed_over_whole_vectors_of_channels(batch: int) -> None:
    x = Tensor(np.ones((batch, 16, 16, 320), np.float32), device=cpu().name).contiguous().realize()
    used = recipes(group_norm(Tree(), x.permute(0, 3, 1, 2), 32).permute(0, 2, 3, 1))
    assert used.count("columns") == 1  # the mean and the variance
    assert used[-1] == "elementwise"


def test_groups_that_lie_in_a_row_stay_rows() -> None:
    """Channels first, a group is contiguous: it stays near while it is gone through again."""
    x = Tensor(np.ones((2, 320, 256), np.float32), device=cpu().name).contiguous().realize()
    used = recipes(group_norm(Tree(), x, 32))
    assert "rows" in used
    assert "columns" not in used


@pytest.mark.parametrize("first", [0.0, 300.0])
def test_a_variance_from_the_same_pass_keeps_its_digits(first: float) -> None:
    """Numbers of spread 1 around 1000, or beside one pixel far off. That one's part loses digits
    by the square of how many deviations it is off, (300 / 19)^2 here, of 6e-8 each: below 1e-4."""
    a = np.random.default_rng(2).normal(size=(1, 256, 64)).astype(np.float32) + np.float32(1000)
    a[:, 0] += np.float32(first)
    x = Tensor(a, device=cpu().name)
    got = group_norm(Tree(), x.permute(0, 2, 1), 32).permute(0, 2, 1).numpy()
    # the mean, 1000, is known to 6e-5, and the spread is 1
    np.testing.assert_allclose(got, expected(a, 32), rtol=1e-4, atol=3e-4)


def test_equal_numbers_have_no_variance() -> None:
    x = Tensor(np.full((1, 256, 64), 0.1, np.float32), device=cpu().name)
    grouped = x.reshape(1, 256, 16, 4)
    centred = grouped - grouped.mean((1, 3), keepdim=True)
    variance = centred.square().mean((1, 3), keepdim=True).numpy()
    assert (variance >= 0).all()
    assert variance.max() < 1e-14  # the square of the mean's rounding
