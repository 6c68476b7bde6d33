"""What the writers of all formats take: tensors whose bytes come piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import BinaryIO

import numpy as np

from weights.checkpoint import TensorInfo

# Name, header, and a function that gives the bytes in order; together they are info.nbytes.
Stored = tuple[str, TensorInfo, Callable[[], Iterable["bytes | np.ndarray"]]]


def write_all(file: BinaryIO, tensor: Stored) -> None:
    """Write a tensor's bytes."""
    name, info, pieces = tensor
    written = 0
    for piece in pieces():
        written += file.write(piece)
    assert written == info.nbytes, f"{name}: {written} bytes instead of {info.nbytes}"
