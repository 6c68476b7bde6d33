"""Stable Diffusion of real structure and some hundred thousand random weights, in both layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.weights import models
from weights import names

WIDE, VOCAB = 64, 300  # channels everywhere but in prompts, which have 64
TEXT = 64
UNET, VAE = "model.diffusion_model.", "first_stage_model."
CONTEXT = {"1": TEXT, "2": TEXT, "xl": 2 * TEXT}


class Weights(dict):
    """Canonical name -> random float32 array."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(0)

    def put(self, name: str, *shape: int) -> None:
        spread = 0.8 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.1
        value = self.draw.normal(size=shape) * spread + (len(shape) == 1 and "norm" in name)
        self[name] = value.astype(np.float32)

    def both(self, name: str, *shape: int) -> None:
        self.put(f"{name}.weight", *shape)
        self.put(f"{name}.bias", shape[0])

    def conv(self, name: str, outs: int = WIDE, ins: int = WIDE, size: int = 3) -> None:
        self.both(name, outs, ins, size, size)

    def residual(self, name: str, ins: int = WIDE) -> None:
        self.both(f"{name}.in_layers.0", ins)
        self.conv(f"{name}.in_layers.2", WIDE, ins)
        self.both(f"{name}.emb_layers.1", WIDE, 4 * WIDE)
        self.both(f"{name}.out_layers.0", WIDE)
        self.conv(f"{name}.out_layers.3")
        if ins != WIDE:
            self.conv(f"{name}.skip_connection", WIDE, ins, 1)

    def transformer(self, name: str, context: int, linear: bool) -> None:
        self.both(f"{name}.norm", WIDE)
        for projection in ("proj_in", "proj_out"):
            self.both(f"{name}.{projection}", WIDE, WIDE, *(() if linear else (1, 1)))
        block = f"{name}.transformer_blocks.0"
        for attention, seen in (("attn1", WIDE), ("attn2", context)):
            self.put(f"{block}.{attention}.to_q.weight", WIDE, WIDE)
            self.put(f"{block}.{attention}.to_k.weight", WIDE, seen)
            self.put(f"{block}.{attention}.to_v.weight", WIDE, seen)
            self.both(f"{block}.{attention}.to_out.0", WIDE, WIDE)
        self.both(f"{block}.ff.net.0.proj", 8 * WIDE, WIDE)
        self.both(f"{block}.ff.net.2", WIDE, 4 * WIDE)
        for n in (1, 2, 3):
            self.both(f"{block}.norm{n}", WIDE)

    def unet(self, version: str, channels: int) -> None:
        """Two levels, with attention in the upper one and in the middle."""
        wide, linear, context = WIDE, version != "1", CONTEXT[version]
        self.conv(f"{UNET}input_blocks.0.0", wide, channels)
        self.conv(f"{UNET}input_blocks.3.0.op")
        for n in (1, 2, 4, 5):
            self.residual(f"{UNET}input_blocks.{n}.0")
        for n in range(6):
            self.residual(f"{UNET}output_blocks.{n}.0", 2 * wide)
        self.conv(f"{UNET}output_blocks.2.1.conv")
        for block in ("input_blocks.1", "input_blocks.2", "middle_block", *(
            f"output_blocks.{n}" for n in (3, 4, 5)
        )):  # fmt: skip
            self.transformer(f"{UNET}{block}.1", context, linear)
        self.residual(f"{UNET}middle_block.0")
        self.residual(f"{UNET}middle_block.2")
        self.both(f"{UNET}time_embed.0", 4 * wide, wide)
        self.both(f"{UNET}time_embed.2", 4 * wide, 4 * wide)
        if version == "xl":
            self.both(f"{UNET}label_emb.0.0", 4 * wide, TEXT + 6 * 16)
            self.both(f"{UNET}label_emb.0.2", 4 * wide, 4 * wide)
        self.both(f"{UNET}out.0", wide)
        self.conv(f"{UNET}out.2", 4)

    def vae(self) -> None:
        self.conv(f"{VAE}quant_conv", 8, 8, 1)
        self.conv(f"{VAE}post_quant_conv", 4, 4, 1)
        for half, ins, outs in (("encoder", 3, 8), ("decoder", 4, 3)):
            p = f"{VAE}{half}."
            self.conv(f"{p}conv_in", WIDE, ins)
            self.both(f"{p}norm_out", WIDE)
            self.conv(f"{p}conv_out", outs)
            self.both(f"{p}mid.attn_1.norm", WIDE)
            for part in ("q", "k", "v", "proj_out"):
                self.conv(f"{p}mid.attn_1.{part}", size=1)
            blocks = [f"{p}mid.block_{n}" for n in (1, 2)]
            side = ("down", 2) if half == "encoder" else ("up", 3)
            for level in range(4):
                blocks += [f"{p}{side[0]}.{level}.block.{n}" for n in range(side[1])]
                if half == "encoder" and level < 3:
                    self.conv(f"{p}down.{level}.downsample.conv")
                if half == "decoder" and level:
                    self.conv(f"{p}up.{level}.upsample.conv")
            for block in blocks:
                for n in (1, 2):
                    self.both(f"{block}.norm{n}", WIDE)
                    self.conv(f"{block}.conv{n}")

    def clip(self, p: str, layers: int) -> None:
        self.put(f"{p}embeddings.token_embedding.weight", VOCAB, TEXT)
        self.put(f"{p}embeddings.position_embedding.weight", 77, TEXT)
        self.both(f"{p}final_layer_norm", TEXT)
        for n in range(layers):
            layer = f"{p}encoder.layers.{n}"
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                self.both(f"{layer}.self_attn.{name}", TEXT, TEXT)
            self.both(f"{layer}.mlp.fc1", 96, TEXT)
            self.both(f"{layer}.mlp.fc2", TEXT, 96)
            self.both(f"{layer}.layer_norm1", TEXT)
            self.both(f"{layer}.layer_norm2", TEXT)

    def openclip(self, p: str, layers: int) -> None:
        self.put(f"{p}token_embedding.weight", VOCAB, TEXT)
        self.put(f"{p}positional_embedding", 77, TEXT)
        self.put(f"{p}text_projection", TEXT, TEXT)
        self.both(f"{p}ln_final", TEXT)
        for n in range(layers):
            layer = f"{p}transformer.resblocks.{n}"
            self.put(f"{layer}.attn.in_proj_weight", 3 * TEXT, TEXT)
            self.put(f"{layer}.attn.in_proj_bias", 3 * TEXT)
            self.both(f"{layer}.attn.out_proj", TEXT, TEXT)
            self.both(f"{layer}.mlp.c_fc", 96, TEXT)
            self.both(f"{layer}.mlp.c_proj", TEXT, 96)
            self.both(f"{layer}.ln_1", TEXT)
            self.both(f"{layer}.ln_2", TEXT)


