"""From prompt to picture as diffusers goes it: the whole pipeline, with the same random weights.

Both draw torch's numbers from one seed, in the same order, so that latents after each step are
comparable, those of samplers with fresh noise too. Tolerance: float32 sums in another order leave
some 3e-6 of the largest value after a call of the UNet, which guidance multiplies by up to 13 and
steps add up: 1e-4. Of the picture's 256 levels that is a part, so a value may round the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.peers import pipelines
from tests.zoo.stable_diffusion.test_samplers_parity import (
    CLASSES,
    COUNTED,
    KARRAS,
    is_sigma,
    paired,
    theirs_n,
)

pytestmark = pytest.mark.peers

CLOSE = 1e-4  # of the largest value
ROUNDED = 0.01  # values of a picture that may be one level off
SEED, PROMPT, NEGATIVE = 5, "a red cat, sitting", "low quality"
T2I, I2I, INPAINT = (f"StableDiffusion{kind}Pipeline" for kind in ("", "Img2Img", "Inpaint"))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], tuple[Path, Any]]:
    """A version -> its folder and our model of it, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(version: str) -> tuple[Path, Any]:
        from zoo.stable_diffusion import load

        if version not in made:
            folder = pipelines.folder(tmp_path_factory.mktemp("sd"), version)
            made[version] = folder, load(folder, dtype="f32")
        return made[version]

    return get


