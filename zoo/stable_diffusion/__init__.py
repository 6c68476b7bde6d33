"""Stable Diffusion: text to image (Rombach et al. 2022), after CompVis/stable-diffusion.

model = zoo.stable_diffusion.load("sd1.5")
model.txt2img("a photo of a cat", seed=1)[0].save("cat.png")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.stable_diffusion.making import Step
    from zoo.stable_diffusion.pipeline import StableDiffusion, load
    from zoo.stable_diffusion.settings import Settings

__all__ = ["Settings", "StableDiffusion", "Step", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only now: `txt2img --help` should not have to start the engine.
    from zoo.stable_diffusion import making, pipeline, settings

    return next(getattr(m, name) for m in (pipeline, making, settings) if hasattr(m, name))
