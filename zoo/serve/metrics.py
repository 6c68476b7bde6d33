"""Counts for Prometheus, in its text format 0.0.4."""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Sequence

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metric:
    """A number, or one for each combination of labels; a histogram where `bounds` are given."""

    def __init__(
        self,
        name: str,
        what: str,
        kind: str = "counter",
        labels: Sequence[str] = (),
        bounds: Sequence[float] = (),
    ) -> None:
        self.name, self.what, self.labels, self.bounds = name, what, tuple(labels), tuple(bounds)
        self.kind = "histogram" if bounds else kind
        self._values: dict[tuple[str, ...], list[float]] = {}
        self._lock = threading.Lock()  # models' threads count, too

    def add(self, amount: float = 1, *labels: object) -> None:
        """Count; for a histogram, observe."""
        with self._lock:
            cells = self._cells(labels)
            cells[-1] += amount
            if self.bounds:
                cells[bisect.bisect_left(self.bounds, amount)] += 1

    def set(self, value: float, *labels: object) -> None:
        """The value of a gauge."""
        with self._lock:
            self._cells(labels)[-1] = value

    def get(self, *labels: object) -> float:
        """The number (of a histogram: the sum)."""
        with self._lock:
            return self._cells(labels)[-1]

    def _cells(self, labels: tuple[object, ...]) -> list[float]:
        """For a histogram the counts between its bounds, then the sum."""
        key = tuple(map(str, labels))
        if len(key) != len(self.labels):
            raise TypeError(f"{self.name} has the labels {self.labels}, not {key}")
        size = len(self.bounds) + 2 if self.bounds else 1
        return self._values.setdefault(key, [0.0] * size)

    def text(self) -> str:
        """Its lines."""
        lines = [f"# HELP {self.name} {self.what}", f"# TYPE {self.name} {self.kind}"]
        with self._lock:
            values = {key: list(cells) for key, cells in self._values.items()}
        for key, cells in values.items():
            pairs = list(zip(self.labels, key))
            if not self.bounds:
                lines.append(f"{self.name}{_braces(pairs)} {cells[0]:.15g}")
                continue
            so_far = 0.0
            for bound, cell in zip((*self.bounds, "+Inf"), cells):
                so_far += cell
                lines.append(f"{self.name}_bucket{_braces([*pairs, ('le', bound)])} {so_far:.15g}")
            lines.append(f"{self.name}_sum{_braces(pairs)} {cells[-1]:.15g}")
            lines.append(f"{self.name}_count{_braces(pairs)} {so_far:.15g}")
        return "\n".join(lines) + "\n"


def _braces(pairs: Sequence[tuple[str, object]]) -> str:
    if not pairs:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Metrics:
    """All that the server counts."""

    def __init__(self) -> None:
        model = ("model",)
        self.requests = Metric(
            "zoo_requests_total", "Requests answered.", labels=("endpoint", "status")
        )
        self.seconds = Metric(
            "zoo_request_seconds",
            "From a request's head to the end of its answer.",
            labels=("endpoint",),
            bounds=SECONDS,
        )
        self.first_token = Metric(
            "zoo_first_token_seconds",
            "From a chat's beginning, its wait included, to its first token.",
            labels=model,
            bounds=SECONDS,
        )
        self.tokens = Metric(
            "zoo_tokens_total",
            "Tokens of prompts, of them from the cache, and of replies.",
            labels=("model", "kind"),
        )
        self.steps = Metric("zoo_steps_total", "Steps of the batch of chats.", labels=model)
        self.busy = Metric("zoo_slots_busy", "Chats in the batch.", "gauge", model)
        self.inside = Metric("zoo_requests_inside", "Requests waiting or at work.", "gauge", model)
        self.memory = Metric(
            "process_resident_memory_bytes", "Memory that the process holds.", "gauge"
        )

    def text(self) -> str:
        """The page that Prometheus reads."""
        self.memory.set(resident_bytes())
        return "".join(metric.text() for metric in vars(self).values())


def resident_bytes() -> int:
    """Memory that the process holds now; where the system doesn't tell, the most it ever held."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            line = next(line for line in status if line.startswith("VmRSS:"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration):
        if sys.platform == "win32":
            return 0
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10