def theirs_of(pipe: Any, steps: int, **options: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """The latents after each call of the UNet, and the picture."""
    import torch

    latents = []

    def seen(pipe, i, time, tensors):
        latents.append(tensors["latents"].numpy().copy())
        return tensors

    given = {"prompt": PROMPT, "generator": torch.Generator().manual_seed(SEED)}
    given |= {"guidance_scale": 7.0, "callback_on_step_end": seen, **options}
    out = pipe(num_inference_steps=steps, **given)
    return latents, np.asarray(out.images[0])


def ours_of(model: Any, *images: Image.Image, theirs: Any, **options: Any):
    """The latents after each step, as their scheduler has them, and the picture."""
    method = {0: model.txt2img, 1: model.img2img, 2: model.inpaint}[len(images)]
    given = {"seed": SEED, "rng": "torch", "width": pipelines.SIZE, "height": pipelines.SIZE}
    seen: list = []
    (picture,) = method(*images, PROMPT, on_step=seen.append, **{**given, **options})
    scale = [1.0 if is_sigma(theirs.scheduler) else np.hypot(step.sigma, 1.0) for step in seen]
    return [step.latent / s for step, s in zip(seen, scale)], np.asarray(picture)


def close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert len(ours) == len(theirs) > 0
    for i, (got, wanted) in enumerate(zip(ours, theirs)):
        error = np.abs(got - wanted).max() / np.abs(wanted).max()
        assert error < CLOSE, f"step {i}: {error:.1e}"


def same(ours: np.ndarray, theirs: np.ndarray) -> None:
    off = np.abs(ours.astype(int) - theirs)
    assert theirs.std() > 20  # levels of 256: there is something to see
    assert ours.shape == theirs.shape and off.max() <= 1 and (off > 0).mean() < ROUNDED


LEVELS = [(name, "default") for name in CLASSES] + [(name, "karras") for name in KARRAS]


@pytest.mark.parametrize("steps", [5, 20, 50])
@pytest.mark.parametrize(("name", "sigmas"), LEVELS)
def test_every_sampler_makes_the_picture_of_diffusers(name, steps, sigmas, models) -> None:
    folder, model = models("1")
    karras = {"use_karras_sigmas": True} if sigmas == "karras" else {}
    pipe = pipelines.pipeline(T2I, folder, name, **karras)
    eta = {"eta": 0.5} if name == "DDIM" else {}
    wanted, picture = theirs_of(pipe, theirs_n(name, steps), negative_prompt=NEGATIVE, **eta)
    options = {"sampler": name, "scheduler": sigmas, "steps": steps, "negative_prompt": NEGATIVE}
    got, our_picture = ours_of(model, theirs=pipe, **options, **eta)
    close(*paired(name, steps, got, wanted))
    if name == "Heun" and steps % 2 == 0:
        return  # the last step is another one: below
    same(our_picture, picture)


@pytest.mark.parametrize("sigmas", ["default", "karras"])
@pytest.mark.parametrize("steps", [20, 50])
def test_an_even_number_of_heuns_calls_ends_with_two_steps_of_eulers(steps, sigmas, models) -> None:
    """So the calls are as many as was asked for; see docs/decisions.md."""
    import torch

    from zoo.stable_diffusion import samplers

    folder, model = models("1")
    pipe = pipelines.pipeline(T2I, folder, "Euler")
    options = {"sampler": "Heun", "scheduler": sigmas, "steps": steps}
    got, our_picture = ours_of(model, theirs=pipe, **options)
    last = samplers.make("Heun", steps, samplers.Options(sigmas=sigmas)).sigmas[-3:]
    start = torch.tensor(got[-3] / last[0], dtype=torch.float32)
    wanted, picture = theirs_of(pipe, None, sigmas=last.tolist(), latents=start)
    close(got[-2:], wanted)
    same(our_picture, picture)


# Ours, and what diffusers calls it.
GUIDED = [
    ({}, {}),
    ({"negative_prompt": NEGATIVE, "guidance_rescale": 0.7},) * 2,
    ({"cfg_scale": 1.0, "clip_skip": 2}, {"guidance_scale": 1.0, "clip_skip": 1}),
    ({"cfg_scale": 1.0}, {"guidance_scale": 1.0}),
]


@pytest.mark.parametrize(("options", "named"), GUIDED, ids=lambda given: "-".join(given))
def test_prompts_guide_as_they_do_in_diffusers(options, named, models) -> None:
    folder, model = models("1")
    pipe = pipelines.pipeline(T2I, folder, "Euler")
    wanted, picture = theirs_of(pipe, 8, **named)
    got, our_picture = ours_of(model, theirs=pipe, sampler="Euler", steps=8, **options)
    close(got, wanted)
    same(our_picture, picture)


def test_clip_skip_is_for_negative_prompts_too(models) -> None:
    """As in A1111's; diffusers encodes those with all layers, unless it is told otherwise."""
    import torch

    folder, model = models("1")
    pipe = pipelines.pipeline(T2I, folder, "Euler")
    with torch.no_grad():
        said = [pipe.encode_prompt(text, "cpu", 1, False, clip_skip=1)[0]
                for text in (PROMPT, NEGATIVE)]  # fmt: skip
    embeds = {"prompt_embeds": said[0], "negative_prompt_embeds": said[1]}
    wanted, picture = theirs_of(pipe, 8, prompt=None, **embeds)
    options = {"sampler": "Euler", "steps": 8, "negative_prompt": NEGATIVE, "clip_skip": 2}
    got, our_picture = ours_of(model, theirs=pipe, **options)
    close(got, wanted)
    same(our_picture, picture)


def test_pictures_of_a_batch_are_those_of_a_list_of_generators(models) -> None:
    import torch

    folder, model = models("1")
    pipe = pipelines.pipeline(T2I, folder, "Euler a")
    seeds = [torch.Generator().manual_seed(SEED + i) for i in range(2)]
    wanted = pipe(PROMPT, num_inference_steps=8, num_images_per_prompt=2, generator=seeds,
                  guidance_scale=7.0).images  # fmt: skip
    got = model.txt2img(PROMPT, steps=8, sampler="Euler a", seed=SEED, rng="torch", batch=2)
    for ours, theirs in zip(got, wanted):
        same(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("name", ["DDIM", "DPM++ 2M", "UniPC"])
def test_a_model_that_predicts_v(name, models) -> None:
    folder, model = models("2")
    assert model.kind.prediction == "v"
    pipe = pipelines.pipeline(T2I, folder, name)
    wanted, picture = theirs_of(pipe, 20, negative_prompt=NEGATIVE)
    options = {"sampler": name, "steps": 20, "negative_prompt": NEGATIVE}
    got, our_picture = ours_of(model, theirs=pipe, **options)
    close(got, wanted)
    same(our_picture, picture)


XL = [
    ({}, {}),  # without a negative prompt half of what guides is zero
    ({"negative_prompt": NEGATIVE}, {"negative_prompt": NEGATIVE}),
    ({"clip_skip": 3, "width": 96}, {"clip_skip": 1, "width": 96, "height": 64}),
]


@pytest.mark.parametrize(("options", "named"), XL, ids=lambda given: "-".join(given))
@pytest.mark.parametrize("name", ["Euler", "DPM++ 2M"])
def test_xl(name, options, named, models) -> None:
    folder, model = models("xl")
    pipe = pipelines.pipeline("StableDiffusionXLPipeline", folder, name)
    wanted, picture = theirs_of(pipe, 10, **named)
    got, our_picture = ours_of(model, theirs=pipe, sampler=name, steps=10, **options)
    close(got, wanted)
    same(our_picture, picture)


def given_picture() -> Image.Image:
    """Something with edges and without."""
    down, across = np.mgrid[: pipelines.SIZE, : pipelines.SIZE]
    waves = [np.sin(across / 9 + n) * np.cos(down / 7 - n) > 0.3 for n in range(3)]
    shades = [(across * 2 + down) % 256 for _ in range(3)]
    pixels = np.where(np.stack(waves, -1), 220, np.stack(shades, -1))
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in COUNTED])
def test_img2img(name, models) -> None:
    folder, model = models("1")
    pipe = pipelines.pipeline(I2I, folder, name)
    wanted, picture = theirs_of(pipe, 20, image=given_picture(), strength=0.6)
    options = {"sampler": name, "steps": 20, "strength": 0.6}
    got, our_picture = ours_of(model, given_picture(), theirs=pipe, **options)
    close(got, wanted)
    same(our_picture, picture)


