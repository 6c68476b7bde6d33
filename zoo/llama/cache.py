"""The key/value cache: where the keys and values of new tokens go, and what these tokens see.

Axes: T new tokens, S tokens so far with the new ones, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import Tensor, dtype
from engine.functional import attention, causal_mask
from engine.symbolic import Int
from zoo.llama import rope as rotary
from zoo.llama.model import Config


@dataclass
class Cache:
    """Keys and values of the tokens so far, and the rotary tables: one entry per layer in each.

    Room for as many sequences as there are slots: slot n has rows K * n … K * (n + 1) - 1.
    """

    k: list[Tensor]  # (slots * K, context, D)
    v: list[Tensor]  # (slots * K, context, D)
    rope: list[Tensor]  # (2, context, D / 2): cosines, sines
    heads: int  # K


def init_cache(
    config: Config,
    context: int,
    device: str | None = None,
    kind: dtype.DType = dtype.float32,
    slots: int = 1,
) -> Cache:
    """Room for `context` tokens in each slot, all zero; keys and values are of the type `kind`."""
    heads, d = config.n_kv_heads, config.head_dim

    def empty(*shape: int) -> list[Tensor]:
        zeros = Tensor.zeros(*shape, dtype=kind, device=device)
        return [zeros.contiguous() for _ in range(config.n_layers)]

    k, v = empty(slots * heads, context, d), empty(slots * heads, context, d)
    k[0].realize(*k[1:], *v)
    table = rotary.table(context, d, config.rope_theta, config.rope_scaling)
    ropes = [Tensor.from_numpy(table, device=device)] * config.n_layers
    if config.local_theta is not None:
        local = Tensor.from_numpy(rotary.table(context, d, config.local_theta), device=device)
        ropes = [local if window else full for full, window in zip(ropes, config.windows)]
    return Cache(k, v, ropes, heads)


@dataclass(frozen=True)
class Span:
    """T new tokens of one sequence, at positions start … of a slot."""

    cache: Cache
    start: Int
    slot: Int = 0

    def angles(self, layer: int, count: Int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the `count` = T positions, (T, D / 2) each."""
        table, here = self.cache.rope[layer], slice(self.start, self.start + count)
        return table[0, here], table[1, here]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep keys and values, (K, T, D), of the new tokens."""
        here = slice(self.start, self.start + k.shape[1])
        self.cache.k[layer][self._rows(), here] = k
        self.cache.v[layer][self._rows(), here] = v

    def attend(
        self, layer: int, q: Tensor, window: int | None, scale: float | None, cap: float | None
    ) -> Tensor:
        """(H, T, D): what queries (H, T, D) find among the tokens up to their own."""
        count = q.shape[1]
        end = self.start + count
        k, v = (x[layer][self._rows(), :end] for x in (self.cache.k, self.cache.v))
        return attention(q, k, v, causal_mask(count, end, self.start, window), scale, cap)

    def _rows(self) -> slice:
        return slice(self.slot * self.cache.heads, (self.slot + 1) * self.cache.heads)


@dataclass(frozen=True)
class Step:
    """T new tokens, each of another sequence: at positions[i] of slots[i], int32 (T,) each.

    `length`: S, tokens of the longest of the sequences, the new one included.
    """

    cache: Cache
    slots: Tensor
    positions: Tensor
    length: Int

    def angles(self, layer: int, count: Int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the T positions, (T, D / 2) each."""
        table = self.cache.rope[layer]
        return table[0][self.positions], table[1][self.positions]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep keys and values, (K, T, D), of the new tokens."""
        heads, count, d = k.shape
        size = self.cache.k[layer].shape[1]
        places = (self._rows() * size + self.positions.unsqueeze(-1)).reshape(count * heads)
        for kept, new in ((self.cache.k[layer], k), (self.cache.v[layer], v)):
            kept.put(places, new.permute(1, 0, 2).reshape(count * heads, d))

    def attend(
        self, layer: int, q: Tensor, window: int | None, scale: float | None, cap: float | None
    ) -> Tensor:
        """(H, T, D): what queries (H, T, D) find among the tokens of their sequences."""
        heads, count, d = q.shape
        rows = self._rows().reshape(count * self.cache.heads)
        k, v = (x[layer][:, : self.length][rows] for x in (self.cache.k, self.cache.v))
        seen = self.positions.reshape(count, 1).expand(count, self.cache.heads)
        seen = seen.reshape(count * self.cache.heads, 1, 1, 1)
        at = Tensor.arange(self.length).reshape(1, 1, 1, self.length)
        mask = at < seen + 1
        if window is not None:
            mask = mask & (seen - at < window)
        queries = q.permute(1, 0, 2).reshape(count * heads, 1, d)
        found = attention(queries, k, v, mask, scale, cap)
        return found.reshape(count, heads, d).permute(1, 0, 2)

    def _rows(self) -> Tensor:
        """(T, K): rows of the cache."""
        heads = self.cache.heads
        return self.slots.unsqueeze(-1) * heads + Tensor.arange(heads)
