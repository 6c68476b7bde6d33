"""Whisper's names: OpenAI's, Hugging Face's, whisper.cpp's and CTranslate2's, any into any."""

from __future__ import annotations

import numpy as np
import pytest

from tests.weights import models, whisper
from weights import WeightError, names
from weights.names.whisper import dims

LAYOUTS = whisper.layouts()


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_becomes_every_other_bit_for_bit(source, target):
    given = models.checkpoint(LAYOUTS[source])
    assert names.recognise(given) == ("whisper", source)
    models.assert_equal(names.in_layout(given, target), LAYOUTS[target], tensors=True)


@pytest.mark.parametrize("source", LAYOUTS)
def test_sizes_are_read_off_the_shapes(source):
    ours = names.canonical(models.checkpoint(LAYOUTS[source]))
    assert dims(ours) == whisper.DIMS
    for metadata in (
        {"n_audio_head": 4, "n_text_head": 8},
        {"dims": {"n_audio_head": 4, "n_text_head": 8}},
        {"encoder_attention_heads": 4, "decoder_attention_heads": 8},
        {"encoder/num_heads": 4, "decoder/num_heads": 8},
    ):
        named = dims(names.canonical(models.checkpoint(LAYOUTS[source], metadata)))
        assert named == whisper.DIMS | {"n_audio_head": 4, "n_text_head": 8}


def test_the_output_matrix_is_the_embedding():
    table = LAYOUTS["openai"]["decoder.token_embedding.weight"]
    for layout, key in (("hf", "proj_out.weight"), ("ctranslate2", "decoder/projection/weight")):
        given = models.checkpoint(LAYOUTS[layout] | {key: table})
        models.assert_equal(names.canonical(given), LAYOUTS["openai"])


def quantised(code: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """CTranslate2's integers, a scale per row (int8) or per matrix (int16), and their values."""
    stored, values = dict(LAYOUTS["ctranslate2"]), dict(LAYOUTS["ctranslate2"])
    for key, w in LAYOUTS["ctranslate2"].items():
        if not key.endswith("/weight"):
            continue
        flat = np.abs(w.reshape(len(w), -1))
        scale = 127 / flat.max(axis=1) if code == "i1" else np.array(1024 / flat.max())
        scale = scale.astype("<f4")
        column = scale.reshape(-1, *[1] * (w.ndim - 1))
        stored[key], stored[f"{key}_scale"] = np.rint(w * column).astype(code), scale
        values[key] = stored[key].astype("<f4") / column
    return stored, values


@pytest.mark.parametrize("code", ["i1", "<i2"])
def test_integers_of_ctranslate2_become_what_their_scales_make_of_them(code):
    stored, values = quantised(code)
    wanted = names.canonical(models.checkpoint(values))
    given = models.checkpoint(stored)
    got = names.canonical(given)
    models.assert_equal(got, {key: models.array(e) for key, e in wanted.entries.items()})
    key = "decoder.blocks.1.cross_attn.value.weight"
    # The engine divides by multiplying, which rounds twice where NumPy rounds once.
    np.testing.assert_allclose(got[key].numpy(), wanted[key].numpy(), rtol=2.4e-7)
    assert names.recognise(got) == ("whisper", "openai")


def test_a_scale_that_does_not_fit_names_its_tensor():
    stored, _ = quantised("i1")
    stored["encoder/conv1/weight_scale"] = np.ones(3, "<f4")
    with pytest.raises(
        WeightError, match="model: tensor 'encoder.conv1.weight': its scale doesn't"
    ):
        names.canonical(models.checkpoint(stored))


def test_a_missing_part_and_an_unknown_key_are_named():
    arrays = dict(LAYOUTS["openai"])
    del arrays["decoder.blocks.1.cross_attn.value.weight"]
    missing = "tensor 'decoder.blocks.1.cross_attn.value.weight': the tensor is missing"
    with pytest.raises(WeightError, match=missing):
        names.in_layout(models.checkpoint(arrays), "ctranslate2")
    arrays = LAYOUTS["hf"] | {"model.encoder.layers.0.self_attn.k_proj.bias": np.zeros(2, "<f4")}
    with pytest.raises(WeightError, match="self_attn.k_proj.bias': no row of the name table"):
        names.canonical(models.checkpoint(arrays))
    arrays = LAYOUTS["ctranslate2"] | {"encoder/layer_0/self_attention/linear_0/weight": np.ones(
        (4, 3), "<f4")}  # fmt: skip
    with pytest.raises(WeightError, match="linear_0/weight': its rows do not divide evenly"):
        names.canonical(models.checkpoint(arrays))


def test_other_sequence_models_are_not_taken_for_whisper():
    bart = {"model.encoder.layers.0.self_attn.k_proj.weight": np.ones((2, 2), "<f4")}
    assert names.recognise(models.checkpoint(bart)) is None
    given = models.checkpoint(LAYOUTS["hf"], {"model_type": "speech_to_text"})
    assert names.recognise(given) is None


def test_sizes_that_no_tensor_shows_are_an_error():
    arrays = dict(LAYOUTS["openai"])
    del arrays["decoder.positional_embedding"]
    with pytest.raises(WeightError, match="'decoder.positional_embedding': the tensor is missing"):
        dims(models.checkpoint(arrays))
    arrays["decoder.positional_embedding"] = np.ones(3, "<f4")
    with pytest.raises(WeightError, match="wrong shape .expected 2 axes"):
        dims(models.checkpoint(arrays))
    with pytest.raises(WeightError, match="128 columns do not divide into heads .got 3"):
        dims(models.checkpoint(LAYOUTS["openai"], {"n_text_head": 3}))
