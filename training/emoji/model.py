"""The networks: Stable Diffusion 1's own classes, small; and CLIP's tokenizer, cut to few words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from zoo.stable_diffusion import tokenizer as clip
from zoo.stable_diffusion.tokenizer import Tokenizer

TEXT = 128  # channels of the text encoder
# Merges that are kept whether or not a caption needs them: words are then cut less finely.
_FREQUENT = 1000

SCHEDULER = {
    "_class_name": "PNDMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "clip_sample": False,
}


def autoencoder() -> AutoencoderKL:
    """3.6 M parameters; pictures (B, 3, 64, 64) to latents (B, 4, 8, 8)."""
    return AutoencoderKL(
        block_out_channels=(32, 32, 64, 128),
        layers_per_block=2,
        latent_channels=4,
        sample_size=64,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )


def unet() -> UNet2DConditionModel:
    """6.1 M parameters: two levels, at 8x8 with attention and at 4x4 without, and the middle."""
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(96, 128),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT,
        attention_head_dim=8,
    )


def text_encoder(vocabulary: int) -> CLIPTextModel:
    """1.1 M parameters: three layers of two heads."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=TEXT,
            intermediate_size=4 * TEXT,
            num_hidden_layers=3,
            num_attention_heads=TEXT // 64,
            projection_dim=TEXT,
            hidden_act="quick_gelu",
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
        )
    )


def tokenizer(texts: Iterable[str]) -> Tokenizer:
    """CLIP's tokenizer with the merges that these texts need and the most frequent others.

    Texts are cut into the tokens that CLIP cuts them into: of the merges that could come next the
    one of lowest rank is always kept.
    """
    whole = clip.default()
    rank = {"".join(pair): n for n, pair in reversed(list(enumerate(whole.merges)))}
    names = {id: token for token, id in whole.vocab.items()}
    needed = set(range(_FREQUENT))
    pending = [names[id] for text in set(texts) for id in whole.encode(text)]
    while pending:
        token = pending.pop()
        if token in rank and (rank[token] not in needed or rank[token] < _FREQUENT):
            needed.add(rank[token])
            pending += [part for part in whole.merges[rank[token]] if len(part) < len(token)]
    merges = [whole.merges[n] for n in sorted(needed)]
    letters = [names[n] for n in range(512)]
    tokens = [*letters, *("".join(pair) for pair in merges), clip.BEGIN, clip.END]
    made = Tokenizer({token: id for id, token in enumerate(tokens)}, merges)
    assert len(made.vocab) == len(tokens), "two merges make one token"
    return made


def save_tokenizer(made: Tokenizer, folder: Path) -> None:
    """Write the files that diffusers, transformers and our own reader want."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in made.merges)]
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": clip.LENGTH,
        "do_lower_case": True,
        "bos_token": clip.BEGIN,
        "eos_token": clip.END,
        "unk_token": clip.END,
        "pad_token": clip.END,
    }
    (folder / "vocab.json").write_text(json.dumps(made.vocab, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
