"""The models and their commands; no model imports another."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def lazily(package: str, **modules: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported, from `modules`, when they are used.

    So `--help` need not start the engine.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get
