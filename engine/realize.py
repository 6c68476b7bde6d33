"""Tensors computed now: from nodes to memory in one call."""

from __future__ import annotations

from collections.abc import Sequence

from engine.graph import Node
from engine.prepare import prepare
from engine.runtime import LOCK
from engine.specialise import specialised


def realize(nodes: Sequence[Node], device_name: str) -> list[Node]:
    """Compute nodes now and return a BUFFER node for each."""
    with LOCK:
        plan = specialised(nodes, device_name)
        results = prepare(plan, repeated=False).run({})
        plan.commit()
    return results
