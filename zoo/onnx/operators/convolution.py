"""Convolutions over any number of axes, and what undoes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine import Tensor, convolution
from zoo.onnx import values as v
from zoo.onnx.layout import channels_first, channels_last, lies_last, stored
from zoo.onnx.operators.linear import centred
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value

Sides = list[tuple[int, int]]
MANY = 16  # channels that fill a vector
FEWEST = 4  # for which the engine stores what it reads


def sides(
    auto_pad: str,
    pads: Sequence[int] | None,
    space: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Sides:
    """(before, after) on each axis: as given, or so that no place is lost (SAME_*)."""
    rank = len(kernel)
    if not auto_pad.startswith("SAME"):
        pads = pads if pads is not None and auto_pad != "VALID" else (0,) * 2 * rank
        return list(zip(pads[:rank], pads[rank:]))
    out = []
    for n, k, s, d in zip(space, kernel, strides, dilations):
        total = max(0, (-(-n // s) - 1) * s + d * (k - 1) + 1 - n)
        less, more = total // 2, total - total // 2
        out.append((less, more) if auto_pad == "SAME_UPPER" else (more, less))
    return out


@operator("Conv", heavy=True)
def conv(x: Value, weight: Value, bias: Value = None, *, auto_pad: str = "NOTSET",
         dilations: tuple | None = None, group: int = 1, kernel_shape: tuple | None = None,
         pads: tuple | None = None, strides: tuple | None = None):  # fmt: skip
    """x (B, C, *space) and weight (O, C / group, *kernel) -> (B, O, *out)."""
    kernel = weight.shape[2:]
    strides, dilations = strides or (1,) * len(kernel), dilations or (1,) * len(kernel)
    around = sides(auto_pad, pads, x.shape[2:], kernel, strides, dilations)
    return convolve(x, weight, bias, strides, around, dilations, group)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    strides: Sequence[int],
    around: Sides,
    dilations: Sequence[int],
    group: int,
) -> Tensor:
    """The engine's convolution over any number of axes; many channels come last in memory."""
    dtype, o, several = x.dtype, weight.shape[0], set(weight.shape[2:]) != {1}
    if dtype.is_float:  # halves are summed in float32, with the bias
        x, weight = x.float(), weight.float()
    fits = group == 1 and o >= FEWEST or group == o >= MANY
    if several and not fits:  # windows overlap: what makes x is done before, not once per tap
        x = stored(x)
    out = convolution.conv(x, weight, None, strides, around, dilations, group)
    if set(out.shape[2:]) == {1}:  # else it would be made by whoever scales channels, for each one
        out = out.contiguous()
    if bias is None:  # one of zeros: what computes says how numbers lie
        bias = Tensor.zeros(o, device=out.device)
    bias = bias.cast(out.dtype)
    if o < MANY and not lies_last(x):
        return (out + bias.reshape(o, *(1,) * len(strides))).cast(dtype)
    return channels_first((channels_last(out) + bias).cast(dtype))


