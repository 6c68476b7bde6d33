"""Checkpoints: open any supported format, reach its tensors by name, fetch models by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from weights import ctranslate2, diffusers, folder, ggml, gguf, meta, pytorch, safetensors, zipped
from weights.cache import FetchError
from weights.checkpoint import Checkpoint, TensorInfo, WeightError
from weights.convert import write_as
from weights.download import fetch, resolve
from weights.mapped import open_file
from weights.params import Params, check

__all__ = [
    "Checkpoint",
    "FetchError",
    "Params",
    "TensorInfo",
    "WeightError",
    "check",
    "convert",
    "fetch",
    "load",
    "resolve",
]

# The first bytes of files that people do have, and what to do with them.
_FOREIGN = (
    (b"sys_info\0", "a PyTorch file from before version 0.1.10", "save it again with a newer one"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model", "run `git lfs pull`"),
    (b"tjgg", "an old GGML file", "use the model's GGUF version"),
    (b"<", "a web page or XML", "fetch the model file itself"),
)


def load(path: str | os.PathLike[str], device: str | None = None) -> Checkpoint:
    """Open a GGUF, safetensors or PyTorch file or a Hugging Face folder, told apart by content.

    Only headers are read. `device` is where the tensors will live (None: the default device).
    WeightError, naming the file, when it is none of these or is damaged.
    """
    path = Path(path)
    try:
        return _load(path, device)
    except OSError as error:  # of a folder that may not be looked into, a name that is too long
        reason = error.strerror or str(error)
        raise WeightError(f"can't be read: {reason}", file=path) from None


def _load(path: Path, device: str | None) -> Checkpoint:
    if path.is_dir():
        if ctranslate2.is_folder(path):
            return ctranslate2.load_folder(path, device)
        if diffusers.is_folder(path):
            return diffusers.load(path, load, device)
        return (meta if meta.is_folder(path) else folder).load(path, device)
    with open_file(path) as file:
        head, size = file.read(32), os.fstat(file.fileno()).st_size
    if head[:4] == gguf.MAGIC:
        return gguf.load(path, device)
    if head[:4] == ggml.MAGIC:
        return ggml.load(path, device)
    if ctranslate2.looks_like(head):
        return ctranslate2.load(path, device)
    if safetensors.looks_like(head, size):
        return safetensors.load(path, device)
    if head[:4] == zipped.MAGIC or head[:1] == pytorch.PROTO:
        return pytorch.load(path, device)
    expected = "a GGUF, safetensors or PyTorch file, or a folder of them"
    for magic, what, remedy in _FOREIGN:
        if head.startswith(magic):
            raise WeightError(f"it is {what}", file=path, expected=expected, remedy=remedy)
    raise WeightError("not a checkpoint", file=path, expected=expected)


def convert(src: str | os.PathLike[str], dst: str | os.PathLike[str], **options: Any) -> None:
    """Write the checkpoint at `src` to `dst` in the format of its suffix: see `write_as`."""
    write_as(load(src, device="reference"), dst, **options)
