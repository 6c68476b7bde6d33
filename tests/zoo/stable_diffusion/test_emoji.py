"""The model that comes with the package: that it draws, what it draws, and that diffusers agrees.

`emoji.npz` beside this has what training had: names, and the autoencoder's latents (times 32, as
int8). `python -m training.emoji` writes it together with the weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import weights
from weights import registry
from zoo.stable_diffusion import flags, load

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "zoo" / "stable_diffusion" / "data" / "emoji"


def draw(where: Path, name: str, *args: str) -> subprocess.CompletedProcess:
    """`txt2img` in a process of its own, without a cache and without a network."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ZOO_CACHE": str(where), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "zoo.stable_diffusion", "txt2img", "red apple", "-o", name]
    return subprocess.run([*command, *args], capture_output=True, cwd=where, env=env, text=True)


@pytest.fixture(scope="module")
def model():
    return load(dtype="f32")


def test_without_a_model_it_draws_an_emoji_says_so_and_repeats_it(tmp_path) -> None:
    quickly = ("--steps", "1", "--device", "reference")  # which compiles nothing
    for name in ("a.png", "b.png"):
        done = draw(tmp_path, name, "--seed", "1", *quickly)
        assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr
        assert done.stderr == f"{flags.HINT}\n"
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (64, 64)
        assert "Model: stable-diffusion-emoji" in image.info["parameters"]
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_of_a_device_that_is_not_there_it_says_just_that(tmp_path) -> None:
    done = draw(tmp_path, "a.png", "--device", "abacus")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "no device 'abacus'" in done.stderr


def test_it_comes_with_the_package_and_its_licence() -> None:
    assert weights.fetch("emoji") == FOLDER
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    assert size < 24e6 and abs(registry.find("emoji").size - size) < 1e5
    assert "SIL OPEN FONT LICENSE" in (FOLDER / "OFL.txt").read_text()


def references() -> tuple[list[str], np.ndarray]:
    """Names of all things, and their latents (N, 256) in the UNet's scale."""
    with np.load(Path(__file__).with_name("emoji.npz")) as file:
        names, latents = file["names"].tolist(), file["latents"].astype(np.float32) / 32
    return names, latents.reshape(len(names), -1)


@pytest.mark.slow
def test_most_pictures_show_what_was_asked_for(model) -> None:
    """Of 100 things, in the same noise, how many are among the 5 nearest: all; chance is 0.4%."""
    names, latents = references()
    right = 0
    asked = np.linspace(0, len(names) - 1, 100).round().astype(int)
    for i in asked:
        (picture,) = model.txt2img(names[i], seed=0)
        pixels = np.asarray(picture, np.float32).transpose(2, 0, 1)[None] / 127.5 - 1
        made = model.encode(pixels).reshape(1, -1)
        nearest = np.argsort(((latents - made) ** 2).sum(-1))[:5]
        right += i in nearest
    assert right >= 90


@pytest.mark.slow
def test_a_colour_in_the_prompt_is_in_the_picture(model) -> None:
    """Of pairs of colour and thing that training never showed most get the colour."""
    strongest = {"red": 0, "green": 1, "blue": 2}
    pairs = "blue apple, blue taco, blue guitar, blue strawberry, blue crab, blue pear, blue bear"
    pairs += ", red frog, red dress, green lion, green violin, green fish"
    right = 0
    for prompt in pairs.split(", "):
        (picture,) = model.txt2img(prompt, seed=0)
        pixels = np.asarray(picture, np.float32)
        drawn = pixels[pixels.min(-1) < 200]
        right += drawn.mean(0).argmax() == strongest[prompt.split()[0]]
    assert right >= 8


@pytest.mark.peers
def test_diffusers_computes_the_same(model) -> None:
    """Both in float32 over the same float16 weights, so that only the order of sums differs."""
    import torch
    from diffusers import StableDiffusionPipeline

    theirs = StableDiffusionPipeline.from_pretrained(FOLDER, torch_dtype=torch.float32)
    prompts = ["red apple", "", "a cat's face, blue"]
    ids = theirs.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
    noise = np.random.default_rng(0).normal(size=(3, 4, 8, 8)).astype(np.float32)
    with torch.no_grad():
        context = theirs.text_encoder(ids.input_ids)[0]
        velocity = theirs.unet(torch.from_numpy(noise), 500, context).sample.numpy()
        picture = theirs.vae.decode(torch.from_numpy(noise)).sample
        latent = theirs.vae.encode(picture).latent_dist.mean.numpy()
    ours = model.encode_text(prompts)
    scale = model.kind.scale
    np.testing.assert_allclose(ours, context.numpy(), atol=1e-3)
    np.testing.assert_allclose(model.unet(noise, 500, ours), velocity, atol=1e-3)
    np.testing.assert_allclose(model.decode(noise * scale), picture.numpy(), atol=1e-3)
    np.testing.assert_allclose(model.encode(picture.numpy()) / scale, latent, atol=1e-3)


@pytest.mark.peers
def test_diffusers_draws_the_same_picture(model) -> None:
    import torch
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    theirs = StableDiffusionPipeline.from_pretrained(FOLDER, torch_dtype=torch.float32)
    theirs.scheduler = DDIMScheduler.from_config(theirs.scheduler.config)
    theirs.set_progress_bar_config(disable=True)
    options = {"guidance_scale": 7.0, "height": 64, "width": 64, "output_type": "np"}
    drawn = theirs("red apple", num_inference_steps=10,
                   generator=torch.Generator().manual_seed(3), **options).images[0]  # fmt: skip
    (ours,) = model.txt2img("red apple", steps=10, sampler="DDIM", seed=3, rng="torch")
    # Our picture is rounded to 8 bits.
    assert np.abs(np.asarray(ours) / 255 - drawn).max() < 1e-3 + 0.5 / 255
