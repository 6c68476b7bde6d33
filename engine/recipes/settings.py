"""What a rewriting recipe may know and ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine import graph as g
from engine.graph import Node
from engine.ir import Target
from engine.recipes.product import Quantised, is_constant, quantised


@dataclass
class Settings:
    """target: the device. exact: float32 factors are multiplied as they are, never rounded.

    pack(node) computes a node over weights now, once for all graphs, and gives its BUFFER.
    """

    target: Target
    exact: bool
    pack: Callable[[Node], Node]
    _quantised: dict[Node, Quantised | None] = field(default_factory=dict)

    def is_weight(self, factor: Node) -> bool:
        """Whether a factor depends on weights alone, and so may be packed for good."""
        return is_constant(factor)

    def quantised(self, factor: Node) -> Quantised | None:
        """A (1, rows, depth) factor as a Quantised constant matrix, None if it isn't one."""
        if factor not in self._quantised:
            constant = factor.shape[0] == 1 and is_constant(factor)
            found = quantised(g.reshape(factor, factor.shape[1:])) if constant else None
            self._quantised[factor] = found
        return self._quantised[factor]