def test_img2img_with_heun(models) -> None:
    """11 of 21 calls here, 6 of 11 steps there. Of PLMS diffusers calls at times it isn't at."""
    folder, model = models("1")
    pipe = pipelines.pipeline(I2I, folder, "Heun")
    wanted, picture = theirs_of(pipe, 11, image=given_picture(), strength=0.56)
    options = {"sampler": "Heun", "steps": 21, "strength": 0.56}
    got, our_picture = ours_of(model, given_picture(), theirs=pipe, **options)
    assert len(wanted) == 11
    close(*paired("Heun", 11, got, wanted))
    same(our_picture, picture)


def hole() -> Image.Image:
    """White where all is made anew, along the edges of latent pixels.

    Elsewhere ours covers all latent pixels that it touches, diffusers those whose corner it does.
    """
    mask = np.zeros((pipelines.SIZE,) * 2, np.uint8)
    mask[16:48, 8:40] = 255
    return Image.fromarray(mask)


INPAINTING = [("1", name) for name in CLASSES if name not in COUNTED]
INPAINTING += [("inpaint", name) for name in ("DDIM", "Euler a", "DPM++ 2M")]


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize(("version", "name"), INPAINTING)
def test_inpainting(version, name, strength, models) -> None:
    """What a mask doesn't cover is given back as it was, which diffusers leaves to its user."""
    folder, model = models(version)
    pipe = pipelines.pipeline(INPAINT, folder, name)
    images = given_picture(), hole()
    named = {"image": images[0], "mask_image": images[1], "strength": strength}
    wanted, picture = theirs_of(pipe, 8, **named, height=pipelines.SIZE, width=pipelines.SIZE)
    options = {"sampler": name, "steps": 8, "strength": strength}
    got, our_picture = ours_of(model, *images, theirs=pipe, **options)
    close(got, wanted)
    covered = np.asarray(images[1])[..., None] > 0
    same(our_picture, np.where(covered, picture, np.asarray(images[0])))
