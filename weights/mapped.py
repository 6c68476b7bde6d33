"""A file's bytes, mapped read-only, and the Entry that reads one tensor out of them."""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from weights.checkpoint import Entry, TensorInfo, WeightError
from weights.quant import BY_NAME, READABLE

if TYPE_CHECKING:
    from engine import Tensor


_mapped: weakref.WeakKeyDictionary[mmap.mmap, Path] = weakref.WeakKeyDictionary()


def open_file(path: Path) -> BinaryIO:
    """Open a file to be read; WeightError when it can't be, or is a pipe or a device.

    Opening a pipe waits for somebody to write, for ever if nobody does.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise WeightError("neither a file nor a folder", file=path)
        return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise WeightError(f"can't be read: {reason}", file=path) from None


def open_mapped(path: Path) -> mmap.mmap:
    """Map `path` read-only; WeightError when it is empty or can't be opened."""
    try:
        with open_file(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            _mapped[data] = path
            return data
    except ValueError:
        raise WeightError("the file is empty", file=path) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise WeightError(f"can't be read: {reason}", file=path) from None


def is_mapped(path: Path) -> bool:
    """Whether this process has the file open: what it holds may be read yet."""
    try:
        others = [other for other in list(_mapped.values()) if other.exists()]
        return path.exists() and any(path.samefile(other) for other in others)
    except OSError:
        return False  # what can't be looked at can't have been opened


def give_back() -> None:
    """Let the system have the pages that were read of all mapped files.

    They count as this process's memory, though they are read again when they are needed again.
    """
    for data in list(_mapped):
        if hasattr(data, "madvise") and not data.closed:
            data.madvise(mmap.MADV_DONTNEED)


def entry(path: Path, data: mmap.mmap, name: str, info: TensorInfo, offset: int) -> Entry:
    """The Entry of a tensor whose bytes lie at `offset` in `data`; the caller checked bounds."""
    raw = partial(np.frombuffer, data, np.uint8, info.nbytes, offset)
    return decoded(path, name, info, raw)


def decoded(path: Path, name: str, info: TensorInfo, raw: Callable[[], np.ndarray]) -> Entry:
    """The Entry whose Tensor is what its type makes of its bytes."""
    return Entry(info, raw, partial(_read, path, name, info, raw))


def _read(
    path: Path, name: str, info: TensorInfo, raw: Callable[[], np.ndarray], device: str | None
) -> Tensor:
    decode = BY_NAME[info.type].decode
    if decode is None:
        raise WeightError(
            f"its type {info.type} can't be read yet",
            file=path,
            tensor=name,
            remedy=f"types that can be read: {', '.join(READABLE)}",
        )
    return decode(raw(), info.shape, device)
