"""LLaMA-family language models: `load(name_or_path)` gives a model that chats.

model = zoo.llama.load("smollm2")
for piece in model.chat("What is the capital of France?"):
    print(piece, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo import lazily

if TYPE_CHECKING:
    from zoo.llama.generate import Llama
    from zoo.llama.loading import load

__all__ = ["Llama", "load"]
__getattr__ = lazily(__name__, Llama="generate", load="loading")
