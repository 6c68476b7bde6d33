"""Gaussian noise made on the CPU, so that a seed means the same picture on every device.

`CounterNoise` is the default; `TorchNoise` repeats torch's CPU generator, for the pictures that
other programs make from a seed. One source serves one picture: picture i of a batch has seed + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

F = np.float32
# What noise is for; each draws from a stream of its own. The order is part of what a seed means.
PURPOSES = ("latent", "step", "encode", "again")
MAX_SEED = 2**64 - 1


class Noise(Protocol):
    """A source of float32 standard normals for one picture."""

    def normal(self, shape: Sequence[int], purpose: str = "latent") -> np.ndarray: ...


class CounterNoise:
    """Philox4x64-10 (Salmon et al., 2011), turned into normals by Box and Muller's transform.

    The k-th drawing for a purpose has the key (seed, index of the purpose) and a counter whose
    highest word is k, so no drawing depends on how much any other took. Words 2j and 2j + 1 of the
    stream, cut to 53 bits, make values 2j and 2j + 1, computed in float64.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed & MAX_SEED
        self._drawn = dict.fromkeys(PURPOSES, 0)

    def normal(self, shape: Sequence[int], purpose: str = "latent") -> np.ndarray:
        key, counter = (self.seed, PURPOSES.index(purpose)), (0, 0, 0, self._drawn[purpose])
        self._drawn[purpose] += 1
        size = int(np.prod(shape))
        bits = np.random.Philox(
            key=np.array(key, np.uint64), counter=np.array(counter, np.uint64)
        ).random_raw(size + size % 2)
        u = (bits >> np.uint64(11)).reshape(-1, 2) * 2.0**-53  # 0 <= u < 1
        radius, angle = np.sqrt(-2 * np.log(1 - u[:, 0])), 2 * np.pi * u[:, 1]
        pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        return pairs.reshape(-1)[:size].astype(F).reshape(shape)


class TorchNoise:
    """`torch.randn(shape, generator=torch.Generator().manual_seed(seed))`, drawing by drawing.

    Bit for bit as on processors with AVX2; elsewhere torch itself differs by 3 units in the last
    place. At least 16 values a drawing, of which torch takes the same path. As there, drawings
    follow each other in one stream, whatever they are for, and a seed counts modulo 2^32.
    """

    def __init__(self, seed: int) -> None:
        # The legacy seeding is the Mersenne Twister's own (Matsumoto and Nishimura, 1998).
        self._state = np.random.RandomState(seed % 2**32)

    def normal(self, shape: Sequence[int], purpose: str = "latent") -> np.ndarray:
        size = int(np.prod(shape))
        assert size >= 16, f"{size} values, for which torch has another path"
        uniform = self._uniform(size)
        out = np.empty(size, F)
        whole = size // 16 * 16
        out[:whole] = _in_sixteens(uniform[:whole])
        if whole < size:  # the last 16 are drawn anew
            out[-16:] = _in_sixteens(self._uniform(16))
        return out.reshape(shape)

    def _uniform(self, size: int) -> np.ndarray:
        bits = self._state.randint(0, 2**32, size, np.uint32)
        return (bits & 0xFFFFFF).astype(F) * F(2**-24)


def sources(seed: int, count: int, rng: str = "counter") -> list[Noise]:
    """The sources of `count` pictures, `rng` one of RNGS."""
    return [RNGS[rng](seed + i) for i in range(count)]


RNGS = {"counter": CounterNoise, "torch": TorchNoise}


def _in_sixteens(uniform: np.ndarray) -> np.ndarray:
    """Box and Muller's transform of 8 pairs at a time: values j and j + 8 of 16."""
    u = uniform.reshape(-1, 2, 8)
    radius = np.sqrt(F(-2) * _log(1 - u[:, 0]))
    sine, cosine = _sine_cosine(F(2 * np.pi) * u[:, 1])
    return np.stack([radius * cosine, radius * sine], axis=1).reshape(-1)


# The functions that torch's vector code has, in its order of operations: Cephes's (Moshier),
# with products and sums fused into one rounding wherever its compiler does so.

_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
# pi / 4 and log 2, in parts of few bits, so that products with small integers are exact.
_QUARTER_PI = (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8)
_LOG2 = (-2.12194440e-4, 0.693359375)


def _fused(a: np.ndarray, b: np.ndarray | float, c: np.ndarray | float) -> np.ndarray:
    """a * b + c, rounded once: float64 holds the product of two float32 exactly."""
    return (np.asarray(a, np.float64) * np.asarray(F(b), np.float64) + F(c)).astype(F)


def _polynomial(x: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    y = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        y = _fused(y, x, coefficient)
    return y


def _log(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    small = mantissa < F(0.707106781186547524)
    e = (exponent - small).astype(F)
    x = np.where(small, mantissa + (mantissa - 1), mantissa - 1)
    z = x * x
    y = _fused(_polynomial(x, _LOG) * x, z, e * F(_LOG2[0]))
    return _fused(e, _LOG2[1], x + _fused(z, -0.5, y))


def _sine_cosine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    octant = ((x * F(1.27323954473516)).astype(np.int32) + 1) & ~1
    for part in _QUARTER_PI:
        x = _fused(octant.astype(F), part, x)
    z = x * x
    cosine = _fused(_polynomial(z, _COSINE) * z, z, -(z * F(0.5))) + 1
    sine = _fused(_polynomial(z, _SINE) * z, x, x)
    swapped = octant & 2 != 0
    first, second = np.where(swapped, cosine, sine), np.where(swapped, sine, cosine)
    return np.where(octant & 4, -first, first), np.where((octant - 2) & 4, second, -second)
