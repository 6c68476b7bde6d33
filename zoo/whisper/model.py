"""Whisper: an encoder of log-mel frames and a decoder of text tokens (Radford et al. 2022).

Names are the checkpoint keys of openai/whisper. Axes: B windows of 30 s, R rows of tokens (a window
has one row, or several that are tried side by side), F audio positions, T new tokens, S tokens so
far with the new ones, H heads, D head size, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine import Tensor, dtype
from engine.convolution import conv1d
from engine.functional import (
    attention,
    causal_mask,
    embedding,
    gelu,
    join_heads,
    layer_norm,
    linear,
    split_heads,
)
from engine.symbolic import Int

Params = Any  # a tree over the checkpoint: weights.Params


@dataclass(frozen=True)
class Config:
    """What a checkpoint says of its network, by openai's names; ctx in positions."""

    n_mels: int
    n_audio_ctx: int
    n_audio_state: int
    n_audio_head: int
    n_audio_layer: int
    n_vocab: int
    n_text_ctx: int
    n_text_state: int
    n_text_head: int
    n_text_layer: int


@dataclass
class Cache:
    """Keys and values, one entry per layer: `k`, `v` of the tokens, `xk`, `xv` of the audio."""

    k: list[Tensor]  # (R * H, columns, D)
    v: list[Tensor]
    xk: list[Tensor]  # (B * H, F, D)
    xv: list[Tensor]


@dataclass
class Place:
    """Where new tokens go: into the columns of the cache from `column` on, and which they follow.

    The first of their rows is `row`, of window `window`. The texts of all rows begin in column
    `first`, or each in its own of `begins` (R,), the first of which is `first`; T is 1 then.
    """

    column: Int
    first: Int = 0
    begins: Tensor | None = None
    row: Int = 0
    window: Int = 0


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every key that a checkpoint has."""
    audio, text = config.n_audio_state, config.n_text_state
    shapes = {
        "encoder.positional_embedding": (config.n_audio_ctx, audio),
        "decoder.token_embedding.weight": (config.n_vocab, text),
        "decoder.positional_embedding": (config.n_text_ctx, text),
    }

    def layer(name: str, *shape: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]

    layer("encoder.conv1", audio, config.n_mels, 3)
    layer("encoder.conv2", audio, audio, 3)
    layer("encoder.ln_post", audio)
    layer("decoder.ln", text)
    sides = (("encoder", audio, config.n_audio_layer, ("attn",)),
             ("decoder", text, config.n_text_layer, ("attn", "cross_attn")))  # fmt: skip
    for side, size, layers, kinds in sides:
        for block in (f"{side}.blocks.{n}" for n in range(layers)):
            for kind in kinds:
                read = size if kind == "attn" else audio  # what keys and values are made of
                for name, width in {"query": size, "key": read, "value": read, "out": size}.items():
                    layer(f"{block}.{kind}.{name}", size, width, bias=name != "key")
                layer(f"{block}.{kind}_ln", size)
            layer(f"{block}.mlp.0", 4 * size, size)
            layer(f"{block}.mlp.2", size, 4 * size)
            layer(f"{block}.mlp_ln", size)
    return shapes


def feed_forward(p: Params, x: Tensor) -> Tensor:
    """The two linear layers that a checkpoint calls mlp.0 and mlp.2."""
    return linear(p[2], gelu(linear(p[0], x)))


# The encoder.


def encode(p: Params, config: Config, mel: Tensor) -> Tensor:
    """Audio features (B, F, C) of log-mel frames (B, n_mels, 2 F)."""
    x = gelu(conv1d(mel, p.conv1.weight, p.conv1.bias, padding=1))
    x = gelu(conv1d(x, p.conv2.weight, p.conv2.bias, stride=2, padding=1))
    x = x.permute(0, 2, 1) + p.positional_embedding  # (B, F, C)
    heads = config.n_audio_head
    for block in p.blocks:
        h = layer_norm(block.attn_ln, x)
        q, k, v = (split_heads(linear(block.attn[n], h), heads) for n in ("query", "key", "value"))
        x = x + linear(block.attn.out, join_heads(attention(q, k, v), heads))
        x = x + feed_forward(block.mlp, layer_norm(block.mlp_ln, x))
    return layer_norm(p.ln_post, x)


def listen(p: Params, config: Config, cache: Cache, features: Tensor, window: Int) -> None:
    """Write the keys and values of a window, of its audio features (1, F, C), to the cache."""
    heads = config.n_text_head
    here = slice(window * heads, (window + 1) * heads)
    for n, block in enumerate(p.blocks):
        cache.xk[n][here] = split_heads(linear(block.cross_attn.key, features), heads)
        cache.xv[n][here] = split_heads(linear(block.cross_attn.value, features), heads)


# The decoder.


def attend_text(p: Params, config: Config, x: Tensor, place: Place, cache: Cache, n: int) -> Tensor:
    """Attention of new tokens (R, T, C) to all of their row's text so far."""
    rows, t, _ = x.shape
    heads, end = config.n_text_head, place.column + t
    q, k, v = (split_heads(linear(p[name], x), heads) for name in ("query", "key", "value"))
    keys, values = cache.k[n], cache.v[n]
    here = slice(place.row * heads, (place.row + rows) * heads)
    keys[here, place.column : end] = k
    values[here, place.column : end] = v
    seen = causal_mask(t, end - place.first, place.column - place.first)
    if place.begins is not None:  # (R * H, 1, 1, S)
        columns = Tensor.arange(end - place.first) + Tensor(place.first)
        begun = place.begins.reshape(rows, 1, 1) <= columns
        seen = begun.expand(rows, heads, end - place.first).reshape(rows * heads, 1, 1, -1)
    out = attention(q, keys[here, place.first : end], values[here, place.first : end], seen)
    return linear(p.out, join_heads(out, heads))


