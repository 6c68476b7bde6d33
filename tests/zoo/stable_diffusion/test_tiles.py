"""Tiles: they cover the picture, and what doesn't depend on the surroundings comes out exactly."""

from __future__ import annotations

import numpy as np
import pytest

from zoo.stable_diffusion import tiles


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 112, 113, 200, 333])
def test_tiles_cover_everything_and_overlap_enough(length: int) -> None:
    starts = tiles.starts(length)
    size = min(tiles.TILE, length)
    assert starts[0] == 0 and starts[-1] + size == length
    assert all(0 < b - a <= tiles.TILE - tiles.OVERLAP for a, b in zip(starts, starts[1:]))


@pytest.mark.parametrize(("ins", "outs"), [(1, 8), (8, 1)])
def test_a_network_that_sees_one_pixel_is_the_same_in_tiles(ins: int, outs: int) -> None:
    """Tolerance: the weights' sums and quotients round a few times, 1e-6 is ten float32 steps."""
    x = np.random.default_rng(0).normal(size=(2, 3, 70 * ins, 90 * ins)).astype(np.float32)

    def run(part: np.ndarray) -> np.ndarray:
        assert part.shape[2] <= tiles.TILE * ins and part.shape[3] <= tiles.TILE * ins
        grown = part.repeat(outs, 2).repeat(outs, 3)
        return grown[:, :, ::ins, ::ins]

    np.testing.assert_allclose(tiles.tiled(run, x, ins, outs), run_whole(x, ins, outs), atol=1e-6)


def run_whole(x: np.ndarray, ins: int, outs: int) -> np.ndarray:
    return x.repeat(outs, 2).repeat(outs, 3)[:, :, ::ins, ::ins]


def test_tiles_that_disagree_fade_into_each_other() -> None:
    """Each tile is another grey: no step between neighbours is more than one pixel's share."""
    greys = iter([0.0, 1.0])

    def run(part: np.ndarray) -> np.ndarray:
        return np.full((1, 1, 8 * part.shape[2], 8 * part.shape[3]), next(greys), np.float32)

    row = tiles.tiled(run, np.zeros((1, 4, 8, 112), np.float32), 1, 8)[0, 0, 30]
    assert row[0] == 0 and row[-1] == 1
    assert 0 <= np.diff(row).min() and np.diff(row).max() <= 1.01 / (8 * tiles.OVERLAP)


def test_progress_is_told_each_tile() -> None:
    told: list[tuple[int, int]] = []
    tiles.tiled(lambda part: part, np.zeros((1, 1, 100, 60)), 1, 1, lambda *n: told.append(n))
    assert told == [(1, 2), (2, 2)]


def test_free_memory_is_a_number_or_unknown() -> None:
    free = tiles.available_memory()
    assert free is None or 1 << 20 < free < 1 << 60
