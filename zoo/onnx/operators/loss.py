"""Losses of training, which exported models sometimes hold."""

from __future__ import annotations

from zoo.onnx import values as v
from zoo.onnx.operators.reductions import log_softmax
from zoo.onnx.registry import operator
from zoo.onnx.values import Value


@operator("NegativeLogLikelihoodLoss")
def nll_loss(x: Value, target: Value, weight: Value = None, *, ignore_index: int | None = None,
             reduction: str = "mean"):  # fmt: skip
    """-x at the target's class along axis 1, times the class's weight."""
    classes = x.shape[1]
    places = v.reshape(v.iota(classes, x), (1, classes, *(1,) * (x.ndim - 2)))
    index = v.cast(v.reshape(target, (target.shape[0], 1, *target.shape[1:])), "int32")
    hit = places == index
    if ignore_index is not None:
        hit = hit & (index != ignore_index)
    share = v.where(hit, v.number(x, 1), v.number(x, 0))
    if weight is not None:
        share = share * v.reshape(weight, (1, classes, *(1,) * (x.ndim - 2)))
    share = v.cast(share, v.type_of(x))
    each = -_over_classes(v.where(hit, x, v.number(x, 0)) * share)
    if reduction == "none":
        return each
    total = v.reduce("sum", each, range(each.ndim), keep=False)
    if reduction == "sum":
        return total
    return total / v.reduce("sum", share, range(share.ndim), keep=False)


def _over_classes(x: Value) -> Value:
    return v.reduce("sum", x, (1,), keep=False)


@operator("SoftmaxCrossEntropyLoss")
def cross_entropy(x: Value, target: Value, weight: Value = None, *,
                  ignore_index: int | None = None, reduction: str = "mean"):  # fmt: skip
    """The loss of log softmax along axis 1, which is the second output."""
    logs = log_softmax(x, axis=1)
    how = {"ignore_index": ignore_index, "reduction": reduction}
    return nll_loss(logs, target, weight, **how), logs


@operator("Binarizer", domain="ai.onnx.ml")
def binarizer(x: Value, *, threshold: float = 0.0):
    """1 above the threshold."""
    return v.cast(x > threshold, v.type_of(x))
