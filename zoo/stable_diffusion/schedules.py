"""Noise schedules: which times the UNet is asked about, and how much noise there is at each.

A noise level sigma is the noise's standard deviation where the picture's own size is left alone:
sigma^2 = (1 - a) / a for the signal power a that diffusion models are trained with. Spacings and
defaults are those of diffusers's schedulers; Karras et al. 2022, equation 5; Lin et al. 2023,
"Common Diffusion Noise Schedules and Sample Steps are Flawed", for spacings and zero terminal SNR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weights import WeightError
from zoo.errors import UsageError

SPACINGS = ("leading", "trailing", "linspace")
SIGMAS = ("default", "karras", "exponential")


@dataclass(frozen=True)
class Options:
    """How a model was trained, and how its schedule is to be cut into steps.

    The defaults are SD 1's. `spacing` None is the sampler's own; `sigmas` is one of SIGMAS.
    `set_alpha_to_one`: DDIM and PLMS end without noise, not at the level of time 0.
    """

    train_steps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    prediction: str = "epsilon"
    spacing: str | None = None
    steps_offset: int = 1
    zero_snr: bool = False
    set_alpha_to_one: bool = False
    sigmas: str = "default"
    lcm_steps: int = 50
    timestep_scaling: float = 10.0


@dataclass(frozen=True)
class Schedule:
    """Noise levels from first to last, for `calls` evaluations of the UNet.

    `sampler` is a key of SAMPLERS. `times` (n,) go with `sigmas` (n + 1,), whose last is where the
    sampler ends. Noise of variance 1 times `first` is where txt2img starts; img2img adds sigmas[0]
    times noise to its latent (`add_noise`).
    """

    sampler: str
    times: np.ndarray
    sigmas: np.ndarray
    first: float
    calls: int
    options: Options


def add_noise(latent: np.ndarray, noise: np.ndarray, sigma: float) -> np.ndarray:
    """The VAE's latent at a noise level: where img2img starts, and what a mask keeps."""
    return latent + sigma * noise.astype(np.float64)


def alphas_cumprod(options: Options) -> np.ndarray:
    """Signal power at each training time, float64 (train_steps,)."""
    n, low, high = options.train_steps, options.beta_start, options.beta_end
    if options.beta_schedule == "linear":
        betas = np.linspace(low, high, n)
    else:
        betas = np.linspace(low**0.5, high**0.5, n) ** 2
    alphas = np.cumprod(1 - betas.astype(np.float32).astype(np.float64))
    if options.zero_snr:
        roots = np.sqrt(alphas)
        alphas = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    return alphas


def sigmas_of(alphas: np.ndarray) -> np.ndarray:
    """Noise levels sqrt((1 - a) / a) of signal powers a."""
    return np.sqrt((1 - alphas) / alphas)


def karras(low: float, high: float, n: int) -> np.ndarray:
    """n noise levels from high to low, evenly spaced after taking the 7th root."""
    return np.linspace(high ** (1 / 7), low ** (1 / 7), n) ** 7


def exponential(low: float, high: float, n: int) -> np.ndarray:
    """n noise levels from high to low, evenly spaced after taking the logarithm."""
    return np.exp(np.linspace(np.log(high), np.log(low), n))


def cut(
    grid: str, n: int, options: Options, spacing: str, least_signal: float
) -> tuple[np.ndarray, np.ndarray]:
    """n times from the noisiest on, and the n + 1 noise levels that they lead through.

    `grid` says how a sampler wants its times: "int" whole ones, "float" fractions too, "extra"
    whole ones of a schedule that is one longer, "lcm" those of a distilled model. `least_signal`
    stands for a signal power of 0. UsageError for an `n` that there are too few times for.
    """
    table = sigmas_of(np.maximum(alphas_cumprod(options), least_signal))
    index = np.arange(len(table))
    times = _lcm_times(n, options) if grid == "lcm" else _times(grid, n, options, spacing)
    levels = np.interp(times, index, table)
    if options.sigmas != "default":
        if grid == "lcm":
            raise UsageError("LCM was distilled at noise levels of its own; leave out --scheduler")
        # From the first to the last level of training, or of the times.
        low, high = (table[0], table[-1]) if grid == "extra" else (levels[-1], levels[0])
        levels = (karras if options.sigmas == "karras" else exponential)(low, high, n)
        times = np.interp(np.log(levels), np.log(table), index)
        times = np.round(times) if grid == "extra" else times
    if np.any(np.diff(levels) >= 0):
        raise UsageError(f"{n} steps are more than this sampler can tell apart")
    keeps_noise = grid == "int" and not options.set_alpha_to_one
    return times, np.append(levels, table[0] if keeps_noise else 0.0)


