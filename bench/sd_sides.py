"""The runtimes that `bench sd` compares, each behind the same few methods.

Imports of a runtime happen in `load`, in that side's own process.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.measure import peak_memory_mb

LATENT = 64  # 512 pixels
SHOWN = 4096  # values of a result that are compared


def inputs(version: str) -> list[np.ndarray]:
    """A step of guidance: two latents, their times, two prompts; XL's pooled prompts and sizes."""
    draw = np.random.default_rng(0)
    wide = {"1": 768, "2": 1024, "xl": 2048}[version]
    latent = draw.normal(size=(1, 4, LATENT, LATENT)).repeat(2, 0)
    given = [latent, np.array([500.0, 500.0]), draw.normal(size=(2, 77, wide))]
    if version == "xl":
        given += [draw.normal(size=(2, 1280)), np.array([[512.0, 512, 0, 0, 512, 512]] * 2)]
    return [array.astype(np.float32) for array in given]


class Side:
    """A loaded model: `unet` and `vae` compute on fixed inputs and return an array."""

    inputs: list[np.ndarray]
    latent: np.ndarray

    def unet(self) -> np.ndarray:
        raise NotImplementedError

    def vae(self) -> np.ndarray:
        raise NotImplementedError

    def prepare(self, version: str) -> None:
        """The inputs, once a version is known."""
        self.inputs = inputs(version)
        self.latent = self.inputs[0][:1]

    def result(self, what: str) -> list[float]:
        """Some values of what "unet" or "vae" gives; also compiles and fills caches."""
        flat = getattr(self, what)().reshape(-1)
        return [float(v) for v in flat[:: max(1, len(flat) // SHOWN)]]

    def seconds(self, what: str) -> float:
        begun = time.perf_counter()
        getattr(self, what)()
        return time.perf_counter() - begun

    def peak_memory_mb(self) -> float | None:
        return peak_memory_mb()


class Menagerie(Side):
    """This project."""

    def load(self, path: str, threads: int, device: str | None = None, dtype: str = "auto") -> None:
        from zoo.stable_diffusion import loading

        self.networks, _ = loading.load(path, device, dtype)
        self.prepare(self.networks.kind.version)

    def version(self) -> str:
        return self.networks.kind.version

    def unet(self) -> np.ndarray:
        return self.networks.unet(*self.inputs)

    def vae(self) -> np.ndarray:
        return self.networks.decode(self.latent * np.float32(self.networks.kind.scale), tiled=False)


class Torch(Side):
    """diffusers's modules on torch, channels last, over the same file."""

    def load(self, path: str, threads: int, version: str, dtype: str) -> None:
        import torch

        import weights
        from bench import sd_torch
        from zoo.stable_diffusion.loading import identified

        torch.set_num_threads(threads)
        self.torch, self.kind = torch, getattr(torch, dtype)
        ours, _ = identified(weights.load(path))
        modules = (sd_torch.module(ours, part, version) for part in ("unet", "vae"))
        last = torch.channels_last
        self._unet, self._vae = (m.to(self.kind).to(memory_format=last) for m in modules)
        self.prepare(version)

    def unet(self) -> np.ndarray:
        latent, times, context, *more = (self._tensor(array) for array in self.inputs)
        given = dict(zip(("text_embeds", "time_ids"), more)) or None
        with self.torch.inference_mode():
            out = self._unet(latent, times, context, added_cond_kwargs=given).sample
        return out.float().numpy()

    def vae(self) -> np.ndarray:
        with self.torch.inference_mode():
            return self._vae.decode(self._tensor(self.latent)).sample.float().numpy()

    def _tensor(self, array: np.ndarray) -> Any:
        made = self.torch.from_numpy(array).to(self.kind)
        return made.to(memory_format=self.torch.channels_last) if made.ndim == 4 else made
