"""Params: a checkpoint's tensors as a read-only tree, so names in model code are its keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from weights.checkpoint import WeightError, printable

if TYPE_CHECKING:
    from engine import Tensor

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_SHOWN = 3  # keys that one error line names


class MissingKey(WeightError, KeyError, AttributeError):
    """A key that the checkpoint lacks; also a KeyError and AttributeError so `hasattr` works."""


class _Tree:
    """What all nodes of one tree share: the tensors, the nesting of their keys, the keys used."""

    def __init__(self, tensors: Mapping[str, Tensor], file: object) -> None:
        self.tensors, self.file = tensors, file
        self.made: dict[str, Tensor] = {}
        self.nested: dict[str, dict] = {}
        for key in tensors:
            node = self.nested
            for part in key.split("."):
                node = node.setdefault(part, {})


class Params:
    """A node of the tree: `p.layers[0].attention.wq.weight`, `"bias" in p`, `len(p.layers)`.

    A child is reached by attribute, by index or by item (also dotted: `p["attention.wq"]`); a key
    gives its Tensor, the same object each time. Iterating gives the numbered children in order.
    MissingKey names the file, the full key and near matches.
    """

    __slots__ = ("_tree", "_prefix", "_node")

    def __init__(self, tensors: Mapping[str, Tensor], file: object = None) -> None:
        self._tree = _Tree(tensors, file if file is not None else getattr(tensors, "path", None))
        self._prefix, self._node = "", self._tree.nested

    def __getattr__(self, name: str) -> Tensor | Params:
        if name.startswith("__"):  # what copy and pickle probe for is never a key
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, key: str | int) -> Tensor | Params:
        if isinstance(key, int):
            key = str(self._numbers()[key] if key < 0 else key)
        full = self._prefix + key
        tree, node = self._tree, self._node
        if full in tree.made:
            return tree.made[full]
        if full in tree.tensors:
            return tree.made.setdefault(full, tree.tensors[full])
        for part in key.split("."):
            if part not in node:
                raise self._missing(full)
            node = node[part]
        child = object.__new__(Params)
        child._tree, child._prefix, child._node = tree, full + ".", node
        return child

    def __contains__(self, key: object) -> bool:
        node = self._node
        for part in str(key).split("."):
            if part not in node:
                return False
            node = node[part]
        return True

    def __len__(self) -> int:
        return len(self._numbers())

    def __bool__(self) -> bool:
        return bool(self._node)

    def __iter__(self) -> Iterator[Tensor | Params]:
        return (self[number] for number in self._numbers())

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._node]

    def __repr__(self) -> str:
        return f"Params({self._prefix[:-1]!r}: {', '.join(self._node)})"

    def _numbers(self) -> list[int]:
        return sorted(int(name) for name in self._node if _NUMBER.fullmatch(name))

    def _missing(self, full: str) -> MissingKey:
        near = difflib.get_close_matches(full, self._tree.tensors, _SHOWN)
        remedy = f"near matches: {', '.join(near)}" if near else None
        return MissingKey(f"no key '{printable(full)}'", file=self._tree.file, remedy=remedy)

    def unused(self) -> list[str]:
        """The keys under this node whose Tensor nothing has asked for yet."""
        tree = self._tree
        return [k for k in tree.tensors if k.startswith(self._prefix) and k not in tree.made]


def check(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    ignore: Iterable[str] = (),
    file: object = None,
) -> None:
    """Check that a checkpoint has exactly the keys of `expected`, with those shapes.

    `ignore` lists regular expressions of further keys that may be there (matched whole). Reads
    headers only. WeightError names file, key, expected and got.
    """
    file = file if file is not None else getattr(tensors, "path", None)
    missing = [key for key in expected if key not in tensors]
    if missing:
        near = difflib.get_close_matches(missing[0], tensors, _SHOWN)
        remedy = f"near matches: {', '.join(near)}" if near else None
        raise MissingKey(f"no key {_some(missing)}", file=file, remedy=remedy)
    for key, shape in expected.items():
        got = _shape(tensors, key)
        if got != tuple(shape):
            shown = f"shape {tuple(shape)}"
            raise WeightError("wrong shape", file=file, tensor=key, expected=shown, got=got)
    allowed = re.compile("|".join(f"(?:{row})" for row in ignore) or r"(?!)")
    extra = [key for key in tensors if key not in expected and not allowed.fullmatch(key)]
    if extra:
        remedy = "the file holds another model, or one with more parts"
        raise WeightError(f"unexpected key {_some(extra)}", file=file, remedy=remedy)


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(f"'{printable(key)}'" for key in keys[:_SHOWN]) + more


def _shape(tensors: Mapping[str, Tensor], key: str) -> tuple[int, ...]:
    info = getattr(tensors, "info", None)  # a Checkpoint answers without making the Tensor
    return tuple(info(key).shape if info else tensors[key].shape)
