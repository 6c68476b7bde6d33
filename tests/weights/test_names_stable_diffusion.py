"""Stable Diffusion's names: CompVis's single file and diffusers's parts, of every version."""

from __future__ import annotations

import numpy as np
import pytest

from tests.weights import models
from tests.weights.sd import VERSIONS, Model
from weights import WeightError, names
from weights.names.stable_diffusion import version

MODELS = {name: Model(name) for name in VERSIONS}
BLOCK = "model.diffusion_model.input_blocks.1.0."


@pytest.mark.parametrize("name", VERSIONS)
def test_compvis_and_diffusers_become_one_another_bit_for_bit(name):
    model = MODELS[name]
    single, folder = models.checkpoint(model.compvis), models.checkpoint(model.diffusers)
    assert names.recognise(single) == ("stable_diffusion", "compvis")
    assert names.recognise(folder) == ("stable_diffusion", "diffusers")
    assert version(single) == version(folder) == name
    models.assert_equal(names.canonical(single), model.compvis)
    models.assert_equal(names.canonical(folder), model.compvis)
    models.assert_equal(names.in_layout(single, "diffusers"), model.diffusers)
    models.assert_equal(names.in_layout(folder, "diffusers"), model.diffusers)


def test_what_the_engine_reads_is_renamed_like_the_bytes():
    model = MODELS["2"]
    keys = [k for k in model.compvis if ".resblocks.0." in k or "decoder.mid.attn_1" in k]
    keys += ["cond_stage_model.model.text_projection", "model.diffusion_model.time_embed.0.weight"]
    given = models.checkpoint(model.diffusers)
    ours = names.canonical(given)
    for key in keys:
        np.testing.assert_array_equal(ours[key].numpy(), model.compvis[key], err_msg=key)


def test_names_of_older_and_newer_libraries_are_read_too():
    """An attention of the autoencoder before diffusers 0.17; a text encoder of transformers 5."""
    model = MODELS["xl"]
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def spelled(key: str) -> str:
        if not key.startswith("vae."):
            return key.replace("text_model.", "")
        stem, _, last = key.rpartition(".")
        there, _, name = stem.rpartition("attentions.0.")
        return f"{there}attentions.0.{old[name]}.{last}" if name in old else key

    given = {spelled(key): w for key, w in model.diffusers.items()}
    assert "vae.decoder.mid_block.attentions.0.query.weight" in given
    assert "text_encoder_2.encoder.layers.1.mlp.fc1.bias" in given
    ours = names.canonical(models.checkpoint(given))
    models.assert_equal(ours, model.compvis)
    models.assert_equal(names.in_layout(ours, "diffusers"), model.diffusers)  # today's names


LEFT_OVER = """
betas alphas_cumprod alphas_cumprod_prev sqrt_alphas_cumprod sqrt_one_minus_alphas_cumprod
log_one_minus_alphas_cumprod sqrt_recip_alphas_cumprod sqrt_recipm1_alphas_cumprod
posterior_variance posterior_log_variance_clipped posterior_mean_coef1 posterior_mean_coef2
logvar lvlb_weights scale_factor denoiser.sigmas model_ema.decay
model_ema.diffusion_modelinput_blocks00weight first_stage_model.loss.logvar
first_stage_model.loss.discriminator.main.0.weight cond_stage_model.logit_scale
cond_stage_model.model.logit_scale conditioner.embedders.1.model.logit_scale
cond_stage_model.transformer.text_model.embeddings.position_ids
"""


def test_what_training_left_in_the_file_is_left_out():
    arrays = MODELS["1"].compvis | dict.fromkeys(LEFT_OVER.split(), np.ones(2, "<f4"))
    models.assert_equal(names.canonical(models.checkpoint(arrays)), MODELS["1"].compvis)
    positions = "text_encoder.text_model.embeddings.position_ids"
    arrays = MODELS["1"].diffusers | {positions: np.ones(2, "<f4")}
    models.assert_equal(names.canonical(models.checkpoint(arrays)), MODELS["1"].compvis)


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        ("compvis", "alphas"),
        ("compvis", "control_model.time_embed.0.weight"),
        ("compvis", f"{BLOCK}in_layers.1.weight"),
        ("compvis", "model.diffusion_model.input_blocks.12.0.op.scale"),
        ("compvis", "first_stage_model.decoder.up.4.block.1.norm1.weight"),
        ("compvis", "lora_unet_down_blocks_0.weight"),
        ("compvis", "conditioner.embedders.0.model.ln_final.weight"),
        ("diffusers", "unet.down_blocks.00.resnets.0.norm1.weight"),
        ("diffusers", "unet.down_blocks.9.resnets.0.norm1.weight"),
        ("diffusers", "unet.down_blocks.0.resnets.2.norm1.weight\n"),
        ("diffusers", "vae.decoder.up_blocks.4.resnets.1.norm1.weight"),
        ("diffusers", "safety_checker.visual_projection.weight"),
        ("diffusers", "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.bias"),
    ],
)
def test_a_key_of_no_row_is_named(layout, key):
    arrays = getattr(MODELS["1"], layout) | {key: np.ones(2, "<f4")}
    with pytest.raises(WeightError, match="no row of the name table matches it") as caught:
        names.canonical(models.checkpoint(arrays))
    assert caught.value.tensor == key


def test_two_keys_for_one_tensor_and_a_missing_third_of_one_are_errors():
    model = MODELS["2"]
    two = model.diffusers | {"vae.decoder.mid_block.attentions.0.query.bias": np.ones(4, "<f4")}
    with pytest.raises(WeightError, match=r"query.bias': it and '.*to_q.bias' are both first_"):
        names.canonical(models.checkpoint(two))
    key = "text_encoder.text_model.encoder.layers.1.self_attn.k_proj.weight"
    less = {name: w for name, w in model.diffusers.items() if name != key}
    with pytest.raises(WeightError, match="layers.1.self_attn.k_proj.weight': the tensor is miss"):
        names.canonical(models.checkpoint(less))


def test_the_number_of_layers_of_a_level_is_read_off_the_keys():
    """Distilled models have one residual block a level on the way down, and two on the way up."""
    given = {
        f"model.diffusion_model.{key}": np.ones(3, "<f4")
        for key in (
            "time_embed.0.weight", "input_blocks.0.0.weight", "input_blocks.1.0.in_layers.0.weight",
            "input_blocks.2.0.op.weight", "input_blocks.3.0.in_layers.0.weight",
            "output_blocks.1.1.conv.weight", "output_blocks.3.1.norm.weight",
            "output_blocks.3.2.conv.weight",
        )
    }  # fmt: skip
    there = names.in_layout(models.checkpoint(given), "diffusers")
    assert set(there) == {
        "unet.time_embedding.linear_1.weight", "unet.conv_in.weight",
        "unet.down_blocks.0.resnets.0.norm1.weight", "unet.up_blocks.0.upsamplers.0.conv.weight",
        "unet.down_blocks.0.downsamplers.0.conv.weight",
        "unet.down_blocks.1.resnets.0.norm1.weight",
        "unet.up_blocks.1.attentions.1.norm.weight", "unet.up_blocks.1.upsamplers.0.conv.weight",
    }  # fmt: skip
    assert set(names.canonical(there)) == set(given)
