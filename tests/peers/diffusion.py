"""Random Stable Diffusion models of real structure and tiny width, made by diffusers."""

from __future__ import annotations

from typing import Any

# What differs between the versions' UNets; all else is the same.
UNETS: dict[str, dict[str, Any]] = {
    "1": {
        "block_out_channels": (8, 16, 32, 32),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    },
    "2": {
        "block_out_channels": (8, 16, 32, 32),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "use_linear_projection": True,
    },
    "xl": {
        "block_out_channels": (8, 16, 32),
        "down_block_types": ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * 2,
        "up_block_types": ("CrossAttnUpBlock2D",) * 2 + ("UpBlock2D",),
        "transformer_layers_per_block": (1, 2, 10),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    },
    "refiner": {
        "block_out_channels": (8, 16, 32, 32),
        "down_block_types": ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * 2 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 2 + ("UpBlock2D",),
        "transformer_layers_per_block": 4,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    },
}
# Layers of the text encoders, by their part of the folder.
TEXT = {
    "1": {"text_encoder": 12},
    "2": {"text_encoder": 23},
    "xl": {"text_encoder": 12, "text_encoder_2": 32},
    "refiner": {"text_encoder_2": 32},
}


def parts(version: str) -> dict[str, Any]:
    """Part of the folder -> a torch module of random weights."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(0)
    made: dict[str, Any] = {
        "unet": UNet2DConditionModel(
            cross_attention_dim=16, attention_head_dim=8, in_channels=9 if version == "1" else 4,
            norm_num_groups=8, **UNETS[version],
        ),
        "vae": AutoencoderKL(
            block_out_channels=(8, 16, 32, 32), layers_per_block=2, norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        ),
    }  # fmt: skip
    for part, layers in TEXT[version].items():
        config = CLIPTextConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
            num_attention_heads=2, projection_dim=12, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        kind = CLIPTextModelWithProjection if part == "text_encoder_2" else CLIPTextModel
        made[part] = kind(config)
    return made
