"""Pictures as numbers: PIL's images to arrays (1, C, H, W) and back, sizes, previews, grids."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps

from zoo.stable_diffusion.settings import LARGEST, SMALLEST, UNIT

# How a latent looks, roughly: red, green and blue for each of its channels and what they start at.
# SD 1 and 2: keturn, on Hugging Face's forum, 2022; XL: T. A. Vass, "Explaining the SDXL latent
# space", 2024.
_LOOKS = {
    "xl": (
        np.array([[60, 60, 60], [-60, -5, 10], [25, 15, -5], [-70, -50, -35]]) / 127.5,
        np.array([150, 140, 130]) / 127.5 - 1,
    )
}
_LOOK = (
    np.array(
        [[0.298, 0.207, 0.208], [0.187, 0.286, 0.173], [-0.158, 0.189, 0.264],
         [-0.184, -0.271, -0.473]]
    ),
    np.zeros(3),
)  # fmt: skip


def upright(image: Image.Image) -> Image.Image:
    """The picture in RGB as it is meant to be seen: turned, and what shows through is white."""
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def fitting(image: Image.Image, trained: int) -> tuple[int, int]:
    """Width and height to work at: the picture's own, in whole latent pixels.

    A picture of more than twice as many pixels as the model was trained with is made smaller.
    """
    shrink = min(1.0, math.sqrt(2 * trained**2 / (image.width * image.height)))
    sides = (int(side * shrink) // UNIT * UNIT for side in image.size)
    width, height = (min(max(side, SMALLEST), LARGEST) for side in sides)
    return width, height


def of_image(image: Image.Image, width: int, height: int) -> np.ndarray:
    """(1, 3, H, W) from -1 to 1."""
    image = upright(image)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(image, np.float32) / np.float32(127.5) - 1
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def of_mask(mask: Image.Image, width: int, height: int) -> np.ndarray:
    """(1, 1, H, W): True where it is white, which is to be made anew."""
    mask = ImageOps.grayscale(upright(mask))
    if mask.size != (width, height):
        mask = mask.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(mask)[None, None] >= 128


def shrunk(mask: np.ndarray) -> np.ndarray:
    """A mask of pixels as one of latent pixels: those that it touches anywhere."""
    b, c, h, w = mask.shape
    return mask.reshape(b, c, h // UNIT, UNIT, w // UNIT, UNIT).any(axis=(3, 5))


def to_image(pixels: np.ndarray) -> Image.Image:
    """The picture of an array (1, 3, H, W) from -1 to 1; what is beyond is cut off."""
    bright = np.clip(pixels[0].astype(np.float64) / 2 + 0.5, 0, 1)
    return Image.fromarray(np.rint(bright * 255).astype(np.uint8).transpose(1, 2, 0))


def resized(latent: np.ndarray, width: int, height: int) -> np.ndarray:
    """A latent (1, C, H, W) at another size, in latent pixels; between the old ones by lines."""
    channels = [
        Image.fromarray(channel).resize((width, height), Image.Resampling.BILINEAR)
        for channel in latent[0].astype(np.float32)
    ]
    return np.stack([np.asarray(channel) for channel in channels])[None]


def rough(latent: np.ndarray, version: str) -> np.ndarray:
    """About what a latent (1, 4, H, W) will look like, (1, 3, 8 H, 8 W), without a network."""
    factors, start = _LOOKS.get(version, _LOOK)
    small = np.einsum("bchw,cr->brhw", latent, factors) + start[:, None, None]
    return resized(small, small.shape[3] * UNIT, small.shape[2] * UNIT)


def grid(images: Sequence[Image.Image]) -> Image.Image:
    """All of them side by side, in about as many rows as columns."""
    columns = math.ceil(math.sqrt(len(images)))
    width, height = (max(side) for side in zip(*(image.size for image in images)))
    whole = Image.new("RGB", (columns * width, -(-len(images) // columns) * height), "black")
    for i, image in enumerate(images):
        whole.paste(image, (i % columns * width, i // columns * height))
    return whole
