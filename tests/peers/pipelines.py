"""Whole diffusers pipelines of real structure, narrow and with few layers, with random weights.

Their folders are written by diffusers itself, so ours reads what users have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.zoo.stable_diffusion import tiny
from tests.zoo.stable_diffusion.test_samplers_parity import CLASSES

WIDE, TEXT = 64, 64  # channels of the UNet's lower level and of each text encoder
SIZE = 64  # pixels each way

# What differs between the versions' UNets; all else is the same.
UNETS: dict[str, dict[str, Any]] = {
    "1": {"attention_head_dim": 8, "cross_attention_dim": TEXT},
    "inpaint": {"attention_head_dim": 8, "cross_attention_dim": TEXT, "in_channels": 9},
    "2": {
        "attention_head_dim": [1, 1],
        "block_out_channels": (WIDE, WIDE),
        "cross_attention_dim": TEXT,
        "use_linear_projection": True,
    },
    "xl": {
        "attention_head_dim": [1, 1],
        "block_out_channels": (WIDE, WIDE),
        "cross_attention_dim": 2 * TEXT,
        "use_linear_projection": True,
        "transformer_layers_per_block": [1, 2],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 16,
        "projection_class_embeddings_input_dim": TEXT + 6 * 16,
    },
}
# As in the folders of SD 1.5, SD 2.1 and XL: each sampler has its own spacing of times but in XL's.
_PNDM = {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False}
_EULER = {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "leading"}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "1": _PNDM,
    "inpaint": _PNDM,
    "2": {**_PNDM, "_class_name": "DDIMScheduler", "prediction_type": "v_prediction"},
    "xl": _EULER,
}
_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def folder(where: Path, version: str) -> Path:
    """A folder as `save_pretrained` writes it, of version "1", "inpaint", "2" or "xl"."""
    import torch
    from transformers import CLIPTokenizer

    torch.manual_seed(0)
    parts = {**_networks(version), **_encoders(version)}
    with torch.no_grad():
        for module in parts.values():
            for weight in module.parameters():
                if weight.ndim < 2:  # fresh norms and biases are ones and zeros
                    weight.add_(torch.randn_like(weight) * 0.1)
        parts["unet"].conv_out.weight.mul_(3)  # about as large as the noise that it predicts
    for n, part in enumerate([part for part in parts if part.startswith("text")]):
        name = part.replace("text_encoder", "tokenizer")
        made = where / f"{version}_{name}"
        made.mkdir()
        tiny.with_tokenizer(made)
        # OpenCLIP's text encoders are padded with the first token, CLIP's own with the last.
        pad = "!" if n or version == "2" else "<|endoftext|>"
        said = {"model_max_length": 77, "pad_token": pad, "tokenizer_class": "CLIPTokenizer"}
        (made / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(said))
        parts[name] = CLIPTokenizer.from_pretrained(made / "tokenizer")
    out = where / version
    for part, module in parts.items():
        module.save_pretrained(out / part)
    (out / "scheduler").mkdir()
    scheduler = {**_BETAS, "steps_offset": 1, **SCHEDULERS[version]}
    (out / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = {part: [type(m).__module__.partition(".")[0], type(m).__name__]
             for part, m in parts.items()}  # fmt: skip
    index["_diffusers_version"] = "0.6.0"
    index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    index["_class_name"] = f"StableDiffusion{'XL' if version == 'xl' else ''}Pipeline"
    (out / "model_index.json").write_text(json.dumps(index))
    return out


def _networks(version: str) -> dict[str, Any]:
    from diffusers import AutoencoderKL, UNet2DConditionModel

    shape = {
        "sample_size": SIZE // 8,
        "block_out_channels": (WIDE // 2, WIDE),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    if version == "xl":
        shape["down_block_types"] = ("DownBlock2D", "CrossAttnDownBlock2D")
        shape["up_block_types"] = ("CrossAttnUpBlock2D", "UpBlock2D")
    return {
        "unet": UNet2DConditionModel(**{**shape, **UNETS[version]}),
        "vae": AutoencoderKL(
            block_out_channels=(32,) * 4, layers_per_block=2, latent_channels=4, sample_size=SIZE,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            scaling_factor=0.13025 if version == "xl" else 0.18215,
        ),
    }  # fmt: skip


def _encoders(version: str) -> dict[str, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    made = {}
    for part in ("text_encoder", "text_encoder_2")[: 2 if version == "xl" else 1]:
        openclip = part == "text_encoder_2" or version == "2"
        config = CLIPTextConfig(
            vocab_size=tiny.VOCAB, hidden_size=TEXT, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=1, projection_dim=TEXT, bos_token_id=tiny.VOCAB - 2,
            eos_token_id=tiny.VOCAB - 1, hidden_act="gelu" if openclip else "quick_gelu",
        )  # fmt: skip
        made[part] = (CLIPTextModelWithProjection if part[-1] == "2" else CLIPTextModel)(config)
    return made


def pipeline(kind: str, where: Path, sampler: str | None = None, **options: Any) -> Any:
    """A pipeline class of diffusers over a folder, perhaps with another scheduler than its own."""
    import diffusers

    pipe = getattr(diffusers, kind).from_pretrained(where, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    # Where diffusers looks for the last norm, which newer versions of transformers moved up.
    pipe.text_encoder.__dict__.setdefault("text_model", pipe.text_encoder)
    if sampler:
        cls, own = CLASSES[sampler]
        pipe.scheduler = getattr(diffusers, cls).from_config(
            pipe.scheduler.config, **own, **options
        )
    return pipe
