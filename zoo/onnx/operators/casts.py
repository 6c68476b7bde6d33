"""Changes of the element type."""

from __future__ import annotations

import numpy as np

from weights.onnx_schema import NAMES
from zoo.onnx import values as v
from zoo.onnx.node import LIFTED
from zoo.onnx.operators.narrow import narrowed
from zoo.onnx.registry import operator
from zoo.onnx.values import Value


@operator("Cast")
def cast(x: Value, *, to: int, saturate: int = 1, round_mode: str = "up", call):
    """To the type of a number of onnx.proto."""
    return convert(x, NAMES[to], saturate, call)


@operator("CastLike")
def cast_like(x: Value, like: Value, *, saturate: int = 1, round_mode: str = "up", call):
    """To the type of another input."""
    return convert(x, v.type_of(like), saturate, call)


def convert(x: Value, name: str, saturate: int, call) -> Value:
    """To a type by name; the device has no numbers of less than 8 bits, and no texts."""
    plain = name in LIFTED and not (isinstance(x, np.ndarray) and x.dtype.name not in LIFTED)
    return v.cast(x, name) if plain else narrowed(call.numbers(x), name, bool(saturate))
