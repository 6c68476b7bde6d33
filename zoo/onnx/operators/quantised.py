"""Numbers of 8 bits and less beside a scale: x ≈ (q - zero point) * scale."""

from __future__ import annotations

import numpy as np

from engine import Tensor
from weights.onnx_schema import NAMES
from zoo.onnx import values as v
from zoo.onnx.node import LIFTED
from zoo.onnx.operators.casts import convert
from zoo.onnx.operators.convolution import conv
from zoo.onnx.operators.linear import centred
from zoo.onnx.operators.narrow import SMALL, narrowed
from zoo.onnx.registry import operator
from zoo.onnx.values import Value, Weight

_RANGES = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767),
           "int32": (-(2**31), 2**31 - 1), **SMALL}  # fmt: skip


def _spread(x: Value, scale: Value, axis: int, block: int) -> Value:
    """Scales shaped to broadcast: one, one per place of an axis, or one per block of places."""
    if scale.ndim == 0 or (scale.ndim == 1 and scale.shape[0] == 1):
        return v.reshape(scale, ())
    axis = v.axis_in(axis, x.ndim)
    if not block:
        sizes = [1] * x.ndim
        sizes[axis] = x.shape[axis]
        return v.reshape(scale, sizes)
    places = np.arange(x.shape[axis]) // block
    return v.take(scale, places, axis)


@operator("DequantizeLinear")
def dequantize(x: Weight, scale: Weight, zero: Weight = None, *, axis: int = 1,
               block_size: int = 0, output_dtype: int = 0, call):  # fmt: skip
    """(x - zero) * scale, of the scale's type."""
    x, scale, zero = _together(x, scale, zero, call)
    name = NAMES[output_dtype] if output_dtype else v.type_of(scale)
    wide = v.cast(x, "float32")
    if zero is not None:
        wide = wide - v.cast(_spread(x, zero, axis, block_size), "float32")
    return v.cast(wide * v.cast(_spread(x, scale, axis, block_size), "float32"), name)


def _together(x: Value, scale: Value, zero: Value | None, call) -> tuple:
    """All three as tensors if x is one, and as arrays where the device lacks its type."""
    if not isinstance(x, Tensor) and any(isinstance(y, Tensor) for y in (scale, zero)):
        if x.dtype.name not in LIFTED:
            return x, call.numbers(scale), call.numbers(zero)
    like = next((y for y in (x, scale, zero) if isinstance(y, Tensor)), None)

    def lifted(y):
        return y if y is None or isinstance(y, Tensor) else Tensor(y, device=like.device)

    if like is None or (zero is not None and not isinstance(zero, Tensor)
                        and zero.dtype.name not in LIFTED):  # fmt: skip
        return tuple(call.numbers(y) for y in (x, scale, zero))
    return lifted(x), lifted(scale), lifted(zero)


@operator("QuantizeLinear")
def quantize(x: Weight, scale: Weight, zero: Weight = None, *, axis: int = 1, block_size: int = 0,
             output_dtype: int = 0, precision: int = 0, saturate: int = 1, call):  # fmt: skip
    """round(x / scale) + zero, halves to even, within the range of the type."""
    name = NAMES[output_dtype] if output_dtype else "uint8" if zero is None else v.type_of(zero)
    if name not in LIFTED:
        x, scale, zero = (call.numbers(y) for y in (x, scale, zero))
    x, scale, zero = _together(x, scale, zero, call)
    wide = v.cast(x, "float32") / v.cast(_spread(x, scale, axis, block_size), "float32")
    if name not in _RANGES:
        shift = 0 if zero is None else v.cast(_spread(x, zero, axis, block_size), "float32")
        return narrowed(wide + shift, name, bool(saturate))
    offset = None if zero is None else v.cast(_spread(x, zero, axis, block_size), "float32")
    return _rounded(wide, offset, name, call)


def _rounded(wide: Value, offset: Value | None, name: str, call) -> Value:
    low, high = _RANGES[name]
    whole = v.round_(wide)
    whole = whole if offset is None else whole + offset
    within = v.minimum(v.maximum(whole, low), high)
    return convert(within, name, 1, call)


@operator("DynamicQuantizeLinear")
def dynamic_quantize(x: Value, *, call):
    """To uint8 with the scale that the values themselves ask for: (q, scale, zero point)."""
    low, high = v.minimum(x.min(), 0), v.maximum(x.max(), 0)
    low, high = v.cast(low, "float32"), v.cast(high, "float32")
    scale = (high - low) / 255
    safe = v.where(scale == 0, 1.0, scale) if isinstance(x, Tensor) else scale or np.float32(1)
    zero = v.round_(v.minimum(v.maximum(0 - low / safe, 0), 255))
    return _rounded(x / safe, zero, "uint8", call), scale, v.cast(zero, "uint8")


def _requantised(total: Value, factor: Value, zero: Value, call) -> Value:
    offset = v.cast(zero, "float32")
    return _rounded(v.cast(total, "float32") * factor, offset, v.type_of(zero), call)


@operator("QLinearMatMul")
def qlinear_matmul(a: Value, a_scale: Value, a_zero: Value, b: Value, b_scale: Value,
                   b_zero: Value, y_scale: Value, y_zero: Value, *, call):  # fmt: skip
    """The product of two quantised matrices, quantised."""
    total = centred(a, a_zero, -1) @ centred(b, b_zero, 0)
    rows = a_scale.ndim == 1 and a_scale.shape[0] > 1
    a_scale = v.reshape(a_scale, (-1, 1)) if rows else a_scale
    factor = v.cast(a_scale, "float32") * v.cast(b_scale, "float32") / v.cast(y_scale, "float32")
    return _requantised(total, factor, y_zero, call)


@operator("QLinearConv", heavy=True)
def qlinear_conv(x: Value, x_scale: Value, x_zero: Value, w: Value, w_scale: Value, w_zero: Value,
                 y_scale: Value, y_zero: Value, bias: Value = None, *, auto_pad: str = "NOTSET",
                 dilations: tuple | None = None, group: int = 1,
                 kernel_shape: tuple | None = None, pads: tuple | None = None,
                 strides: tuple | None = None, call):  # fmt: skip
    """The convolution of quantised values, quantised; the bias is int32."""
    per_channel = (-1, *(1,) * (w.ndim - 1))
    w_zero = v.reshape(w_zero, per_channel) if w_zero.numel > 1 else v.reshape(w_zero, ())
    x_zero = v.reshape(x_zero, ())
    total = conv(centred(x, x_zero, 0), centred(w, w_zero, 0), bias, auto_pad=auto_pad,
                 dilations=dilations, group=group, pads=pads, strides=strides)  # fmt: skip
    w_scale = v.reshape(w_scale, per_channel[:-1] if w_scale.numel > 1 else ())
    factor = v.reshape(x_scale, ()) * w_scale / v.reshape(y_scale, ())
    return _requantised(total, factor, v.reshape(y_zero, ()), call)
