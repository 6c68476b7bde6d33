"""Operators that bring numbers to mean 0 and variance 1, or to a norm of 1."""

from __future__ import annotations

from collections.abc import Sequence

from engine import Tensor
from zoo.onnx import values as v
from zoo.onnx.layout import as_it_lies
from zoo.onnx.registry import operator
from zoo.onnx.values import Value, Weight


def _along(x: Value, values: Weight, axis: int = 1) -> Value:
    """Numbers per channel, shaped to broadcast."""
    sizes = [1] * x.ndim
    sizes[axis] = -1
    return beside(x, v.reshape(values, sizes))


def beside(x: Value, other: Weight) -> Value:
    """An array as a tensor, if x is one."""
    if isinstance(x, Tensor) and not isinstance(other, Tensor):
        return Tensor(other, device=x.device)
    return other


def _standard(x: Value, axes: Sequence[int], epsilon: float) -> Value:
    centred = x - v.reduce("mean", x, axes)
    variance = v.reduce("mean", centred * centred, axes)
    return centred * v.reciprocal(v.sqrt(variance + v.number(x, epsilon)))


def _wide(x: Value) -> Value:
    """Halves are summed as float32."""
    return v.cast(x, "float32") if v.type_of(x) in ("float16", "bfloat16") else x


@operator("BatchNormalization")
def batch_normalization(x: Value, scale: Weight, bias: Weight, mean: Weight, var: Weight, *,
                        epsilon: float = 1e-5, momentum: float = 0.9, training_mode: int = 0,
                        spatial: int = 1, is_test: int = 1, call):  # fmt: skip
    """x * a + b per channel; of constants a and b are computed while the model is prepared."""
    if training_mode:
        axes = [a for a in range(x.ndim) if a != 1]
        now = v.reduce("mean", x, axes, keep=False)
        spread = v.reduce("mean", (x - _along(x, now)) * (x - _along(x, now)), axes, keep=False)
        m, keep = v.number(x, momentum), v.number(x, 1 - momentum)
        running = beside(x, mean) * m + now * keep, beside(x, var) * m + spread * keep
        mean, var = now, spread
    if any(isinstance(p, Tensor) for p in (scale, bias, mean, var)):
        scale, bias, mean, var = (beside(x, p) for p in (scale, bias, mean, var))
    a = scale * v.reciprocal(v.sqrt(var + v.number(var, epsilon)))
    line = (x, _along(x, a), _along(x, bias - mean * a))
    out = as_it_lies(lambda x, a, b: v.cast(x * a + b, v.type_of(x)), line)
    return (out, *running) if training_mode else out


@operator("InstanceNormalization")
def instance_normalization(x: Value, scale: Value, bias: Value, *, epsilon: float = 1e-5):
    """Each channel of each picture by itself."""
    out = _standard(_wide(x), range(2, x.ndim), epsilon)
    return v.cast(out * _along(x, scale) + _along(x, bias), v.type_of(x))


@operator("GroupNormalization")
def group_normalization(x: Value, scale: Value, bias: Value, *, epsilon: float = 1e-5,
                        num_groups: int, stash_type: int = 1, call):  # fmt: skip
    """Groups of channels together; before opset 21 scale and bias were per group."""
    b, c = x.shape[:2]
    parts = v.reshape(_wide(x), (b, num_groups, c // num_groups, *x.shape[2:]))
    out = _standard(parts, range(2, parts.ndim), epsilon)
    if call.opset < 21 and scale.shape[0] == num_groups:
        out = out * _along(out, scale) + _along(out, bias)
        return v.cast(v.reshape(out, x.shape), v.type_of(x))
    out = v.reshape(out, x.shape)
    return v.cast(out * _along(x, scale) + _along(x, bias), v.type_of(x))


@operator("LayerNormalization")
def layer_normalization(x: Value, scale: Value, bias: Value = None, *, axis: int = -1,
                        epsilon: float = 1e-5, stash_type: int = 1):  # fmt: skip
    """The axes from `axis` on together; also their mean and inverse deviation."""
    axes, wide = range(v.axis_in(axis, x.ndim), x.ndim), _wide(x)
    mean = v.reduce("mean", wide, axes)
    centred = wide - mean
    variance = v.reduce("mean", centred * centred, axes)
    inverse = v.reciprocal(v.sqrt(variance + v.number(wide, epsilon)))
    out = v.cast(centred * inverse, v.type_of(x)) * scale
    return (out if bias is None else out + bias), mean, inverse


@operator("RMSNormalization")
def rms_normalization(x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5,
                      stash_type: int = 1):  # fmt: skip
    """x by its root mean square over the axes from `axis` on."""
    axes, wide = range(v.axis_in(axis, x.ndim), x.ndim), _wide(x)
    square = v.reduce("mean", wide * wide, axes)
    out = wide * v.reciprocal(v.sqrt(square + v.number(wide, epsilon)))
    return v.cast(out, v.type_of(x)) * scale


@operator("MeanVarianceNormalization")
def mean_variance_normalization(x: Value, *, axes: tuple = (0, 2, 3)):
    """To mean 0 and variance 1 over axes."""
    return _standard(x, axes, 1e-9)


@operator("LpNormalization")
def lp_normalization(x: Value, *, axis: int = -1, p: int = 2):
    """By the norm along an axis; what is 0 stays so."""
    axes = (v.axis_in(axis, x.ndim),)
    if p == 1:
        norm = v.reduce("sum", v.absolute(x), axes)
    else:
        norm = v.sqrt(v.reduce("sum", x * x, axes))
    safe = v.where(norm == 0, v.number(x, 1), norm)
    return v.where(norm == 0, v.number(x, 0), x / safe)


@operator("LRN")
def lrn(x: Value, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int):
    """By the squares of neighbouring channels (Krizhevsky et al. 2012)."""
    c = x.shape[1]
    before = min((size - 1) // 2, c)  # there is nothing beyond the channels
    after = min(size - 1 - (size - 1) // 2, c)
    padded = v.pad(x * x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
    total = v.part(padded, 1, 0, c)
    for i in range(1, before + after + 1):
        total = total + v.part(padded, 1, i, i + c)
    base = total * v.number(x, alpha / size) + v.number(x, bias)
    return x * v.exp(v.log(base) * v.number(x, -beta))
