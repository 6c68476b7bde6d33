"""Samplers against diffusers's schedulers: the same latent after every step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.zoo.stable_diffusion import toy
from zoo.stable_diffusion.samplers import make, sample
from zoo.stable_diffusion.schedules import Options, add_noise, read_config

pytestmark = pytest.mark.peers

CLASSES = {
    "DDIM": ("DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False}),
    "PLMS": ("PNDMScheduler", {"skip_prk_steps": True}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "Euler a": ("EulerAncestralDiscreteScheduler", {}),
    "Heun": ("HeunDiscreteScheduler", {}),
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {}),
    "DPM++ 2M SDE": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "LCM": ("LCMScheduler", {}),
    "UniPC": ("UniPCMultistepScheduler", {}),
}
COUNTED = ("Heun", "PLMS")  # N calls of the model are another number of steps there
KARRAS = ("Euler", "Heun", "DPM++ 2M", "DPM++ 2M SDE", "UniPC")
ZERO_SNR = ("DDIM", "Euler", "Euler a", "DPM++ 2M", "DPM++ 2M SDE", "LCM", "UniPC")
SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
# diffusers computes in float32: its rounding, over up to 50 steps, is what is left.
TOLERANCE = 1e-4


def scheduler(name: str, **options):
    import diffusers

    kind, own = CLASSES[name]
    return getattr(diffusers, kind)(**{**SCALED, "steps_offset": 1, **own, **options})


def their_steps(theirs, latent, monkeypatch, eta: float = 0.0, first: int = 0) -> list:
    """The latents after each call of the model, in diffusers's scale, and the model's calls."""
    import importlib

    import torch

    noise = toy.fresh_noise()
    module = importlib.import_module(type(theirs).__module__)
    if hasattr(module, "randn_tensor"):
        monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: torch.from_numpy(noise()))
    x, out = torch.from_numpy(latent), []
    extra = {"eta": eta} if eta else {}
    for time in theirs.timesteps[first:]:
        seen = theirs.scale_model_input(x, time)
        output = torch.from_numpy(toy.model(seen.numpy(), float(time)))
        x = theirs.step(output, time, x, **extra).prev_sample
        out.append(x.numpy())
    return out


def our_steps(schedule, latent, eta: float | None = None) -> tuple[np.ndarray, list, int]:
    """The result, the latents after each step (as they are, at variance 1), calls of the model."""
    seen, calls = [], []

    def model(x, time):
        calls.append(time)
        return toy.model(x, time)

    def callback(i, x, picture):
        seen.append((x, x / np.hypot(schedule.sigmas[i + 1], 1.0)))

    result = sample(model, latent, schedule, toy.fresh_noise(), callback, eta)
    return result, seen, len(calls)


def theirs_n(name: str, steps: int) -> int:
    """The number that diffusers takes for so many calls of the model."""
    return {"PLMS": steps - 1, "Heun": steps // 2 + 1}.get(name, steps)


def is_sigma(theirs) -> bool:
    """Whether a scheduler's latents are x0 + sigma * noise; else they are of variance 1."""
    return hasattr(theirs, "sigmas") and abs(float(theirs.init_noise_sigma) - 1) > 1e-3


def paired(name: str, steps: int, ours: list, theirs: list) -> tuple[list, list]:
    """The latents after each of our steps and each of their calls that should be equal."""
    if name == "Heun":  # theirs shows latents half-way
        theirs = [*theirs[1::2], theirs[-1]]
        if steps % 2 == 0:  # the last but one is theirs only in part
            ours, theirs = ours[:-2], theirs[:-2]
    if name == "PLMS":
        theirs = theirs[1:]
    return ours, theirs


