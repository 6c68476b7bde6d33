"""Operators that say which element comes from where: shapes, slices, joins."""

from __future__ import annotations

import numpy as np

from engine import Tensor
from zoo.onnx import values as v
from zoo.onnx.layout import channels_first, channels_last, lies_last
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value, Weight


@operator("Shape")
def shape(x: Weight, *, start: int = 0, end: int | None = None):
    """The sizes of the axes from start to end."""
    return np.array(x.shape[start:end], np.int64)


@operator("Size")
def size(x: Weight):
    """How many elements there are."""
    return np.array(np.prod(x.shape, dtype=np.int64))


@operator("Reshape")
def reshape(x: Value, shape: Known, *, allowzero: int = 0):
    """To a shape, in which 0 keeps a size and -1 is what is left."""
    sizes = [x.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(v.ints(shape))]
    if -1 in sizes and not allowzero and 0 in x.shape:
        sizes[sizes.index(-1)] = 0
    return v.reshape(x, sizes)


@operator("Flatten")
def flatten(x: Value, *, axis: int = 1):
    """Two axes: those before `axis` as one, and the rest."""
    axis = axis + x.ndim if axis < 0 else axis
    return v.reshape(x, (_count(x.shape[:axis]), _count(x.shape[axis:])))


def _count(sizes) -> int:
    return int(np.prod(sizes, dtype=np.int64))


@operator("Transpose")
def transpose(x: Value, *, perm: tuple | None = None):
    """The axes in another order, backwards by default."""
    return v.permute(x, tuple(reversed(range(x.ndim))) if perm is None else perm)


@operator("Squeeze")
def squeeze(x: Value, axes: Known = None):
    """Without the axes of size 1, or those of them that are named."""
    named = range(x.ndim) if axes is None else [v.axis_in(a, x.ndim) for a in v.ints(axes)]
    gone = {a for a in named if axes is not None or x.shape[a] == 1}
    if any(x.shape[a] != 1 for a in gone):
        raise ValueError(f"axes {sorted(gone)} of {list(x.shape)} aren't all of size 1")
    return v.reshape(x, [n for a, n in enumerate(x.shape) if a not in gone])


@operator("Unsqueeze")
def unsqueeze(x: Value, axes: Known):
    """With axes of size 1 where they are named."""
    rank = x.ndim + axes.size
    new, rest = {v.axis_in(a, rank) for a in v.ints(axes)}, iter(x.shape)
    return v.reshape(x, [1 if a in new else next(rest) for a in range(rank)])


@operator("Expand")
def expand(x: Value, shape: Known):
    """Broadcast with a shape."""
    return v.expand(x, np.broadcast_shapes(tuple(x.shape), v.ints(shape)))


@operator("Concat")
def concat(*xs: Value, axis: int):
    """One after the other along an axis."""
    axis = v.axis_in(axis, xs[0].ndim)
    parts = [x for x in xs if x.shape[axis]] or [xs[0]]
    if axis == 1 and all(map(lies_last, parts)):
        return channels_first(v.concat([*map(channels_last, parts)], xs[0].ndim - 1))
    return v.concat(parts, axis)


