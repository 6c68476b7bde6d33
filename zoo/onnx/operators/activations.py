"""Functions that networks bend their numbers with."""

from __future__ import annotations

import math

from engine import Tensor, functional
from zoo.onnx import values as v
from zoo.onnx.registry import operator, pointwise
from zoo.onnx.values import Value


@pointwise("Elu")
def elu(x: Value, *, alpha: float = 1.0):
    """Clevert et al. 2015."""
    return v.where(x < 0, (v.exp(x) - 1) * v.number(x, alpha), x)


@pointwise("Celu")
def celu(x: Value, *, alpha: float = 1.0):
    """Barron 2017."""
    a = v.number(x, alpha)
    return v.maximum(x, 0) + v.minimum((v.exp(x / a) - 1) * a, 0)


@pointwise("Selu")
def selu(x: Value, *, alpha: float = 1.67326319217681884765625,
         gamma: float = 1.05070102214813232421875):  # fmt: skip
    """Klambauer et al. 2017."""
    return elu(x, alpha=alpha) * v.number(x, gamma)


@pointwise("Gelu")
def gelu(x: Value, *, approximate: str = "none"):
    """x times the share of a normal distribution below it."""
    half = v.number(x, 0.5)
    if approximate == "tanh":
        inner = (x + x * x * x * v.number(x, 0.044715)) * v.number(x, math.sqrt(2 / math.pi))
        return x * half * (v.tanh(inner) + 1)
    if isinstance(x, Tensor):
        return functional.gelu(x)
    return x * half * (v.erf(x * v.number(x, math.sqrt(0.5))) + 1)


@pointwise("Swish")
def swish(x: Value, *, alpha: float = 1.0):
    """x sigmoid(alpha x)."""
    return x * v.sigmoid(x * v.number(x, alpha))


@pointwise("SwiGLU")
def swiglu(x: Value, y: Value, *, alpha: float = 1.0):
    """swish(x) y."""
    return swish(x, alpha=alpha) * y


@pointwise("HardSigmoid")
def hard_sigmoid(x: Value, *, alpha: float = 0.2, beta: float = 0.5):
    """alpha x + beta within 0 and 1."""
    return v.minimum(v.maximum(x * v.number(x, alpha) + v.number(x, beta), 0), 1)


@pointwise("LeakyRelu")
def leaky_relu(x: Value, *, alpha: float = 0.01):
    """alpha x below 0."""
    return v.where(x < 0, x * v.number(x, alpha), x)


@operator("PRelu")
def prelu_6(x: Value, slope: Value):
    """As before opset 7, where slopes belong to channels."""
    many = slope.ndim == 1 and slope.shape[0] > 1
    return prelu(x, v.reshape(slope, (-1, *(1,) * (x.ndim - 2))) if many else slope)


@pointwise("PRelu", since=7)
def prelu(x: Value, slope: Value):
    """slope x below 0."""
    return v.where(x < 0, x * slope, x)


@pointwise("ThresholdedRelu")
def thresholded_relu(x: Value, *, alpha: float = 1.0):
    """0 up to alpha."""
    return v.where(x > v.number(x, alpha), x, v.number(x, 0))


@pointwise("Shrink")
def shrink(x: Value, *, bias: float = 0.0, lambd: float = 0.5):
    """Towards 0 by bias; 0 within lambd of it."""
    low = v.where(x < -lambd, v.cast(x + v.number(x, bias), v.type_of(x)), v.number(x, 0))
    return v.where(x > lambd, v.cast(x - v.number(x, bias), v.type_of(x)), low)
