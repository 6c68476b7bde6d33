"""The real CTranslate2 Whisper files of the registry become OpenAI's, and stay what they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weights
from weights import FetchError, names
from weights.names import whisper

# of OpenAI's `dims` for these models
TINY_EN = {"n_vocab": 51864, "n_audio_state": 384, "n_audio_layer": 4, "n_text_layer": 4}
BASE = {"n_vocab": 51865, "n_audio_state": 512, "n_audio_layer": 6, "n_text_layer": 6}


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("whisper-tiny.en", TINY_EN),
        pytest.param("whisper-base", BASE, marks=pytest.mark.slow),  # 148 MB, in two parts
    ],
)
def test_a_converted_file_equals_its_source(name: str, dims: dict, tmp_path: Path) -> None:
    try:
        path = weights.resolve(name)
    except FetchError as error:
        pytest.skip(f"needs {name}: {error}")
    source = weights.load(path, "reference")
    assert source.format == "ctranslate2"
    renamed = names.canonical(source)
    found = whisper.dims(renamed)
    assert {key: found[key] for key in dims} == dims
    weights.convert(path, tmp_path / "model.pt")
    made = weights.load(tmp_path / "model.pt", "reference")
    assert names.recognise(made) == ("whisper", "openai")
    assert set(made) == set(renamed)
    for key in made:
        assert made.info(key) == renamed.info(key), key
        np.testing.assert_array_equal(made.entries[key].raw(), renamed.entries[key].raw(), key)
