"""Read diffusers's folders of Stable Diffusion: one sub-folder per network, each with its config.

The networks' tensors become one checkpoint under the prefixes `unet.`, `vae.`, `text_encoder.`
and `text_encoder_2.`. A network's file may be whole or in shards, safetensors or PyTorch's, and
in several precisions, which its name tells. Source: the file names in diffusers's and
transformers's `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weights.checkpoint import Checkpoint, Entry, WeightError, printable
from weights.jsonfile import read_object
from weights.shards import read_index

INDEX = "model_index.json"
PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")
_STEMS = (
    ("diffusion_pytorch_model", "safetensors"),
    ("model", "safetensors"),
    ("diffusion_pytorch_model", "bin"),
    ("pytorch_model", "bin"),
)
_VARIANTS = ("", "fp16", "bf16")  # in the order of our preference; others only when asked for

OpenFile = Callable[[Path, "str | None"], Checkpoint]


def is_folder(path: Path) -> bool:
    """Whether the folder is a pipeline of diffusers."""
    return (path / INDEX).is_file()


def load(
    path: Path, open_file: OpenFile, device: str | None = None, variant: str | None = None
) -> Checkpoint:
    """Open the networks of a pipeline's folder, each file with `open_file(path, device)`.

    `variant` names the files to take ("fp16", "non_ema", "" for those without one); None takes
    full precision, or the only precision that a network has. `.metadata` is `model_index.json`
    with the networks' and the scheduler's configurations in place of their class names.
    WeightError, naming file or folder, when one is missing or damaged.
    """
    metadata: dict[str, Any] = read_object(path / INDEX)
    parts = [name for name in PARTS if _is_there(metadata.get(name))]
    if not parts:
        expected = f"one of {', '.join(PARTS)}"
        raise WeightError("a pipeline without Stable Diffusion's networks", file=path / INDEX,
                          expected=expected)  # fmt: skip
    entries: dict[str, Entry] = {}
    for name in parts:
        folder = path / name
        if not folder.is_dir():
            remedy = f"fetch {name} again"
            raise WeightError(f"{INDEX} lists it, but it is not there", file=folder, remedy=remedy)
        found = _read_part(folder, lambda file: open_file(file, device).entries, variant)
        entries |= {f"{name}.{key}": entry for key, entry in found.items()}
    configs = {name: path / name / "config.json" for name in parts}
    configs["scheduler"] = path / "scheduler" / "scheduler_config.json"
    metadata |= {name: read_object(file) for name, file in configs.items() if file.is_file()}
    return Checkpoint(path, "diffusers", metadata, entries, device)


def _is_there(row: object) -> bool:
    """Whether a row of `model_index.json`, [library, class], names a network; null says no."""
    return isinstance(row, list) and any(isinstance(item, str) for item in row)


def _read_part(
    folder: Path, open_file: Callable[[Path], Mapping[str, Entry]], variant: str | None
) -> dict[str, Entry]:
    for file, is_index in _candidates(_VARIANTS if variant is None else (variant,)):
        found = folder / file
        if found.is_file():
            return read_index(found, open_file) if is_index else dict(open_file(found))
    wanted = "" if variant is None else f" of variant '{printable(variant)}'"
    expected = ", ".join(f"{stem}.{ending}" for stem, ending in _STEMS)
    raise WeightError(f"no weights{wanted} in this folder", file=folder, expected=expected)


def _candidates(variants: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """(file name, whether it is an index), the one to be preferred first."""
    for variant in variants:
        dotted = f".{variant}" if variant else ""
        for stem, ending in _STEMS:
            yield f"{stem}.{ending}.index{dotted}.json", True
            yield f"{stem}{dotted}.{ending}", False
