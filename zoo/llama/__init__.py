"""LLaMA-family language models: `load(name_or_path)` gives a model that chats.

model = zoo.llama.load("smollm2")
for piece in model.chat("What is the capital of France?"):
    print(piece, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.llama.generate import Llama
    from zoo.llama.loading import load

__all__ = ["Llama", "load"]


def __getattr__(name: str) -> Any:
    # `python -m zoo.llama --help` should not have to start the engine.
    if name == "load":
        from zoo.llama.loading import load

        return load
    if name == "Llama":
        from zoo.llama.generate import Llama

        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
