"""The UNet of Stable Diffusion 1, 2 and XL: predicts the noise in a latent picture.

Papers: Rombach et al. 2022 (latent diffusion), Podell et al. 2023 (XL). Names are CompVis's
checkpoint keys, and which blocks there are is read off them, so one definition serves all versions.
Axes: B pictures, H and W latent pixels, C channels, S tokens of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine import Tensor
from engine.functional import gelu, layer_norm, linear, silu
from zoo.stable_diffusion.layers import Params, attend, conv, norm, pointwise, upsample

RES_EPS, TRANSFORMER_EPS = 1e-5, 1e-6


@dataclass(frozen=True)
class Config:
    """What the shapes of a checkpoint don't say: the number of attention heads, or their size."""

    heads: int | None = None  # SD 1 has 8 at every width
    head_size: int = 64

    def heads_of(self, channels: int) -> int:
        return self.heads or channels // self.head_size


def sinusoid(t: Tensor, size: int) -> Tensor:
    """(B, size): cosines and sines of t (B,) at size / 2 frequencies, from 1 down to 1/10000."""
    half = size // 2
    frequency = np.exp(-np.log(10000) * np.arange(half) / half).astype(np.float32)
    angle = t.unsqueeze(-1) * Tensor.from_numpy(frequency, device=t.device)
    return Tensor.cat(angle.cos(), angle.sin(), axis=-1)


def residual(p: Params, x: Tensor, time: Tensor) -> Tensor:
    """Two convolutions, between which the time comes in, beside a shortcut."""
    h = conv(p.in_layers[2], silu(norm(p.in_layers[0], x, RES_EPS)))
    h = h + linear(p.emb_layers[1], silu(time)).reshape(x.shape[0], 1, 1, -1)
    h = conv(p.out_layers[3], silu(norm(p.out_layers[0], h, RES_EPS)))
    return h + (conv(p.skip_connection, x) if "skip_connection" in p else x)


def feed_forward(p: Params, x: Tensor) -> Tensor:
    """GEGLU (Shazeer 2020)."""
    value, gate = pointwise(p.net[0].proj, x).split(*[p.net[2].weight.shape[1]] * 2, axis=-1)
    return linear(p.net[2], value * gelu(gate))


def cross(p: Params, x: Tensor, context: Tensor, heads: int) -> Tensor:
    """Attention of x (B, T, C) to a context (B, S, …)."""
    q, k, v = linear(p.to_q, x), linear(p.to_k, context), linear(p.to_v, context)
    return linear(p.to_out[0], attend(q, k, v, heads))


def transformer(p: Params, x: Tensor, context: Tensor, config: Config) -> Tensor:
    """Attention of all pixels to each other and to the prompt, (B, H, W, C)."""
    b, h, w, c = x.shape
    heads = config.heads_of(c)
    y = pointwise(p.proj_in, norm(p.norm, x, TRANSFORMER_EPS).reshape(b, h * w, c))
    for block in p.transformer_blocks:
        z = layer_norm(block.norm1, y)
        y = y + cross(block.attn1, z, z, heads)
        y = y + cross(block.attn2, layer_norm(block.norm2, y), context, heads)
        y = y + feed_forward(block.ff, layer_norm(block.norm3, y))
    return x + pointwise(p.proj_out, y).reshape(b, h, w, c)


def block(
    p: Params,
    x: Tensor,
    time: Tensor,
    context: Tensor,
    config: Config,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """One block: its layers one after another, each known by its keys.

    `size` is that of the result where it grows: halving may have rounded up on the way down.
    """
    for layer in p:
        if "in_layers" in layer:
            x = residual(layer, x, time)
        elif "transformer_blocks" in layer:
            x = transformer(layer, x, context, config)
        elif "op" in layer:
            x = conv(layer.op, x, stride=2)
        elif "conv" in layer:
            x = upsample(layer, x, size)
        else:
            x = conv(layer, x)
    return x


def unet(
    p: Params,
    config: Config,
    x: Tensor,
    t: Tensor,
    context: Tensor,
    pooled: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    """The noise (or v) in latents x (B, C, H, W) at times t (B,), for prompts (B, S, …).

    XL's also takes the pooled prompts (B, 1280) and the sizes (B, 6): original height and width,
    the crop's top and left, target height and width, in pixels.
    """
    x = x.permute(0, 2, 3, 1)  # (B, H, W, C)
    width = p.time_embed[0].weight.shape[1]
    time = linear(p.time_embed[2], silu(linear(p.time_embed[0], sinusoid(t, width))))
    if "label_emb" in p:
        wide = (p.label_emb[0][0].weight.shape[1] - pooled.shape[1]) // sizes.shape[1]
        given = sinusoid(sizes.reshape(-1), wide).reshape(x.shape[0], -1)
        given = Tensor.cat(pooled, given, axis=-1)
        time = time + linear(p.label_emb[0][2], silu(linear(p.label_emb[0][0], given)))
    kept = []
    for down in p.input_blocks:
        x = block(down, x, time, context, config)
        kept.append(x)
    x = block(p.middle_block, x, time, context, config)
    for up in p.output_blocks:
        x = Tensor.cat(x, kept.pop(), axis=-1)
        x = block(up, x, time, context, config, kept[-1].shape[1:3] if kept else None)
    return conv(p.out[2], silu(norm(p.out[0], x, RES_EPS))).permute(0, 3, 1, 2)
