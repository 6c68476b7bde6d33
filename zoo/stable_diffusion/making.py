"""How the latents of a batch are made: from noise, or from a picture with or without a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from zoo.stable_diffusion import pixels, samplers, schedules
from zoo.stable_diffusion.guidance import Guide
from zoo.stable_diffusion.networks import Kind, Networks
from zoo.stable_diffusion.noise import Noise
from zoo.stable_diffusion.schedules import Schedule
from zoo.stable_diffusion.settings import UNIT, Settings

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Step:
    """How far it is: `done` of `total` calls of the UNet, at picture `index` of a batch.

    latent (1, 4, H, W) is what the sampler goes on from, at noise level sigma: x0 + sigma * noise.
    picture is the finished latent that it leads to so far, in the UNet's scale.
    """

    done: int
    total: int
    index: int
    sigma: float
    latent: np.ndarray
    picture: np.ndarray


OnStep = Callable[[Step], None]


def noise_options(kind: Kind, sigmas: str | None = None) -> schedules.Options:
    """How a model was trained: as its folder says, or else as its version was."""
    if kind.scheduler:
        options = schedules.read_config(kind.scheduler, "scheduler_config.json")
    else:  # XL's folder says that
        options = schedules.Options(spacing="leading" if kind.version == "xl" else None)
    prediction = "v_prediction" if kind.prediction == "v" else "epsilon"
    return replace(options, prediction=prediction, sigmas=sigmas or options.sigmas)


def passes(kind: Kind, chosen: Settings) -> list[Schedule]:
    """The schedule of complete settings and, if there is one, that of the pass at a larger size.

    UsageError for a sampler or steps that there is none for.
    """
    options = noise_options(kind, chosen.scheduler)
    told = [(chosen.steps, 1.0 if chosen.strength is None else chosen.strength)]
    if chosen.hires_size:
        told.append((chosen.hires_steps or chosen.steps, chosen.hires_strength))
    return [samplers.make(chosen.sampler, steps, options, share) for steps, share in told]


def calls(kind: Kind, chosen: Settings) -> int:
    """How often the UNet is called for the pictures of complete settings."""
    return chosen.batch * sum(schedule.calls for schedule in passes(kind, chosen))


class Making:
    """The pictures of one call, one by one: what they share, and how many calls are done.

    context and pooled as in `Guide`; `chosen` are complete settings.
    """

    def __init__(
        self,
        networks: Networks,
        chosen: Settings,
        context: np.ndarray,
        pooled: np.ndarray | None = None,
        image: Image.Image | None = None,
        mask: Image.Image | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.networks, self.chosen, self.on_step = networks, chosen, on_step
        size = chosen.width, chosen.height
        self.image = None if image is None else pixels.of_image(image, *size)
        self.hole = None if mask is None else pixels.of_mask(mask, *size)
        self.schedule, *self.second = passes(networks.kind, chosen)
        rescale = chosen.guidance_rescale
        self.guide = Guide(networks, context, pooled, chosen.cfg_scale, rescale, self._called)
        self.index, self.done, self.total = -1, 0, calls(networks.kind, chosen)

    def _called(self) -> None:
        self.done += 1

    def latent(self, source: Noise) -> np.ndarray:
        """The finished latent (1, 4, H, W) of the next picture."""
        self.index += 1
        width, height = self.chosen.width, self.chosen.height
        shape = (1, 4, height // UNIT, width // UNIT)
        blends = self.hole is not None and not self.networks.kind.inpainting
        # A mask and full strength: nothing of what is under the mask is kept.
        anew = self.image is None or (self.hole is not None and self.chosen.strength == 1)
        # What is drawn first, and in which order, is diffusers's: --rng torch repeats it.
        known = None if anew and not blends else self._encoded(self.image, source)
        noise = source.normal(shape)
        if blends:  # diffusers encodes what is around the mask too, and then doesn't use it
            source.normal(shape, "encode")
        guide = self.guide.of_size(width, height, self._beside(shape, source))
        if anew:
            x = noise * self.schedule.first
        else:
            x = schedules.add_noise(known, noise, float(self.schedule.sigmas[0]))
        around = (pixels.shrunk(self.hole), known, noise) if blends else None
        out = self._sampled(guide, x, self.schedule, source, around)
        for schedule in self.second:
            out = self._larger(out, schedule, source)
        return out

    def _larger(self, small: np.ndarray, schedule: Schedule, source: Noise) -> np.ndarray:
        """A second pass at a larger size, which begins with the first one's latent."""
        width, height = self.chosen.hires_size
        known = pixels.resized(small, width // UNIT, height // UNIT)
        guide = self.guide.of_size(width, height, self._beside(known.shape, source))
        noise = source.normal(known.shape, "again")
        x = schedules.add_noise(known, noise, float(schedule.sigmas[0]))
        return self._sampled(guide, x, schedule, source)

    def _sampled(
        self,
        guide: Guide,
        x: np.ndarray,
        schedule: Schedule,
        source: Noise,
        around: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> np.ndarray:
        """What the sampler makes of x; `around` (hole, latent, noise) is what stays elsewhere."""

        def after(i: int, x: np.ndarray, picture: np.ndarray) -> np.ndarray:
            sigma = float(schedule.sigmas[i + 1])
            if around is not None:
                hole, known, noise = around
                there = schedules.add_noise(known, noise, sigma)
                if i + 1 == len(schedule.times):
                    # The end is scaled to variance 1, so that the latent comes out as it went in.
                    there = known * np.hypot(sigma, 1.0)
                x = np.where(hole, x, there)
            if self.on_step is not None:
                self.on_step(Step(self.done, self.total, self.index, sigma, x, picture))
            return x

        eta = self.chosen.eta
        return samplers.sample(
            guide, x, schedule, lambda: source.normal(x.shape, "step"), after, eta
        )

    def _encoded(self, picture: np.ndarray, source: Noise) -> np.ndarray:
        """A sample of what the autoencoder makes of a picture (1, 3, H, W)."""
        b, _, h, w = picture.shape
        noise = source.normal((b, 4, h // UNIT, w // UNIT), "encode")
        return self.networks.encode(picture, noise, self.chosen.tiled)

    def _beside(self, shape: tuple[int, ...], source: Noise) -> np.ndarray | None:
        """What an inpainting model sees beside the latent (1, 5, H, W): mask, picture around it.

        Without a mask all is to be made anew, and the picture around is grey.
        """
        if not self.networks.kind.inpainting:
            return None
        _, _, h, w = shape
        hole, picture = np.ones((1, 1, h, w)), np.zeros((1, 3, h * UNIT, w * UNIT), np.float32)
        if self.hole is not None:
            hole, picture = pixels.shrunk(self.hole), np.where(self.hole, 0, self.image)
        around = self._encoded(picture.astype(np.float32), source)
        return np.concatenate([hole.astype(np.float32), around], axis=1)

    def outside_kept(self, made: np.ndarray) -> np.ndarray:
        """A decoded picture, with the pixels of the given one where there is no hole."""
        return made if self.hole is None else np.where(self.hole, made, self.image)
