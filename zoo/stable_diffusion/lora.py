"""LoRA files (Hu et al. 2021): small changes to many weights, merged into them as they are read.

A weight W becomes W + strength * alpha / rank * up @ down. Which weight a pair belongs to is told
by its name in one of many spellings: kohya's (`lora_unet_down_blocks_0_…`, for XL with CompVis's
names), diffusers's and peft's (`unet.down_blocks.0.….lora_A.weight`). All come down to the words of
the name with `_` between them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import weights
from engine import Tensor
from weights import Checkpoint, WeightError
from weights.checkpoint import Entry
from weights.names.stable_diffusion import diffusers_names
from zoo.stable_diffusion.structure import UNET

_KEY = re.compile(
    r"(?P<module>.+?)(?:[._]lora)(?:[._]|_linear_layer\.)(?P<role>up|down|A|B)"
    r"(?:\.default(?:_\d+)?)?\.weight|(?P<scaled>.+)\.alpha"
)
_ROLES = {"A": "down", "B": "up"}
_BEFORE = re.compile(r"(?:base_model\.model\.|lora_)+")
_PARTS = {"te": "text_encoder", "te1": "text_encoder", "te2": "text_encoder_2"}
_SHOWN = 3  # names that one note spells out


@dataclass
class Pair:
    """One low-rank change: up (out, rank, …) and down (rank, in, …)."""

    up: Entry | None = None
    down: Entry | None = None
    alpha: float | None = None


@dataclass(frozen=True)
class Lora:
    """A LoRA file: its pairs by normal name, and the keys that belong to no pair."""

    path: Path
    strength: float
    pairs: dict[str, Pair]
    odd: list[str] = field(default_factory=list)

    @staticmethod
    def load(path: str | os.PathLike[str], strength: float = 1.0) -> Lora:
        """A file by path or hub name. WeightError for a file without a single pair."""
        file = weights.load(weights.resolve(path))
        pairs: dict[str, Pair] = {}
        odd: dict[str, list[str]] = {}  # by module: what makes of it something else than a LoRA
        for key, entry in file.entries.items():
            match = _KEY.fullmatch(key)
            if match is None:
                odd.setdefault(_normal(key.rpartition(".")[0]), []).append(key)
                continue
            pair = pairs.setdefault(_normal(match["module"] or match["scaled"]), Pair())
            if match["role"]:
                setattr(pair, _ROLES.get(match["role"], match["role"]), entry)
            else:
                pair.alpha = _number(entry, key, file.path)
        strange = [key for keys in odd.values() for key in keys]
        for name in [n for n, pair in pairs.items() if n in odd or not (pair.up and pair.down)]:
            del pairs[name]  # a part of it alone would be another change than the file means
            strange += [] if name in odd else [name]
        if not pairs:
            problem = "no LoRA: none of its keys is one of a pair (lora_up and lora_down)"
            raise WeightError(problem, file=file.path)
        _alphas(pairs, file)
        return Lora(file.path, strength, pairs, strange)


def _number(entry: Entry, key: str, file: Path) -> float:
    value = entry.read("reference").numpy()
    if value.size != 1 or not np.isfinite(value).all():
        raise WeightError("alpha is one finite number", file=file, tensor=key, got=value.shape)
    return float(value.reshape(()))


def _alphas(pairs: dict[str, Pair], file: Checkpoint) -> None:
    """The alphas that diffusers writes into the file's metadata."""
    try:
        said = json.loads(str(file.metadata.get("lora_adapter_metadata", "{}")))
    except (ValueError, RecursionError):  # others may use that name for what they like
        return
    for key, value in said.items() if isinstance(said, dict) else ():
        part, _, name = key.rpartition(".")
        if name != "lora_alpha" or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        for module, pair in pairs.items():
            if _part(module) == part and pair.alpha is None:
                pair.alpha = float(value)


def _part(name: str) -> str:
    """Which network a normal name is of."""
    parts = ("unet", "text_encoder_2", "text_encoder")
    return next((part for part in parts if name.startswith(part + "_")), "")


def _normal(module: str) -> str:
    """A module's name in any spelling -> diffusers's with `_` for `.`; CompVis's stay."""
    name = _BEFORE.sub("", module, count=1) if _BEFORE.match(module) else module
    name = name.replace(".processor.", ".").replace(".", "_")
    head, _, rest = name.partition("_")
    name = f"{_PARTS[head]}_{rest}" if head in _PARTS else name
    name = name if _part(name) else f"unet_{name}"  # diffusers's earliest files are of UNets alone
    return f"{name}_0" if name.endswith("_to_out") else name


