"""The key/value cache: where the keys and values of new tokens go, and what these tokens see.

Axes: T new tokens, S tokens so far with the new ones, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import Tensor, dtype
from engine.functional import attention, causal_mask
from engine.symbolic import Int
from zoo.errors import UsageError
from zoo.llama import rope as rotary
from zoo.llama.model import Config

KINDS = {"f32": dtype.float32, "f16": dtype.float16, "q8_0": dtype.int8}
BLOCK = 32  # values that share a scale


class Quantised:
    """A tensor (rows, context, D) kept as ggml's q8_0: 32 int8 along D with a scale, 8.5 bits each.

    It is written to as a Tensor is, and what is read of it are halves. 32 must divide D.
    """

    def __init__(self, shape: tuple[int, ...], device: str | None) -> None:
        self.shape = shape
        scales = (*shape[:-1], shape[-1] // BLOCK)
        self.q = Tensor.zeros(*shape, dtype=dtype.int8, device=device).contiguous()
        self.scale = Tensor.zeros(*scales, dtype=dtype.float16, device=device).contiguous()

    def __getitem__(self, where: Any) -> Tensor:
        q, scale = self.q[where], self.scale[where]
        blocks = q.reshape(*scale.shape, BLOCK).float() * scale.float().unsqueeze(-1)
        halves = blocks.reshape(*q.shape).cast(dtype.float16)
        # A copy that all rows of a call read; tokens lie outermost, so that it needs no more room
        # than there are, and each row's keys lie in steps that are known beforehand.
        return halves.transpose(0, 1).contiguous().transpose(0, 1)

    def __setitem__(self, where: Any, new: Tensor) -> None:
        self.q[where], self.scale[where] = self._parts(new)

    def put(self, index: Tensor, new: Tensor) -> None:
        """As of a Tensor: slices of the last axis, by number."""
        q, scale = self._parts(new)
        self.q.put(index, q)
        self.scale.put(index, scale)

    def _parts(self, new: Tensor) -> tuple[Tensor, Tensor]:
        *rest, d = new.shape
        blocks = new.float().reshape(*rest, d // BLOCK, BLOCK)
        scale = blocks.abs().max(-1, keepdim=True) * (1 / 127)
        inverse = Tensor.where(scale == 0, 0.0, scale.reciprocal())
        return (blocks * inverse).round().reshape(*rest, d), scale.squeeze(-1)


@dataclass
class Cache:
    """Keys and values of the tokens so far, and the rotary tables: one entry per layer in each.

    Room for as many sequences as there are slots: slot n has rows K * n … K * (n + 1) - 1.
    """

    k: list[Tensor | Quantised]  # (slots * K, context, D)
    v: list[Tensor | Quantised]  # (slots * K, context, D)
    rope: list[Tensor]  # (2, context, D / 2): cosines, sines
    heads: int  # K


def init_cache(
    config: Config,
    context: int,
    device: str | None = None,
    kind: dtype.DType = dtype.float32,
    slots: int = 1,
) -> Cache:
    """Room for `context` tokens in each slot, all zero; keys and values are of the type `kind`.

    int8 means blocks of them: see Quantised. UsageError where the head size isn't made of blocks.
    """
    heads, d = config.n_kv_heads, config.head_dim
    if kind is dtype.int8 and d % BLOCK:
        raise UsageError(f"a q8_0 cache needs heads of a multiple of {BLOCK} values, not of {d}")

    def empty(*shape: int) -> list[Tensor | Quantised]:
        if kind is dtype.int8:
            return [Quantised(shape, device) for _ in range(config.n_layers)]
        zeros = Tensor.zeros(*shape, dtype=kind, device=device)
        return [zeros.contiguous() for _ in range(config.n_layers)]

    k, v = empty(slots * heads, context, d), empty(slots * heads, context, d)
    buffers = [each for kept in (*k, *v) for each in tensors(kept)]
    buffers[0].realize(*buffers[1:])
    table = rotary.table(context, d, config.rope_theta, config.rope_scaling)
    ropes = [Tensor.from_numpy(table, device=device)] * config.n_layers
    if config.local_theta is not None:
        local = Tensor.from_numpy(rotary.table(context, d, config.local_theta), device=device)
        ropes = [local if window else full for full, window in zip(ropes, config.windows)]
    return Cache(k, v, ropes, heads)


def tensors(kept: Tensor | Quantised) -> tuple[Tensor, ...]:
    """The buffers of a layer's keys or values."""
    return (kept.q, kept.scale) if isinstance(kept, Quantised) else (kept,)


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
