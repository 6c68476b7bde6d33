"""Our UNet, autoencoder and text encoders against diffusers and transformers, on random weights.

Structure is that of SD 1, 2 and XL, narrower. Tolerance: float32 sums of some thousand terms in
another order, through some fifty layers: 1e-4 of the largest value is ten times what was seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Tensor, program
from weights import Params, load, names
from zoo.stable_diffusion import clip, unet, vae

pytestmark = pytest.mark.peers

CLOSE = 1e-4  # of the largest value
RANDOM = np.random.default_rng(0)
UNETS: dict[str, dict[str, Any]] = {
    "1": {
        "block_out_channels": (64, 64, 128, 128),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "attention_head_dim": 8,
        "in_channels": 9,
    },
    "2": {
        "block_out_channels": (64, 64, 128, 128),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "use_linear_projection": True,
        "attention_head_dim": (1, 1, 2, 2),
    },
    "xl": {
        "block_out_channels": (64, 64, 128),
        "down_block_types": ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * 2,
        "up_block_types": ("CrossAttnUpBlock2D",) * 2 + ("UpBlock2D",),
        "transformer_layers_per_block": (1, 2, 3),
        "use_linear_projection": True,
        "attention_head_dim": (1, 1, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 32,
        "projection_class_embeddings_input_dim": 6 * 32 + 64,
    },
}
TEXT = {"1": {"text_encoder": 12}, "2": {"text_encoder": 23}}
TEXT["xl"] = {"text_encoder": 12, "text_encoder_2": 32}
VERSIONS = tuple(UNETS)


def parts_of(version: str) -> dict[str, Any]:
    """Part of the folder -> a torch module with random weights."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(0)
    made: dict[str, Any] = {
        "unet": UNet2DConditionModel(cross_attention_dim=128, sample_size=16, **UNETS[version]),
        "vae": AutoencoderKL(
            block_out_channels=(32, 32, 64, 64), layers_per_block=2, latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        ),
    }  # fmt: skip
    for part, layers in TEXT[version].items():
        openclip = part == "text_encoder_2" or version == "2"
        config = CLIPTextConfig(
            vocab_size=300, hidden_size=128, intermediate_size=192, num_hidden_layers=layers,
            num_attention_heads=2, projection_dim=64, bos_token_id=298, eos_token_id=299,
            hidden_act="gelu" if openclip else "quick_gelu",
        )  # fmt: skip
        kind = CLIPTextModelWithProjection if part == "text_encoder_2" else CLIPTextModel
        made[part] = kind(config)
    with torch.no_grad():
        for module in made.values():
            module.eval()
            for weight in module.parameters():
                if weight.ndim < 2:  # fresh norms and biases are ones and zeros
                    weight.add_(torch.randn_like(weight) * 0.1)
    return made


@pytest.fixture(scope="module", params=VERSIONS)
def pair(request, tmp_path_factory) -> tuple[str, dict[str, Any], Params]:
    """A version, torch's modules and our tree over the same weights."""
    version = request.param
    modules = parts_of(version)
    folder: Path = tmp_path_factory.mktemp(f"sd{version}")
    for part, module in modules.items():
        module.save_pretrained(folder / part)
    index = {part: ["diffusers", type(module).__name__] for part, module in modules.items()}
    (folder / "model_index.json").write_text(json.dumps(index))
    return version, modules, Params(names.canonical(load(folder)))


def near(ours: Tensor, theirs: Any, close: float = CLOSE) -> None:
    theirs = theirs.detach().numpy()
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=close * np.abs(theirs).max())


def draw(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def test_the_unet_predicts_what_diffusers_does(pair) -> None:
    import torch

    version, modules, p = pair
    ins = UNETS[version].get("in_channels", 4)
    x, t, context = draw(2, ins, 16, 24), np.float32([981, 21]), draw(2, 77, 128)
    pooled, sizes = draw(2, 64), np.float32([[512, 768, 0, 8, 512, 768], [64, 64, 1, 2, 64, 64]])
    given = {"text_embeds": torch.tensor(pooled), "time_ids": torch.tensor(sizes)}
    with torch.no_grad():
        theirs = modules["unet"](
            torch.tensor(x), torch.tensor(t), torch.tensor(context),
            added_cond_kwargs=given if version == "xl" else None,
        ).sample  # fmt: skip
    config = unet.Config(heads=8 if version == "1" else None)

    def ours(*inputs: Tensor) -> Tensor:
        return unet.unet(p.model.diffusion_model, config, *inputs)

    more = (pooled, sizes) if version == "xl" else ()
    near(program(ours)(*map(Tensor.from_numpy, (x, t, context, *more))), theirs)


def test_the_autoencoder_encodes_and_decodes_as_diffusers_does(pair) -> None:
    import torch

    _, modules, p = pair
    picture, latent = draw(1, 3, 32, 48), draw(2, 4, 6, 4)
    p = p.first_stage_model
    with torch.no_grad():
        encoded = modules["vae"].encode(torch.tensor(picture)).latent_dist
        decoded = modules["vae"].decode(torch.tensor(latent)).sample
    encode, decode = (program(lambda x, f=f: f(p, x)) for f in (vae.encode, vae.decode))
    ours = encode(Tensor.from_numpy(picture))
    near(ours[:, :4], encoded.mean)
    near(decode(Tensor.from_numpy(latent)), decoded)


def test_the_text_encoders_state_what_transformers_does(pair) -> None:
    import torch

    version, modules, p = pair
    ids = RANDOM.integers(0, 298, size=(2, 77))
    ids[0, 40:], ids[1, 76] = 299, 299
    trees = {
        "1": {"text_encoder": lambda: p.cond_stage_model.transformer.text_model},
        "2": {"text_encoder": lambda: p.cond_stage_model.model},
        "xl": {
            "text_encoder": lambda: p.conditioner.embedders[0].transformer.text_model,
            "text_encoder_2": lambda: p.conditioner.embedders[1].model,
        },
    }
    for part, tree in trees[version].items():
        p_text = tree()
        with torch.no_grad():
            theirs = modules[part](torch.tensor(ids), output_hidden_states=True)
        encoder = clip.openclip if "transformer" in p_text else clip.hugging_face

        def ours(ids: Tensor, last: Tensor, encoder=encoder, p_text=p_text) -> list[Tensor]:
            states = encoder(p_text, ids)
            picked = [clip.pooled(p_text, states[-1], last)] if "text_projection" in p_text else []
            return [states[1], states[-2], *picked]

        last = np.int32([40, 76])
        inputs = (Tensor.from_numpy(ids.astype(np.int32)), Tensor.from_numpy(last))
        first, before_last, *pooled = (t.numpy() for t in program(ours)(*inputs))
        near(Tensor.from_numpy(first), theirs.hidden_states[1])
        near(Tensor.from_numpy(before_last), theirs.hidden_states[-2])
        if pooled:
            near(Tensor.from_numpy(pooled[0]), theirs.text_embeds)
