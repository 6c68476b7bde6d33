"""What the networks draw while they learn, and how much of it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.emoji import data, train
from zoo.stable_diffusion.tokenizer import Tokenizer


@dataclass
class Drawer:
    """The parts of a model, and the factor that its latents are scaled by."""

    vae: torch.nn.Module
    unet: torch.nn.Module
    text_encoder: torch.nn.Module
    tokenizer: Tokenizer
    scale: float

    def _told(self, prompts: Sequence[str]) -> torch.Tensor:
        ids = [self.tokenizer.framed(self.tokenizer.encode(prompt)) for prompt in prompts]
        return self.text_encoder(torch.tensor(ids)).last_hidden_state

    @torch.no_grad()
    def latents(
        self, prompts: Sequence[str], steps: int = 20, guidance: float = 3.0, seed: int = 0
    ) -> torch.Tensor:
        """Scaled latents (N, 4, 8, 8) by DDIM (Song et al. 2020)."""
        context = torch.cat([self._told([""]).expand(len(prompts), -1, -1), self._told(prompts)])
        x = torch.randn(1, 4, train.SIDE, train.SIDE, generator=torch.Generator().manual_seed(seed))
        x = x.repeat(len(prompts), 1, 1, 1)
        powers = train.signal_powers()
        times = torch.linspace(999, 0, steps + 1).round().long()
        for time, after in zip(times[:-1], times[1:]):
            both = self.unet(torch.cat([x, x]), time.expand(2 * len(x)), context).sample
            without, told = both.chunk(2)
            velocity = without + guidance * (told - without)
            signal, noise = powers[time].sqrt(), (1 - powers[time]).sqrt()
            clean, rest = signal * x - noise * velocity, noise * x + signal * velocity
            x = powers[after].sqrt() * clean + (1 - powers[after]).sqrt() * rest
        return clean

    @torch.no_grad()
    def pictures(self, latents: torch.Tensor) -> np.ndarray:
        """(N, 64, 64, 3) uint8."""
        made = torch.cat([self.vae.decode(z / self.scale).sample for z in latents.split(32)])
        made = (made.clamp(-1, 1) * 127.5 + 127.5).round().byte()
        return made.permute(0, 2, 3, 1).numpy()


def seen(count: int = 100) -> list[int]:
    """Which things the score asks for: evenly spread over all."""
    return np.linspace(0, len(data.things()) - 1, count).round().astype(int).tolist()


def share_right(made: torch.Tensor, asked: Sequence[int], known: torch.Tensor, top: int) -> float:
    """How often the thing asked for is among the `top` nearest of the known latents."""
    distances = torch.cdist(made.flatten(1), known.flatten(1))
    near = distances.topk(top, largest=False).indices
    return (near == torch.tensor(asked)[:, None]).any(1).float().mean().item()


def sheet(pictures: np.ndarray, columns: int) -> np.ndarray:
    """Pictures (N, H, W, 3) side by side, rows of `columns`."""
    n, h, w, _ = pictures.shape
    rows = -(-n // columns)
    out = np.full((rows * columns, h, w, 3), 255, np.uint8)
    out[:n] = pictures
    return out.reshape(rows, columns, h, w, 3).swapaxes(1, 2).reshape(rows * h, columns * w, 3)
