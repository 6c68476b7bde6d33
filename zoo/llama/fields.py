"""Checked reading of a checkpoint's metadata, and what a family is whatever format it comes in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from weights import Checkpoint, WeightError
from weights.names.llama import MOST_EXPERTS
from zoo.llama import model

_GEMMA = {"tanh_gelu": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"post_norms": True},
    "gemma3": _GEMMA | {"post_norms": True, "qk_norm": True},
}
LARGEST = 1 << 24  # of any one size: keeps made-up numbers out of the arithmetic


def made(fields: Fields, family: str, values: dict[str, Any]) -> model.Config:
    """The Config of a family with the values of a file; WeightError for what can't be right."""
    scale = {"embedding_scale": math.sqrt(values["dim"])} if family.startswith("gemma") else {}
    c = model.Config(**FAMILIES[family] | scale | values)
    if c.n_layers > len(fields.checkpoint):
        expected = f"at most the file's {len(fields.checkpoint)} tensors"
        fields.fail("the number of layers can't be right", expected, c.n_layers)
    if c.n_heads % c.n_kv_heads:
        expected = f"a divisor of {c.n_heads}"
        fields.fail("key/value heads don't divide the heads", expected, c.n_kv_heads)
    if c.head_dim % 2:
        fields.fail("the head size is odd, so it can't be rotated in pairs", got=c.head_dim)
    if c.rope_scaling and (c.rope_theta <= 1 or c.head_dim < 4):
        got = f"theta {c.rope_theta}, head size {c.head_dim}"
        fields.fail("these rotary positions can't be scaled", got=got)
    if c.windows and len(c.windows) != c.n_layers:
        fields.fail("windows of another number of layers", c.n_layers, len(c.windows))
    if c.n_experts and not 1 <= c.n_chosen <= c.n_experts <= MOST_EXPERTS:
        got = f"{c.n_chosen} of {c.n_experts}"
        fields.fail("bad number of experts", f"some of {MOST_EXPERTS} at most", got)
    return c


def windows(size: int | None, local: Sequence[bool]) -> tuple[int | None, ...]:
    """Config.windows, where some layers are `local` ones that see `size` tokens."""
    return tuple(size if one else None for one in local) if size and any(local) else ()


class Fields:
    """A checkpoint's values by their keys behind `prefix`; WeightError names file and key."""

    def __init__(self, checkpoint: Checkpoint, values: Mapping[str, Any], prefix: str = "") -> None:
        self.checkpoint, self.values, self.prefix = checkpoint, values, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= LARGEST:
            got = "nothing" if value is None else value
            self.fail(f"bad '{self.prefix}{key}'", f"1 to {LARGEST}", got)
        return value

    def number(
        self, key: str, default: float | None = None, source: Mapping[str, Any] | None = None
    ) -> float:
        """A number above 0 under `key`, there or in a part of the metadata."""
        value = self.get(key) if source is None else source.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            got = "nothing" if value is None else value
            self.fail(f"bad '{self.prefix}{key}'", "more than 0", got)
        return float(value)

    def optional(self, key: str) -> float | None:
        """The same, or None where the file has no such number."""
        return None if self.get(key) is None else self.number(key)

    def window(self, key: str) -> int | None:
        """Tokens that a local layer sees; None for a file that has no window, or says 0."""
        return self.integer(key) if self.get(key) else None

    def head_dim(self, key: str, dim: int, heads: int) -> int:
        if self.get(key) is None and dim % heads:
            self.fail(f"the width {dim} does not divide into heads", got=heads)
        return self.integer(key, dim // heads)

    def rows(self, *tensors: str) -> int:
        """The length of the first axis of whichever tensor there is."""
        for tensor in tensors:
            if tensor in self.checkpoint:
                return self.checkpoint.info(tensor).shape[0]
        raise WeightError("the tensor is missing", file=self.checkpoint.path, tensor=tensors[0])

    def fail(self, problem: str, expected: object = None, got: object = None) -> NoReturn:
        raise WeightError(problem, file=self.checkpoint.path, expected=expected, got=got)