def weights_of(version: str = "1", channels: int = 4) -> Weights:
    """All weights of a model, under canonical names."""
    made = Weights()
    made.unet(version, channels)
    made.vae()
    if version == "1":
        made.clip("cond_stage_model.transformer.text_model.", 3)
    elif version == "2":
        made.openclip("cond_stage_model.model.", 3)
    else:
        made.clip("conditioner.embedders.0.transformer.text_model.", 3)
        made.openclip("conditioner.embedders.1.model.", 3)
    return made


def single_file(path: Path, made: dict[str, np.ndarray], **metadata: str) -> Path:
    """A CompVis single file."""
    save_file(dict(made), path, metadata)
    return path


def folder(path: Path, made: dict[str, np.ndarray], **configs: dict[str, Any]) -> Path:
    """A diffusers folder, with configurations by part where given."""
    there = names.in_layout(models.checkpoint(made), "diffusers")
    arrays = {key: models.array(entry) for key, entry in there.entries.items()}
    index: dict[str, Any] = {}
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        own = {k.removeprefix(f"{part}."): v for k, v in arrays.items() if k.startswith(f"{part}.")}
        if own:
            (path / part).mkdir(parents=True)
            stem = "model" if part.startswith("text") else "diffusion_pytorch_model"
            save_file(own, path / part / f"{stem}.safetensors")
            index[part] = ["diffusers", "Any"]
    for part, config in configs.items():
        (path / part).mkdir(exist_ok=True)
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        (path / part / name).write_text(json.dumps(config))
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def with_tokenizer(path: Path, size: int = VOCAB) -> Path:
    """A diffusers folder with a tokenizer of `size` tokens, which knows single characters only."""
    (path / "tokenizer").mkdir()
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    names = [c + end for end in ("", "</w>") for c in characters]
    vocab = {name: id for id, name in enumerate(names)}
    vocab |= {"<|startoftext|>": size - 2, "<|endoftext|>": size - 1}
    (path / "tokenizer" / "vocab.json").write_text(json.dumps(vocab))
    (path / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    return path
