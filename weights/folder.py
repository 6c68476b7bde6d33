"""Folders of shards, as Hugging Face lays them out: safetensors, or else PyTorch files.

A folder has an index, JSON whose `weight_map` says which file has each tensor, or one file of the
usual name, or several files without an index. `.metadata` is its `config.json`, and what
`generation_config.json` says of Whisper's heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weights import pytorch, safetensors
from weights.checkpoint import Checkpoint, Entry, WeightError
from weights.jsonfile import read_object
from weights.shards import read_index


@dataclass(frozen=True)
class _Kind:
    """One format of shards: the name of the only file (its index has that and more), the reader."""

    whole: str
    suffix: str
    load: Callable[[Path], Checkpoint]

    def entries(self, file: Path) -> Mapping[str, Entry]:
        return self.load(file).entries


_KINDS = (
    _Kind("model.safetensors", ".safetensors", safetensors.load),
    _Kind("pytorch_model.bin", ".bin", pytorch.load),
)
# What a training run leaves beside the model, under the same suffix.
_OTHERS = {"training_args.bin", "optimizer.bin", "scheduler.bin"}


def load(path: Path, device: str | None = None) -> Checkpoint:
    """Open a folder; safetensors are preferred where it has both.

    WeightError, naming the file, for a shard that is missing, damaged or outside the folder.
    """
    config = path / "config.json"
    metadata = read_object(config) if config.is_file() else {}
    generation = path / "generation_config.json"
    if metadata.get("model_type") == "whisper" and generation.is_file():
        heads = read_object(generation).get("alignment_heads")
        metadata |= {"alignment_heads": heads} if heads else {}
    return Checkpoint(path, "huggingface", metadata, _entries(path), device)


def _entries(folder: Path) -> dict[str, Entry]:
    for kind in _KINDS:
        index, whole = folder / f"{kind.whole}.index.json", folder / kind.whole
        if index.is_file():
            return read_index(index, kind.entries)
        if whole.is_file():
            return dict(kind.entries(whole))
        files = [f for f in sorted(folder.glob(f"*{kind.suffix}")) if f.name not in _OTHERS]
        if files:
            return _read_all(files, kind)
    suffixes = " or ".join(f"*{kind.suffix}" for kind in _KINDS)
    raise WeightError(f"no {suffixes} file in this folder", file=folder)


def _read_all(files: list[Path], kind: _Kind) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files:
        found = kind.entries(file)
        both = entries.keys() & found.keys()
        if both:
            raise WeightError("another file of the folder has it too", file=file, tensor=min(both))
        entries |= found
    return entries
