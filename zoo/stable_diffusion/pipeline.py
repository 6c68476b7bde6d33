"""Pictures from text: prompts, noise, samplers and networks put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import weights
from weights import Checkpoint, WeightError
from zoo import cli
from zoo.errors import UsageError
from zoo.stable_diffusion import embeddings as inversion
from zoo.stable_diffusion import guidance, loading, pixels, samplers, taesd
from zoo.stable_diffusion import tokenizer as tokenizers
from zoo.stable_diffusion.lora import Lora
from zoo.stable_diffusion.making import Making, OnStep, passes
from zoo.stable_diffusion.networks import Networks
from zoo.stable_diffusion.noise import sources
from zoo.stable_diffusion.settings import (
    DEFAULT_SAMPLER,
    IMG2IMG_STRENGTH,
    INPAINT_STRENGTH,
    Settings,
    check,
    draw_seed,
    settings,
)
from zoo.stable_diffusion.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image


class StableDiffusion:
    """A model with its tokenizer. Latents are in the UNet's scale, pictures as arrays in -1..1.

    `extra` has the vectors of the tokenizer's further words, for each text encoder. `tiny` decodes
    previews, and with `tiny_only` the pictures too.
    """

    def __init__(
        self,
        networks: Networks,
        tokenizer: Tokenizer,
        extra: guidance.Extra = (),
        tiny: Callable[[np.ndarray], np.ndarray] | None = None,
        tiny_only: bool = False,
    ) -> None:
        self.networks, self.tokenizer, self.extra = networks, tokenizer, extra
        self.tiny, self.tiny_only = tiny, tiny_only
        self.kind = networks.kind

    # --- networks ----------------------------------------------------------------------------

    def encode_text(self, prompts: str | Sequence[str], clip_skip: int | None = None) -> np.ndarray:
        """What the UNet is told of prompts: (B, 77, dim), or a multiple of 77 for long ones."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return guidance.encode(self.networks, self.tokenizer, texts, clip_skip, self.extra)[0]

    def unet(
        self,
        latent: np.ndarray,
        timestep: float | np.ndarray,
        context: np.ndarray,
        pooled: np.ndarray | None = None,
        sizes: np.ndarray | None = None,
    ) -> np.ndarray:
        """The noise (or v) predicted in latents (B, C, H, W); see `Networks.unet`."""
        return self.networks.unet(np.asarray(latent), timestep, context, pooled, sizes)

    def decode(self, latent: np.ndarray, tiled: bool | None = None) -> np.ndarray:
        """Latents (B, 4, H, W) -> pictures (B, 3, 8 H, 8 W); see `Networks.decode`."""
        return self.networks.decode(np.asarray(latent), tiled)

    def encode(
        self, image: np.ndarray, noise: np.ndarray | None = None, tiled: bool | None = None
    ) -> np.ndarray:
        """Pictures (B, 3, H, W) -> latents (B, 4, H/8, W/8): the mean, with `noise` a sample."""
        return self.networks.encode(np.asarray(image), noise, tiled)

    def preview(self, latent: np.ndarray) -> Image.Image:
        """About what a finished latent (1, 4, H, W) looks like, quickly."""
        z = np.asarray(latent, np.float32)
        return pixels.to_image(self.tiny(z) if self.tiny else pixels.rough(z, self.kind.version))

    # --- pictures ----------------------------------------------------------------------------

    def txt2img(
        self, prompt: str, on_step: OnStep | None = None, **options: Any
    ) -> list[Image.Image]:
        """Pictures of a prompt; `options` are the fields of `Settings`."""
        return list(self.pictures(settings(prompt, options), on_step=on_step))

    def img2img(
        self, image: Image.Image, prompt: str, on_step: OnStep | None = None, **options: Any
    ) -> list[Image.Image]:
        """Pictures of a prompt that begin with a given one, `strength` of which is made anew."""
        return list(self.pictures(settings(prompt, options), image, on_step=on_step))

    def inpaint(
        self,
        image: Image.Image,
        mask: Image.Image,
        prompt: str,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> list[Image.Image]:
        """A given picture, made anew where the mask is white and left alone elsewhere."""
        return list(self.pictures(settings(prompt, options), image, mask, on_step))

    def complete(
        self, given: Settings, image: Image.Image | None = None, mask: Image.Image | None = None
    ) -> Settings:
        """The settings with what they leave to the model, or to chance; UsageError as `check`."""
        size = pixels.fitting(image, self.kind.size) if image else (self.kind.size,) * 2
        config = self.kind.scheduler
        strength = None if image is None else INPAINT_STRENGTH if mask else IMG2IMG_STRENGTH
        own = {
            "width": size[0],
            "height": size[1],
            "seed": draw_seed(),
            "strength": strength,
            # Of a model that was distilled for it no other sampler makes sense.
            "sampler": "LCM" if samplers.sampler_of(config) == "LCM" else DEFAULT_SAMPLER,
        }
        absent = {name: value for name, value in own.items() if getattr(given, name) is None}
        made = replace(given, **absent)
        check(made)
        if image is None and made.strength is not None:
            raise UsageError("strength is for img2img and inpaint; there is no picture to keep")
        if image is not None and made.hires_size:
            raise UsageError("hires_scale is for txt2img; img2img has the size that it is given")
        passes(self.kind, made)
        return made

    def pictures(
        self,
        given: Settings,
        image: Image.Image | None = None,
        mask: Image.Image | None = None,
        on_step: OnStep | None = None,
    ) -> Iterator[Image.Image]:
        """The pictures of a batch, one after another; each is what its seed alone would give."""
        chosen = self.complete(given, image, mask)
        told = chosen.prompt, chosen.negative_prompt, chosen.cfg_scale, chosen.clip_skip
        said = guidance.conditioning(self.networks, self.tokenizer, self.extra, *told)
        making = Making(self.networks, chosen, *said, image, mask, on_step)
        for source in sources(chosen.seed, chosen.batch, chosen.rng):
            latent = making.latent(source)
            quick = self.tiny if self.tiny_only else None
            made = quick(latent) if quick else self.decode(latent, chosen.tiled)
            yield pixels.to_image(making.outside_kept(made))

    def rehearse(self) -> None:
        """Run every network once at the size that the model was trained with."""
        self.txt2img("", steps=1, sampler="Euler", seed=0)


Path = str | os.PathLike


def load(
    name_or_path: Path = "stable-diffusion-emoji",
    device: str | None = None,
    dtype: str = "auto",
    tune: bool = False,
    *,
    loras: Sequence[tuple[Path, float]] = (),
    embeddings: Sequence[Path] = (),
    taesd_file: Path | None = None,
    taesd_preview_only: bool = False,
    prediction: str | None = None,
) -> StableDiffusion:
    """A model by registry or hub name, or by path: a diffusers folder or a single file.

    loras: files with the strength of each. embeddings: files of textual inversion, whose words
    prompts may use. taesd_file: a tiny decoder, for pictures and previews or for these only.
    prediction: "epsilon" or "v", for single files that don't say. `tune` looks for faster kernels
    on this device, for a minute or two, which later loads use without it. WeightError for a file
    that can't be used, DeviceError without the device, UsageError for a wrong option.
    """
    # What is small is looked at first: a model may take long to fetch.
    for path, strength in loras:
        Lora.load(path, strength)
    files = [weights.resolve(path) for path in embeddings]
    for file in files:
        weights.load(file)
    tiny = None if taesd_file is None else taesd.load(weights.resolve(taesd_file), device)
    networks, checkpoint = loading.load(name_or_path, device, dtype, loras, prediction, cli.note)
    tokenizer = _tokenizer_of(checkpoint, networks.vocabulary)
    words = [word for file in files for word in inversion.load(file, networks.dims)]
    ids: dict[str, range] = {}
    free = networks.vocabulary
    for word in words:
        ids[word.word] = range(free, free := free + len(word))
    extra = [np.concatenate(vectors) for vectors in zip(*(word.vectors for word in words))]
    tokenizer = tokenizer.with_words(ids)
    model = StableDiffusion(networks, tokenizer, extra, tiny, not taesd_preview_only)
    if tune:
        with cli.tuning(device):
            model.rehearse()
    return model


def _tokenizer_of(checkpoint: Checkpoint, vocabulary: int) -> Tokenizer:
    """The tokenizer in a diffusers folder, or CLIP's own for a single file."""
    folder = checkpoint.path / "tokenizer"
    made = tokenizers.from_folder(folder) if folder.is_dir() else tokenizers.default()
    if made.end != vocabulary - 1:
        problem = "the tokenizer is not the text encoder's"
        raise WeightError(
            problem, file=checkpoint.path, expected=vocabulary, got=f"{made.end + 1} tokens"
        )
    return made
