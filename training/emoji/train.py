"""The training of both parts, in steps that can be broken off and gone on with.

Autoencoder: Rombach et al. 2022, without the discriminator. Diffusion: v-prediction (Salimans and
Ho 2022), all times alike, since it is at the noisy ones that a caption decides what is drawn, and
captions left out now and then for guidance (Ho and Salimans 2022). What is written are moving
averages of the weights.
"""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from training.emoji import data, model
from training.emoji.faster import attention, speed_up
from zoo.stable_diffusion.tokenizer import Tokenizer

SIDE = data.SIZE // 8  # of a latent
NOISE = 0.05  # standard deviation of what latents are blurred with
_OWN_COLOURS = 0.7  # share of pictures that are as the font has them
_UNTOLD = 0.1  # share of captions that are left out


class Run:
    """Modules with their averages and optimiser, and how far they are; kept in one file."""

    def __init__(self, file: Path, modules: dict, rate: float, steps: int, half_life: int) -> None:
        self.file, self.modules, self.rate, self.steps = file, modules, rate, steps
        self.half_life, self.step = half_life, 0
        self.averages = {name: copy.deepcopy(m).eval() for name, m in modules.items()}
        for average in self.averages.values():
            average.requires_grad_(False)
        for module in modules.values():
            speed_up(module.requires_grad_(True))
        self.weights = [p for module in modules.values() for p in module.parameters()]
        decayed = [p for p in self.weights if p.ndim > 1]
        rest = [p for p in self.weights if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
        if file.is_file():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self.file, map_location="cpu", weights_only=True)
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
            self.averages[name].load_state_dict(state["averages"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "averages": {name: module.state_dict() for name, module in self.averages.items()},
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
        }
        beside = self.file.with_suffix(".part")
        torch.save(state, beside)
        os.replace(beside, self.file)

    def learn(self, loss: torch.Tensor) -> None:
        """One step of the optimiser: warmed up, then constant, falling to 0 in the last fifth."""
        done = self.step / self.steps
        rate = self.rate * min(1, (self.step + 1) / 200, max(0, (1 - done) / 0.2))
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        self.optimiser.step()
        self.step += 1
        # The average is over fewer steps at first, when weights are worth less.
        keep = min(0.5 ** (1 / self.half_life), (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            averages = [p for module in self.averages.values() for p in module.parameters()]
            torch._foreach_lerp_(averages, self.weights, 1 - keep)


class _Log:
    """A line and a checkpoint every half minute: the mean loss and the speed since the last."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.total, self.count, self.since = 0.0, 0, time.monotonic()

    def add(self, loss: float, size: int) -> None:
        self.total, self.count = self.total + loss, self.count + 1
        seconds = time.monotonic() - self.since
        if seconds > 30:
            speed = self.count * size / seconds
            line = f"step {self.run.step} loss {self.total / self.count:.4f} {speed:.1f} pictures/s"
            print(line, flush=True)
            self.run.save()
            self.total, self.count, self.since = 0.0, 0, time.monotonic()


def pictures() -> torch.Tensor:
    """All pictures that may be seen, (N, 3, 64, 64) uint8."""
    shown = np.stack([s.picture for s in data.samples() if not s.held_out])
    return torch.from_numpy(shown).permute(0, 3, 1, 2).contiguous()


def as_input(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures from 0 to 255 -> from -1 to 1, as the autoencoder takes them."""
    return (pictures.float() / 127.5 - 1).to(memory_format=torch.channels_last)


def _chosen(draw: np.random.Generator, pictures: int, batch: int) -> np.ndarray:
    """Which pictures a batch has."""
    plain, own = len(data.things()), round(_OWN_COLOURS * batch)
    coloured = draw.integers(plain, pictures, size=batch - own)
    return np.concatenate([draw.integers(plain, size=own), coloured])


def edges(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Differences of neighbouring pixels, each way."""
    return x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]


def difference(made: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """L1 and L2 of pixels, L1 of edges, and of colours, which are learned last without that."""
    loss = F.l1_loss(made, x) + F.mse_loss(made, x) + F.mse_loss(*map(chroma, (made, x)))
    return loss + sum(F.l1_loss(a, b) for a, b in zip(edges(made), edges(x)))


def chroma(x: torch.Tensor) -> torch.Tensor:
    """Red less green, and blue less both: (B, 2, H, W)."""
    red, green, blue = x.unbind(1)
    return torch.stack([red - green, blue - (red + green) / 2], 1)


def train_autoencoder(run: Run, batch: int, seed: int) -> None:
    """Pictures to latents and back.

    While it learns, each channel of the latents is given mean 0 and variance 1 over the batch; with
    a KL divergence in its place such small latents shrink to nothing before they are of use. The
    last step writes that scale into the encoder.
    """
    all_pictures, log = pictures(), _Log(run)
    module, norm = run.modules["vae"], run.modules["norm"]
    while run.step < run.steps:
        draw = np.random.default_rng((seed, run.step))
        torch.manual_seed(seed + run.step)
        x = as_input(all_pictures[_chosen(draw, len(all_pictures), batch)])
        with torch.autocast("cpu", torch.bfloat16):
            z = norm(module.quant_conv(module.encoder(x))[:, :4].float())
            made = module.decode(z + NOISE * torch.randn_like(z)).sample.float()
        loss = difference(made, x)
        run.learn(loss)
        log.add(loss.item(), batch)
    run.save()


@torch.no_grad()
def finished(vae: torch.nn.Module, latents: torch.Tensor) -> torch.nn.Module:
    """An autoencoder that made these latents, changed so that they have mean 0 and variance 1."""
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    layer = vae.quant_conv
    layer.weight[:4] /= deviation.reshape(-1, 1, 1, 1)
    layer.bias[:4] = (layer.bias[:4] - mean) / deviation
    layer.weight[4:] = 0
    layer.bias[4:] = 2 * float(np.log(NOISE))
    return vae


def train_decoder(run: Run, latents: torch.Tensor, batch: int, seed: int) -> None:
    """The decoder goes on alone, since the UNet has learned the encoder's latents (N, 4, 8, 8)."""
    all_pictures, log = pictures(), _Log(run)
    first, decoder = run.modules["post_quant_conv"], run.modules["decoder"]
    while run.step < run.steps:
        draw = np.random.default_rng((seed, run.step))
        torch.manual_seed(seed + run.step)
        chosen = _chosen(draw, len(all_pictures), batch)
        z = latents[chosen].to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            made = decoder(first(z + NOISE * torch.randn_like(z))).float()
        loss = difference(made, as_input(all_pictures[chosen]))
        run.learn(loss)
        log.add(loss.item(), batch)
    run.save()


@torch.no_grad()
def encoded(module: torch.nn.Module, pictures: torch.Tensor) -> torch.Tensor:
    """The means of the latents (N, 4, 8, 8) of pictures (N, 3, 64, 64)."""
    parts = [module.encode(as_input(part)).latent_dist.mean for part in pictures.split(64)]
    return torch.cat(parts).contiguous()


def signal_powers() -> torch.Tensor:
    """What is left of a picture's power at each of the 1000 times."""
    low, high = model.SCHEDULER["beta_start"] ** 0.5, model.SCHEDULER["beta_end"] ** 0.5
    return torch.cumprod(1 - torch.linspace(low, high, 1000, dtype=torch.float64) ** 2, 0).float()


class _Captions:
    """Token ids of captions, each text cut only once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.known = tokenizer, {}

    def __call__(self, texts: list[str]) -> torch.Tensor:
        for text in texts:
            if text not in self.known:
                self.known[text] = self.tokenizer.framed(self.tokenizer.encode(text))
        return torch.tensor([self.known[text] for text in texts])


def train_diffusion(
    run: Run, latents: torch.Tensor, tokenizer: Tokenizer, batch: int, seed: int
) -> None:
    """The UNet and the text encoder, on scaled latents (N, 4, 8, 8) of the pictures shown."""
    shown = [s for s in data.samples() if not s.held_out]
    F.scaled_dot_product_attention = attention  # of diffusers and transformers
    powers = signal_powers()
    unet, text = run.modules["unet"], run.modules["text_encoder"]
    ids, log = _Captions(tokenizer), _Log(run)
    while run.step < run.steps:
        draw = np.random.default_rng((seed, run.step))
        torch.manual_seed(seed + run.step)
        chosen = _chosen(draw, len(shown), batch)
        told = [data.caption(shown[i].names, draw) for i in chosen]
        told = ["" if draw.random() < _UNTOLD else caption for caption in told]
        x = latents[chosen]
        noise, times = torch.randn_like(x), torch.randint(1000, (batch,))
        power = powers[times].reshape(-1, 1, 1, 1)
        noisy = (power.sqrt() * x + (1 - power).sqrt() * noise).to(
            memory_format=torch.channels_last
        )
        velocity = power.sqrt() * noise - (1 - power).sqrt() * x
        with torch.autocast("cpu", torch.bfloat16):
            context = text(ids(told)).last_hidden_state
            made = unet(noisy, times, context).sample
        loss = F.mse_loss(made.float(), velocity)
        run.learn(loss)
        log.add(loss.item(), batch)
    run.save()
