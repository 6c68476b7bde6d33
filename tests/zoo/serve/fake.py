"""A server without an engine: a batch that says what a rule makes of each prompt."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.zoo.llama import vocab
from zoo.llama.generate import Llama
from zoo.llama.gguf_tokenizer import from_gguf
from zoo.serve.app import application
from zoo.serve.guard import Rules
from zoo.serve.metrics import Metrics
from zoo.serve.models import Models, Options
from zoo.serve.scheduler import Scheduler

TOKENIZER = from_gguf(vocab.tiny())
PIECE = 16  # prompt tokens a step
Says = Callable[[str], str]


def heard(prompt: str) -> str:
    """What the model replies by default: the last thing that a user said, so that replies which
    got mixed up show."""
    said = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    return f"You said: {said[-1] if said else prompt}<|im_end|>"


class FakeBatch:
    """Stands in for `zoo.llama.batch.Batch`, and fails when it is used in another way than that.

    `says` makes the reply's text, special tokens among it, of the prompt's.
    """

    def __init__(self, slots: int, size: int, says: Says = heard) -> None:
        self.slots, self.size, self.says = slots, size, says
        self.script: dict[int, list[int]] = {}
        self.pending: dict[int, int] = {}  # prompt tokens to be computed
        self.waits: set[int] = set()  # slots whose logits were given and whose token was not
        self.steps, self.most = 0, 0
        self.may_step = threading.Event()
        self.may_step.set()
        self.fails: Exception | None = None

    def add(self, ids: list[int]) -> int:
        slot = next(n for n in range(self.slots) if n not in self.script)
        assert 0 < len(ids) <= self.size
        text = self.says(TOKENIZER.decode(ids))
        self.script[slot] = TOKENIZER.encode(text, special=True)
        self.pending[slot] = len(ids)
        self.most = max(self.most, len(self.script))
        return slot

    def step(self) -> dict[int, np.ndarray]:
        self.may_step.wait(10)
        self.steps += 1
        if self.fails is not None:
            raise self.fails
        for slot, left in self.pending.items():
            if left > 0:
                self.pending[slot] = left - PIECE
                if left > PIECE:
                    return {}
                return {slot: self._logits(slot)}
        return {slot: self._logits(slot) for slot in self.script if slot not in self.waits}

    def _logits(self, slot: int) -> np.ndarray:
        self.waits.add(slot)
        logits = np.zeros(TOKENIZER.vocab_size, np.float32)
        script = self.script[slot]
        logits[script[0] if script else TOKENIZER.eos_id] = 20
        return logits

    def feed(self, slot: int, token: int) -> None:
        self.waits.remove(slot)
        if self.script[slot][:1] == [token]:
            self.script[slot].pop(0)

    def free(self, slot: int) -> None:
        del self.script[slot], self.pending[slot]
        self.waits.discard(slot)


def scheduler(
    slots: int = 4, size: int = 4000, says: Says = heard, metrics: Metrics | None = None
) -> Scheduler:
    """A scheduler on a fake batch; the model is called tiny."""
    config = SimpleNamespace(vocab_size=TOKENIZER.vocab_size, max_context=size)
    llama = Llama(config, TOKENIZER, FakeBatch(slots, size, says), "tiny")
    return Scheduler(llama, llama.context, slots, metrics or Metrics())


class Server:
    """An application on fakes. `rules` are the fields of Rules; loaders by kind take a model's name
    to a model."""

    def __init__(
        self,
        chats: Scheduler | None = None,
        slots: int = 4,
        queue: int = 8,
        loaders: dict[str, Callable[[str], Any]] | None = None,
        **rules: Any,
    ) -> None:
        self.metrics = Metrics()
        self.chats = chats or scheduler(slots, metrics=self.metrics)
        self.chats.metrics = self.metrics
        makers = {"chat": lambda name: self.chats} | (loaders or {})
        names = {kind: (f"tiny-{kind}" if kind != "chat" else "tiny",) for kind in makers}
        by_kind = {kind: _loader(make) for kind, make in makers.items()}
        options = Options(**names, slots=slots, queue=queue)
        self.models = Models(options, self.metrics, by_kind)
        self.app = application(self.models, Rules(**rules), self.metrics)

    @property
    def batch(self) -> FakeBatch:
        return self.chats.batch


def _loader(make: Callable[[str], Any]) -> Callable[..., Any]:
    return lambda path, name, options, metrics: make(name)
