"""Noise levels and times: published values, and diffusers's configurations."""

from __future__ import annotations

import numpy as np
import pytest

from weights import WeightError
from zoo.errors import UsageError
from zoo.stable_diffusion.samplers import SAMPLERS, make, sampler_of
from zoo.stable_diffusion.schedules import (
    Options,
    alphas_cumprod,
    exponential,
    karras,
    read_config,
    sigmas_of,
)

SD1 = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.6.0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
}


def test_signal_power_and_noise_levels_of_training() -> None:
    alphas = alphas_cumprod(Options())
    # as many digits as are published
    np.testing.assert_allclose(alphas[[0, 499, 999]], [0.99915, 0.2776697, 0.0046601], atol=5e-8)
    np.testing.assert_allclose(sigmas_of(alphas)[[0, 999]], [0.029167, 14.614641], atol=5e-7)


def test_karras_levels() -> None:
    expected = [14.6146, 9.1029, 5.4784, 3.1686, 1.7494, 0.9141, 0.4469, 0.2014, 0.0819, 0.0292]
    low, high = sigmas_of(alphas_cumprod(Options()))[[0, -1]]
    np.testing.assert_allclose(karras(low, high, 10), expected, atol=5e-5)
    for sampler in ("Euler", "DPM++ 2M"):
        schedule = make(sampler, 10, Options(sigmas="karras"))
        np.testing.assert_allclose(schedule.sigmas, [*expected, 0.0], atol=5e-5)


def test_exponential_levels_have_one_ratio() -> None:
    levels = exponential(0.5, 8.0, 5)
    np.testing.assert_allclose(levels, [8, 4, 2, 1, 0.5])


def test_times_of_ddim() -> None:
    times = make("DDIM", 50).times
    assert times.tolist() == list(range(981, 0, -20))


@pytest.mark.parametrize(
    ("sampler", "spacing", "expected"),
    [
        ("Euler", "linspace", [999, 749.25, 499.5, 249.75, 0]),
        ("Euler", "leading", [801, 601, 401, 201, 1]),
        ("Euler", "trailing", [999, 799, 599, 399, 199]),
        ("DDIM", "linspace", [999, 749, 500, 250, 0]),
        ("DPM++ 2M", "linspace", [999, 799, 599, 400, 200]),
        ("DPM++ 2M", "leading", [831, 665, 499, 333, 167]),
        ("DPM++ 2M", "trailing", [999, 799, 599, 399, 199]),
        ("LCM", None, [999, 799, 599, 399, 199]),
    ],
)
def test_times_of_five_steps(sampler, spacing, expected) -> None:
    assert make(sampler, 5, Options(spacing=spacing)).times.tolist() == expected


@pytest.mark.parametrize("name", SAMPLERS)
def test_img2img_keeps_its_share_of_the_steps(name) -> None:
    whole, part = make(name, 50), make(name, 50, strength=0.75)
    assert part.calls == 37
    n = len(part.times)
    np.testing.assert_array_equal(part.sigmas, whole.sigmas[-n - 1 :])
    np.testing.assert_array_equal(part.times, whole.times[-n:])


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_strength_below_one_step_is_one_step(name) -> None:
    schedule = make(name, 10, strength=0.05)
    assert schedule.calls == len(schedule.times) == 1


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_strength_is_no_step_and_no_noise(name) -> None:
    schedule = make(name, 10, strength=0.0)
    assert schedule.calls == len(schedule.times) == 0
    assert schedule.sigmas.tolist() == [0.0]


