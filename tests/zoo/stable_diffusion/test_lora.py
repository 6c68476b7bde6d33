"""LoRA: every spelling of a name means the same weight, which becomes W + s alpha / r up @ down.

Tolerance: the sum is of float32 products in another order than NumPy's, 1e-6 is some ten steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.weights import models
from tests.zoo.stable_diffusion import tiny
from weights import WeightError
from zoo.stable_diffusion.lora import Lora, merged

RANK = 3
BLOCK = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0."
QUERY, OUT = f"{BLOCK}attn1.to_q.weight", f"{BLOCK}attn1.to_out.0.weight"
CONV = "model.diffusion_model.input_blocks.1.0.in_layers.2.weight"
SKIP = "model.diffusion_model.output_blocks.0.0.skip_connection.weight"
PROJECTION = "model.diffusion_model.input_blocks.1.1.proj_in.weight"
CLIP = "cond_stage_model.transformer.text_model.encoder.layers.1.self_attn.k_proj.weight"
SECOND = "conditioner.embedders.1.model.transformer.resblocks.1.attn.in_proj_weight"
FIRST = "conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1.weight"
THERE = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1."

# version, our weight, a module's name and what follows it for down, up.
SPELLINGS = [
    ("1", QUERY, "lora_" + (THERE + "to_q").replace(".", "_"), ".lora_down", ".lora_up"),
    ("1", QUERY, f"{THERE}to_q", ".lora_A", ".lora_B"),
    ("1", QUERY, f"{THERE}to_q", ".lora_A.default", ".lora_B.default"),
    ("1", QUERY, f"{THERE}to_q", ".lora.down", ".lora.up"),
    ("1", QUERY, f"{THERE}processor.to_q", "_lora.down", "_lora.up"),
    ("1", OUT, f"{THERE}processor.to_out", "_lora.down", "_lora.up"),
    ("1", OUT, f"base_model.model.{THERE}to_out.0".replace("unet.", ""), ".lora_A", ".lora_B"),
    ("1", CONV, "lora_unet_down_blocks_0_resnets_0_conv1", ".lora_down", ".lora_up"),
    ("1", SKIP, "lora_unet_up_blocks_0_resnets_0_conv_shortcut", ".lora_down", ".lora_up"),
    ("1", PROJECTION, "lora_unet_down_blocks_0_attentions_0_proj_in", ".lora_down", ".lora_up"),
    ("1", CLIP, "lora_te_text_model_encoder_layers_1_self_attn_k_proj", ".lora_down", ".lora_up"),
    ("1", CLIP, "text_encoder.text_model.encoder.layers.1.self_attn.k_proj",
     ".lora_linear_layer.down", ".lora_linear_layer.up"),
    ("1", CLIP, "text_encoder.encoder.layers.1.self_attn.k_proj", ".lora_A", ".lora_B"),
    ("xl", QUERY, "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q",
     ".lora_down", ".lora_up"),
    ("xl", FIRST, "lora_te1_text_model_encoder_layers_0_mlp_fc1", ".lora_down", ".lora_up"),
]  # fmt: skip


def pair(shape: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random down and up for a weight, shaped as convolutions have them."""
    draw = np.random.default_rng(seed)
    up = (shape[0], RANK, *[1] * (len(shape) - 2))
    return tuple(draw.normal(size=s).astype(np.float32) for s in ((RANK, *shape[1:]), up))


def change(down: np.ndarray, up: np.ndarray) -> np.ndarray:
    return up.reshape(len(up), RANK) @ down.reshape(RANK, -1)


def file(path: Path, tensors: dict[str, np.ndarray], **metadata: str) -> Path:
    save_file(tensors, path, metadata)
    return path


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s[2] + s[4])
def test_every_spelling_of_a_name_means_its_weight(spelling: tuple, tmp_path: Path) -> None:
    version, key, module, below, above = spelling
    made = tiny.weights_of(version)
    down, up = pair(made[key].shape)
    tensors = {f"{module}{below}.weight": down, f"{module}{above}.weight": up}
    notes: list[str] = []
    loras = [Lora.load(file(tmp_path / "l.safetensors", tensors), 0.5)]
    ours = merged(models.checkpoint(made), loras, notes.append)
    wanted = made[key] + 0.5 * change(down, up).reshape(made[key].shape)
    np.testing.assert_allclose(ours[key].numpy(), wanted, atol=1e-6)
    raw = ours.entries[key].raw().view("<f4").reshape(wanted.shape)
    np.testing.assert_allclose(raw, wanted, atol=1e-6)
    others = [name for name in made if name != key]
    assert not notes and all(ours.entries[n].info.type == "F32" for n in ours)
    for name in others[::50]:
        np.testing.assert_array_equal(ours[name].numpy(), made[name])


