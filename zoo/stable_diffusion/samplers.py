"""Samplers: ways from noise to a latent, each a generator over the steps of a schedule.

A latent x at noise level sigma is x0 + sigma * noise, in float64, whatever sampler works on it; the
UNet is given x / sqrt(sigma^2 + 1), which has variance 1. Written so, the formulas that papers
write with alphas are short: with `to` the next noise level and r = to / sigma,

    DDIM, Euler, Euler a    x0 + sqrt(to^2 - up^2) * eps + up * noise  (up: how much is new noise)
    PLMS                    x + (to - sigma) * eps, extrapolated
    DPM++ 2M, UniPC         r * x + (1 - r) * x0, extrapolated

Sources: DDIM, Song et al. 2021; PLMS, Liu et al. 2022; Euler, Heun, Karras et al. 2022; Euler a,
Crowson's k-diffusion; DPM++, Lu et al. 2022; LCM, Luo et al. 2023; UniPC, Zhao et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zoo.errors import UsageError
from zoo.stable_diffusion.schedules import SIGMAS, Options, Schedule, cut

Model = Callable[[np.ndarray, float], np.ndarray]  # (x of variance 1, time) -> noise or v
# Gives (x, the picture that it leads to) after each step, and is sent the x to go on from.
Steps = Generator[tuple[np.ndarray, np.ndarray], np.ndarray, None]


@dataclass(frozen=True)
class Run:
    """One pass of a model over a schedule; `noise()` gives fresh normals of the latent's shape."""

    model: Model
    schedule: Schedule
    noise: Callable[[], np.ndarray]
    eta: float

    def steps(self) -> Iterator[tuple[int, float, float]]:
        """(index, noise level, next noise level) of each step."""
        sigmas = self.schedule.sigmas.tolist()
        yield from ((i, sigmas[i], sigmas[i + 1]) for i in range(len(sigmas) - 1))

    def output(self, x: np.ndarray, i: int) -> np.ndarray:
        """What the UNet says about a latent at level i."""
        scaled = x / np.hypot(self.schedule.sigmas[i], 1.0)
        time = float(self.schedule.times[i])
        return self.model(scaled.astype(np.float32), time).astype(np.float64)

    def split(self, x: np.ndarray, output: np.ndarray, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(x0, eps) that the UNet's output means for a latent at level i."""
        sigma = self.schedule.sigmas[i]
        if self.schedule.options.prediction == "epsilon":
            return x - sigma * output, output
        x0 = x / (sigma**2 + 1) - output * (sigma / np.hypot(sigma, 1.0))
        return x0, (x - x0) / sigma

    def predict(self, x: np.ndarray, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.split(x, self.output(x, i), i)


def _ancestral(x: np.ndarray, run: Run) -> Steps:
    """DDIM and Euler's method, with `eta` of the noise that each step removes put back anew."""
    for i, sigma, to in run.steps():
        x0, eps = run.predict(x, i)
        up = run.eta * to * (1 - (to / sigma) ** 2) ** 0.5
        moved = x0 + max(to**2 - up**2, 0.0) ** 0.5 * eps
        x = yield (moved + up * run.noise() if run.eta else moved), x0


def _heun(x: np.ndarray, run: Run) -> Steps:
    """Euler's method, corrected by the slope at its end; as many steps as the calls allow."""
    corrected = run.schedule.calls - len(run.schedule.times)
    for i, sigma, to in run.steps():
        x0, eps = run.predict(x, i)
        moved = x + (to - sigma) * eps
        if i < corrected:
            _, there = run.predict(moved, i + 1)
            moved = x + (to - sigma) * (eps + there) / 2
        x = yield moved, x0


_ADAMS = ((1.0,), (1.5, -0.5), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


def _plms(x: np.ndarray, run: Run) -> Steps:
    """Adams and Bashforth's multistep method; the first step is corrected by a second call."""
    corrected = run.schedule.calls - len(run.schedule.times)
    past: list[np.ndarray] = []
    for i, sigma, to in run.steps():
        past = [run.output(x, i), *past[:3]]
        # The outputs are combined, and then turned into noise: another result for v only.
        combined = sum(weight * output for weight, output in zip(_ADAMS[len(past) - 1], past))
        x0, eps = run.split(x, combined, i)
        if i < corrected:
            there = run.output(x + (to - sigma) * eps, i + 1)
            _, eps = run.split(x, (past[0] + there) / 2, i)
        x = yield x + (to - sigma) * eps, x0


def _extrapolated(now: np.ndarray, before: np.ndarray, sigmas: np.ndarray, i: int) -> np.ndarray:
    """x0 half a step on, in log sigma, by the line through its last two values."""
    h, last = np.log(sigmas[i] / sigmas[i + 1]), np.log(sigmas[i - 1] / sigmas[i])
    return now + (now - before) * (h / last) / 2


def _dpmpp_2m(x: np.ndarray, run: Run) -> Steps:
    """DPM-Solver++(2M); with `eta` 1 the same for the stochastic equation, 0.5 half-way there."""
    before = None
    for i, sigma, to in run.steps():
        x0, _ = run.predict(x, i)
        r = to / sigma
        aim = x0 if before is None or to == 0 else _extrapolated(x0, before, run.schedule.sigmas, i)
        keep, up = r ** (1 + run.eta), to * (1 - r ** (2 * run.eta)) ** 0.5
        before, x = x0, keep * x + (1 - keep) * aim
        x = yield (x + up * run.noise() if run.eta else x), x0


def _unipc(x: np.ndarray, run: Run) -> Steps:
    """UniPC of order 2, variant B2: each call of the model also corrects the step before it."""
    sigmas = run.schedule.sigmas
    before = older = start = None  # x0 of the last two steps, and where the last one began
    for i, sigma, to in run.steps():
        x0, _ = run.predict(x, i)
        if before is not None:
            x = _corrected(start, x0, before, older, sigmas, i)
        start, r = x, to / sigma
        aim = x0 if before is None or to == 0 else _extrapolated(x0, before, sigmas, i)
        older, before = before, x0
        x = yield r * x + (1 - r) * aim, x0


def _corrected(start, now, before, older, sigmas: np.ndarray, i: int) -> np.ndarray:
    """The latent at level i again, now that x0 is known there; `start` was at level i - 1."""
    r = sigmas[i] / sigmas[i - 1]
    if older is None:
        return r * start + (1 - r) * (before + now) / 2
    h = np.log(1 / r)
    past = -np.log(sigmas[i - 2] / sigmas[i - 1]) / h
    first = (np.expm1(-h) / -h - 1) / np.expm1(-h)
    second = 2 * ((np.expm1(-h) / -h - 1) / -h - 0.5) / np.expm1(-h)
    weight = (first - second) / (1 - past)
    slope = weight * (older - before) / past + (first - weight) * (now - before)
    return r * start + (1 - r) * (before + slope)


def _lcm(x: np.ndarray, run: Run) -> Steps:
    """A latent consistency model's jump to the picture, and back to the next noise level."""
    for i, sigma, to in run.steps():
        x0, _ = run.predict(x, i)
        scaled = run.schedule.times[i] * run.schedule.options.timestep_scaling
        skip, out = 0.25 / (scaled**2 + 0.25), scaled / np.hypot(scaled, 0.5)
        picture = out * x0 + skip * x / np.hypot(sigma, 1.0)
        x = yield (picture + to * run.noise() if to else picture), picture


@dataclass(frozen=True)
class Sampler:
    """A row of SAMPLERS.

    `grid` is how times are cut: "int" whole ones, "float" fractions too, "extra" whole ones of a
    schedule one longer, "lcm" a distilled model's. `spacing` and `eta` are defaults. `transitions`
    is how many steps n calls of the UNet are good for. `least_signal` stands for none in a model's
    training (zero terminal SNR); 0 if the sampler is of no use then, its first step being too long.
    """

    name: str
    steps: Callable[[np.ndarray, Run], Steps]
    grid: str
    spacing: str
    aliases: tuple[str, ...] = ()
    eta: float = 0.0
    transitions: Callable[[int], int] = int
    least_signal: float = 2.0**-24


def _half(calls: int) -> int:
    """Two calls for each of Heun's steps but the last or, for an even number, the last two."""
    return calls // 2 + 1


def _one_less(calls: int) -> int:
    """A step less, whose call corrects the first; there must be a second step to call it at."""
    return calls - 1 if calls > 2 else calls


SAMPLERS = {
    row.name: row
    for row in (
        Sampler("DDIM", _ancestral, "int", "leading", ("DDIMScheduler",), 0.0, least_signal=1e-16),
        Sampler("PLMS", _plms, "int", "leading", ("PNDM", "PNDMScheduler"), 0.0, _one_less, 1e-16),
        Sampler("Euler", _ancestral, "float", "linspace", ("k_euler", "EulerDiscreteScheduler")),
        Sampler("Euler a", _ancestral, "float", "linspace", ("k_euler_a", "Euler ancestral",
                "k_euler_ancestral", "EulerAncestralDiscreteScheduler"), 1.0),
        Sampler("Heun", _heun, "float", "linspace", ("k_heun", "HeunDiscreteScheduler"), 0.0,
                _half, least_signal=0.0),
        Sampler("DPM++ 2M", _dpmpp_2m, "extra", "linspace", ("k_dpmpp_2m", "dpmpp_2m", "dpmpp2m",
                "DPMSolverMultistepScheduler")),
        Sampler("DPM++ 2M SDE", _dpmpp_2m, "extra", "linspace", ("k_dpmpp_2m_sde",
                "dpmpp_2m_sde", "sde-dpmsolver++"), 1.0),
        Sampler("LCM", _lcm, "lcm", "leading", ("LCMScheduler",), least_signal=1e-16),
        Sampler("UniPC", _unipc, "extra", "linspace", ("unipc", "UniPCMultistepScheduler")),
    )
}  # fmt: skip


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum() or c == "+").replace("++", "pp")


_FOUND = {_plain(name): row for row in SAMPLERS.values() for name in (row.name, *row.aliases)}


def find(name: str) -> Sampler:
    """The sampler of a name of A1111's, CompVis's or diffusers's; case and spaces don't matter.

    UsageError for a name that none has.
    """
    if _plain(name) not in _FOUND:
        raise UsageError(f"unknown sampler {name!r}; there are {', '.join(SAMPLERS)}")
    return _FOUND[_plain(name)]


def sampler_of(config: Mapping[str, Any]) -> str | None:
    """The sampler that a scheduler_config.json of diffusers is for, if it is one of ours."""
    name, kind = str(config.get("_class_name")), str(config.get("algorithm_type"))
    key = _plain("sde-dpmsolver++" if kind.startswith("sde-") else name)
    return _FOUND[key].name if key in _FOUND else None


def _with_sigmas(sampler: str, options: Options) -> tuple[str, Options]:
    """Older names of A1111's say which noise levels to take: "DPM++ 2M Karras"."""
    first, _, last = sampler.strip().rpartition(" ")
    if first and last.lower() in SIGMAS:
        return first, replace(options, sigmas=last.lower())
    return sampler, options


def make(
    sampler: str, steps: int, options: Options | None = None, strength: float = 1.0
) -> Schedule:
    """The schedule of `steps` evaluations of the UNet, or of img2img's share of them.

    `strength` in 0..1 keeps the last int(steps * strength) of them, at least one unless it is 0.
    UsageError for a sampler or a number of steps that there is no schedule for.
    """
    sampler, options = _with_sigmas(sampler, options or Options())
    method = find(sampler)
    if not 0 <= strength <= 1:
        raise UsageError(f"the strength must be from 0 to 1, got {strength:g}")
    if not 1 <= steps <= options.train_steps:
        raise UsageError(f"steps must be from 1 to {options.train_steps}, got {steps}")
    if options.zero_snr and not method.least_signal:
        raise UsageError(f"{method.name} can't begin with noise alone, as this model has to")
    spacing = options.spacing or method.spacing
    n = method.transitions(steps)
    times, sigmas = cut(method.grid, n, options, spacing, method.least_signal)
    # A latent of variance 1 at the first level; Euler's family takes sigma for sqrt(sigma^2 + 1).
    is_sigma = method.grid == "float" and spacing != "leading"
    first = float(sigmas[0] if is_sigma else np.hypot(sigmas[0], 1.0))
    calls = max(int(steps * strength), 1) if strength else 0
    if not calls:
        return Schedule(method.name, times[:0], np.zeros(1), first, calls, options)
    start = n - method.transitions(calls)
    return Schedule(method.name, times[start:], sigmas[start:], first, calls, options)


def sample(
    model: Model,
    x: np.ndarray,
    schedule: Schedule,
    noise: Callable[[], np.ndarray],
    callback: Callable[[int, np.ndarray, np.ndarray], np.ndarray | None] | None = None,
    eta: float | None = None,
) -> np.ndarray:
    """Follow a schedule from latent `x` at its first noise level; float32 of variance 1 at its end.

    `model(latent, time)` is given latents of variance 1. After each step `callback(i, x, picture)`
    sees the latent, at noise level sigmas[i + 1], and the finished one that it leads to so far; an
    array that it gives back takes the latent's place, as a mask's does. `eta` is how much of the
    noise that DDIM, Euler and DPM++ take away is made anew; None is the sampler's own share.
    """
    method = SAMPLERS[schedule.sampler]
    run = Run(model, schedule, noise, method.eta if eta is None else eta)
    steps = method.steps(x.astype(np.float64), run)
    last = len(schedule.times) - 1
    found = next(steps, None)
    for i in range(last + 1):
        x, picture = found
        changed = callback(i, x, picture) if callback else None
        x = x if changed is None else changed.astype(np.float64)
        found = steps.send(x) if i < last else None
    return (x / np.hypot(schedule.sigmas[-1], 1.0)).astype(np.float32)
