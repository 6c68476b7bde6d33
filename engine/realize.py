"""Tensors computed now: from nodes to memory in one call."""

from __future__ import annotations

from collections.abc import Sequence

from engine.graph import Node
from engine.prepare import prepare
from engine.runtime import LOCK
from engine.schedule import schedule
from engine.specialise import recipes_of


def realize(nodes: Sequence[Node], device_name: str) -> list[Node]:
    """Compute nodes now and return a BUFFER node for each."""
    with LOCK:
        plan = schedule(nodes, device_name, recipes_of(device_name))
        results = prepare(plan, repeated=False).run({})
        plan.commit()
    return results
