"""RoPE scaling: frequencies against the formulas of the papers and against published numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zoo.llama import rope
from zoo.llama.rope import Scaling


def frequencies(head_dim: int, theta: float, scaling: Scaling) -> np.ndarray:
    """(head_dim / 2,) angles between neighbouring positions, without YaRN's factor."""
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return rope.SCALINGS[scaling.kind](plain, scaling, theta, 1)


def plain(head_dim: int, theta: float) -> list[float]:
    return [theta ** (-2 * j / head_dim) for j in range(head_dim // 2)]


def test_llama3_equals_the_published_frequencies():
    """Published with nine digits."""
    got = frequencies(64, 5e5, Scaling("llama3", 32, 8192, low=1, high=4))
    want = np.array(plain(64, 5e5))
    np.testing.assert_allclose(got[:15], want[:15], rtol=1e-15)
    np.testing.assert_allclose(got[15:18], [1.29054793e-3, 4.29556797e-4, 9.7082878e-5], rtol=1e-8)
    np.testing.assert_allclose(got[18:], want[18:] / 32, rtol=1e-15)
    got, want = frequencies(128, 5e5, Scaling("llama3", 8, 8192)), np.array(plain(128, 5e5))
    np.testing.assert_allclose(got[:29], want[:29], rtol=1e-15)
    np.testing.assert_allclose(got[35:], want[35:] / 8, rtol=1e-15)


def test_linear_divides_positions():
    scaled, straight = rope.table(64, 8, 1e4, Scaling("linear", 4)), rope.table(16, 8, 1e4)
    np.testing.assert_array_equal(scaled[:, ::4], straight)


def test_factors_divide_each_frequency():
    got = frequencies(8, 1e4, Scaling("factors", factors=(1.0, 2.0, 4.0, 8.0)))
    np.testing.assert_allclose(got, np.array(plain(8, 1e4)) / [1, 2, 4, 8], rtol=1e-15)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_follows_the_paper(truncate):
    """Peng et al. 2023, equations 18 to 23, pair by pair."""
    d, theta, factor, original = 64, 1e4, 4.0, 2048
    got = frequencies(d, theta, Scaling("yarn", factor, original, truncate=truncate))

    def pair(turns):
        return d / 2 * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair(32), pair(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    for j, f in enumerate(plain(d, theta)):
        ramp = min(max((j - low) / (high - low), 0), 1)
        assert got[j] == pytest.approx((1 - ramp) * f + ramp * f / factor, rel=1e-14)
    assert got[0] == 1 and got[-1] == pytest.approx(plain(d, theta)[-1] / factor)


def test_yarn_lengthens_the_rotated_vectors():
    flat = rope.table(8, 8, 1e4, Scaling("yarn", 4, 16))
    longer = rope.table(8, 8, 1e4, Scaling("yarn", 4, 16, attention=1.5))
    np.testing.assert_array_equal(longer, flat * np.float32(1.5))


def test_dynamic_grows_with_the_text_and_keeps_what_was():
    scaling, d = Scaling("dynamic", 2, 16), 8
    table = rope.table(64, d, 1e4, scaling)
    np.testing.assert_array_equal(table[:, :16], rope.table(16, d, 1e4))
    np.testing.assert_array_equal(rope.table(40, d, 1e4, scaling), table[:, :40])
    for position in (16, 17, 40, 63):
        theta = 1e4 * (2 * (position + 1) / 16 - 1) ** (d / (d - 2))
        angles = [position * f for f in plain(d, theta)]
        # float32, of cosines up to 1
        np.testing.assert_allclose(table[0, position], np.cos(angles), atol=1e-7)
        np.testing.assert_allclose(table[1, position], np.sin(angles), atol=1e-7)
