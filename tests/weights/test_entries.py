"""Entries made of other entries: their bytes and their Tensors say the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.weights import models
from weights import WeightError, entries
from weights.checkpoint import Entry, TensorInfo


def q8_0(rows: int, columns: int, seed: int = 0) -> tuple[Entry, np.ndarray]:
    """An Entry of random blocks, and its bytes row by row."""
    draw = np.random.default_rng(seed)
    raw = draw.integers(0, 60, (rows, columns // 32 * 34), np.uint8)  # scales stay small
    info = TensorInfo((rows, columns), "Q8_0", raw.size)
    return entries.from_raw(info, lambda: raw.reshape(-1)), raw


def agrees(entry: Entry, wanted: np.ndarray) -> None:
    """Shape, bytes and Tensor are those of `wanted`, exactly."""
    assert entry.info == models.entry(wanted).info
    raw = entry.raw()
    assert raw.dtype == np.uint8 and raw.shape == (wanted.nbytes,)
    assert raw.tobytes() == np.ascontiguousarray(wanted).tobytes()
    np.testing.assert_array_equal(entry.read("reference").numpy(), wanted)


X = np.random.default_rng(1).normal(size=(6, 4, 3)).astype("<f4")


@pytest.mark.parametrize("code", ["<f4", "<f2"])
def test_rows_joined_reshaped_and_reordered_are_numpys(code):
    x = X.astype(code)
    agrees(entries.rows(models.entry(x), 2, 5), x[2:5])
    agrees(entries.rows(models.entry(x), 4, 4), x[4:4])
    for part, wanted in zip(entries.split(models.entry(x), 3), np.split(x, 3), strict=True):
        agrees(part, wanted)
    agrees(entries.reshaped(models.entry(x), (24, 3)), x.reshape(24, 3))
    agrees(
        entries.reordered(models.entry(x), (3, 2), (1, 0)),
        x.reshape(3, 2, 4, 3).swapaxes(0, 1).reshape(6, 4, 3),
    )
    agrees(entries.zeros_like(models.entry(x)), np.zeros_like(x))
    agrees(entries.transposed(models.entry(x[0])), x[0].T)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_parts_are_joined_along_any_axis(axis):
    parts = np.split(X, [1], axis=axis)
    agrees(entries.joined([models.entry(part) for part in parts], axis), X)
    assert entries.joined([entry := models.entry(X)], axis) is entry


def test_rows_of_blocks_stay_whole():
    entry, raw = q8_0(6, 64)
    other, more = q8_0(6, 32, seed=1)
    cases = [
        (entries.rows(entry, 1, 3), raw[1:3]),
        (entries.joined([entry, entries.rows(entry, 0, 2)]), np.concatenate([raw, raw[:2]])),
        (entries.joined([entry, other], axis=1), np.concatenate([raw, more], axis=1)),
        (entries.reordered(entry, (2, 3), (1, 0)), raw.reshape(2, 3, -1).swapaxes(0, 1)),
        (entries.reshaped(entry, (2, 3, 64)), raw),
    ]
    for made_of, wanted in cases:
        assert made_of.raw().tobytes() == np.ascontiguousarray(wanted).tobytes()
        direct = entries.from_raw(made_of.info, made_of.raw).read("reference")
        np.testing.assert_array_equal(made_of.read("reference").numpy(), direct.numpy())


@pytest.mark.parametrize("code", ["i1", "<i2"])
@pytest.mark.parametrize("scales", [(6,), (1,), ()])
def test_whole_numbers_are_divided_by_the_scales_of_their_rows(code, scales):
    draw = np.random.default_rng(2)
    x = draw.integers(-127, 128, (6, 4, 3)).astype(code)
    scale = draw.uniform(50, 1000, scales).astype("<f4")
    wanted = x.astype("<f4") / scale.reshape(-1, 1, 1)
    entry = entries.scaled(models.entry(x), models.entry(scale))
    assert entry.raw().tobytes() == wanted.tobytes()
    # One rounding in the bytes; the engine divides by multiplying, which rounds twice.
    np.testing.assert_allclose(entry.read("reference").numpy(), wanted, rtol=2.4e-7)


def test_nothing_is_read_before_it_is_asked_for():
    def never() -> np.ndarray:
        raise AssertionError("read too early")

    lazy = Entry(TensorInfo((6, 4), "F32", 96), never, lambda device: never())
    whole = Entry(TensorInfo((6, 4), "I8", 24), never, lambda device: never())
    scale = Entry(TensorInfo((6,), "F32", 24), never, lambda device: never())
    entries.joined([*entries.split(lazy, 2), entries.reordered(lazy, (3, 2), (1, 0))])
    entries.transposed(entries.reshaped(lazy, (4, 6)))
    entries.scaled(whole, scale)
    entries.zeros_like(lazy)


def test_what_does_not_fit_is_one_clear_line():
    x, blocks = models.entry(X), q8_0(6, 64)[0]
    matrix, column, half = (
        models.entry(X[0]),
        models.entry(X[:, 0, 0]),
        models.entry(X[0].astype("<f2")),
    )
    whole = models.entry(np.zeros((4, 3), "i1"))
    cases = {
        "it has no such rows": lambda: entries.rows(x, 4, 7),
        "no such rows": lambda: entries.rows(models.entry(X[0, 0, 0].reshape(())), 0, 1),
        "do not divide evenly .expected a multiple of 4": lambda: entries.split(x, 4),
        "no axis 2": lambda: entries.joined([matrix, matrix], axis=2),
        "different types": lambda: entries.joined([matrix, half]),
        "joined along axis 0": lambda: entries.joined([matrix, x]),
        "joined along axis 1": lambda: entries.joined([x, models.entry(X[:5])], axis=1),
        "can't take that shape": lambda: entries.reshaped(x, (6, 4)),
        "blocks of Q8_0 would be cut": lambda: entries.reshaped(blocks, (24, 16)),
        "rows do not divide like that": lambda: entries.reordered(x, (4, 2), (1, 0)),
        "can't be transposed": lambda: entries.transposed(blocks),
        "matrix of a plain type": lambda: entries.transposed(x),
        "doesn't fit its type": lambda: entries.scaled(matrix, column),
        "doesn't fit its rows .expected shape .4,": lambda: entries.scaled(whole, column),
    }
    for message, act in cases.items():
        with pytest.raises(WeightError, match=message) as caught:
            act()
        assert "\n" not in str(caught.value)
