"""The model among what a training run saved: its tensors, and the plain values beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from weights.budget import Budget
from weights.checkpoint import WeightError
from weights.pickle_machine import Known
from weights.stand_ins import ElementType, NumpyArray, Record, TensorRef

# Where training code keeps the model among other things, most specific first.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_MAX_DEPTH = 24  # dicts in dicts
_MAX_ARRAY = 4096  # values of a NumPy array that are kept as metadata
_NODE = 100  # bytes of memory for a value, and what looking at it is charged


def find_model(root: Any, budget: Budget) -> tuple[list[tuple[str, TensorRef]], dict[str, Any]]:
    """The named tensors of a checkpoint, and the plain values beside them."""
    if type(root) is not dict:
        got = "one tensor" if type(root) is TensorRef else type(root).__name__
        raise WeightError("not a state_dict", file=budget.path, expected="a dict", got=got)
    rest: dict[str, Any] = {}
    for _ in range(_MAX_DEPTH):
        inner = _wrapper(budget, root)
        beside = ((k, v) for k, v in root.items() if k != inner or inner is None)
        for key, value in beside:
            plain = _plain(budget, value)
            if plain is not _OMIT:
                rest[_spelled(budget, key)] = plain
        if inner is None:
            return list(_tensors(budget, root)), rest
        root = root[inner]
    raise WeightError(f"its dicts are nested deeper than {_MAX_DEPTH}", file=budget.path)


def _wrapper(budget: Budget, tree: dict[Any, Any]) -> str | None:
    """The key under which the model lies; None when `tree` itself is the model."""
    if any(type(value) is TensorRef for value in tree.values()):
        return None
    return next((k for k in _WRAPPERS if any(_tensors(budget, tree.get(k)))), None)


def _tensors(
    budget: Budget, tree: Any, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, TensorRef]]:
    """Every tensor of nested dicts, its keys joined by dots."""
    if type(tree) is not dict:
        return
    if depth > _MAX_DEPTH:
        raise WeightError(f"its dicts are nested deeper than {_MAX_DEPTH}", file=budget.path)
    for key, value in tree.items():
        budget.spend(_NODE)
        if type(value) is not TensorRef and type(value) is not dict:
            continue
        name = f"{prefix}{_spelled(budget, key)}"
        budget.spend(sys.getsizeof(name))
        if type(value) is TensorRef:
            yield name, value
        else:
            yield from _tensors(budget, value, f"{name}.", depth + 1)


def _spelled(budget: Budget, key: Any) -> str:
    if type(key) is str:
        return key
    text = key.name if isinstance(key, Known) else str(key)
    budget.spend(sys.getsizeof(text))
    return text


_OMIT = object()  # what has no plain spelling


class _HoldsTensor(Exception):
    """Raised where a value is the state of an optimiser or the like, not metadata."""


def _plain(budget: Budget, value: Any) -> Any:
    """`value` as strings, numbers, lists and dicts; _OMIT when it holds a tensor at any depth."""
    try:
        return _copy(budget, value, 0)
    except _HoldsTensor:
        return _OMIT


def _copy(budget: Budget, value: Any, depth: int) -> Any:
    budget.spend(_NODE)
    if depth > _MAX_DEPTH:
        raise WeightError(f"its values are nested deeper than {_MAX_DEPTH}", file=budget.path)
    if value is None or type(value) in (bool, int, float, str):
        return value
    match value:
        case TensorRef():
            raise _HoldsTensor
        case ElementType() | Known():
            return value.name
        case Record():
            return _copy(budget, value.fields, depth + 1)
        case NumpyArray(values=array) if array.size <= _MAX_ARRAY and array.dtype.kind != "c":
            budget.spend(_NODE * array.size * max(array.ndim, 1))  # a list of one, for each axis
            return array.tolist()
        case list() | tuple() | set() | frozenset():
            items = (_copy(budget, item, depth + 1) for item in value)
            return [item for item in items if item is not _OMIT]
        case dict():
            pairs = ((_spelled(budget, k), _copy(budget, v, depth + 1)) for k, v in value.items())
            return {key: item for key, item in pairs if item is not _OMIT}
    return _OMIT
