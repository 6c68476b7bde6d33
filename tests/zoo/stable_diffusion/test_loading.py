"""Loading: both layouts mean the same model, and what is wrong is named in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.zoo.stable_diffusion import tiny
from weights import WeightError
from zoo.errors import UsageError
from zoo.stable_diffusion.loading import load

VERSIONS = ("1", "2", "xl")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_folder_and_a_single_file_are_the_same_model(version: str, tmp_path: Path) -> None:
    made = tiny.weights_of(version)
    single, _ = load(tiny.single_file(tmp_path / "one.safetensors", made), "reference")
    folder, _ = load(tiny.folder(tmp_path / "many", made), "reference")
    assert single.kind.version == folder.kind.version == version
    names = single.params._tree.tensors
    assert set(names) == set(folder.params._tree.tensors) == set(made)
    for name in list(made)[::40]:
        np.testing.assert_array_equal(names[name].numpy(), made[name])
        np.testing.assert_array_equal(folder.params._tree.tensors[name].numpy(), made[name])


def test_what_a_model_is_comes_from_its_configurations(tmp_path: Path) -> None:
    configs = {
        "unet": {"attention_head_dim": [8, 8], "block_out_channels": [64, 64], "sample_size": 96},
        "vae": {"scaling_factor": 0.5},
        "scheduler": {"prediction_type": "v_prediction", "beta_start": 0.1},
    }
    kind = load(tiny.folder(tmp_path / "a", tiny.weights_of(), **configs), "reference")[0].kind
    assert (kind.prediction, kind.scale, kind.size, kind.unet.head_size) == ("v", 0.5, 768, 8)
    assert kind.scheduler["beta_start"] == 0.1


@pytest.mark.parametrize(
    ("version", "scale", "size", "heads"),
    [("1", 0.18215, 512, 8), ("2", 0.18215, 512, None), ("xl", 0.13025, 1024, None)],
)
def test_a_single_file_is_judged_by_its_version(
    version: str, scale: float, size: int, heads: int | None, tmp_path: Path
) -> None:
    kind = load(tiny.single_file(tmp_path / "m.safetensors", tiny.weights_of(version)))[0].kind
    assert (kind.prediction, kind.scale, kind.size) == ("epsilon", scale, size)
    assert kind.unet.heads == heads and not kind.inpainting


def test_v_prediction_is_told_by_the_file_and_can_be_overridden(tmp_path: Path) -> None:
    made = tiny.weights_of("2")
    says = {"modelspec.prediction_type": "v"}
    file = tiny.single_file(tmp_path / "m.safetensors", made, **says)
    assert load(file, "reference")[0].kind.prediction == "v"
    assert load(file, "reference", prediction="epsilon")[0].kind.prediction == "epsilon"
    marked = tiny.single_file(tmp_path / "v.safetensors", made | {"v_pred": np.zeros(0, "f4")})
    assert load(marked, "reference")[0].kind.prediction == "v"


def test_nine_channels_are_for_inpainting(tmp_path: Path) -> None:
    file = tiny.single_file(tmp_path / "m.safetensors", tiny.weights_of(channels=9))
    assert load(file, "reference")[0].kind.inpainting


BROKEN = {
    "missing": ("input_blocks.2.0.in_layers.2.weight", None, "input_blocks.2.0.in_layers.2.weight"),
    "shape": ("middle_block.0.out_layers.3.bias", (7,), "middle_block.0.out_layers.3.bias"),
    "context": ("input_blocks.2.1.transformer_blocks.0.attn2.to_k.weight", (64, 128), "(64, 64)"),
    "extra": ("input_blocks.2.2.conv.weight", (32, 32), "input_blocks.2.2.conv.weight"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_key_that_is_not_as_expected_is_named(case: str, tmp_path: Path) -> None:
    name, shape, told = BROKEN[case]
    made = tiny.weights_of()
    made.pop(tiny.UNET + name, None)
    if shape:
        made[tiny.UNET + name] = np.zeros(shape, np.float32)
    file = tiny.single_file(tmp_path / "m.safetensors", made)
    with pytest.raises(WeightError) as error:
        load(file, "reference")
    assert told in str(error.value) and "m.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("double_blocks.0.img_attn.qkv.weight", "Flux"),
        ("model.diffusion_model.joint_blocks.0.x.weight", "Stable Diffusion 3"),
        ("lora_unet_mid_block_attentions_0_proj_in.lora_up.weight", "a LoRA"),
        ("first_stage_model.decoder.conv_in.weight", "an autoencoder alone"),
        ("a.weight", "something else"),
    ],
)
def test_another_model_is_refused_by_name(key: str, what: str, tmp_path: Path) -> None:
    save_file({key: np.zeros((2, 2), np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(WeightError, match=f"not a Stable Diffusion model.*{what}"):
        load(tmp_path / "m.safetensors", "reference")


def test_wrong_options_are_usage_errors(tmp_path: Path) -> None:
    for options in ({"dtype": "f16"}, {"prediction": "x0"}, {"name_or_path": " "}):
        with pytest.raises(UsageError):
            load(**{"name_or_path": tmp_path, "device": "reference", **options})


def test_channels_that_do_not_divide_into_heads_are_named(tmp_path: Path) -> None:
    file = tiny.folder(tmp_path / "m", tiny.weights_of(), unet={"attention_head_dim": 5})
    with pytest.raises(WeightError, match="norm1.weight.*attention heads.*multiple of 5"):
        load(file, "reference")
