"""Our models as a backend of the onnx package, whose conformance suite runs through it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx.backend.base import Backend, BackendRep

from zoo.onnx.model import Model, load


class Rep(BackendRep):
    """A model ready to run on inputs in order."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, inputs: Sequence[Any], **_: Any) -> tuple[Any, ...]:
        names = [value.name for value in self.model.inputs]
        return tuple(self.model.run(dict(zip(names, inputs))).values())


class Reference(Backend):
    """Runs on the reference device: the kernels of the others have tests of their own."""

    device = "reference"

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **_: Any) -> Rep:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            path.write_bytes(model.SerializeToString())
            return Rep(load(path, device=cls.device))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"
