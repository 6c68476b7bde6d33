"""What a picture is to be made with, checked before anything long is begun."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.errors import UsageError
from zoo.options import check as check_fields
from zoo.options import names_of, refuse_unknown
from zoo.stable_diffusion import samplers, schedules
from zoo.stable_diffusion.noise import MAX_SEED, RNGS

UNIT = 8  # pixels that a latent pixel stands for
SMALLEST, LARGEST = 64, 8192  # pixels each way
MOST_PICTURES = 1000
DEFAULT_SAMPLER = "DPM++ 2M"
IMG2IMG_STRENGTH, INPAINT_STRENGTH = 0.75, 1.0


@dataclass(frozen=True)
class Settings:
    """Options of `StableDiffusion.txt2img`, `img2img` and `inpaint`; None is the model's own.

    steps: calls of the UNet. scheduler: noise levels, one of schedules.SIGMAS. seed: of the first
    picture, the next has the next; None draws one. width, height: pixels, multiples of 8.
    clip_skip: 1 is the text encoder's last layer, 2 the one before. guidance_rescale: 0 to 1,
    Lin et al. 2023. eta: how much noise is made anew. rng: one of noise.RNGS. strength: 0 to 1, how
    much of a given picture is made anew. hires_scale: above 1, a second pass at so many times the
    size, of which hires_strength is the strength and hires_steps the steps (None: as many).
    tiled: the autoencoder's work in tiles; None where memory is short.
    """

    prompt: str
    negative_prompt: str = ""
    steps: int = 20
    sampler: str | None = None
    scheduler: str | None = None
    cfg_scale: float = 7.0
    seed: int | None = None
    width: int | None = None
    height: int | None = None
    batch: int = 1
    clip_skip: int | None = None
    guidance_rescale: float = 0.0
    eta: float | None = None
    rng: str = "counter"
    strength: float | None = None
    hires_scale: float = 1.0
    hires_strength: float = 0.7
    hires_steps: int | None = None
    tiled: bool | None = None

    @property
    def hires_size(self) -> tuple[int, int] | None:
        """Width and height of the second pass, if there is one; for settings with a size."""
        if self.hires_scale == 1:
            return None
        across, down = (round(n * self.hires_scale / UNIT) for n in (self.width, self.height))
        return across * UNIT, down * UNIT


def settings(prompt: str, options: Mapping[str, Any]) -> Settings:
    """Checked settings of a prompt and options by name; UsageError for what can't be."""
    refuse_unknown(options, names_of(Settings), "txt2img, img2img or inpaint")
    made = Settings(prompt, **options)
    check(made)
    return made


# Lowest and highest value of each number.
_SPANS = {
    "steps": (1, 1000),
    "cfg_scale": (0, 1000),
    "batch": (1, MOST_PICTURES),
    "clip_skip": (1, 100),
    "guidance_rescale": (0, 1),
    "eta": (0, 1),
    "strength": (0, 1),
    "hires_scale": (1, 8),
    "hires_strength": (0, 1),
    "hires_steps": (1, 1000),
    "seed": (0, MAX_SEED),
    "width": (SMALLEST, LARGEST),
    "height": (SMALLEST, LARGEST),
}


def check(given: Settings) -> None:
    """UsageError, in one line, for settings that no model could meet."""
    check_fields(given, _SPANS)
    for name in ("width", "height"):
        value = getattr(given, name)
        if value and value % UNIT:
            near = f"{value // UNIT * UNIT} and {value // UNIT * UNIT + UNIT}"
            raise UsageError(f"{name} must be a multiple of {UNIT}, got {value}; {near} are near")
    if given.rng not in RNGS:
        raise UsageError(f"unknown rng {given.rng!r}; there are {', '.join(RNGS)}")
    if given.scheduler is not None and given.scheduler not in schedules.SIGMAS:
        known = ", ".join(schedules.SIGMAS)
        raise UsageError(f"unknown scheduler {given.scheduler!r}; there are {known}")
    if given.sampler is not None:
        options = schedules.Options(sigmas=given.scheduler or "default")
        for steps in {given.steps, given.hires_steps or given.steps}:
            samplers.make(given.sampler, steps, options)
    if given.width and given.height and max(given.hires_size or (0,)) > LARGEST:
        raise UsageError(f"hires_scale makes more than {LARGEST} pixels of a side")


def draw_seed() -> int:
    """A new seed, short enough to be typed."""
    return secrets.randbelow(2**32)
