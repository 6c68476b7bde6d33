"""The models that are served, by name: no request can ask for any other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from weights import registry
from zoo.errors import UsageError
from zoo.serve.errors import ApiError
from zoo.serve.fields import Fields
from zoo.serve.metrics import Metrics
from zoo.serve.scheduler import Scheduler
from zoo.serve.worker import Gate, Worker

WHISPER = "whisper-1"  # what clients of OpenAI's have built in: the first that transcribes
KINDS = {"chat": "chats", "speech": "transcribes", "pictures": "draws"}


@dataclass(frozen=True)
class Options:
    """What is served, and how; the defaults are those of the command.

    chat, speech, pictures: names or paths of models, the first of each being the one that serves
    requests that name none. ctx: most tokens of prompt and reply together (None: the loader's).
    slots: chats that go on at the same time; queue: requests to each model that may wait.
    """

    chat: Sequence[str] = ()
    speech: Sequence[str] = ()
    pictures: Sequence[str] = ()
    ctx: int | None = None
    slots: int = 8
    queue: int = 64
    device: str | None = None
    dtype: str = "auto"


@dataclass
class Served:
    """A model by name: what it is for, the thread that works it, and who is let in."""

    name: str
    kind: str
    worker: Worker
    gate: Gate
    created: int = field(default_factory=lambda: int(time.time()))

    async def run(self, job: Callable[[Any], Any]) -> Any:
        """What a job on the model gives, without keeping the event loop."""
        return await asyncio.wrap_future(self.worker.submit(job))


class Models:
    """All that are served."""

    def __init__(
        self, options: Options, metrics: Metrics, loaders: Mapping[str, Loader] | None = None
    ) -> None:
        self.options, self.metrics = options, metrics
        self.served: dict[str, Served] = {}
        for kind, load in (loaders or LOADERS).items():
            for path in getattr(options, kind):
                self._serve(kind, path, load)

    def _serve(self, kind: str, path: str, load: Loader) -> None:
        name = name_of(path)
        if name in self.served:
            raise UsageError(f"two models would be served as {name!r}")
        step = Scheduler.step if kind == "chat" else None
        worker = Worker(name, lambda: load(path, name, self.options, self.metrics), step)
        room = self.options.slots if kind == "chat" else 1
        self.served[name] = Served(name, kind, worker, Gate(room + self.options.queue))

    def find(self, kind: str, fields: Fields) -> Served:
        """The model that a request names, by any of its names, or the first of the kind.

        ApiError for any other.
        """
        if "model" not in fields or (kind == "speech" and fields.get("model") == WHISPER):
            found = next((each for each in self.served.values() if each.kind == kind), None)
            if found is None:
                raise ApiError(404, f"no model that {KINDS[kind]} is served here", "model")
            return found
        name = fields.text("model")
        same = (each for each in self.served.values() if own_name(each.name) == own_name(name))
        found = self.served.get(name) or next(same, None)
        if found is None:
            message = f"the model {name[:99]!r} is not served here; /v1/models lists those that are"
            raise ApiError(404, message, "model", "model_not_found")
        if found.kind != kind:
            raise ApiError(400, f"{name} is no model that {KINDS[kind]}", "model")
        return found

    def load(self) -> bool:
        """Load them all, one after another; False once one fails, which the log has."""
        for each in self.served.values():
            each.worker.submit(lambda model: None).exception()
            if each.worker.state == "failed":
                return False
        return True

    def close(self, timeout: float) -> None:
        """End the threads, each after the job that it is at."""
        for each in self.served.values():
            each.worker.close(timeout)


Loader = Callable[[str, str, Options, Metrics], Any]  # path, name -> what the worker's jobs get


def name_of(path: str) -> str:
    """How a model is called in requests: a name as it is, a file or folder by its own name."""
    parts = PurePath(path).parts
    is_file = path.startswith((".", "~")) or PurePath(path).is_absolute() or len(parts) > 3
    return PurePath(path).stem if is_file or path.endswith(".gguf") else path


def own_name(name: str) -> str:
    """What the registry calls a model that it knows by another name; others as they are."""
    model = registry.known(name)
    return name if model is None else model.name


def _chat(path: str, name: str, options: Options, metrics: Metrics) -> Scheduler:
    from zoo.llama.batch import Batch
    from zoo.llama.loading import load

    def batch(params: Any, config: Any, size: int, *where: Any) -> Batch:
        return Batch(params, config, options.slots, size, *where)

    llama = load(path, options.device, options.dtype, options.ctx, make=batch)
    llama.name = name
    return Scheduler(llama, llama.context, llama.embed, metrics)


def _speech(path: str, name: str, options: Options, metrics: Metrics) -> Any:
    from zoo.whisper.whisper import load

    return load(path, options.device, options.dtype)


def _pictures(path: str, name: str, options: Options, metrics: Metrics) -> Any:
    from zoo.stable_diffusion.pipeline import load

    return load(path, options.device, options.dtype)


LOADERS: dict[str, Loader] = {"chat": _chat, "speech": _speech, "pictures": _pictures}
