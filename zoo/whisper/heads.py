"""Which attention heads of a decoder follow the audio, and so tell when a word is said."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from weights import WeightError

Heads = tuple[tuple[int, int], ...]  # (layer, head)

_SIZES = {(4, 6): "tiny", (6, 8): "base", (12, 12): "small", (24, 16): "medium", (32, 20): "large",
          (4, 20): "large-v3-turbo"}  # fmt: skip


def measured() -> dict[str, Heads]:
    """What OpenAI measured for its models, by name. Source: openai/whisper, `__init__.py`."""
    text = (resources.files("zoo.whisper") / "data" / "heads.json").read_text("utf-8")
    return {name: tuple(map(tuple, pairs)) for name, pairs in json.loads(text).items()}


def heads_of(
    n_text_layer: int,
    n_text_head: int,
    metadata: Mapping[str, Any],
    name: str = "",
    n_vocab: int = 0,
) -> Heads:
    """The alignment heads that the metadata name, or else those of OpenAI's model of that size.

    `name` (of the file) tells large-v1 from large-v2, `n_vocab` English-only models from others. A
    model of another size has all heads of the last half of its layers, as in the reference.
    WeightError for metadata whose heads are none of this model.
    """
    named = metadata.get("alignment_heads")
    if named:
        return _checked(named, n_text_layer, n_text_head)
    size = _SIZES.get((n_text_layer, n_text_head))
    if size == "large":
        size += "-v3" if n_vocab > 51865 else "-v1" if "v1" in name else "-v2"
    if n_vocab == 51864:
        size = f"{size}.en"
    half = range(n_text_layer // 2, n_text_layer)
    return measured().get(size, tuple(itertools.product(half, range(n_text_head))))


def _checked(named: Any, layers: int, heads: int) -> Heads:
    if isinstance(named, (list, tuple)) and len(named) <= layers * heads:
        if all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in named):
            if all(type(i) is int for pair in named for i in pair):
                if all(0 <= layer < layers and 0 <= head < heads for layer, head in named):
                    return tuple((layer, head) for layer, head in named)
    expected = f"pairs of a layer below {layers} and a head below {heads}"
    raise WeightError("alignment_heads are not heads of this model", expected=expected, got=named)
