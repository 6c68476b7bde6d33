"""Group norms that take their statistics from elsewhere, so that tiles of a picture agree."""

from __future__ import annotations

from engine import Tensor
from zoo.stable_diffusion.layers import GROUPS, Params, norm


class Kept:
    """Group norms of one picture (1, H, W, C) that also keep what each saw."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, p: Params, x: Tensor, eps: float) -> Tensor:
        _, h, w, c = x.shape
        parts = x.reshape(h * w, GROUPS, c // GROUPS)
        mean = parts.mean((0, 2), keepdim=True)
        variance = (parts - mean).square().mean((0, 2))
        self.seen.append(Tensor.stack(mean.reshape(GROUPS), variance))
        return norm(p, x, eps)

    def statistics(self) -> Tensor:
        """Mean and variance of each group, norm by norm: (norms, 2, GROUPS)."""
        return Tensor.stack(*self.seen)


class Given:
    """Group norms by such statistics, in the order in which they were kept."""

    def __init__(self, statistics: Tensor) -> None:
        self.statistics, self.used = statistics, 0

    def __call__(self, p: Params, x: Tensor, eps: float) -> Tensor:
        wide = x.shape[-1] // GROUPS
        each = self.statistics[self.used].unsqueeze(-1).expand(2, GROUPS, wide)
        mean, variance = each.reshape(2, 1, GROUPS * wide).split(1, 1)
        self.used += 1
        x = (x - mean) * (variance + eps).rsqrt()
        return x * p.weight + p.bias
