"""Stable Diffusion in both layouts, spelled without our tables, of the versions' real structure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

VERSIONS = ("1", "2", "xl", "refiner")
LAYERS, DEPTH = 2, 2  # of a text encoder, of the transformers: any number goes the same way

# What is in a block, ours and theirs; `+` is a convolution, `1` a 1x1 one, `-` a vector.
UNET_RESNET = """
in_layers.0- norm1-
in_layers.2+ conv1+
emb_layers.1 time_emb_proj
out_layers.0- norm2-
out_layers.3+ conv2+
skip_connection1 conv_shortcut1
"""
VAE_RESNET = """
norm1- norm1-
conv1+ conv1+
norm2- norm2-
conv2+ conv2+
nin_shortcut1 conv_shortcut1
"""
VAE_ATTENTION = """
norm- group_norm-
q1 to_q
k1 to_k
v1 to_v
proj_out1 to_out.0
"""
TRANSFORMER = ("attn1.to_out.0", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2")
TRANSFORMER_NO_BIAS = tuple(f"attn{k}.to_{x}.weight" for k in (1, 2) for x in "qkv")
CLIP_LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
OPENCLIP = {
    "self_attn.out_proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    "layer_norm1": "ln_1", "layer_norm2": "ln_2",
}  # fmt: skip
SHAPES = {"+": (4, 4, 3, 3), "1": (4, 4, 1, 1), "-": (4,), "": (4, 4)}


def blocks(section: str) -> list[tuple[str, str]]:
    """The pairs of one section of the data file."""
    text = (Path(__file__).parent / "data" / "sd_blocks.txt").read_text("utf-8")
    lines = text.split(f"## {section}\n")[1].split("##")[0].split("\n")
    return [tuple(line.split()) for line in lines if line]


class Model:
    """The same random tensors under both layouts' names."""

    def __init__(self, version: str) -> None:
        self.compvis: dict[str, np.ndarray] = {}
        self.diffusers: dict[str, np.ndarray] = {}
        self.draw = np.random.default_rng(0)
        linear = version != "1"
        for ours, theirs in blocks("1" if version == "2" else version):
            self.block(f"model.diffusion_model.{ours}", f"unet.{theirs}", linear)
        for ours, theirs in blocks("vae"):
            self.block(f"first_stage_model.{ours}", f"vae.{theirs}", linear)
        if version == "1":
            self.clip("cond_stage_model.transformer", "text_encoder")
        if version == "2":
            self.openclip("cond_stage_model.model", "text_encoder")
        if version == "xl":
            self.clip("conditioner.embedders.0.transformer", "text_encoder")
            self.openclip("conditioner.embedders.1.model", "text_encoder_2")
        if version == "refiner":
            self.openclip("conditioner.embedders.0.model", "text_encoder_2")

    def put(self, ours: str, theirs: str, shape: tuple[int, ...], there=None) -> None:
        value = self.draw.normal(size=shape).astype("<f4")
        self.compvis[ours] = value
        self.diffusers[theirs] = value if there is None else np.ascontiguousarray(there(value))

    def both(self, ours: str, theirs: str, kind: str = "", there=None) -> None:
        """A weight of that kind, and a bias."""
        self.put(f"{ours}.weight", f"{theirs}.weight", SHAPES[kind], there)
        self.put(f"{ours}.bias", f"{theirs}.bias", (4,))

    def block(self, ours: str, theirs: str, linear: bool) -> None:
        vae = theirs.startswith("vae.")
        if ".resnets." in theirs:
            self.layers(ours, theirs, VAE_RESNET if vae else UNET_RESNET)
        elif ".attentions." in theirs and vae:
            self.layers(ours, theirs, VAE_ATTENTION)
        elif ".attentions." in theirs:
            self.transformer(ours, theirs, "" if linear else "1")
        else:
            self.both(ours, theirs, "-" if "norm" in theirs else "" if "linear" in theirs else "+")

    def layers(self, ours: str, theirs: str, table: str) -> None:
        for a, b in (line.split() for line in table.split("\n") if line):
            kind = a[-1] if a[-1] in SHAPES and not a.endswith(".1") else ""
            turned = kind == "1" and b[-1] != "1"  # a linear layer there
            a, b = a.removesuffix(kind), b.removesuffix(kind)
            self.both(f"{ours}.{a}", f"{theirs}.{b}", kind, (lambda w: w[..., 0, 0]) if turned else
                      None)  # fmt: skip

    def transformer(self, ours: str, theirs: str, projection: str) -> None:
        self.both(f"{ours}.norm", f"{theirs}.norm", "-")
        for name in ("proj_in", "proj_out"):
            self.both(f"{ours}.{name}", f"{theirs}.{name}", projection)
        for n in range(DEPTH):
            here, there = f"{ours}.transformer_blocks.{n}", f"{theirs}.transformer_blocks.{n}"
            for name in TRANSFORMER:
                self.both(f"{here}.{name}", f"{there}.{name}")
            for name in TRANSFORMER_NO_BIAS:
                self.put(f"{here}.{name}", f"{there}.{name}", (4, 4))
            for k in (1, 2, 3):
                self.both(f"{here}.norm{k}", f"{there}.norm{k}", "-")

    def clip(self, ours: str, theirs: str) -> None:
        for name, kind in clip_names():
            here, there = f"{ours}.text_model.{name}", f"{theirs}.text_model.{name}"
            if name.endswith("weight"):
                self.put(here, there, (5, 4))
            else:
                self.both(here, there, kind)

    def openclip(self, ours: str, theirs: str) -> None:
        text = f"{theirs}.text_model"
        table = f"{text}.embeddings"
        self.put(f"{ours}.token_embedding.weight", f"{table}.token_embedding.weight", (5, 4))
        self.put(f"{ours}.positional_embedding", f"{table}.position_embedding.weight", (5, 4))
        self.put(
            f"{ours}.text_projection", f"{theirs}.text_projection.weight", (4, 3), np.transpose
        )
        self.both(f"{ours}.ln_final", f"{text}.final_layer_norm", "-")
        for n in range(LAYERS):
            here, there = f"{ours}.transformer.resblocks.{n}", f"{text}.encoder.layers.{n}"
            for a, b in OPENCLIP.items():
                self.both(f"{here}.{b}", f"{there}.{a}", "-" if "norm" in a else "")
            for kind, shape in (("weight", (12, 4)), ("bias", (12,))):
                whole = self.draw.normal(size=shape).astype("<f4")
                self.compvis[f"{here}.attn.in_proj_{kind}"] = whole
                for letter, part in zip("qkv", np.split(whole, 3), strict=True):
                    self.diffusers[f"{there}.self_attn.{letter}_proj.{kind}"] = part


def clip_names() -> Iterator[tuple[str, str]]:
    """(name, kind) of a CLIPTextModel; a name with its own ending is a single tensor."""
    yield from (("embeddings.token_embedding.weight", ""), ("final_layer_norm", "-"))
    yield "embeddings.position_embedding.weight", ""
    for n in range(LAYERS):
        for name in (*CLIP_LINEAR, "mlp.fc1", "mlp.fc2"):
            yield f"encoder.layers.{n}.{name}", ""
        for k in (1, 2):
            yield f"encoder.layers.{n}.layer_norm{k}", "-"
