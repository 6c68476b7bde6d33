"""TAESD (madebyollin): a tiny decoder of latents, good enough for previews and very quick.

Its layers are numbered; a number without weights is a doubling of the picture. Files have its own
names (`1.weight`, …) or those of diffusers's AutoencoderTiny (`decoder.layers.0.weight`, …).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import numpy as np

import weights
from engine import Tensor, get_device, program
from weights import Params, WeightError
from zoo.errors import UsageError
from zoo.stable_diffusion.layers import conv, doubled

_KEY = re.compile(r"(?:decoder\.layers\.|decoder\.)?(\d{1,2})\.(?:conv\.[024]\.)?(?:weight|bias)")
_LARGE = 3.0  # latents fade out beyond


def decode(p: Params, z: Tensor) -> Tensor:
    """Latents in the UNet's scale (B, 4, H, W) -> pictures (B, 3, 8 H, 8 W), about -1 to 1."""
    numbers = sorted(int(n) for n in dir(p) if n.isdigit())
    first, last = numbers[0], numbers[-1]
    x = (z / _LARGE).tanh() * _LARGE
    x = conv(p[first], x.permute(0, 2, 3, 1)).relu()
    for n in range(first + 2, last + 1):
        if n not in numbers:
            x = doubled(x)
        elif "conv" in p[n]:
            layers = p[n].conv
            h = conv(layers[2], conv(layers[0], x).relu()).relu()
            x = (conv(layers[4], h) + x).relu()
        else:
            x = conv(p[n], x)
    return (x * 2 - 1).permute(0, 3, 1, 2)


def load(
    path: str | os.PathLike[str], device: str | None = None
) -> Callable[[np.ndarray], np.ndarray]:
    """A function of a file: latents (B, 4, H, W) -> pictures (B, 3, 8 H, 8 W), NumPy both.

    WeightError for a file that is no TAESD decoder for 4 channels.
    """
    get_device(device)
    file = weights.load(weights.resolve(path), device)
    own = {key: match for key in file if (match := _KEY.fullmatch(key))}
    names = {key.removeprefix("decoder.").removeprefix("layers."): key for key in own}
    first = min((int(match[1]) for match in own.values()), default=0)
    shape = file.info(names[f"{first}.weight"]).shape if f"{first}.weight" in names else None
    if shape is None or len(shape) != 4 or shape[1] != 4:
        expected = "a TAESD decoder of latents with 4 channels"
        raise WeightError("no TAESD decoder", file=file.path, expected=expected, got=shape)
    width = shape[0]
    _check(file, names, first, width)
    p = Params({name: file[key] for name, key in names.items()}, file.path)
    run = program(lambda z: decode(p, z), precision="auto")

    def preview(latent: np.ndarray) -> np.ndarray:
        if latent.ndim != 4 or latent.shape[1] != 4:
            raise UsageError(f"latents have the shape (B, 4, H, W), got {latent.shape}")
        z = np.ascontiguousarray(latent, np.float32)
        return np.array(run(Tensor.from_numpy(z, device=device)).numpy())

    return preview


def _check(file: weights.Checkpoint, names: dict[str, str], first: int, width: int) -> None:
    """That the layers are TAESD's: 3, 3, 3 and 1 blocks with doublings between."""
    expected: dict[str, tuple[int, ...]] = {}

    def layer(name: str, outs: int, ins: int, bias: bool = True) -> None:
        expected[f"{name}.weight"] = (outs, ins, 3, 3)
        if bias:
            expected[f"{name}.bias"] = (outs,)

    layer(f"{first}", width, 4)
    n = first + 2
    for blocks in (3, 3, 3, 1):
        for _ in range(blocks):
            for k in (0, 2, 4):
                layer(f"{n}.conv.{k}", width, width)
            n += 1
        if blocks == 3:
            layer(f"{n + 1}", width, width, bias=False)
            n += 2
    layer(f"{n}", 3, width)
    tensors = {name: file.entries[key] for name, key in names.items()}
    weights.check(weights.Checkpoint(file.path, file.format, {}, tensors), expected)
