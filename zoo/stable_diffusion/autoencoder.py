"""The autoencoder at work: whole pictures, or tiles where the whole doesn't fit in memory.

Of tiles only the part with the large pictures is computed; the rest, with its attention, sees the
whole. What tiles can't know, the mean and variance in each group norm, is taken from the same
network on every nth pixel of the whole. So neighbouring tiles agree where they overlap, and there
is no seam; the picture differs from one in a single piece by what those statistics are off.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine import Tensor, program
from weights import Params
from zoo.errors import UserError
from zoo.stable_diffusion import tiles, vae
from zoo.stable_diffusion.norms import Given, Kept

PIXELS = 8  # per latent pixel, each way
_KEPT = 3  # sizes whose kernels and memory a program keeps
# Bytes that a pixel of the picture needs, as measured at 512 to 1024 pixels.
_PER_PIXEL = {"auto": 2400, "f32": 5400}

Progress = Callable[[int, int], None]


class Runner:
    """Programs on one device, NumPy in and out; the last few sizes of each stay compiled."""

    def __init__(self, device: str | None, precision: str) -> None:
        self.device, self.precision = device, precision

    def __call__(self, function: Callable, precision: str | None = None) -> Callable:
        """`function` of tensors as one of arrays that gives an array, or a list of them."""
        made = program(function, precision=precision or self.precision)

        def run(*inputs: np.ndarray) -> np.ndarray | list[np.ndarray]:
            while len(made.captures) > _KEPT:
                del made.captures[next(iter(made.captures))]
            out = made(*map(self.tensor, inputs))
            several = isinstance(out, tuple)
            return [np.array(t.numpy()) for t in out] if several else np.array(out.numpy())

        run.captures = made.captures
        return run

    def tensor(self, values: np.ndarray) -> Tensor:
        """An array on this device: integers as int32, others as float32."""
        array = np.asarray(values)
        kind = np.int32 if array.dtype.kind in "iu" else np.float32
        return Tensor.from_numpy(np.ascontiguousarray(array, kind), device=self.device)


class _Programs:
    """All that is compiled of an autoencoder in one precision."""

    def __init__(self, p: Params, compiled: Runner) -> None:
        def statistics(part: Callable) -> Callable:
            def of(x: Tensor) -> Tensor:
                kept = Kept()
                part(p, x, kept)
                return kept.statistics()

            return compiled(of)

        self.decode = compiled(lambda z: vae.decode(p, z))
        self.sketch = compiled(lambda z: vae.sketch(p, z))
        self.paint = compiled(lambda x, given: vae.paint(p, x, Given(given)))
        self.painted = statistics(vae.paint)
        self.encode = compiled(lambda x: vae.encode(p, x))
        self.shrink = compiled(lambda x, given: vae.shrink(p, x, Given(given)))
        self.shrunk = statistics(vae.shrink)
        self.conclude = compiled(lambda x: vae.conclude(p, x))


class Autoencoder:
    """Pictures to latents and back, one of a batch after the other; latents are not scaled."""

    def __init__(self, p: Params, device: str | None, dtype: str) -> None:
        self.dtype = dtype
        self.programs = [_Programs(p, Runner(device, d)) for d in dict.fromkeys((dtype, "f32"))]

    def decode(self, z: np.ndarray, tiled: bool | None, progress: Progress | None) -> np.ndarray:
        """Latents (B, 4, H, W) -> pictures (B, 3, 8 H, 8 W)."""

        def in_tiles(use: _Programs, one: np.ndarray) -> np.ndarray:
            seen = use.sketch(one)
            given = use.painted(sample(seen, 1))
            return tiles.tiled(lambda tile: use.paint(tile, given), seen, 1, PIXELS, progress)

        tiled = self._too_large(z.shape[2] * z.shape[3]) if tiled is None else tiled
        return self._each(z, in_tiles if tiled else lambda use, one: use.decode(one))

    def encode(self, x: np.ndarray, tiled: bool | None, progress: Progress | None) -> np.ndarray:
        """Pictures (B, 3, H, W) -> means and log-variances (B, 8, H/8, W/8)."""

        def in_tiles(use: _Programs, one: np.ndarray) -> np.ndarray:
            given = use.shrunk(sample(one, PIXELS))
            return use.conclude(
                tiles.tiled(lambda tile: use.shrink(tile, given), one, PIXELS, 1, progress)
            )

        latents = x.shape[2] * x.shape[3] // PIXELS**2
        tiled = self._too_large(latents) if tiled is None else tiled
        return self._each(x, in_tiles if tiled else lambda use, one: use.encode(one))

    def _each(
        self, x: np.ndarray, run: Callable[[_Programs, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """`run` on each picture; in float32 where the faster programs overflow."""
        made = []
        for n in range(len(x)):
            for use in self.programs:
                out = run(use, x[n : n + 1])
                if np.isfinite(out).all():
                    break
            else:
                raise UserError("the autoencoder's result isn't finite, in float32 neither")
            made.append(out)
        return np.concatenate(made)

    def _too_large(self, latents: int) -> bool:
        """Whether so many latent pixels at once take more than half of the memory that is free."""
        free = tiles.available_memory()
        return free is not None and 2 * latents * PIXELS**2 * _PER_PIXEL[self.dtype] > free


def sample(x: np.ndarray, pixels: int) -> np.ndarray:
    """Every nth pixel of x (B, C, H, W), so many that it is no larger than a tile."""
    most = tiles.TILE * pixels
    rows, columns = (np.linspace(0, n - 1, min(n, most)).round().astype(int) for n in x.shape[2:])
    return np.ascontiguousarray(x[:, :, rows][:, :, :, columns])
