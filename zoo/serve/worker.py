"""One thread per model: it loads the model at its first job, and does one job after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from zoo import cli
from zoo.serve.errors import ApiError

PAUSE_S = 0.0005  # long enough for another model's thread to take the device
Job = Callable[[Any], Any]


class Worker:
    """The thread of a model. Jobs are called with the model, in the order in which they came.

    `step` is what the model does between jobs, as long as it says that there is more to do. A load
    that fails fails the jobs that wait for it; the next one tries again.
    """

    def __init__(
        self, name: str, load: Callable[[], Any], step: Callable[[Any], bool] | None = None
    ) -> None:
        self.state = "not loaded"  # loading, ready, failed, closed
        self._load, self._step = load, step
        self._jobs: queue.SimpleQueue[tuple[Job, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"model {name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Future:
        """The job's result, later. One that is cancelled before it has begun is not done."""
        future: Future = Future()
        self._jobs.put((job, future))
        return future

    def close(self, timeout: float) -> None:
        """No more jobs after those that are there; waits until they are done, seconds at most."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        model, more = None, False
        while (item := self._next(more)) is not None:
            if item:
                job, future = item
                if not future.set_running_or_notify_cancel():
                    continue
                if model is None:
                    model = self._loaded(future)
                if model is not None:
                    _do(job, model, future)
            more = self._step is not None and model is not None and self._step(model)
        self.state = "closed"

    def _next(self, more: bool) -> tuple[Job, Future] | tuple[()] | None:
        """The next job, nothing where there is none but more to do, None at the end."""
        try:
            return self._jobs.get(block=not more)
        except queue.Empty:
            return ()

    def _loaded(self, future: Future) -> Any:
        self.state = "loading"
        try:
            model = self._load()
        except cli.user_errors() as error:
            # The client is not told: the line may name the server's files.
            cli.note(f"python -m zoo serve: {cli.describe(error)}")
            message = "the model can't be loaded; the server's log says why"
            future.set_exception(ApiError(503, message, code="model_not_loaded"))
        except BaseException as error:  # noqa: BLE001 - goes to who waits for the job
            future.set_exception(error)
        else:
            self.state = "ready"
            return model
        self.state = "failed"
        return None


def _do(job: Job, model: Any, future: Future) -> None:
    try:
        future.set_result(job(model))
    except BaseException as error:  # noqa: BLE001 - likewise
        future.set_exception(error)


class Gate:
    """Lets as many requests to a model as may be under way or wait; each beyond is told to retry.

    Belongs to the event loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.inside = limit, 0

    @contextmanager
    def entered(self, count: int = 1) -> Iterator[None]:
        """Inside, the request counts; ApiError 429 when there is no room for it, 400 if never."""
        if count > self.limit:
            raise ApiError(400, f"{count} replies are asked for; at most {self.limit} at once")
        if self.inside + count > self.limit:
            message = f"the model is busy: {self.inside} requests are waiting or under way"
            headers = {"Retry-After": "1" if self.inside < 16 else "5"}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
        self.inside += count
        try:
            yield
        finally:
            self.inside -= count