def test_zero_terminal_snr_begins_with_noise_alone() -> None:
    alphas = alphas_cumprod(Options(zero_snr=True))
    assert alphas[-1] == 0
    assert alphas[0] == pytest.approx(alphas_cumprod(Options())[0], abs=1e-12)
    assert make("Euler", 5, Options(zero_snr=True)).sigmas[0] == pytest.approx(4096, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "steps", "message"),
    [
        ("Euler", 0, "from 1 to 1000, got 0"),
        ("Euler", 1001, "from 1 to 1000, got 1001"),
        ("LCM", 51, "at most 50 steps"),
        ("DPM++ 2M", 1000, "more than this sampler can tell apart"),
        ("Oiler", 20, "unknown sampler 'Oiler'; there are DDIM, PLMS, Euler"),
    ],
)
def test_what_has_no_schedule_is_one_line(name, steps, message) -> None:
    with pytest.raises(UsageError, match=message) as error:
        make(name, steps)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("strength", [-0.1, 1.1, float("nan")])
def test_a_strength_out_of_range_is_refused(strength) -> None:
    with pytest.raises(UsageError, match="strength"):
        make("Euler", 20, strength=strength)


@pytest.mark.parametrize(
    ("name", "sampler", "sigmas"),
    [
        ("euler_a", "Euler a", "default"),
        ("k_euler_ancestral", "Euler a", "default"),
        ("k_euler_a", "Euler a", "default"),
        ("EulerAncestralDiscreteScheduler", "Euler a", "default"),
        ("DPM++ 2M Karras", "DPM++ 2M", "karras"),
        ("dpmpp 2m sde exponential", "DPM++ 2M SDE", "exponential"),
        ("ddim", "DDIM", "default"),
        ("pndm", "PLMS", "default"),
        ("Karras", None, None),
    ],
)
def test_names_of_samplers(name, sampler, sigmas) -> None:
    if sampler is None:
        with pytest.raises(UsageError):
            make(name, 5)
    else:
        schedule = make(name, 5)
        assert (schedule.sampler, schedule.options.sigmas) == (sampler, sigmas)


def test_the_configuration_of_sd1_is_the_default() -> None:
    assert read_config(SD1) == Options()
    assert sampler_of(SD1) == "PLMS"


def test_a_configuration_chooses_sampler_and_levels() -> None:
    config = {
        **SD1,
        "_class_name": "DPMSolverMultistepScheduler",
        "algorithm_type": "sde-dpmsolver++",
        "use_karras_sigmas": True,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    }
    options = read_config(config)
    assert sampler_of(config) == "DPM++ 2M SDE"
    assert options.sigmas == "karras" and options.prediction == "v_prediction"
    assert options.zero_snr and options.spacing == "trailing"
    assert sampler_of({"_class_name": "EDMEulerScheduler"}) is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sigma_data", 0.5, "unknown scheduler option 'sigma_data'"),
        ("thresholding", True, "thresholding is not supported"),
        ("use_beta_sigmas", True, "use_beta_sigmas is not supported"),
        ("final_sigmas_type", "sigma_min", "final_sigmas_type is not supported"),
        ("trained_betas", [0.1], "trained_betas is not supported"),
        ("beta_schedule", "squaredcos_cap_v2", "expected linear or scaled_linear"),
        ("beta_schedule", ["linear"], "expected linear or scaled_linear"),
        ("prediction_type", "sample", "expected epsilon or v_prediction"),
        ("beta_start", "small", "expected a number"),
        ("beta_start", float("nan"), "expected a number"),
        ("beta_start", 0, "0 < start <= end < 1"),
        ("beta_end", 1.5, "0 < start <= end < 1"),
        ("num_train_timesteps", 10**9, "expected a whole number"),
        ("num_train_timesteps", 0, "expected a whole number from 1"),
        ("original_inference_steps", 0, "expected a whole number from 1"),
        ("steps_offset", True, "expected a whole number from 0"),
        ("set_alpha_to_one", 1, "expected true or false"),
    ],
)
def test_a_configuration_that_cannot_be_met_is_one_line(key, value, message) -> None:
    with pytest.raises(WeightError, match=message) as error:
        read_config({**SD1, key: value}, "scheduler_config.json")
    assert str(error.value).startswith("scheduler_config.json: ")
    assert "\n" not in str(error.value)
