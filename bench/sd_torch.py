"""Stable Diffusion's networks in torch, by diffusers and transformers, over a checkpoint of ours.

The modules' weights are the mapped file itself where torch can use it: `layer_by_layer` computes
in float32 without ever holding more than one layer in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weights import Checkpoint, names

_DOWN, _CROSS_DOWN = "DownBlock2D", "CrossAttnDownBlock2D"
_UP, _CROSS_UP = "UpBlock2D", "CrossAttnUpBlock2D"
_FOUR: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": (_CROSS_DOWN,) * 3 + (_DOWN,),
    "up_block_types": (_UP,) + (_CROSS_UP,) * 3,
}
UNETS: dict[str, dict[str, Any]] = {
    "1": {**_FOUR, "attention_head_dim": 8, "cross_attention_dim": 768},
    "2": {**_FOUR, "attention_head_dim": (5, 10, 20, 20), "cross_attention_dim": 1024,
          "use_linear_projection": True},
    "xl": {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": (_DOWN,) + (_CROSS_DOWN,) * 2,
        "up_block_types": (_CROSS_UP,) * 2 + (_UP,),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 1280 + 6 * 256,
    },
}  # fmt: skip
# Channels, layers, inner channels, heads, activation of each text encoder.
_CLIP_L = (768, 12, 3072, 12, "quick_gelu")
TEXT = {
    "1": {"text_encoder": _CLIP_L},
    "2": {"text_encoder": (1024, 24, 4096, 16, "gelu")},
    "xl": {"text_encoder": _CLIP_L, "text_encoder_2": (1280, 32, 5120, 20, "gelu")},
}


def module(ours: Checkpoint, part: str, version: str) -> Any:
    """The torch module of one part ("unet", "vae", "text_encoder", …) with ours's weights."""
    import torch

    with torch.device("meta"):
        made = _empty(part, version)
    state = {}
    wanted = made.state_dict()
    there = names.in_layout(ours, "diffusers")
    for key, entry in there.entries.items():
        if not key.startswith(f"{part}."):
            continue
        name = key.removeprefix(f"{part}.")
        name = name if name in wanted else name.removeprefix("text_model.")
        if name in wanted:  # SD 2's projection is not
            array = entry.raw().view(np.float16).reshape(entry.info.shape)
            state[name] = torch.from_numpy(np.require(array, requirements="W"))
    made.load_state_dict(state, strict=False, assign=True)
    for name, buffer in made.named_buffers():
        if buffer.is_meta:  # the positions 0 to 76
            owner = made.get_submodule(name.rpartition(".")[0])
            owner.register_buffer(name.rpartition(".")[2], torch.arange(buffer.shape[-1])[None],
                                  persistent=False)  # fmt: skip
    missing = [name for name, weight in made.named_parameters() if weight.is_meta]
    assert not missing, f"{part} has no {', '.join(missing[:3])}"
    return made.eval()


def _empty(part: str, version: str) -> Any:
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    if part == "unet":
        return UNet2DConditionModel(in_channels=4, out_channels=4, **UNETS[version])
    if part == "vae":
        return AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        )  # fmt: skip
    dim, layers, inner, heads, act = TEXT[version][part]
    config = CLIPTextConfig(
        vocab_size=49408, hidden_size=dim, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, hidden_act=act, projection_dim=dim, bos_token_id=49406,
        eos_token_id=49407,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if part == "text_encoder_2" else CLIPTextModel)(config)


def layer_by_layer(made: Any) -> Any:
    """Make each layer's weights float32 while it works, and only then."""
    kept: dict[Any, list] = {}

    def before(layer: Any, _: Any) -> None:
        kept[layer] = [weight.data for weight in layer.parameters(recurse=False)]
        for weight in layer.parameters(recurse=False):
            weight.data = weight.data.float()

    def after(layer: Any, _: Any, __: Any) -> None:
        for weight, data in zip(layer.parameters(recurse=False), kept.pop(layer)):
            weight.data = data

    for layer in made.modules():
        if list(layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after)
    return made
