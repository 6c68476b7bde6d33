"""The symbolic ints that kernels read from memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.runtime import Device, Step
from engine.symbolic import Expr


class Ints:
    """The symbolic ints of a list of steps, in one small buffer.

    Steps that take the same ones share a place in it, so nothing else changes between two runs.
    """

    def __init__(self, device: Device, steps: Sequence[Step]) -> None:
        self.places: dict[tuple[Expr, ...], int] = {}
        self.order: list[Expr] = []
        for step in steps:
            if step.variables and step.variables not in self.places:
                self.places[step.variables] = len(self.order)
                self.order += step.variables
        self.device = device
        self.values = np.zeros(max(1, len(self.order)), np.int32)
        self.memory = device.allocate(self.values.nbytes)

    def set(self, values: Mapping[Expr, int]) -> None:
        if self.order:
            self.values[:] = [values[v] for v in self.order]
            self.device.write(self.memory, self.values)
