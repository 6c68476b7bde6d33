"""Textual inversion (Gal et al. 2022): vectors that stand in prompts for a word of their own.

Formats: A1111's `.pt` (`string_to_param`), `.safetensors` with `emb_params`, XL's with `clip_l`
and `clip_g`, and diffusers's, which has the word itself as its key.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import weights
from weights import WeightError

_MOST = 1000  # vectors of a word; more than 75 don't even fit into a prompt's chunk
_XL = ("clip_l", "clip_g")


@dataclass(frozen=True)
class Embedding:
    """A word of textual inversion: for each text encoder its vectors (n, dim) float32."""

    word: str
    vectors: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.vectors[0])


def load(
    path: str | os.PathLike[str], dims: Sequence[int], word: str | None = None
) -> list[Embedding]:
    """The words of a file, for text encoders of `dims` channels.

    A word is called as the file is, but in diffusers's files, which name it; `word` overrides
    both. WeightError for a file of another kind, or one for other text encoders.
    """
    file = weights.load(weights.resolve(path))
    stem = word or file.path.stem
    keys = set(file)
    inside = [key for key in file if key.startswith("string_to_param.")]
    if keys & set(_XL):
        groups = {stem: [key for key in _XL if key in keys]}
    elif "emb_params" in keys:
        groups = {stem: ["emb_params"]}
    elif inside:
        groups = {stem: inside[:1]}
    elif all(len(file.info(key).shape) in (1, 2) for key in file) and 0 < len(keys) <= _MOST:
        groups = {word if word and len(keys) == 1 else key: [key] for key in file}
    else:
        raise WeightError("no textual inversion", file=file.path)
    return [Embedding(name, _vectors(file, own, dims)) for name, own in groups.items()]


def _vectors(
    file: weights.Checkpoint, keys: Sequence[str], dims: Sequence[int]
) -> tuple[np.ndarray, ...]:
    shapes = [file.info(key).shape for key in keys]
    counts = {shape[0] if len(shape) == 2 else 1 for shape in shapes}
    fits = [shape[-1] for shape in shapes if shape] == list(dims) and len(counts) == 1
    if not fits or not 1 <= counts.pop() <= _MOST:
        expected = " and ".join(f"(vectors, {dim})" for dim in dims)
        remedy = "it was made for another version of Stable Diffusion"
        raise WeightError("vectors of another shape", file=file.path, tensor=keys[0],
                          expected=expected, got=" and ".join(map(str, shapes)),
                          remedy=remedy)  # fmt: skip
    entries = [file.entries[key].read("reference").numpy() for key in keys]
    return tuple(np.array(e, np.float32).reshape(-1, dim) for e, dim in zip(entries, dims))
