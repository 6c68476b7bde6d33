"""A model without an engine: says what it is told to, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from tests.zoo.llama import vocab
from zoo.llama.generate import Llama
from zoo.llama.gguf_tokenizer import from_gguf


class ScriptedContext:
    """Stands in for `zoo.llama.context.Context`: each call foretells the next id of the script.

    `computed` counts the positions of each call that its cache did not hold.
    """

    def __init__(self, size: int, vocab_size: int, script: Sequence[int]) -> None:
        self.size, self.ids = size, []
        self.computed: list[int] = []
        self._vocab_size, self._script = vocab_size, list(script)
        self._calls = 0

    def next_logits(self, ids: Sequence[int]) -> np.ndarray:
        assert 0 < len(ids) <= self.size
        same = 0
        while same < min(len(ids) - 1, len(self.ids)) and ids[same] == self.ids[same]:
            same += 1
        self.computed.append(len(ids) - same)
        self.ids = list(ids)
        logits = np.zeros(self._vocab_size, np.float32)
        logits[self._script[self._calls % len(self._script)]] = 10
        self._calls += 1
        return logits

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        return np.stack([self.next_logits(ids[: n + 1]) for n in range(len(ids))])

    def restart(self, script: Sequence[int]) -> None:
        self._script, self._calls = list(script), 0


def scripted(script: Sequence[str], size: int = 1000, **options) -> Llama:
    """A Llama whose reply is the tokens of the given texts, special tokens among them."""
    tokenizer = from_gguf(vocab.tiny(**options))
    ids = [i for text in script for i in one(tokenizer, text)]
    context = ScriptedContext(size, tokenizer.vocab_size, ids)
    config = SimpleNamespace(vocab_size=tokenizer.vocab_size, max_context=size)
    return Llama(config, tokenizer, context)


def one(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special=True)