@operator("Split")
def split(x: Value, split: Known = None, *, axis: int = 0, num_outputs: int = 0, call):
    """Parts along an axis, equal ones unless their sizes are given."""
    axis = v.axis_in(axis, x.ndim)
    if split is None:
        count = num_outputs or len(call.outputs)
        each = -(-x.shape[axis] // count)
        sizes = [max(0, min(each, x.shape[axis] - i * each)) for i in range(count)]
    else:
        sizes = v.ints(split)
    ends = np.cumsum(sizes)
    return tuple(v.part(x, axis, int(end) - n, int(end)) for end, n in zip(ends, sizes))


@operator("Slice")
def slice_(x: Value, starts: Known, ends: Known, axes: Known = None, steps: Known = None):
    """start:end:step along axes, as Python slices."""
    named = range(starts.size) if axes is None else v.ints(axes)
    strides = (1,) * starts.size if steps is None else v.ints(steps)
    for axis, start, end, step in zip(named, v.ints(starts), v.ints(ends), strides):
        axis = v.axis_in(axis, x.ndim)
        n = x.shape[axis]
        first, last, step = slice(start, end if end >= -n or step > 0 else None, step).indices(n)
        if not isinstance(x, Tensor):
            last = None if last < 0 else last
            x = x[(*[slice(None)] * axis, slice(first, last, step))]
            continue
        count = len(range(first, last, step))
        low = first if step > 0 else first + (count - 1) * step
        x = v.part(x, axis, low if count else 0, low + (count - 1) * abs(step) + 1 if count else 0)
        x = v.every(v.flip(x, axis) if step < 0 and count else x, axis, abs(step))
    return x


@operator("Tile")
def tile(x: Value, repeats: Known):
    """Repeated along each axis."""
    times = v.ints(repeats)
    spread = [n for size in x.shape for n in (1, size)]
    wide = [n for size, m in zip(x.shape, times) for n in (m, size)]
    whole = [size * m for size, m in zip(x.shape, times)]
    return v.reshape(v.expand(v.reshape(x, spread), wide), whole)


@operator("Pad")
def pad(x: Value, pads: Known, value: Known = None, axes: Known = None, *, mode: str = "constant"):
    """New elements before and after, or fewer for negative amounts."""
    named = range(x.ndim) if axes is None else [v.axis_in(a, x.ndim) for a in v.ints(axes)]
    amounts, numbers = [(0, 0)] * x.ndim, v.ints(pads)
    for i, axis in enumerate(named):
        amounts[axis] = numbers[i], numbers[i + len(numbers) // 2]
    cut = [(max(0, -b), n - max(0, -a)) for n, (b, a) in zip(x.shape, amounts)]
    x = v.shrink(x, cut)
    amounts = [(max(0, b), max(0, a)) for b, a in amounts]
    if mode == "constant":
        number = 0 if value is None else value.reshape(-1)[0].item()
        return v.pad(x, amounts, number)
    return _mirrored(x, amounts, {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}[mode])


def _mirrored(x: Value, amounts: list, mode: str) -> Value:
    for axis, (before, after) in enumerate(amounts):
        if before or after:
            places = np.pad(np.arange(x.shape[axis]), (before, after), mode=mode)
            x = v.take(x, places, axis)
    return x


@operator("DepthToSpace")
def depth_to_space(x: Value, *, blocksize: int, mode: str = "DCR"):
    """Channels become squares of places: (B, C s², H, W) -> (B, C, H s, W s)."""
    b, c, h, w = x.shape
    s = blocksize
    if mode == "DCR":
        x = v.permute(v.reshape(x, (b, s, s, c // s**2, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        x = v.permute(v.reshape(x, (b, c // s**2, s, s, h, w)), (0, 1, 4, 2, 5, 3))
    return v.reshape(x, (b, c // s**2, h * s, w * s))


@operator("SpaceToDepth")
def space_to_depth(x: Value, *, blocksize: int, mode: str = "DCR"):
    """Squares of places become channels: (B, C, H s, W s) -> (B, s² C, H, W)."""
    b, c, h, w = x.shape
    s = blocksize
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    x = v.permute(v.reshape(x, (b, c, h // s, s, w // s, s)), order)
    return v.reshape(x, (b, c * s**2, h // s, w // s))


@operator("Trilu")
def trilu(x: Value, k: Known = None, *, upper: int = 1):
    """The upper or lower triangle, from the k-th diagonal on; 0 elsewhere."""
    offset = 0 if k is None else int(k)
    rows = v.reshape(v.iota(x.shape[-2], x), (-1, 1)) if x.shape[-2] else v.iota(0, x)
    columns = v.iota(x.shape[-1], x)
    if 0 in x.shape:
        return x
    inside = columns >= rows + offset if upper else columns <= rows + offset
    return v.where(inside, x, v.number(x, 0))


@operator("CenterCropPad")
def center_crop_pad(x: Value, shape: Known, *, axes: tuple | None = None):
    """The middle, cut or padded with zeros to a shape."""
    named = range(x.ndim) if axes is None else [v.axis_in(a, x.ndim) for a in axes]
    for axis, size in zip(named, v.ints(shape)):
        n = x.shape[axis]
        if size < n:
            x = v.part(x, axis, (n - size) // 2, (n - size) // 2 + size)
        amounts = [(0, 0)] * x.ndim
        more = max(0, size - n)
        amounts[axis] = more // 2, more - more // 2
        x = v.pad(x, amounts)
    return x