@operator("ConvTranspose", heavy=True)
def conv_transpose(x: Value, weight: Value, bias: Value = None, *, auto_pad: str = "NOTSET",
                   dilations: tuple | None = None, group: int = 1,
                   kernel_shape: tuple | None = None, output_padding: tuple | None = None,
                   output_shape: tuple | None = None, pads: tuple | None = None,
                   strides: tuple | None = None):  # fmt: skip
    """x (B, C, *space) spread by the strides and convolved with weight (C, O / group, *kernel)."""
    kernel, rank = weight.shape[2:], x.ndim - 2
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    more = output_padding or (0,) * rank
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations)]
    full = [(n - 1) * s + r + m for n, s, r, m in zip(x.shape[2:], strides, reach, more)]
    if output_shape is not None or auto_pad.startswith("SAME"):
        sizes = output_shape or [n * s for n, s in zip(x.shape[2:], strides)]
        cut = [n - size for n, size in zip(full, sizes[-rank:])]
        halves = [(n - n // 2, n // 2) for n in cut]
        cuts = [(a, b) for b, a in halves] if auto_pad == "SAME_UPPER" else halves
    else:
        cuts = sides(auto_pad, pads, x.shape[2:], kernel, strides, dilations)
    apart = tuple(kernel) == tuple(strides) and set(dilations) == {1}
    if group == 1 and apart and not any(map(any, cuts)) and not any(more):
        return _side_by_side(x, weight, bias)
    # What the transpose would cut off beyond a whole kernel is cut afterwards.
    around = [(r - 1 - b, r - 1 - a + m) for r, (b, a), m in zip(reach, cuts, more)]
    spread = _spread(x, strides)
    trimmed = [(max(0, -b), n - max(0, -a)) for n, (b, a) in zip(spread.shape[2:], around)]
    spread = spread.shrink([(0, n) for n in x.shape[:2]] + trimmed)
    around = [(max(0, b), max(0, a)) for b, a in around]
    c, o = weight.shape[:2]
    turned = weight.reshape(group, c // group, o, *kernel)
    turned = turned.permute(0, 2, 1, *range(3, 3 + rank)).reshape(group * o, c // group, *kernel)
    turned = turned.flip(*range(2, 2 + rank))
    return convolve(spread, turned, bias, (1,) * rank, around, dilations, group)


def _side_by_side(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Kernels that don't overlap: one product, whose columns are the places of a kernel."""
    (b, c, *space), (_, o, *kernel), rank = x.shape, weight.shape, x.ndim - 2
    pixels = x.permute(0, *range(2, 2 + rank), 1).reshape(-1, c)
    out = (pixels @ weight.reshape(c, -1)).reshape(b, *space, o, *kernel)
    axes = [a for i in range(rank) for a in (1 + i, 2 + rank + i)]
    out = out.permute(0, 1 + rank, *axes).reshape(b, o, *(n * k for n, k in zip(space, kernel)))
    return out if bias is None else out + bias.reshape(o, *(1,) * rank)


def _spread(x: Tensor, strides: Sequence[int]) -> Tensor:
    """stride - 1 zeros between the elements of each axis of space."""
    for axis, step in enumerate(strides, 2):
        n = x.shape[axis]
        if step > 1:
            wide = x.unsqueeze(axis + 1)
            amounts = [(0, 0)] * wide.ndim
            amounts[axis + 1] = (0, step - 1)
            flat = wide.pad(amounts).reshape(*x.shape[:axis], n * step, *x.shape[axis + 1 :])
            x = v.part(flat, axis, 0, (n - 1) * step + 1)
    return x


@operator("ConvInteger", heavy=True)
def conv_integer(x: Value, weight: Value, x_zero: Value = None, w_zero: Value = None, *,
                 auto_pad: str = "NOTSET", dilations: tuple | None = None, group: int = 1,
                 kernel_shape: tuple | None = None, pads: tuple | None = None,
                 strides: tuple | None = None):  # fmt: skip
    """The convolution of 8-bit integers less their zero points, int32."""
    how = {"auto_pad": auto_pad, "dilations": dilations, "group": group, "pads": pads,
           "strides": strides}  # fmt: skip
    if w_zero is not None and w_zero.ndim == 1:
        w_zero = w_zero.reshape(-1, *(1,) * (weight.ndim - 1))
    return conv(centred(x, x_zero, 0), centred(weight, w_zero, 0), **how)


@operator("Col2Im")
def col2im(x: Known, image_shape: Known, block_shape: Known, *, dilations: tuple | None = None,
           pads: tuple | None = None, strides: tuple | None = None):  # fmt: skip
    """Blocks (B, C * block, places) added up where they came from: (B, C, *image)."""
    image, block = v.ints(image_shape), v.ints(block_shape)
    rank = len(image)
    dilations, strides = dilations or (1,) * rank, strides or (1,) * rank
    pads = pads or (0,) * 2 * rank
    wide = [n + pads[i] + pads[i + rank] for i, n in enumerate(image)]
    places = [(n - d * (k - 1) - 1) // s + 1
              for n, k, d, s in zip(wide, block, dilations, strides)]  # fmt: skip
    b, c = x.shape[0], x.shape[1] // int(np.prod(block))
    parts, out = x.reshape(b, c, *block, *places), np.zeros((b, c, *wide), x.dtype)
    for k in np.ndindex(*block):
        where = tuple(slice(i * d, i * d + s * n, s)
                      for i, d, s, n in zip(k, dilations, strides, places))  # fmt: skip
        out[(slice(None), slice(None), *where)] += parts[(slice(None), slice(None), *k)]
    inner = tuple(slice(pads[i], pads[i] + n) for i, n in enumerate(image))
    return out[(slice(None), slice(None), *inner)]
