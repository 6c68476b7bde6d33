"""ONNX: `load(path)` gives a model of any exporter that runs here.

model = zoo.onnx.load("detector.onnx")
boxes = model.run({"images": pictures})["boxes"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.onnx.model import Model, load

__all__ = ["Model", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only now: `run --help` should not have to start the engine.
    from zoo.onnx import model

    return getattr(model, name)
