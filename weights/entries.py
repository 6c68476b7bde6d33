"""Entries made of other entries: rows of one, several joined, another order, shape or scale.

All are lazy, both in their bytes and in their Tensor, and all but `transposed` and `scaled` move
whole rows, so that they work for quantised types too, whose blocks lie along the last axis.
What doesn't fit is a WeightError without a file; the caller knows which tensor it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from engine import Tensor
from weights.checkpoint import Entry, TensorInfo, WeightError
from weights.quant import BY_NAME

if TYPE_CHECKING:
    Shape = tuple[int, ...]


def from_raw(info: TensorInfo, raw: Callable[[], np.ndarray]) -> Entry:
    """The Entry whose Tensor is what its type makes of the bytes that `raw()` gives."""
    return Entry(info, raw, lambda device: _decode(info)(raw(), info.shape, device))


def rows(entry: Entry, start: int, stop: int) -> Entry:
    """Rows start..stop of the first axis."""
    shape = entry.info.shape
    if not shape or not 0 <= start <= stop <= shape[0]:
        _fail("it has no such rows", f"rows {start} to {stop}", shape)
    info = _sized(entry, (stop - start, *shape[1:]))
    row = info.nbytes // max(stop - start, 1)
    return from_raw(info, lambda: entry.raw()[start * row : stop * row])


def split(entry: Entry, count: int) -> list[Entry]:
    """`count` equal parts of the first axis."""
    shape = entry.info.shape
    if not shape or shape[0] % count:
        _fail("its rows do not divide evenly", f"a multiple of {count} rows", shape)
    step = shape[0] // count
    return [rows(entry, step * k, step * (k + 1)) for k in range(count)]


def joined(entries: Sequence[Entry], axis: int = 0) -> Entry:
    """Entries of one type, side by side along `axis`; the other axes must agree."""
    infos = [entry.info for entry in entries]
    first, kinds = infos[0].shape, {info.type for info in infos}
    if not 0 <= axis < len(first):
        _fail(f"there is no axis {axis} to join along", got=first)
    if len(kinds) > 1:
        _fail("parts of different types can't be joined", got=", ".join(sorted(kinds)))
    others = {(*info.shape[:axis], *info.shape[axis + 1 :]) for info in infos}
    if len(others) > 1 or any(len(info.shape) != len(first) for info in infos):
        shapes = ", ".join(str(info.shape) for info in infos)
        _fail(f"parts of these shapes can't be joined along axis {axis}", got=shapes)
    if len(infos) == 1:
        return entries[0]
    total = sum(info.shape[axis] for info in infos)
    info = _sized(entries[0], (*first[:axis], total, *first[axis + 1 :]))
    outer = math.prod(first[:axis])

    def raw() -> np.ndarray:
        parts = [e.raw().reshape(outer, e.info.nbytes // max(outer, 1)) for e in entries]
        return np.concatenate(parts, axis=1).reshape(-1)

    return Entry(
        info, raw, lambda device: Tensor.cat(*[e.read(device) for e in entries], axis=axis)
    )


def reshaped(entry: Entry, shape: Shape) -> Entry:
    """The same values in the same order under another shape."""
    if math.prod(shape) != math.prod(entry.info.shape):
        _fail("it can't take that shape", shape, entry.info.shape)
    info = _sized(entry, tuple(shape))
    return Entry(info, entry.raw, lambda device: entry.read(device).reshape(*shape))


def reordered(entry: Entry, parts: Shape, axes: Shape) -> Entry:
    """Rows in another order: seen as a grid of `parts` whose axes are permuted to `axes`."""
    shape = entry.info.shape
    if not shape or math.prod(parts) != shape[0] or 0 in parts:
        _fail("its rows do not divide like that", " x ".join(map(str, parts)), shape)

    def raw() -> np.ndarray:
        grid = entry.raw().reshape(*parts, -1)  # (..., bytes of a row)
        return grid.transpose(*axes, len(parts)).reshape(-1)

    def read(device: str | None) -> Tensor:
        grid = entry.read(device).reshape(*parts, *shape[1:])
        rest = range(len(parts), len(parts) + len(shape) - 1)
        return grid.permute(*axes, *rest).reshape(*shape)

    return Entry(entry.info, raw, read)


def transposed(entry: Entry) -> Entry:
    """A matrix with rows and columns exchanged; plain types only, blocks lie along rows."""
    info = entry.info
    if len(info.shape) != 2 or BY_NAME[info.type].block != 1:
        _fail("it can't be transposed", "a matrix of a plain type", f"{info.type} {info.shape}")
    size = BY_NAME[info.type].nbytes
    turned = replace(info, shape=info.shape[::-1])

    def raw() -> np.ndarray:
        return entry.raw().reshape(*info.shape, size).swapaxes(0, 1).reshape(-1)

    return Entry(turned, raw, lambda device: entry.read(device).transpose(0, 1))


def scaled(entry: Entry, scale: Entry) -> Entry:
    """Whole numbers divided by one float32 scale per row, or by one for all: float32."""
    shape, scales = entry.info.shape, scale.info.shape
    if entry.info.type not in ("I8", "I16") or scale.info.type != "F32":
        kinds = f"{entry.info.type} and {scale.info.type}"
        _fail("its scale doesn't fit its type", "I8 or I16, with F32 scales", kinds)
    if math.prod(scales) != 1 and scales != shape[:1]:
        _fail("its scale doesn't fit its rows", f"shape {shape[:1]}", scales)
    column = (-1, *[1] * (len(shape) - 1))
    info = TensorInfo(shape, "F32", math.prod(shape) * 4)
    kind = {"I8": "i1", "I16": "<i2"}[entry.info.type]

    def raw() -> np.ndarray:
        numbers = entry.raw().view(kind).reshape(shape).astype("<f4")
        with np.errstate(divide="ignore", invalid="ignore"):  # a scale of 0 is the file's fault
            numbers /= np.frombuffer(scale.raw().tobytes(), "<f4").reshape(column)
        return numbers.reshape(-1).view(np.uint8)

    def read(device: str | None) -> Tensor:
        return entry.read(device).float() / scale.read(device).reshape(*column)

    return Entry(info, raw, read)


def copied(entry: Entry) -> Entry:
    """The same, but its Tensor reads one copy of the bytes, wherever the entry has them from.

    For a weight that lies in several parts, since an element of those that are joined is looked
    for in each of them.
    """
    return from_raw(entry.info, entry.raw)


def plus(entry: Entry, number: float) -> Entry:
    """Values of a plain type of floats with a number added to each: float32."""
    shape, kind = entry.info.shape, BY_NAME[entry.info.type]
    if kind.block != 1 or kind.decode is None:
        _fail("nothing can be added to its type", "F32, F16 or BF16", entry.info.type)
    info = TensorInfo(shape, "F32", math.prod(shape) * 4)

    def raw() -> np.ndarray:
        values = kind.decode(entry.raw(), shape, "reference").float() + number
        return values.numpy().reshape(-1).view(np.uint8)

    return from_raw(info, raw)


def repeated(entry: Entry, count: int) -> Entry:
    """One value, `count` times: shape (count,)."""
    info = replace(entry.info, shape=(count,), nbytes=entry.info.nbytes * count)
    return from_raw(info, lambda: np.tile(entry.raw(), count))


def zeros_like(entry: Entry) -> Entry:
    """Zeros of the same plain type and shape."""
    return from_raw(entry.info, partial(np.zeros, entry.info.nbytes, np.uint8))


def _sized(entry: Entry, shape: Shape) -> TensorInfo:
    """The header of a part or a whole of another shape; its rows must stay whole blocks."""
    nbytes = BY_NAME[entry.info.type].size(shape)
    if nbytes is None:
        _fail(f"blocks of {entry.info.type} would be cut", got=shape)
    return TensorInfo(shape, entry.info.type, nbytes)


def _decode(info: TensorInfo) -> Callable[..., Tensor]:
    decode = BY_NAME[info.type].decode
    if decode is None:
        _fail(f"its type {info.type} can't be read yet")
    return decode


def _fail(problem: str, expected: object = None, got: object = None) -> None:
    raise WeightError(problem, expected=expected, got=got)
