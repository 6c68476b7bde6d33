"""What a rewriting recipe may know and ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.graph import Node, Op, graph_variables, toposort
from engine.ir import Target
from engine.recipes import blocks


@dataclass
class Settings:
    """target: the device. terms: the bfloat16 terms that a float32 factor may be rounded to (see
    terms.py), 0 if it has to be multiplied as it is.

    pack(weight, layout) gives the BUFFER of layout(weight), a node over weights: it is computed
    now, once for all graphs. form(weight) is the same node for all weights made in the same way.
    """

    target: Target
    terms: int
    pack: Callable[[Node, Callable[[Node], Node]], Node]
    form: Callable[[Node], Node]
    _blocks: dict[Node, blocks.Layout | None] = field(default_factory=dict)
    _weights: dict[Node, bool | None] = field(default_factory=dict)

    def is_weight(self, factor: Node) -> bool:
        """Whether a factor depends on weights alone (one at least): it may be packed for good.

        A part of one that a symbolic int chooses may not.
        """
        known = self._weights
        for n in toposort([factor], leaves=known.keys()):
            if n.op is Op.BUFFER:
                known[n] = n.arg[0].constant
            elif n not in known:
                parts = {known[s] for s in n.src} - {None}
                parts |= {False} if graph_variables([n]) else set()
                known[n] = min(parts) if parts else None
        return known[factor] is True

    def blocks(self, factor: Node) -> blocks.Layout | None:
        """How a (1, rows, depth) factor that is a quantised weight is packed, None for others."""
        if not self.is_weight(factor):
            return None
        form = self.form(factor)
        if form not in self._blocks:
            self._blocks[form] = blocks.layout(form)
        return self._blocks[form]