# --- which weight each pair changes ------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A weight, or the part of a joined one that a name means: the rows `part` of `parts`."""

    key: str
    part: int = 0
    parts: int = 1


def _places(ours: Checkpoint) -> dict[str, _Place]:
    """Normal name -> the weight that it means."""
    found: dict[str, _Place] = {}
    for key, theirs in diffusers_names(ours).items():
        for part, name in enumerate(theirs):
            if name.endswith(".weight"):
                found[_normal(name.removesuffix(".weight"))] = _Place(key, part, len(theirs))
        if key.startswith(UNET) and key.endswith(".weight"):  # as in kohya's files of XL
            name = key.removeprefix(UNET).removesuffix(".weight")
            found[_normal(f"unet.{name}")] = _Place(key)
    for name, place in list(found.items()):  # without `text_model.`, as newer transformers have it
        found.setdefault(name.replace("_text_model_", "_", 1), place)
    return found


def merged(
    ours: Checkpoint,
    loras: Sequence[Lora],
    note: Callable[[str], None] | None = None,
) -> Checkpoint:
    """A canonical checkpoint whose weights have the changes of `loras` added as they are read.

    Nothing is computed now. `note` is told in one line what of a file was skipped. WeightError for
    a file none of whose pairs has a weight here, or a pair of another shape than its weight.
    """
    if not loras:
        return ours
    places = _places(ours)
    changes: dict[str, list[tuple[_Place, Pair, float]]] = {}
    for lora in loras:
        skipped = list(lora.odd)
        for name, pair in lora.pairs.items():
            place = places.get(name)
            if place is None:
                skipped.append(name)
                continue
            scale = _scale(pair, ours, place, name, lora)
            changes.setdefault(place.key, []).append((place, pair, scale))
        if not any(name in places for name in lora.pairs):
            problem = f"none of its {len(lora.pairs)} changes has a weight in this model"
            remedy = "it was made for another model"
            got = next(iter(lora.pairs))
            raise WeightError(problem, file=lora.path, got=got, remedy=remedy)
        if skipped and note:
            more = f" and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
            note(f"{lora.path}: skipped {', '.join(skipped[:_SHOWN])}{more}")
    entries = dict(ours.entries)
    for key, found in changes.items():
        entries[key] = _changed(key, entries[key], found)
    return Checkpoint(ours.path, ours.format, ours.metadata, entries, ours.device)


def _scale(pair: Pair, ours: Checkpoint, place: _Place, name: str, lora: Lora) -> float:
    """strength * alpha / rank; WeightError when the pair doesn't fit its weight."""
    shape = ours.info(place.key).shape
    rows, inner = shape[0] // place.parts, math.prod(shape[1:])
    if place.key.endswith("text_projection"):  # stored the other way round
        rows, inner = inner, rows
    up, down = pair.up.info.shape, pair.down.info.shape
    rank = down[0] if down else 0
    wanted = (rows, rank, inner)
    got = (up[0] if up else 0, math.prod(up[1:]), math.prod(down[1:]))
    if not rank or got != wanted:
        remedy = "the LoRA was made for another version of Stable Diffusion"
        raise WeightError("it doesn't fit its weight", file=lora.path, tensor=name,
                          expected=f"up and down for {shape}", got=f"{up} and {down}",
                          remedy=remedy)  # fmt: skip
    return lora.strength * (rank if pair.alpha is None else pair.alpha) / rank


def _changed(key: str, entry: Entry, changes: Sequence[tuple[_Place, Pair, float]]) -> Entry:
    """The entry with changes added; its bytes on disk are no longer what it is."""
    shape = entry.info.shape

    def read(device: str | None) -> Tensor:
        weight = entry.read(device).float()
        for place, pair, scale in changes:
            up, down = (e.read(device).float() for e in (pair.up, pair.down))
            change = up.reshape(up.shape[0], -1) @ down.reshape(down.shape[0], -1) * scale
            if key.endswith("text_projection"):
                change = change.transpose()
            if place.parts > 1:
                rows = shape[0] // place.parts
                behind = (place.parts - 1 - place.part) * rows
                change = change.pad([(place.part * rows, behind), (0, 0)])
            weight = weight + change.reshape(*shape)
        return weight

    def raw() -> np.ndarray:
        return np.ascontiguousarray(read("reference").numpy(), "<f4").reshape(-1).view(np.uint8)

    return Entry(replace(entry.info, type="F32", nbytes=4 * math.prod(shape)), raw, read)
