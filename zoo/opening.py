"""Open a model's file once it is sure that there is a device for it."""

from __future__ import annotations

import os

import weights
from engine import get_device
from weights import Checkpoint
from zoo.errors import UsageError

DTYPES = ("auto", "f32")


def open_model(name_or_path: str | os.PathLike[str], device: str | None, dtype: str) -> Checkpoint:
    """The checkpoint of a model by registry or hub name, or by path.

    WeightError for a file that can't be read, DeviceError without the device, UsageError for an
    empty name or a type that isn't one of DTYPES.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if isinstance(name_or_path, str) and not name_or_path.strip():
        raise UsageError("the model name is empty")
    get_device(device)  # no device, no sense in reading weights
    return weights.load(weights.resolve(name_or_path), device)
