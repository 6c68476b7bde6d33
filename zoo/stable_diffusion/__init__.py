"""Stable Diffusion: text to image (Rombach et al. 2022), after CompVis/stable-diffusion.

model = zoo.stable_diffusion.load("sd1.5")
model.txt2img("a photo of a cat", seed=1)[0].save("cat.png")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo import lazily

if TYPE_CHECKING:
    from zoo.stable_diffusion.making import Step
    from zoo.stable_diffusion.pipeline import StableDiffusion, load
    from zoo.stable_diffusion.settings import Settings

__all__ = ["Settings", "StableDiffusion", "Step", "load"]
__getattr__ = lazily(
    __name__, Settings="settings", StableDiffusion="pipeline", Step="making", load="pipeline"
)
