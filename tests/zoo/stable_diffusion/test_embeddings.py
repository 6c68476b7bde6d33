"""Textual inversion in each of its formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weights import WeightError
from zoo.stable_diffusion.embeddings import load

VECTORS = np.arange(12, dtype=np.float32).reshape(2, 6)
WIDER = np.arange(16, dtype=np.float32).reshape(2, 8)


def saved(path: Path, **tensors: np.ndarray) -> Path:
    save_file(tensors, path)
    return path


def test_a_word_is_called_as_its_file(tmp_path: Path) -> None:
    (found,) = load(saved(tmp_path / "my-style.safetensors", emb_params=VECTORS), [6])
    assert found.word == "my-style" and len(found) == 2
    np.testing.assert_array_equal(found.vectors[0], VECTORS)
    assert load(tmp_path / "my-style.safetensors", [6], "other")[0].word == "other"


def test_diffusers_files_name_their_words(tmp_path: Path) -> None:
    file = saved(tmp_path / "learned_embeds.safetensors", **{"<cat>": VECTORS[0], "<dog>": VECTORS})
    found = {e.word: e.vectors[0] for e in load(file, [6])}
    np.testing.assert_array_equal(found["<cat>"], VECTORS[:1])
    np.testing.assert_array_equal(found["<dog>"], VECTORS)


def test_xl_has_vectors_for_each_encoder(tmp_path: Path) -> None:
    file = saved(tmp_path / "x.safetensors", clip_g=WIDER, clip_l=VECTORS.astype(np.float16))
    (found,) = load(file, [6, 8])
    np.testing.assert_array_equal(found.vectors[0], VECTORS)
    np.testing.assert_array_equal(found.vectors[1], WIDER)
    assert all(v.dtype == np.float32 for v in found.vectors)


@pytest.mark.parametrize(
    ("tensors", "dims"),
    [
        ({"emb_params": VECTORS}, [8]),
        ({"emb_params": VECTORS}, [6, 8]),
        ({"clip_l": VECTORS, "clip_g": WIDER[:1]}, [6, 8]),
        ({"emb_params": np.zeros((2, 6, 1), np.float32)}, [6]),
        ({"emb_params": np.zeros((0, 6), np.float32)}, [6]),
    ],
)
def test_vectors_for_other_encoders_are_refused(tensors: dict, dims: list, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="vectors of another shape.*another version"):
        load(saved(tmp_path / "e.safetensors", **tensors), dims)


def test_a_model_is_no_textual_inversion(tmp_path: Path) -> None:
    file = saved(tmp_path / "m.safetensors", weight=np.zeros((2, 2, 3, 3), np.float32))
    with pytest.raises(WeightError, match="no textual inversion"):
        load(file, [6])
