"""A model of no weights, whose networks are smooth functions of all that they are given."""

from __future__ import annotations

import numpy as np

from zoo.stable_diffusion import tokenizer, unet
from zoo.stable_diffusion.networks import Kind
from zoo.stable_diffusion.pipeline import StableDiffusion

DIM = 8


class FakeNetworks:
    """What the UNet and the text encoder were asked is kept, call by call."""

    vocabulary = 49408

    def __init__(self, version: str = "1", channels: int = 4, **scheduler: object) -> None:
        self.kind = Kind(version, "epsilon", 0.18215, 64, channels, unet.Config(heads=8), scheduler)
        self.dims = (DIM, DIM) if version == "xl" else (DIM,)
        self.asked: list[tuple] = []
        self.texts: list[tuple] = []

    def encode_text(self, ids, clip_skip=None, extra=()):
        ids = np.asarray(ids)
        self.texts.append((ids, clip_skip, extra))
        states = np.sin(ids[..., None] * np.arange(1, sum(self.dims) + 1) / 7 + (clip_skip or 0))
        pooled = states[:, 0] + ids.sum(axis=1, keepdims=True) / 1e6
        states = states.astype(np.float32)
        return states, pooled.astype(np.float32) if self.kind.version == "xl" else None

    def unet(self, latent, time, context, pooled=None, sizes=None):
        assert latent.dtype == np.float32 and latent.shape[1] == self.kind.channels
        self.asked.append((latent, time, context, pooled, sizes))
        place = np.linspace(-1, 1, context.shape[1])[:, None]
        told = (context * place).mean(axis=(1, 2), dtype=np.float64)[:, None, None, None]
        beside = latent[:, 4:].mean(axis=1, keepdims=True) if latent.shape[1] > 4 else 0
        out = np.tanh(latent[:, :4] * 0.7 + 5 * told + 0.1 * beside + 0.3 * np.cos(time / 137))
        return out.astype(np.float32)

    def decode(self, latent, tiled=None, progress=None):
        return np.repeat(np.repeat(latent[:, :3], 8, axis=2), 8, axis=3)

    def encode(self, image, noise=None, tiled=None, progress=None):
        b, _, h, w = image.shape
        mean = image.reshape(b, 3, h // 8, 8, w // 8, 8).mean(axis=(3, 5))
        mean = np.concatenate([mean, mean[:, :1]], axis=1).astype(np.float32)
        return mean if noise is None else mean + np.float32(0.01) * noise


def fake(version: str = "1", channels: int = 4, tiny=None, **scheduler: object) -> StableDiffusion:
    """A model for pictures of 64 x 64."""
    networks = FakeNetworks(version, channels, **scheduler)
    return StableDiffusion(networks, tokenizer.default(), tiny=tiny)