def extend(
    p: Params,
    config: Config,
    ids: Tensor,
    windows: int,
    place: Place,
    cache: Cache,
    asked: list[Tensor] | None = None,
) -> Tensor:
    """(R, T, C): T new tokens a row, of so many windows, after all blocks; writes the cache.

    The rows of a window are neighbours. `asked`, if given, gets each layer's queries of the audio.
    """
    (rows, t), heads = ids.shape, config.n_text_head
    here = slice(place.window * heads, (place.window + windows) * heads)
    x = embedding(p.token_embedding, ids) + positions(p.positional_embedding, place, t)
    for n, block in enumerate(p.blocks):
        x = x + attend_text(block.attn, config, layer_norm(block.attn_ln, x), place, cache, n)
        q = linear(block.cross_attn.query, layer_norm(block.cross_attn_ln, x))
        # All rows of a window ask at once: (B, R / B * T, C) -> (B * H, R / B * T, D).
        q = split_heads(q.reshape(windows, rows // windows * t, -1), heads)
        if asked is not None:
            asked.append(q)
        heard = join_heads(attention(q, cache.xk[n][here], cache.xv[n][here]), heads)
        x = x + linear(block.cross_attn.out, heard.reshape(*x.shape))
        x = x + feed_forward(block.mlp, layer_norm(block.mlp_ln, x))
    return layer_norm(p.ln, x)


def positions(table: Tensor, place: Place, t: Int) -> Tensor:
    """What says how far into its text a token is: (T, C), or (R, 1, C) where texts differ."""
    if place.begins is None:
        at = place.column - place.first
        return table[at : at + t]
    return table[Tensor(place.column) - place.begins].unsqueeze(1)


def logits(p: Params, x: Tensor) -> Tensor:
    """(…, n_vocab) of x (…, C): the output matrix is the embedding."""
    return linear(p.token_embedding, x).cast(dtype.float32)


def alignment(asked: list[Tensor], cache: Cache, heads: Sequence[tuple[int, int]]) -> Tensor:
    """(len(heads), T, F): how well each audio position answers a token, for some (layer, head)."""
    q = Tensor.stack(*(asked[layer][head] for layer, head in heads))  # (heads, T, D)
    k = Tensor.stack(*(cache.xk[layer][head] for layer, head in heads))  # (heads, F, D)
    return (q @ k.transpose()).cast(dtype.float32) * q.shape[-1] ** -0.5
