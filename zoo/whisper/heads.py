"""Which attention heads of a decoder follow the audio, and so tell when a word is said."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from weights import WeightError

Heads = tuple[tuple[int, int], ...]  # (layer, head)

_SIZES = {(4, 6): "tiny", (6, 8): "base", (12, 12): "small", (24, 16): "medium", (32, 20): "large",
          (4, 20): "large-v3-turbo"}  # fmt: skip
# Layer -> heads, as OpenAI measured for its models. Source: openai/whisper, `__init__.py`.
_HEADS: dict[str, dict[int, tuple[int, ...]]] = {
    "tiny.en": {1: (0,), 2: (0, 5), 3: (0, 1, 2, 3, 4)},
    "tiny": {2: (2,), 3: (0, 2, 3, 4, 5)},
    "base.en": {3: (3,), 4: (7,), 5: (1, 5, 7)},
    "base": {3: (1,), 4: (2, 3, 7), 5: (1, 2, 4, 6)},
    "small.en": {6: (6,), 7: (0, 3, 8), 8: (2, 5, 7), 9: (0, 4, 8, 10), 10: (0, 1, 2, 3, 6, 11),
                 11: (2, 4)},
    "small": {5: (3, 9), 8: (0, 4, 7, 8), 9: (0, 7, 9), 10: (5,)},
    "medium.en": {11: (4,), 14: (1, 12, 14), 15: (4,), 16: (0, 4, 9), 17: (12, 14),
                  18: (7, 10, 15), 20: (0, 3, 9, 14), 21: (12,)},
    "medium": {13: (15,), 15: (4, 15), 16: (1,), 20: (0,), 23: (4,)},
    "large-v1": {9: (19,), 11: (2, 4, 17), 22: (7, 11, 17), 23: (2, 15)},
    "large-v2": {10: (12,), 13: (17,), 16: (11, 12, 13), 17: (15, 16), 18: (4, 11, 19), 19: (11,),
                 21: (2, 3), 22: (3, 9, 12), 23: (5, 7, 13), 25: (5,), 26: (1, 12), 27: (15,)},
    "large-v3": {7: (0,), 10: (17,), 12: (18,), 13: (12,), 16: (1,), 17: (14,), 19: (11,), 21: (4,),
                 24: (1,), 25: (6,)},
    "large-v3-turbo": {2: (4, 11), 3: (3, 6, 11, 14)},
}  # fmt: skip
ALIGNMENT_HEADS: dict[str, Heads] = {
    name: tuple((layer, head) for layer, heads in layers.items() for head in heads)
    for name, layers in _HEADS.items()
}


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
    return ALIGNMENT_HEADS.get(size, tuple(itertools.product(half, range(n_text_head))))


def _checked(named: Any, layers: int, heads: int) -> Heads:
    if isinstance(named, (list, tuple)) and len(named) <= layers * heads:
        if all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in named):
            if all(type(i) is int for pair in named for i in pair):
                if all(0 <= layer < layers and 0 <= head < heads for layer, head in named):
                    return tuple((layer, head) for layer, head in named)
    expected = f"pairs of a layer below {layers} and a head below {heads}"
    raise WeightError("alignment_heads are not heads of this model", expected=expected, got=named)
