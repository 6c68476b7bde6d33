"""The key/value pairs of a GGUF file to be written."""

from __future__ import annotations

from typing import Any

from weights.checkpoint import Checkpoint

_OWN = ("general.alignment", "split.no", "split.count", "split.tensors.count")  # of one file only


def for_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    """The metadata of `checkpoint` as GGUF pairs."""
    metadata = checkpoint.metadata
    typed = getattr(metadata, "typed", metadata.get)
    return {key: typed(key) for key in metadata if key not in _OWN}
