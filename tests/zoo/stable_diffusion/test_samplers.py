"""Samplers: calls of the model, pinned results, masks and noise."""

from __future__ import annotations

import numpy as np
import pytest

from tests.zoo.stable_diffusion import toy
from zoo.errors import UsageError
from zoo.stable_diffusion.samplers import SAMPLERS, make, sample
from zoo.stable_diffusion.schedules import Options, add_noise

# The first three values after five steps (PLMS: six calls, which are five steps) with noise and
# with v as the model's output; test_samplers_parity shows them equal to diffusers's.
PINNED = {
    "DDIM": ((4.38528, 0.719337, 1.14977), (0.542718, 0.16814, 0.226006)),
    "PLMS": ((4.31827, 0.723923, 1.17428), (0.451158, -0.0216861, 0.0537351)),
    "Euler": ((12.1294, 1.3377, 2.46694), (0.428721, 0.163981, 0.185952)),
    "Euler a": ((13.2464, 0.635435, 0.43078), (0.0306097, -0.0367178, 0.382465)),
    "Heun": ((11.7555, 3.23995, 1.79813), (2.71811, 1.07265, 1.83286)),
    "DPM++ 2M": ((11.9899, 1.34674, 2.2384), (0.566249, 0.189875, 0.249278)),
    "DPM++ 2M SDE": ((12.9321, 0.327666, 0.37814), (-0.209968, 0.0873032, 0.4123)),
    "LCM": ((9.25731, 0.28097, 0.459262), (-0.290165, 0.0735399, 0.225433)),
    "UniPC": ((11.9446, 1.36334, 2.19115), (0.597034, 0.198383, 0.265232)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_results_are_those_of_diffusers(name) -> None:
    for prediction, expected in zip(("epsilon", "v_prediction"), PINNED[name]):
        schedule = make(name, 6 if name == "PLMS" else 5, Options(prediction=prediction))
        result = sample(toy.model, toy.normals() * schedule.first, schedule, toy.fresh_noise())
        assert result.dtype == np.float32
        # six digits are written down
        np.testing.assert_allclose(result.flat[:3], expected, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 20, 37, 50])
@pytest.mark.parametrize("name", SAMPLERS)
def test_n_steps_are_n_calls_of_the_model(name, steps) -> None:
    calls = []

    def model(x, time):
        assert x.dtype == np.float32
        calls.append(time)
        return toy.model(x, time)

    schedule = make(name, steps)
    sample(model, toy.normals() * schedule.first, schedule, toy.fresh_noise())
    assert len(calls) == schedule.calls == steps


@pytest.mark.parametrize("sigmas", ["default", "karras", "exponential"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_model_that_knows_the_picture_leads_to_it(name, sigmas) -> None:
    """Given the true noise, every sampler ends at the picture, whatever noise is added."""
    if name == "LCM" and sigmas != "default":
        pytest.skip("a distilled model has levels of its own")
    picture = toy.normals(5).astype(np.float64)
    schedule = make(name, 20, Options(sigmas=sigmas, set_alpha_to_one=True))
    level = dict(zip(schedule.times.tolist(), schedule.sigmas.tolist()))

    def model(x, time):
        sigma = level[time]
        return (x.astype(np.float64) * np.hypot(sigma, 1) - picture) / sigma

    result = sample(model, add_noise(picture, toy.normals(), schedule.sigmas[0]), schedule,
                    toy.fresh_noise())  # fmt: skip
    # LCM keeps (0.5 / (10 * time))^2 of the latent: 6e-8 at its last time. Else float32's rounding.
    np.testing.assert_allclose(result, picture, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_mask_keeps_what_it_covers(name) -> None:
    picture, noise = toy.normals(2), toy.normals(3)
    mask = np.zeros(toy.SHAPE)
    mask[..., :2] = 1
    schedule = make(name, 10, Options(set_alpha_to_one=True), strength=0.8)

    def keep(i, x, leads_to):
        assert leads_to.shape == x.shape
        return mask * add_noise(picture, noise, schedule.sigmas[i + 1]) + (1 - mask) * x

    start = add_noise(picture, noise, schedule.sigmas[0])
    result = sample(toy.model, start, schedule, toy.fresh_noise(), keep)
    np.testing.assert_array_equal(result[..., :2], picture[..., :2])
    assert np.abs(result - picture)[..., 2:].min() > 1e-4


@pytest.mark.parametrize("name", SAMPLERS)
def test_fresh_noise_is_asked_for_by_stochastic_samplers_only(name) -> None:
    drawn = []

    def noise():
        drawn.append(1)
        return toy.normals(len(drawn))

    schedule = make(name, 6)
    sample(toy.model, toy.normals(), schedule, noise)
    expected = {"Euler a": 6, "DPM++ 2M SDE": 6, "LCM": 5}
    assert len(drawn) == expected.get(name, 0)


def test_euler_a_without_fresh_noise_is_euler_and_ddim_with_it_is_euler_a() -> None:
    def run(name, eta):
        schedule = make(name, 8, Options(spacing="leading", set_alpha_to_one=True))
        return sample(toy.model, toy.normals(), schedule, toy.fresh_noise(), eta=eta)

    np.testing.assert_array_equal(run("Euler a", 0.0), run("Euler", 0.0))
    np.testing.assert_array_equal(run("DDIM", 1.0), run("Euler a", 1.0))
    assert np.abs(run("DDIM", 1.0) - run("DDIM", 0.0)).max() > 0.01


def test_dpmpp_2m_with_fresh_noise_is_its_stochastic_form() -> None:
    def run(name, eta):
        schedule = make(name, 8)
        return sample(toy.model, toy.normals(), schedule, toy.fresh_noise(), eta=eta)

    np.testing.assert_array_equal(run("DPM++ 2M", 1.0), run("DPM++ 2M SDE", None))
    np.testing.assert_array_equal(run("DPM++ 2M SDE", 0.0), run("DPM++ 2M", None))


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_steps_leave_the_latent_alone(name) -> None:
    schedule = make(name, 20, strength=0)
    latent = toy.normals()
    np.testing.assert_array_equal(sample(toy.model, latent, schedule, toy.fresh_noise()), latent)


@pytest.mark.parametrize("steps", [1, 5, 50])
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "Heun"])
def test_zero_terminal_snr_stays_finite(name, steps) -> None:
    options = Options(prediction="v_prediction", zero_snr=True, spacing="trailing")
    schedule = make(name, steps, options)
    x = toy.normals() * schedule.first
    result = sample(toy.model, x, schedule, toy.fresh_noise())
    assert np.isfinite(result).all() and np.abs(result).max() < 10


def test_heun_does_not_take_zero_terminal_snr() -> None:
    """Its first step's two slopes differ by little, times a step of thousands."""
    with pytest.raises(UsageError, match="Heun can't begin with noise alone"):
        make("Heun", 20, Options(zero_snr=True))