def check(name, steps, options, monkeypatch, eta=None, **config):
    theirs = scheduler(name, **config)
    theirs.set_timesteps(theirs_n(name, steps))
    schedule = make(name, steps, options)
    noise = toy.normals()
    first = float(theirs.init_noise_sigma)
    expected = their_steps(theirs, noise * first, monkeypatch, eta or 0.0)
    result, seen, calls = our_steps(schedule, noise * schedule.first, eta)
    assert calls == steps
    ours, expected = paired(
        name, steps, [pair[0 if is_sigma(theirs) else 1] for pair in seen], expected
    )
    assert len(ours) == len(expected)
    for got, want in zip(ours, expected):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
    if not (name == "Heun" and steps % 2 == 0):
        np.testing.assert_allclose(result, expected[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("steps", [5, 20, 21, 50])
@pytest.mark.parametrize("name", CLASSES)
def test_every_sampler_takes_the_steps_of_diffusers(name, steps, prediction, monkeypatch) -> None:
    options = Options(prediction=prediction)
    check(name, steps, options, monkeypatch, prediction_type=prediction)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("steps", [5, 20, 50])
@pytest.mark.parametrize("name", KARRAS)
def test_karras_noise_levels(name, steps, prediction, monkeypatch) -> None:
    options = Options(prediction=prediction, sigmas="karras")
    check(name, steps, options, monkeypatch, prediction_type=prediction, use_karras_sigmas=True)


@pytest.mark.parametrize("steps", [5, 20, 50])
@pytest.mark.parametrize("name", ["Euler", "Heun"])
def test_exponential_noise_levels(name, steps, monkeypatch) -> None:
    check(name, steps, Options(sigmas="exponential"), monkeypatch, use_exponential_sigmas=True)


@pytest.mark.parametrize("name", ["DPM++ 2M", "UniPC"])
def test_exponential_noise_levels_of_multistep_samplers(name) -> None:
    """The levels are equal; diffusers cuts times to whole ones, 998.99 to 998, and we round."""
    theirs = scheduler(name, use_exponential_sigmas=True)
    theirs.set_timesteps(20)
    ours = make(name, 20, Options(sigmas="exponential"))
    # float32 against float64: 1 - a has lost 10 bits where a is nearly 1
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=3e-5)
    np.testing.assert_allclose(ours.times, theirs.timesteps.numpy(), rtol=0, atol=1)


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("steps", [5, 20, 50])
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("DDIM", "PLMS", "LCM")])
def test_spacings(name, steps, spacing, monkeypatch) -> None:
    check(name, steps, Options(spacing=spacing), monkeypatch, timestep_spacing=spacing)


@pytest.mark.parametrize("steps", [5, 20, 50])
def test_ddim_with_trailing_times(steps, monkeypatch) -> None:
    """Where steps divide 1000; else diffusers goes on by 1000 // steps, past its own next time."""
    check("DDIM", steps, Options(spacing="trailing"), monkeypatch, timestep_spacing="trailing")


@pytest.mark.parametrize("steps", [5, 20, 50])
@pytest.mark.parametrize("name", ZERO_SNR)
def test_zero_terminal_snr(name, steps, monkeypatch) -> None:
    spacing = {} if name == "LCM" else {"timestep_spacing": "trailing"}
    config = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, **spacing}
    options = Options(prediction="v_prediction", zero_snr=True, spacing="trailing")
    check(name, steps, options, monkeypatch, **config)


@pytest.mark.parametrize("eta", [0.5, 1.0])
@pytest.mark.parametrize("to_one", [False, True])
def test_ddim_with_fresh_noise(eta, to_one, monkeypatch) -> None:
    options = Options(set_alpha_to_one=to_one)
    check("DDIM", 20, options, monkeypatch, eta, set_alpha_to_one=to_one)


@pytest.mark.parametrize("name", CLASSES)
def test_linear_betas(name, monkeypatch) -> None:
    linear = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
    check(name, 20, Options(**linear), monkeypatch, **linear)


@pytest.mark.parametrize(("steps", "strength"), [(50, 0.75), (20, 0.3), (10, 0.1)])
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in COUNTED])
def test_img2img_starts_where_diffusers_does(name, steps, strength, monkeypatch) -> None:
    import torch

    theirs = scheduler(name)
    theirs.set_timesteps(steps)
    first = max(steps - int(steps * strength), 0)
    if hasattr(theirs, "set_begin_index"):
        theirs.set_begin_index(first)
    latent, noise = toy.normals(2), toy.normals(3)
    start = theirs.add_noise(
        torch.from_numpy(latent), torch.from_numpy(noise), theirs.timesteps[first : first + 1]
    )
    expected = their_steps(theirs, start.numpy(), monkeypatch, first=first)
    schedule = make(name, steps, strength=strength)
    result, _, calls = our_steps(schedule, add_noise(latent, noise, schedule.sigmas[0]))
    assert calls == int(steps * strength) == len(expected)
    np.testing.assert_allclose(result, expected[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CLASSES)
def test_a_scheduler_config_of_diffusers_reads_as_it_is_meant(name, monkeypatch) -> None:
    config = dict(scheduler(name, prediction_type="v_prediction").config)
    options = read_config(config)
    assert options.spacing == config.get("timestep_spacing")
    assert options.set_alpha_to_one == config.get("set_alpha_to_one", True)
    same = replace(options, spacing=None, set_alpha_to_one=False)
    assert same == Options(prediction="v_prediction")
