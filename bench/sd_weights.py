"""Stable Diffusion of full size with random weights, as a CompVis single file in float16.

Nobody's weights are needed to measure speed, or to see whether two implementations agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.runtime.host import user_cache
from weights import Checkpoint, TensorInfo, safetensors_write
from weights.checkpoint import Entry
from weights.stored import Stored
from weights.whole import whole_file
from zoo.stable_diffusion import structure

# Widths of the UNet's levels and how many transformer blocks a layer has in each.
UNETS = {
    "1": ((320, 640, 1280, 1280), (1, 1, 1, 0), 1),
    "2": ((320, 640, 1280, 1280), (1, 1, 1, 0), 1),
    "xl": ((320, 640, 1280), (0, 2, 10), 10),
}
VAE = (128, 256, 512, 512)
# Channels, layers, inner channels of each text encoder.
TEXT = {"1": ((768, 12, 3072),), "2": ((1024, 24, 4096),)}
TEXT["xl"] = ((768, 12, 3072), (1280, 32, 5120))
VOCABULARY, POSITIONS = 49408, 77
_PIECE = 1 << 22  # values drawn at a time


def telling(version: str) -> dict[str, tuple[int, ...]]:
    """The few keys and shapes that tell all others of a version."""
    widths, depths, middle = UNETS[version]
    u, v = structure.UNET, structure.VAE
    keys: dict[str, tuple[int, ...]] = {
        f"{u}input_blocks.0.0.weight": (widths[0], 4, 3, 3),
        f"{u}input_blocks.{3 * len(widths) - 1}.0.in_layers.0.weight": (widths[-1],),
        f"{u}middle_block.1.transformer_blocks.{middle - 1}.norm1.weight": (widths[-1],),
        f"{u}out.2.weight": (4, widths[0], 3, 3),
        f"{v}post_quant_conv.weight": (4, 4, 1, 1),
    }
    for level, (wide, depth) in enumerate(zip(widths, depths)):
        block = f"{u}input_blocks.{1 + 3 * level}"
        keys[f"{block}.0.in_layers.2.weight"] = (wide,)
        if depth:
            keys[f"{block}.1.transformer_blocks.{depth - 1}.norm1.weight"] = (wide,)
    if version == "xl":
        keys[f"{u}label_emb.0.0.weight"] = (1280, 1280 + 6 * 256)
    for level, wide in enumerate(VAE):
        keys[f"{v}encoder.down.{level}.block.0.conv1.weight"] = (wide,)
    for (prefix, openclip), (dim, layers, inner) in zip(structure.TEXT[version], TEXT[version]):
        layer = "transformer.resblocks" if openclip else "encoder.layers"
        first = "mlp.c_fc" if openclip else "mlp.fc1"
        table = "token_embedding" if openclip else "embeddings.token_embedding"
        places = "positional_embedding" if openclip else "embeddings.position_embedding.weight"
        keys[f"{prefix}{table}.weight"] = (VOCABULARY, dim)
        keys[f"{prefix}{places}"] = (POSITIONS, dim)
        keys |= {f"{prefix}{layer}.{n}.{first}.weight": (inner,) for n in range(layers)}
        if openclip:
            keys[f"{prefix}text_projection"] = (dim, dim)
    return keys


def shapes(version: str) -> dict[str, tuple[int, ...]]:
    """Every key of a version's checkpoint -> its shape."""

    def nothing(*_: Any) -> Any:
        raise AssertionError("there is no data yet")

    keys = telling(version).items()
    entries = {key: Entry(TensorInfo(s, "F16", 0), nothing, nothing) for key, s in keys}
    skeleton = Checkpoint(Path(version), "safetensors", {}, entries)
    return structure.expected(skeleton, version)


def random_file(version: str, folder: Path | None = None) -> Path:
    """The file of a version, made where it isn't there yet; 2 to 7 GB. Default: in ZOO_CACHE."""
    folder = folder or user_cache() / "random"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"stable-diffusion-{version}-random.safetensors"
    if not path.exists():
        draw = np.random.default_rng(0)
        stored = [_stored(name, shape, draw) for name, shape in shapes(version).items()]
        with whole_file(path) as place:
            safetensors_write.write(place, stored, {"modelspec.prediction_type": "epsilon"})
    return path


def _stored(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> Stored:
    """Normal weights whose products keep the size of what goes in; norms around 1."""
    count = int(np.prod(shape))
    matrix = len(shape) > 1
    spread = np.float32(1 / np.sqrt(count // shape[0])) if matrix else np.float32(0.05)
    norm = not matrix and name.endswith("weight")
    info = TensorInfo(shape, "F16", 2 * count)
    return name, info, partial(_pieces, count, spread, float(norm), draw)


def _pieces(
    count: int, spread: np.float32, middle: float, draw: np.random.Generator
) -> Iterator[np.ndarray]:
    for at in range(0, count, _PIECE):
        values = draw.standard_normal(min(_PIECE, count - at), np.float32)
        yield (values * spread + np.float32(middle)).astype("<f2").view(np.uint8)