def _times(grid: str, n: int, options: Options, spacing: str) -> np.ndarray:
    train, extra = options.train_steps, n + (grid == "extra")
    if spacing == "leading":
        times = np.arange(extra)[::-1] * (train // extra) + options.steps_offset
    elif spacing == "trailing":
        times = np.round(train - np.arange(n) * (train / n)) - 1
    else:
        times = np.linspace(0, train - 1, extra)[::-1]
        times = times if grid == "float" else np.round(times)
    return np.minimum(times[:n], train - 1).astype(np.float64)


def _lcm_times(n: int, options: Options) -> np.ndarray:
    """n of the times that a latent consistency model was distilled at."""
    original = options.lcm_steps
    if n > original:
        raise UsageError(f"LCM takes at most {original} steps with this model, got {n}")
    every = options.train_steps // original
    distilled = np.arange(original, 0, -1) * every - 1.0
    return distilled[np.floor(np.linspace(0, original, n, endpoint=False)).astype(int)]


# diffusers's scheduler_config.json: keys that are options of ours, and how they are checked.
_KEYS: dict[str, tuple[str, Any]] = {
    "num_train_timesteps": ("train_steps", int),
    "beta_start": ("beta_start", float),
    "beta_end": ("beta_end", float),
    "beta_schedule": ("beta_schedule", ("linear", "scaled_linear")),
    "prediction_type": ("prediction", ("epsilon", "v_prediction")),
    "timestep_spacing": ("spacing", SPACINGS),
    "steps_offset": ("steps_offset", int),
    "rescale_betas_zero_snr": ("zero_snr", bool),
    "set_alpha_to_one": ("set_alpha_to_one", bool),
    "original_inference_steps": ("lcm_steps", int),
    "timestep_scaling": ("timestep_scaling", float),
}
# What diffusers takes for a key that the file leaves out.
_ABSENT: dict[str, Any] = {
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "steps_offset": 0,
    "set_alpha_to_one": True,
}
# Keys that would change pictures in ways that we lack, with the values that change nothing.
_NEUTRAL: dict[str, tuple] = {
    "trained_betas": (None,),
    "thresholding": (False, None),
    "use_beta_sigmas": (False, None),
    "use_flow_sigmas": (False, None),
    "use_lu_lambdas": (False, None),
    "use_dynamic_shifting": (False, None),
    "timestep_type": ("discrete",),
    "interpolation_type": ("linear",),
    "variance_type": (None, "fixed_small", "fixed_large"),
    "final_sigmas_type": ("zero", None),
    "sigma_min": (None,),
    "sigma_max": (None,),
    "shift_terminal": (None,),
    "lambda_min_clipped": (None, float("-inf"), "-inf"),
}
# What describes the choice of a sampler, of no meaning to others, or is overruled by diffusers.
_IGNORED = {
    *("clip_sample", "clip_sample_range", "skip_prk_steps", "solver_order", "solver_type"),
    *("algorithm_type", "lower_order_final", "euler_at_final", "predict_x0", "solver_p"),
    *("disable_corrector", "sample_max_value", "dynamic_thresholding_ratio", "flow_shift"),
    *("time_shift_type", "noise_sampler_seed", "use_karras_sigmas", "use_exponential_sigmas"),
}


def read_config(config: Mapping[str, Any], file: object = None) -> Options:
    """The options in a scheduler_config.json of diffusers.

    WeightError, naming `file` and key, for a value that can't be, and for keys that we don't know.
    """
    found = {name: _ABSENT[key] for key, (name, _) in _KEYS.items() if key in _ABSENT}
    for key, value in config.items():
        if key in _KEYS and value is not None:
            name, kind = _KEYS[key]
            found[name] = _checked(key, value, kind, file)
        elif key in _NEUTRAL and not any(value == neutral for neutral in _NEUTRAL[key]):
            raise WeightError(f"scheduler option {key} is not supported", file=file, got=value)
        elif not (key in _KEYS or key in _NEUTRAL or key in _IGNORED or key.startswith("_")):
            raise WeightError(f"unknown scheduler option {key!r}", file=file, got=value)
    for name in ("karras", "exponential"):
        if config.get(f"use_{name}_sigmas"):
            found["sigmas"] = name
    options = replace(Options(), **found)
    if not 0 < options.beta_start <= options.beta_end < 1:
        got = f"{options.beta_start} and {options.beta_end}"
        expected = "0 < start <= end < 1"
        raise WeightError("beta_start and beta_end", file=file, expected=expected, got=got)
    return options


def _checked(key: str, value: Any, kind: Any, file: object) -> Any:
    if isinstance(kind, tuple):
        good, expected = value in kind, " or ".join(kind)
    elif kind is float:
        good, expected = type(value) in (int, float) and 0 <= value < 1e6, "a number from 0 on"
    elif kind is int:
        low = 0 if key == "steps_offset" else 1
        good, expected = type(value) is int and low <= value <= 10_000, f"a whole number from {low}"
    else:
        good, expected = type(value) is bool, "true or false"
    if not good:
        raise WeightError(f"scheduler option {key}", file=file, expected=expected, got=value)
    return value