def test_one_of_three_projections_in_one_matrix_is_changed(tmp_path: Path) -> None:
    made = tiny.weights_of("xl")
    down, up = pair((tiny.TEXT, tiny.TEXT))
    module = "lora_te2_text_model_encoder_layers_1_self_attn_k_proj"
    tensors = {f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}
    loras = [Lora.load(file(tmp_path / "l.safetensors", tensors))]
    ours = merged(models.checkpoint(made), loras)[SECOND].numpy()
    wanted = made[SECOND].copy()
    wanted[tiny.TEXT : 2 * tiny.TEXT] += change(down, up)
    np.testing.assert_allclose(ours, wanted, atol=1e-6)


def test_alpha_scales_and_several_files_add_up(tmp_path: Path) -> None:
    made = tiny.weights_of()
    kohya, peft = pair(made[QUERY].shape, 1), pair(made[QUERY].shape, 2)
    name, other = SPELLINGS[0][2], f"{THERE}to_q"
    first = {
        f"{name}.lora_down.weight": kohya[0],
        f"{name}.lora_up.weight": kohya[1],
        f"{name}.alpha": np.array(6, np.float32),
    }
    second = {f"{other}.lora_A.weight": peft[0], f"{other}.lora_B.weight": peft[1]}
    says = json.dumps({"unet.lora_alpha": 1.5, "unet.r": RANK, "text_encoder.lora_alpha": 9})
    loras = [
        Lora.load(file(tmp_path / "a.safetensors", first), 0.5),
        Lora.load(file(tmp_path / "b.safetensors", second, lora_adapter_metadata=says), -2.0),
    ]
    ours = merged(models.checkpoint(made), loras)[QUERY].numpy()
    wanted = made[QUERY] + 0.5 * 6 / RANK * change(*kohya) - 2 * 1.5 / RANK * change(*peft)
    np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_what_matches_nothing_is_noted_and_all_of_it_an_error(tmp_path: Path) -> None:
    made = models.checkpoint(tiny.weights_of())
    down, up = pair((64, 64))
    good, alien = SPELLINGS[0][2], "lora_unet_double_blocks_0_img_attn"
    both = {f"{n}.{part}.weight": w for n in (good, alien) for part, w in
            (("lora_down", down), ("lora_up", up))}  # fmt: skip
    weird = both | {f"{good}_2.hada_w1_a": down}
    notes: list[str] = []
    merged(made, [Lora.load(file(tmp_path / "l.safetensors", weird))], notes.append)
    assert len(notes) == 1 and "double_blocks_0_img_attn" in notes[0] and "hada" in notes[0]
    only = {key: w for key, w in both.items() if alien in key}
    with pytest.raises(WeightError, match="none of its 1 changes has a weight"):
        merged(made, [Lora.load(file(tmp_path / "m.safetensors", only))])


def test_a_pair_with_a_magnitude_is_no_lora(tmp_path: Path) -> None:
    """DoRA's change is another one: half of it would be wrong, so it is refused."""
    down, up = pair((64, 64))
    name = SPELLINGS[0][2]
    tensors = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    tensors[f"{name}.dora_scale"] = np.ones((64, 1), np.float32)
    with pytest.raises(WeightError, match="no LoRA"):
        Lora.load(file(tmp_path / "l.safetensors", tensors))


def test_files_that_do_not_fit_say_so(tmp_path: Path) -> None:
    made = models.checkpoint(tiny.weights_of())
    name = SPELLINGS[0][2]
    down, up = pair((64, 80))
    wrong = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    with pytest.raises(WeightError, match="doesn't fit its weight.*another version"):
        merged(made, [Lora.load(file(tmp_path / "l.safetensors", wrong))])
    half = {f"{name}.lora_down.weight": down}
    with pytest.raises(WeightError, match="no LoRA"):
        Lora.load(file(tmp_path / "h.safetensors", half))
    odd = wrong | {f"{name}.alpha": np.array(np.nan, np.float32)}
    with pytest.raises(WeightError, match="alpha is one finite number"):
        Lora.load(file(tmp_path / "n.safetensors", odd))
