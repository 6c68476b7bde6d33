"""Which attention heads of a decoder follow the audio, and so tell when a word is said."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from weights import WeightError
from zoo.whisper.model import Config

Heads = tuple[tuple[int, int], ...]  # (layer, head)

_SIZES = {(4, 6): "tiny", (6, 8): "base", (12, 12): "small", (24, 16): "medium", (32, 20): "large",
          (4, 20): "large-v3-turbo"}  # fmt: skip


def measured() -> dict[str, Heads]:
    """What OpenAI measured for its models, by name. Source: openai/whisper, `__init__.py`."""
    text = (resources.files("zoo.whisper") / "data" / "heads.json").read_text("utf-8")
    return {name: tuple(map(tuple, pairs)) for name, pairs in json.loads(text).items()}


def heads_of(config: Config, metadata: Mapping[str, Any], name: str = "") -> Heads:
    """The alignment heads that the metadata name, or else those of OpenAI's model of that size.

    `name` (of the file) tells large-v1 from large-v2. A model of another size has all heads of the
    last half of its layers, as in the reference. WeightError for metadata whose heads are none of
    this model.
    """
    layers, heads = config.n_text_layer, config.n_text_head
    every = list(itertools.product(range(layers), range(heads)))
    if named := metadata.get("alignment_heads"):
        known = set(map(repr, every))
        if isinstance(named, (list, tuple)) and len(named) <= len(every):
            pairs = [tuple(pair) for pair in named if isinstance(pair, (list, tuple))]
            if len(pairs) == len(named) and known.issuperset(map(repr, pairs)):
                return tuple(pairs)
        expected = f"pairs of a layer below {layers} and a head below {heads}"
        raise WeightError(
            "alignment_heads are not heads of this model", expected=expected, got=named
        )
    size = _SIZES.get((layers, heads))
    if size == "large":
        size += "-v3" if config.n_vocab > 51865 else "-v1" if "v1" in name else "-v2"
    if config.n_vocab == 51864:
        size = f"{size}.en"
    return measured().get(size, tuple(every[layers // 2 * heads :]))
