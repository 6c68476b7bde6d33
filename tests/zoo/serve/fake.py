"""A server without an engine: a batch that says what a rule makes of each prompt."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from PIL import Image

from tests.zoo.llama import vocab
from zoo.llama.generate import Llama
from zoo.llama.gguf_tokenizer import from_gguf
from zoo.serve.app import application
from zoo.serve.guard import Rules
from zoo.serve.metrics import Metrics
from zoo.serve.models import Models, Options
from zoo.serve.scheduler import Scheduler
from zoo.stable_diffusion.making import Step
from zoo.whisper.transcript import Segment, Transcript, Word

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
        self.slots = [SimpleNamespace(done=0) for _ in range(slots)]
        self.size, self.says = size, says
        self.script: dict[int, list[int]] = {}
        self.pending: dict[int, int] = {}  # prompt tokens to be computed
        self.waits: set[int] = set()  # slots whose logits were given and whose token was not
        self.steps, self.most = 0, 0
        self.may_step = threading.Event()
        self.may_step.set()
        self.fails: Exception | None = None
        self.pace = 0.0  # seconds a step

    def add(self, ids: list[int]) -> int:
        slot = next(n for n in range(len(self.slots)) if n not in self.script)
        assert 0 < len(ids) <= self.size
        text = self.says(TOKENIZER.decode(ids))
        self.script[slot] = TOKENIZER.encode(text, special=True)
        self.pending[slot] = len(ids)
        self.most = max(self.most, len(self.script))
        return slot

    def step(self) -> dict[int, np.ndarray]:
        self.may_step.wait(10)
        time.sleep(self.pace)
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
    return Scheduler(
        llama, llama.context, lambda ids: np.float32([len(ids), 3, 4]), metrics or Metrics()
    )


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


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The application on a port of this machine, in a thread; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http="h11", ws="none", log_config=None, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until something holds, which it must before long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)


class FakeWhisper:
    """Says a sentence in segments of a second, and `paused` between them where it is told to."""

    words = ("one two", "three four", "five")

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.stopped = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def transcribe(self, source, on_segment=None, progress=None, **options) -> Transcript:
        self.asked.append(options | {"bytes": source.read()})
        segments = []
        for n, text in enumerate(self.words):
            self.go_on.wait(10)
            words = [Word(f" {w}", n, n + 1, 0.9) for w in text.split()]
            segment = Segment(n, 0, n, n + 1.0, f" {text}", [1, 2], 0.0, -0.1, 1.0, 0.01, None)
            segment.words = words if options["word_timestamps"] else None
            segments.append(segment)
            try:
                if on_segment:
                    on_segment(segment)
                progress(n + 1, len(self.words))
            except BaseException:
                self.stopped += 1
                raise
        text = "".join(segment.text for segment in segments)
        return Transcript(text, options.get("language", "en"), segments, 3.0)


class FakeDiffusion:
    """Pictures of one colour, in a few steps."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.kind = SimpleNamespace(size=64)
        self.stopped = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def txt2img(self, prompt: str, on_step=None, **options) -> list[Image.Image]:
        self.asked.append(options | {"prompt": prompt})
        steps, count = options.get("steps", 4), options["batch"]
        for n in range(steps * count):
            self.go_on.wait(10)
            try:
                on_step(Step(n + 1, steps * count, n // steps, 1.0, None, None))
            except BaseException:
                self.stopped += 1
                raise
        size = options.get("width", 64), options.get("height", 64)
        return [Image.new("RGB", size, (10 * n, 99, 0)) for n in range(count)]

    def preview(self, latent: Any) -> Image.Image:
        return Image.new("RGB", (8, 8), "grey")
