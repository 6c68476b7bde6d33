"""The tensor engine: lazy graph, fused generated kernels, one file per backend.

A tour from a Tensor to its kernel is in docs/engine.md.
"""

from engine import dtype
from engine.graph import ShapeError
from engine.program import program
from engine.runtime import DeviceError, default_device, get_device, set_default_device
from engine.symbolic import Var
from engine.tensor import Tensor
from engine.tuning import tuned

__all__ = [
    "DeviceError",
    "ShapeError",
    "Tensor",
    "Var",
    "default_device",
    "dtype",
    "get_device",
    "program",
    "set_default_device",
    "tuned",
]
