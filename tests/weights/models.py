"""Checkpoints in memory, for the tests of names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weights import entries
from weights.checkpoint import Checkpoint, Entry, TensorInfo

TYPES = {"<f4": "F32", "<f2": "F16", "i1": "I8", "<i2": "I16"}


def entry(array: np.ndarray) -> Entry:
    kind = next(kind for code, kind in TYPES.items() if np.dtype(code) == array.dtype)
    info = TensorInfo(array.shape, kind, array.nbytes)
    return entries.from_raw(info, lambda: np.frombuffer(array.tobytes(), np.uint8))


def checkpoint(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any] | None = None
) -> Checkpoint:
    made = {key: entry(array) for key, array in arrays.items()}
    return Checkpoint(Path("model"), "test", metadata or {}, made, "reference")


def random(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {key: draw.normal(size=shape).astype("<f4") for key, shape in shapes.items()}


def array(entry: Entry) -> np.ndarray:
    """The values by the entry's bytes."""
    code = next(code for code, kind in TYPES.items() if kind == entry.info.type)
    return entry.raw().view(code).reshape(entry.info.shape)


def assert_equal(got: Checkpoint, wanted: Mapping[str, np.ndarray], tensors: bool = False) -> None:
    """Same keys, shapes, types and bytes; with `tensors` also what the engine makes of them."""
    assert sorted(got) == sorted(wanted)
    for key, values in wanted.items():
        kind = next(kind for code, kind in TYPES.items() if np.dtype(code) == values.dtype)
        assert got.info(key) == TensorInfo(values.shape, kind, values.nbytes), key
        assert got.entries[key].raw().tobytes() == values.tobytes(), key
        if tensors:
            np.testing.assert_array_equal(got[key].numpy(), values, err_msg=key)
