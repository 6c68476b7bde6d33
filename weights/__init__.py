"""Checkpoints: open any supported format, reach its tensors by name, fetch models by name."""

from __future__ import annotations

import os
from pathlib import Path

from weights import gguf, safetensors
from weights.cache import FetchError
from weights.checkpoint import Checkpoint, TensorInfo, WeightError
from weights.download import fetch, resolve
from weights.params import Params, check

__all__ = [
    "Checkpoint",
    "FetchError",
    "Params",
    "TensorInfo",
    "WeightError",
    "check",
    "fetch",
    "load",
    "resolve",
]

# The first bytes of files that people do have, and what to do with them.
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint", "use its safetensors version"),
    (b"\x80", "a pickle, perhaps a PyTorch checkpoint", "use its safetensors version"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model", "run `git lfs pull`"),
    (b"lmgg", "an old GGML file", "use the model's GGUF version"),
    (b"tjgg", "an old GGML file", "use the model's GGUF version"),
    (b"<", "a web page or XML", "fetch the model file itself"),
)


def load(path: str | os.PathLike[str], device: str | None = None) -> Checkpoint:
    """Open a GGUF file, a safetensors file or a Hugging Face folder, told apart by content.

    Only headers are read. `device` is where the tensors will live (None: the default device).
    WeightError, naming the file, when it is none of these or is damaged.
    """
    path = Path(path)
    if path.is_dir():
        return safetensors.load_folder(path, device)
    try:
        with open(path, "rb") as file:
            head, size = file.read(32), os.fstat(file.fileno()).st_size
    except OSError as error:
        reason = error.strerror or str(error)
        raise WeightError(f"can't be read: {reason}", file=path) from None
    if head[:4] == gguf.MAGIC:
        return gguf.load(path, device)
    if safetensors.looks_like(head, size):
        return safetensors.load(path, device)
    expected = "a GGUF or safetensors file, or a folder with *.safetensors"
    for magic, what, remedy in _FOREIGN:
        if head.startswith(magic):
            raise WeightError(f"it is {what}", file=path, expected=expected, remedy=remedy)
    raise WeightError("not a checkpoint", file=path, expected=expected)
