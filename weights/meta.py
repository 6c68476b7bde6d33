"""Meta's own LLaMA folders: `consolidated.NN.pth` beside `params.json`, joined as one model.

Each shard holds a slice of every matrix, so that as many GPUs can work side by side; what is
multiplied by their part of the input is cut into columns, the rest into rows. The embedding is
cut into columns by LLaMA 1 and 2 and into rows by LLaMA 3, which only its shape tells. Sources:
the layers of `llama/model.py` in Meta's repositories llama and llama3, and of fairscale.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from weights import pytorch
from weights.checkpoint import Checkpoint, Entry, WeightError
from weights.entries import joined
from weights.jsonfile import read_object

PARAMS = "params.json"
_SHARD = re.compile(r"consolidated\.([0-9]{2})\.pth")
_COLUMNS = re.compile(r"layers\.[0-9]+\.(attention\.wo|feed_forward\.w2)\.weight")
_EMBEDDING = "tok_embeddings.weight"


def is_folder(path: Path) -> bool:
    """Whether a folder holds Meta's shards."""
    return any(_SHARD.fullmatch(file.name) for file in path.glob("consolidated.*.pth"))


def load(path: Path, device: str | None = None) -> Checkpoint:
    """Open a folder of shards; `.metadata` is `params.json`.

    WeightError, naming the file, for a missing shard, or shards that don't fit together.
    """
    params = read_object(path / PARAMS)
    files = _shards(path)
    shards = [pytorch.load(file, device) for file in files]
    for file, shard in zip(files[1:], shards[1:]):
        odd = shards[0].entries.keys() ^ shard.entries.keys()
        if odd:
            problem = f"it and {files[0].name} hold different tensors"
            raise WeightError(problem, file=file, tensor=min(odd))
    entries = {
        name: _join(path, name, [shard.entries[name] for shard in shards], params)
        for name in shards[0].entries
    }
    return Checkpoint(path, "meta", params, entries, device)


def _shards(path: Path) -> list[Path]:
    files = sorted(file for file in path.iterdir() if _SHARD.fullmatch(file.name))
    for number, file in enumerate(files):
        wanted = f"consolidated.{number:02}.pth"
        if file.name != wanted:
            remedy = f"fetch {wanted} again"
            raise WeightError("a shard is missing", file=path / wanted, remedy=remedy)
    return files


def _join(path: Path, name: str, parts: list[Entry], params: dict[str, Any]) -> Entry:
    shape = parts[0].info.shape
    if len(parts) == 1 or len(shape) < 2:
        return parts[0]  # vectors are the same in every shard
    axis = 1 if _COLUMNS.fullmatch(name) else 0
    if name == _EMBEDDING:
        axis = _embedding_axis(path, shape, len(parts), params)
    try:
        return joined(parts, axis)
    except WeightError as error:
        facts = {"expected": error.expected, "got": error.got}
        raise WeightError(error.problem, file=path, tensor=name, **facts) from None


def _embedding_axis(path: Path, shape: tuple[int, ...], count: int, params: dict[str, Any]) -> int:
    dim, vocabulary = params.get("dim"), params.get("vocab_size", -1)
    if shape[1] == dim:
        if vocabulary not in (-1, shape[0] * count):  # -1: the tokenizer knows, as LLaMA 1 says
            problem = f"its rows do not fit `vocab_size` of {PARAMS}; is a shard missing?"
            facts = {"expected": vocabulary, "got": f"{shape[0]} in each of {count} shards"}
            raise WeightError(problem, file=path, tensor=_EMBEDDING, **facts)
        return 0
    if shape[1] * count == dim:
        return 1
    problem = f"its columns do not fit `dim` of {PARAMS}; is a shard missing?"
    expected = f"{dim}, or {dim} in all {count} shards"
    raise WeightError(problem, file=path, tensor=_EMBEDDING, expected=expected, got=shape[1])
