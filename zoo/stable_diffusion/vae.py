"""The autoencoder between pictures and latents, 8 times smaller each way.

Paper: Rombach et al. 2022. Names are CompVis's checkpoint keys. Axes: B, H, W, C. Both halves are
in two parts, of which the one with the large pictures sees far only through its norms: it can
run on tiles if `norm` is one that knows the whole picture's mean and variance.
"""

from __future__ import annotations

from collections.abc import Callable

from engine import Tensor
from engine.functional import silu
from zoo.stable_diffusion.layers import Params, attend, conv, norm, pointwise, upsample

EPS = 1e-6
Norm = Callable[[Params, Tensor, float], Tensor]


def residual(p: Params, x: Tensor, norm: Norm = norm) -> Tensor:
    """Two convolutions beside a shortcut."""
    h = conv(p.conv1, silu(norm(p.norm1, x, EPS)))
    h = conv(p.conv2, silu(norm(p.norm2, h, EPS)))
    return h + (conv(p.nin_shortcut, x) if "nin_shortcut" in p else x)


def attention(p: Params, x: Tensor) -> Tensor:
    """Attention of all pixels to each other, in one head."""
    b, h, w, c = x.shape
    y = norm(p.norm, x, EPS).reshape(b, h * w, c)
    y = attend(*(pointwise(p[name], y) for name in "qkv"), heads=1)
    return x + pointwise(p.proj_out, y).reshape(b, h, w, c)


def middle(p: Params, x: Tensor) -> Tensor:
    """The deepest level."""
    return residual(p.block_2, attention(p.attn_1, residual(p.block_1, x)))


def finish(p: Params, x: Tensor, norm: Norm = norm) -> Tensor:
    """Norm and last convolution of either half."""
    return conv(p.conv_out, silu(norm(p.norm_out, x, EPS)))


def shrink(p: Params, x: Tensor, norm: Norm = norm) -> Tensor:
    """Pictures (B, 3, H, W) from -1 to 1 -> what the encoder sees in them, (B, C, H/8, W/8)."""
    e = p.encoder
    x = conv(e.conv_in, x.permute(0, 2, 3, 1))
    for level in e.down:
        if "downsample" not in level:
            break
        for layer in level.block:
            x = residual(layer, x, norm)
        # zeros below and to the right only
        x = conv(level.downsample.conv, x, stride=2, padding=((0, 1), (0, 1)))
    return x.permute(0, 3, 1, 2)


def conclude(p: Params, x: Tensor) -> Tensor:
    """The encoder's rest: means and log-variances of latents, (B, 8, H/8, W/8)."""
    e, x = p.encoder, x.permute(0, 2, 3, 1)
    for layer in e.down[-1].block:
        x = residual(layer, x)
    return conv(p.quant_conv, finish(e, middle(e.mid, x))).permute(0, 3, 1, 2)


def encode(p: Params, x: Tensor) -> Tensor:
    """Pictures (B, 3, H, W) from -1 to 1 -> means and log-variances of latents (B, 8, H/8, W/8)."""
    return conclude(p, shrink(p, x))


def sketch(p: Params, z: Tensor) -> Tensor:
    """Latents (B, 4, H, W), not scaled -> what is to be seen where, (B, C, H, W)."""
    d = p.decoder
    x = conv(d.conv_in, conv(p.post_quant_conv, z.permute(0, 2, 3, 1)))
    x = middle(d.mid, x)
    for layer in d.up[-1].block:
        x = residual(layer, x)
    return x.permute(0, 3, 1, 2)


def paint(p: Params, x: Tensor, norm: Norm = norm) -> Tensor:
    """The decoder's rest: pictures (B, 3, 8 H, 8 W), about -1 to 1."""
    d = p.decoder
    x = upsample(d.up[-1].upsample, x.permute(0, 2, 3, 1))
    for level in reversed(list(d.up)[:-1]):
        for layer in level.block:
            x = residual(layer, x, norm)
        if "upsample" in level:
            x = upsample(level.upsample, x)
    return finish(d, x, norm).permute(0, 3, 1, 2)


def decode(p: Params, z: Tensor) -> Tensor:
    """Latents (B, 4, H, W), not scaled -> pictures (B, 3, 8 H, 8 W), about -1 to 1."""
    return paint(p, sketch(p, z))
