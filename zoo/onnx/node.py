"""A node ready to run: its operator, attributes as Python values, and how its inputs come to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engine import DeviceError, ShapeError, Tensor
from engine import dtype as dt
from weights import WeightError
from weights.onnx import Graph, Node, OnnxTensor
from weights.onnx_tensor import dtype_of
from zoo.errors import UserError
from zoo.onnx.layout import as_it_lies
from zoo.onnx.registry import REQUIRED, Operator

_WRONG = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError,
          StopIteration)  # fmt: skip
_KINDS = {"int": int, "float": (float, int), "str": str, "tuple": tuple}  # by annotation
LIFTED = frozenset("bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 "
                   "bfloat16".split())  # fmt: skip


class NeedsNumbers(Exception):
    """A node must see the numbers of a tensor that a program only computes later."""

    def __init__(self, node: BoundNode) -> None:
        self.node = node


@dataclass(frozen=True)
class Call:
    """What an operator may ask about its node: which outputs are wanted, the opset, its graphs.

    `run(graph, values)` runs an attribute that is a graph on its inputs; `numbers(x)` is the
    array of a value, which ends a capture.
    """

    outputs: tuple[bool, ...]
    opset: int
    inputs: int
    run: Callable[[Any, Sequence[Any]], list[Any]]
    numbers: Callable[[Any], Any]


class Device:
    """Brings values to the device and back; constants are brought once.

    `capturing` says that tensors have no numbers yet, since a program is being captured.
    """

    def __init__(self, name: str | None = None, precision: str = "f32") -> None:
        self.name, self.precision, self.capturing = name, precision, False
        self.constants: dict[int, tuple[np.ndarray, Tensor | None]] = {}

    def remember(self, array: np.ndarray) -> None:
        """An array that will never change, so that its tensor may be kept."""
        if isinstance(array, np.ndarray):
            self.constants[id(array)] = array, None

    def lift(self, array: np.ndarray) -> Tensor:
        """The tensor of an array; float64 becomes float32."""
        known, tensor = self.constants.get(id(array), (None, None))
        if tensor is not None:
            return tensor
        made = self._tensor(array, known is not None)
        if known is not None:
            self.constants[id(array)] = array, made
        return made

    def _tensor(self, array: np.ndarray, constant: bool) -> Tensor:
        if array.dtype.name == "bfloat16":
            bits = np.require(array, requirements="AC").view(np.uint16)
            return Tensor.from_numpy(bits, self.name, dt.bfloat16)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        array = np.require(array, requirements="AC").reshape(array.shape)
        return Tensor.from_numpy(array, self.name) if constant else Tensor(array, None, self.name)


def to_host(value: Any) -> Any:
    """The array of a tensor, of a list the arrays."""
    if isinstance(value, (list, tuple)):
        return [to_host(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    if 0 in value.shape:  # nothing to run
        try:
            return np.zeros(value.shape, dtype_of(value.dtype.name))
        except ValueError:
            raise UserError(f"a result has a shape that is too large: {[*value.shape]}") from None
    array = value.numpy()
    return array.astype(dtype_of("bfloat16")) if value.dtype.name == "bfloat16" else array


class BoundNode:
    """One node of a graph with what runs it; `implicit` are names its graphs read from outside.

    `bodies` has the graphs among its attributes, by attribute.
    """

    def __init__(
        self,
        node: Node,
        operator: Operator,
        opset: int,
        where: str,
        bodies: Mapping[str, Any],
        implicit: Sequence[str],
    ) -> None:
        self.node, self.operator, self.opset, self.where = node, operator, opset, where
        self.inputs, self.outputs = node.inputs, node.outputs
        self.bodies, self.implicit = bodies, tuple(implicit)
        self.reads = tuple(name for name in (*node.inputs, *implicit) if name)
        self.given, self.attributes = self._attributes()

    def __repr__(self) -> str:
        return self.where

    def _attributes(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """(inputs that are given as attributes, the other attributes)."""
        op, positions = self.operator, {name for name, _, _ in self.operator.inputs}
        given, others = {}, {}
        for name, value in self.node.attributes.items():
            value = _plain(value)
            if name in op.attributes:
                others[name] = self.bodies[name] if name in self.bodies else value
            elif name in positions:
                kind = np.float32 if _has_float(value) else None
                given[name] = np.asarray(value, kind)
            else:
                raise WeightError(f"{self.where}: attribute {name} is not supported")
        return given, others

    def problem(self) -> str | None:
        """What is wrong with its inputs and attributes before it runs, if something is."""
        op = self.operator
        for name, default in op.attributes.items():
            if default is REQUIRED and name not in self.attributes:
                return f"attribute {name} is missing"
        for name, value in self.attributes.items():
            kind = op.kinds.get(name)
            if not isinstance(value, _KINDS.get(kind, object)):
                return f"attribute {name} must be {kind}, got {type(value).__name__}"
        count = len(self.inputs)
        if count > len(op.inputs) and op.variadic is None:
            return f"it has {count} inputs, but takes at most {len(op.inputs)}"
        for position, (name, _, optional) in enumerate(op.inputs):
            there = position < count and self.inputs[position]
            if not there and not optional and name not in self.given:
                return f"input {name} is missing"
        return None

    def __call__(self, values: Mapping[str, Any], device: Device) -> list[Any]:
        """Its outputs for the values of the names that it reads."""
        op, arguments = self.operator, []
        for position, name in enumerate(self.inputs):
            value = values[name] if name else None
            if value is None and position < len(op.inputs):
                value = self.given.get(op.inputs[position][0])
            arguments.append(value)
        for name, _, _ in op.inputs[len(arguments) :]:
            arguments.append(self.given.get(name))
        arguments = self._brought(arguments, device)
        more = {"call": self._call(values, device)} if op.wants_call else {}
        try:
            with np.errstate(all="ignore"):
                arguments, options = self._or_default(arguments), {**self.attributes, **more}
                if op.pointwise and "axis" not in options:
                    result = as_it_lies(op.function, arguments, **options)
                else:
                    result = op.function(*arguments, **options)
        except ShapeError as error:
            raise UserError(f"{self.where}: {error}") from None
        except MemoryError:
            raise UserError(f"{self.where}: its result is larger than memory") from None
        except (UserError, DeviceError):
            raise
        except _WRONG as error:
            raise UserError(f"{self.where}: {error}") from error
        results = list(result) if isinstance(result, tuple) else [result]
        if any(self.outputs[len(results) :]):
            raise UserError(
                f"{self.where}: it has {len(self.outputs)} outputs, but makes {len(results)}"
            )
        return [_value(each) for each in results]

    def _or_default(self, arguments: list[Any]) -> list[Any]:
        """The arguments up to the last one given, so that the others take their defaults."""
        last = max((i for i, value in enumerate(arguments) if value is not None), default=-1)
        required = sum(not optional for _, _, optional in self.operator.inputs)
        return arguments[: max(last + 1, required)]

    def _brought(self, arguments: list[Any], device: Device) -> list[Any]:
        """Each argument as the operator's signature asks."""
        op, out = self.operator, list(arguments)
        loose = []
        for i, value in enumerate(arguments):
            how = op.comes(i)
            if how == "Known" and isinstance(value, (Tensor, list)):
                out[i] = self._numbers(value, device)
            elif how == "Value" and isinstance(value, (Tensor, np.ndarray)):
                loose.append(i)
        together = op.heavy or any(isinstance(arguments[i], Tensor) for i in loose)
        if not together:
            return out
        arrays = [i for i in loose if isinstance(arguments[i], np.ndarray)]
        if any(arguments[i].dtype.name not in LIFTED for i in arrays):
            for i in loose:
                out[i] = self._numbers(arguments[i], device)
        else:
            for i in arrays:
                out[i] = device.lift(arguments[i])
        return out

    def _numbers(self, value: Any, device: Device) -> Any:
        parts = value if isinstance(value, list) else [value]
        if device.capturing and any(isinstance(part, Tensor) for part in parts):
            raise NeedsNumbers(self)
        return to_host(value)

    def _call(self, values: Mapping[str, Any], device: Device) -> Call:
        def run(body: Any, inputs: Sequence[Any]) -> list[Any]:
            return body.within({name: values[name] for name in body.reads}, inputs, device)

        wanted = tuple(bool(name) for name in self.outputs)
        numbers = partial(self._numbers, device=device)
        return Call(wanted, self.opset, len(self.inputs), run, numbers)


def _plain(value: Any) -> Any:
    return value.read() if isinstance(value, OnnxTensor) else value


def _has_float(value: Any) -> bool:
    first = value[0] if isinstance(value, tuple) and value else value
    return isinstance(first, float)


def _value(result: Any) -> Any:
    """What an operator gave, as a value: NumPy's scalars become arrays."""
    if result is None or isinstance(result, (Tensor, list, np.ndarray)):
        return result
    return np.asarray(result)


def graphs_of(node: Node) -> dict[str, Graph]:
    """The graphs among a node's attributes."""
    return {name: value for name, value in node.attributes.items() if isinstance(value, Graph)}
