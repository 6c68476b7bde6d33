"""Operators that make values from little: constants, ranges, random numbers."""

from __future__ import annotations

import numpy as np

from weights.onnx import OnnxTensor
from weights.onnx_schema import NAMES
from weights.onnx_tensor import dtype_of
from zoo.onnx import values as v
from zoo.onnx.node import LIFTED
from zoo.onnx.operators.normalisation import beside
from zoo.onnx.registry import operator
from zoo.onnx.values import Known, Value, Weight


@operator("Constant")
def constant(*, value: OnnxTensor | None = None, value_float: float | None = None,
             value_floats: tuple | None = None, value_int: int | None = None,
             value_ints: tuple | None = None, value_string: str | None = None,
             value_strings: tuple | None = None):  # fmt: skip
    """The value, whichever attribute holds it."""
    if value is not None:
        return value
    for given, dtype in ((value_float, np.float32), (value_floats, np.float32),
                         (value_int, np.int64), (value_ints, np.int64),
                         (value_string, object), (value_strings, object)):  # fmt: skip
        if given is not None:
            return np.array(given, dtype)
    raise ValueError("it has no value")


@operator("ConstantOfShape")
def constant_of_shape(shape: Known, *, value: OnnxTensor | None = None):
    """One number everywhere, 0 by default."""
    number = np.zeros(1, np.float32) if value is None else value
    return np.full(v.ints(shape), number.reshape(-1)[0], number.dtype)


@operator("Range")
def range_(start: Known, limit: Known, delta: Known):
    """start, start + delta, … below limit."""
    first, last, step = (x.reshape(-1)[0] for x in (start, limit, delta))
    count = max(0, int(np.ceil((float(last) - float(first)) / float(step))))
    return (first + np.arange(count) * step).astype(start.dtype)


@operator("EyeLike")
def eye_like(x: Weight, *, dtype: int | None = None, k: int = 0):
    """Ones on the k-th diagonal."""
    name = v.type_of(x) if dtype is None else NAMES[dtype]
    return np.eye(*x.shape, k=k).astype(dtype_of(name))


@operator("OneHot")
def one_hot(indices: Value, depth: Known, values: Known, *, axis: int = -1, call):
    """values[1] where a new axis's place is the index, values[0] elsewhere."""
    n, rank = int(depth.reshape(-1)[0]), indices.ndim + 1
    axis = v.axis_in(axis, rank)
    index = v.cast(indices, "int32")
    index = v.where(index < 0, index + n, index)
    places = [1] * rank
    places[axis] = n
    sizes = [*indices.shape[:axis], 1, *indices.shape[axis:]]
    hit = v.reshape(index, sizes) == v.reshape(v.iota(n, indices), places)
    if isinstance(hit, np.ndarray) or values.dtype.name not in LIFTED - {"bfloat16"}:
        return np.where(call.numbers(hit), values[1], values[0])
    zero, one = (beside(hit, x.reshape(1)) for x in values)
    return v.where(hit, one, zero)


# --- random numbers --------------------------------------------------------------------------


def _generator(seed: float | None) -> np.random.Generator:
    return np.random.default_rng(None if seed is None else int(np.float32(seed).view(np.uint32)))


def _type(x: Value | None, dtype: int | None) -> np.dtype:
    name = v.type_of(x) if dtype is None and x is not None else NAMES[dtype or 1]
    return dtype_of(name)


@operator("RandomNormal", random=True)
def random_normal(*, dtype: int = 1, mean: float = 0.0, scale: float = 1.0,
                  seed: float | None = None, shape: tuple):  # fmt: skip
    """Normally distributed numbers."""
    return _generator(seed).normal(mean, scale, shape).astype(_type(None, dtype))


@operator("RandomNormalLike", random=True)
def random_normal_like(x: Known, *, dtype: int | None = None, mean: float = 0.0,
                       scale: float = 1.0, seed: float | None = None):  # fmt: skip
    """As many as x has."""
    return _generator(seed).normal(mean, scale, x.shape).astype(_type(x, dtype))


@operator("RandomUniform", random=True)
def random_uniform(*, dtype: int = 1, high: float = 1.0, low: float = 0.0,
                   seed: float | None = None, shape: tuple):  # fmt: skip
    """Numbers between low and high."""
    return _generator(seed).uniform(low, high, shape).astype(_type(None, dtype))


@operator("RandomUniformLike", random=True)
def random_uniform_like(x: Known, *, dtype: int | None = None, high: float = 1.0,
                        low: float = 0.0, seed: float | None = None):  # fmt: skip
    """As many as x has."""
    return _generator(seed).uniform(low, high, x.shape).astype(_type(x, dtype))


@operator("Bernoulli", random=True)
def bernoulli(x: Known, *, dtype: int | None = None, seed: float | None = None):
    """1 with the probability x."""
    return (_generator(seed).random(x.shape) < x).astype(_type(x, dtype))


@operator("Multinomial", random=True)
def multinomial(x: Known, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None):
    """Places drawn from rows of logarithms of probabilities."""
    noise = _generator(seed).gumbel(size=(sample_size, *x.shape))
    return np.argmax(x + noise, -1).T.astype(dtype_of(NAMES[dtype]))


@operator("Dropout")
def dropout(x: Value, ratio: Known = None, training_mode: Known = None, *,
            seed: int | None = None):  # fmt: skip
    """Nothing is dropped, except in training; the second output says what is kept."""
    share = 0.5 if ratio is None else float(ratio)
    if training_mode is None or not bool(training_mode) or share == 0:
        return x, np.ones(x.shape, np.bool_)
    kept = np.random.default_rng(seed).random(x.shape) >= share
    scale = v.number(x, 1 / (1 - share))
    return v.where(beside(x, kept), x * scale, v.number(x, 0)), kept


@operator("BlackmanWindow")
def blackman(size: Known, *, output_datatype: int = 1, periodic: int = 1):
    """0.42 - 0.5 cos + 0.08 cos of twice that."""
    t = _turn(size, periodic)
    return (0.42 - 0.5 * np.cos(t) + 0.08 * np.cos(2 * t)).astype(dtype_of(NAMES[output_datatype]))


@operator("HannWindow")
def hann(size: Known, *, output_datatype: int = 1, periodic: int = 1):
    """0.5 - 0.5 cos."""
    return (0.5 - 0.5 * np.cos(_turn(size, periodic))).astype(dtype_of(NAMES[output_datatype]))


@operator("HammingWindow")
def hamming(size: Known, *, output_datatype: int = 1, periodic: int = 1):
    """25/46 - 21/46 cos."""
    window = 25 / 46 - 21 / 46 * np.cos(_turn(size, periodic))
    return window.astype(dtype_of(NAMES[output_datatype]))


def _turn(size: np.ndarray, periodic: int) -> np.ndarray:
    n = int(size)
    return 2 * np.pi * np.arange(n) / (n if periodic else max(n - 1, 1))
