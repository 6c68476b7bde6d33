"""What the UNet is told beside the latent: prompts, sizes, and what an inpainting model sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zoo.errors import UserError
from zoo.stable_diffusion import prompts
from zoo.stable_diffusion.networks import Networks
from zoo.stable_diffusion.tokenizer import LENGTH, Tokenizer

Extra = Sequence[np.ndarray]  # vectors of textual inversion, for each text encoder


def encode(
    networks: Networks,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    clip_skip: int | None = None,
    extra: Extra = (),
) -> tuple[np.ndarray, np.ndarray | None]:
    """States (B, n * 77, C) of prompts with weights, and what XL takes of them as a whole (B, C2).

    All get as many chunks of 77 tokens as the longest needs.
    """
    cut = prompts.level(tokenizer, *(prompts.chunks(tokenizer, text) for text in texts))
    ids = [[id for chunk in chunks for id in chunk.ids] for chunks in cut]
    states, pooled = networks.encode_text(ids, clip_skip, extra)
    ends = np.cumsum((0, *networks.dims))
    for b, chunks in enumerate(cut):
        for n, chunk in enumerate(chunks):
            rows = slice(n * LENGTH, (n + 1) * LENGTH)
            for low, high in zip(ends, ends[1:]):  # each text encoder's mean is kept
                part = states[b, rows, low:high]
                states[b, rows, low:high] = prompts.emphasise(part, chunk.weights)
    return states, pooled


@dataclass(frozen=True)
class Guide:
    """The UNet as samplers call it: a latent (1, 4, H, W) and a time -> noise or v.

    context (N, S, C), pooled (N, C2) and sizes (N, 6): N is 1, or 2 for classifier-free guidance
    (Ho and Salimans 2022), whose first half is the negative prompt's. `beside` (1, 5, H, W) is for
    inpainting models: the mask, and the latent of what it leaves. `called` is told of each call.
    """

    networks: Networks
    context: np.ndarray
    pooled: np.ndarray | None
    scale: float
    rescale: float
    called: Callable[[], None]
    sizes: np.ndarray | None = None
    beside: np.ndarray | None = None

    def of_size(self, width: int, height: int, beside: np.ndarray | None) -> Guide:
        """The guide of pictures of a size, in pixels."""
        # Original size, where the crop begins, size aimed at; each height first.
        sizes = np.tile(np.float32([height, width, 0, 0, height, width]), (len(self.context), 1))
        return replace(self, sizes=sizes, beside=beside)

    def __call__(self, x: np.ndarray, time: float) -> np.ndarray:
        given = x if self.beside is None else np.concatenate([x, self.beside], axis=1)
        given = np.repeat(given, len(self.context), axis=0)
        out = self.networks.unet(given, time, self.context, self.pooled, self.sizes)
        self.called()
        if not np.isfinite(out).all():
            raise UserError("the UNet's result isn't finite; --dtype f32 may help")
        if len(out) == 1:
            return out
        return guided(out[:1], out[1:], self.scale, self.rescale)


def guided(without: np.ndarray, wanted: np.ndarray, scale: float, rescale: float) -> np.ndarray:
    """Past what is wanted, away from what isn't; `rescale` keeps that much of the first's spread.

    Rescaling: Lin et al. 2023, section 3.4.
    """
    out = without + np.float32(scale) * (wanted - without)
    spread = out.std()
    if rescale and spread:
        out = out * np.float32(rescale * wanted.std() / spread + (1 - rescale))
    return out


def conditioning(
    networks: Networks,
    tokenizer: Tokenizer,
    extra: Extra,
    prompt: str,
    negative_prompt: str,
    cfg_scale: float,
    clip_skip: int | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """States and pooled prompts, the negative one first; without guidance (1) only the positive.

    XL was trained with zeros, not with an empty text, where there is no negative prompt.
    """
    if cfg_scale == 1:
        return encode(networks, tokenizer, [prompt], clip_skip, extra)
    states, pooled = encode(networks, tokenizer, [negative_prompt, prompt], clip_skip, extra)
    if pooled is not None and not negative_prompt:
        states[0] = pooled[0] = 0
    return states, pooled
