"""Write small ONNX models, so that tests need neither the onnx package nor files of it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from weights.onnx_schema import NAMES

NUMBERS = {name: number for number, name in NAMES.items()}


def varint(value: int) -> bytes:
    """A whole number, negative ones as 64 bits."""
    value, out = value & (1 << 64) - 1, bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | float | str | bytes) -> bytes:
    """One field of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def fields(number: int, values: Iterable[Any]) -> bytes:
    """A field for each value."""
    return b"".join(field(number, value) for value in values)


def tensor(array: np.ndarray, name: str = "") -> bytes:
    """A TensorProto with raw data."""
    head = fields(1, map(int, array.shape)) + field(2, NUMBERS[array.dtype.name])
    return head + field(8, name) + field(9, np.ascontiguousarray(array).tobytes())


def attribute(name: str, value: Any) -> bytes:
    """An AttributeProto: an int, float, text, array, graph (bytes), or a list of numbers."""
    kinds = {int: (3, 2), float: (2, 1), str: (4, 3)}
    head = field(1, name)
    if isinstance(value, np.ndarray):
        return head + field(5, tensor(value)) + field(20, 4)
    if isinstance(value, bytes):
        return head + field(6, value) + field(20, 5)
    if isinstance(value, (list, tuple)):
        floats = any(isinstance(each, float) for each in value)
        return head + fields(7 if floats else 8, value) + field(20, 6 if floats else 7)
    number, kind = kinds[type(value)]
    return head + field(number, value) + field(20, kind)


def node(op: str, inputs: str, outputs: str, domain: str = "", **attributes: Any) -> bytes:
    """A NodeProto; names are separated by spaces, `-` is an input that isn't there."""
    names = ["" if name == "-" else name for name in inputs.split()]
    out = fields(1, names) + fields(2, outputs.split()) + field(4, op) + field(7, domain)
    return out + fields(5, (attribute(name, value) for name, value in attributes.items()))


def value(name: str, shape: Sequence[int | str] = (), dtype: str = "float32") -> bytes:
    """A ValueInfoProto of a tensor."""
    dims = (field(1, n) if isinstance(n, int) else field(2, n) for n in shape)
    kind = field(1, NUMBERS[dtype]) + field(2, fields(1, dims))
    return field(1, name) + field(2, field(1, kind))


def graph(
    nodes: Iterable[bytes],
    inputs: Iterable[bytes] = (),
    outputs: Iterable[bytes] = (),
    **initializers: np.ndarray,
) -> bytes:
    """A GraphProto."""
    tensors = (tensor(array, name) for name, array in initializers.items())
    return b"".join([fields(1, nodes), field(2, "g"), fields(5, tensors), fields(11, inputs),
                     fields(12, outputs)])  # fmt: skip


def model(graph: bytes, opset: int = 17, functions: Iterable[bytes] = ()) -> bytes:
    """A ModelProto."""
    return (
        field(1, 8) + field(2, "test") + field(8, field(2, opset))
        + field(7, graph) + fields(25, functions)
    )  # fmt: skip


def function(name: str, inputs: str, outputs: str, nodes: Iterable[bytes]) -> bytes:
    """A FunctionProto of the domain `own`."""
    head = field(1, name) + fields(4, inputs.split()) + fields(5, outputs.split())
    return head + fields(7, nodes) + field(9, field(2, 17)) + field(10, "own")


def external(name: str, shape: Sequence[int], location: str, **more: str) -> bytes:
    """A TensorProto of float32 whose data lies in a file."""
    pairs = {"location": location, **more}
    facts = (field(1, key) + field(2, text) for key, text in pairs.items())
    return (
        fields(1, shape) + field(2, 1) + field(8, name) + fields(13, facts) + field(14, 1)
    )  # fmt: skip


def varied() -> bytes:
    """A model with something of everything that the reader knows."""
    branch = graph([node("Relu", "x", "r")], [], [value("r")])
    other = graph([node("Constant", "", "c", value=np.ones((2, 3), np.float32))], [], [value("c")])
    packed = fields(1, [3]) + field(2, 7) + field(7, b"".join(map(varint, (1, -1, 300))))
    packed += field(8, "p")
    nodes = [
        node("Add", "x w", "y", domain="own"),
        node("If", "on", "z", then_branch=branch, else_branch=other),
        node("Pad", "y p", "q", mode="edge", a=[1.0, 2.0], b=[1, 2, 300]),
    ]
    whole = graph(nodes, [value("x", (2, "n")), value("on", (), "bool")], [value("z")],
                  w=np.ones((2, 3), np.float32), h=np.ones(2, np.float16))  # fmt: skip
    whole += field(5, packed)
    add = function("Add", "a b", "c", [node("Add", "a b", "c")])
    return model(whole, functions=[add])
