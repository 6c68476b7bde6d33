"""Attention, and the rotations that go with it."""

from __future__ import annotations

import math

from zoo.onnx import values as v
from zoo.onnx.registry import operator
from zoo.onnx.values import Value


@operator("Attention")
def attention(q: Value, k: Value, value: Value, mask: Value = None, past_key: Value = None,
              past_value: Value = None, lengths: Value = None, *, is_causal: int = 0,
              kv_num_heads: int = 0, q_num_heads: int = 0, qk_matmul_output_mode: int = 0,
              scale: float | None = None, softcap: float = 0.0, softmax_precision: int = 0,
              left_window_size: int = -1, right_window_size: int = -1):  # fmt: skip
    """softmax(q kᵀ scale + mask) v with grouped heads; also the keys, the values, the scores.

    q (B, H, T, D), or (B, T, H D) with the numbers of heads; past keys and values go in front.
    """
    kind, flat = v.type_of(q), q.ndim == 3
    if flat:
        q = _heads(q, q_num_heads)
        k, value = _heads(k, kv_num_heads), _heads(value, kv_num_heads)
    if past_key is not None:
        k, value = v.concat([past_key, k], 2), v.concat([past_value, value], 2)
    batch, heads, t, d = q.shape
    groups, s = k.shape[1], k.shape[2]
    factor = 1 / math.sqrt(d) if scale is None else scale
    grouped = v.reshape(q, (batch, groups, heads // groups, t, d))
    keys = v.reshape(k, (batch, groups, 1, s, d))
    root = v.number(q, math.sqrt(factor))
    scores = (grouped * root) @ v.permute(keys * root, (0, 1, 2, 4, 3))
    scores = v.reshape(scores, (batch, heads, t, s))
    past = 0 if past_key is None else past_key.shape[2]
    bias, seen = _masked(scores, mask, lengths, past, is_causal, left_window_size,
                         right_window_size)  # fmt: skip
    capped = scores
    if softcap:
        capped = v.tanh(scores * v.number(q, 1 / softcap)) * v.number(q, softcap)
    biased = capped if bias is None else capped + bias
    if seen is not None:
        biased = v.where(seen, biased, v.number(q, -float("inf")))
    weights = _softmax(biased, seen)
    shown = (scores, capped, biased, weights)[qk_matmul_output_mode]
    parts = v.reshape(weights, (batch, groups, heads // groups, t, s))
    out = parts @ v.reshape(value, (batch, groups, 1, s, value.shape[-1]))
    out = v.reshape(out, (batch, heads, t, value.shape[-1]))
    if flat:
        out = v.reshape(v.permute(out, (0, 2, 1, 3)), (batch, t, heads * value.shape[-1]))
    return v.cast(out, kind), k, value, shown


def _softmax(x: Value, seen: Value | None) -> Value:
    """softmax over the last axis; rows that see nothing are 0."""
    if seen is None:
        return v.softmax(x, -1)
    top = v.reduce("max", x, (x.ndim - 1,))
    top = v.where(top > -float("inf"), top, v.number(x, 0))
    e = v.exp(x - top)
    total = v.reduce("sum", e, (x.ndim - 1,))
    return v.where(total == 0, v.number(x, 0), e / v.where(total == 0, v.number(x, 1), total))


def _heads(x: Value, count: int) -> Value:
    """(B, T, H D) -> (B, H, T, D)."""
    b, t, wide = x.shape
    return v.permute(v.reshape(x, (b, t, count, wide // count)), (0, 2, 1, 3))


def _masked(scores, mask, lengths, past, causal, left, right):
    """(what is added to the scores, where keys are seen), each None if there is nothing."""
    t, s = scores.shape[-2:]
    keys, seen, bias = v.reshape(v.iota(s, scores), (1, s)), None, None
    queries = v.reshape(v.iota(t, scores), (t, 1)) + past
    if lengths is not None:
        queries = queries + v.reshape(v.cast(lengths, "int32"), (-1, 1, 1, 1)) - t
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if right >= 0:
        seen = keys <= queries + right
    if left >= 0:
        near = keys >= queries - left
        seen = near if seen is None else seen & near
    if lengths is not None:
        inside = keys < v.reshape(v.cast(lengths, "int32"), (-1, 1, 1, 1))
        seen = inside if seen is None else seen & inside
    if mask is None:
        return bias, seen
    if mask.shape[-1] < s:  # what the mask doesn't say isn't seen
        short = mask.shape[-1]
        mask = v.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, s - short)])
        inside = keys < short
        seen = inside if seen is None else seen & inside
    if v.type_of(mask) == "bool":
        return bias, mask if seen is None else seen & mask
    dark = mask > -float("inf")  # a row that sees nothing is 0, no NaN
    return v.cast(mask, v.type_of(scores)), dark if seen is None else seen & dark


@operator("RotaryEmbedding")
def rotary_embedding(x: Value, cos: Value, sin: Value, positions: Value = None, *,
                     interleaved: int = 0, num_heads: int = 0,
                     rotary_embedding_dim: int = 0):  # fmt: skip
    """Pairs of the last axis turned by the angles of their position (Su et al. 2021)."""
    flat = x.ndim == 3
    y = _heads(x, num_heads) if flat else x
    size = rotary_embedding_dim or y.shape[-1]
    turned, rest = v.part(y, 3, 0, size), v.part(y, 3, size, y.shape[-1])
    if positions is not None:
        cos, sin = v.take(cos, positions, 0), v.take(sin, positions, 0)
    half = size // 2
    cos, sin = v.part(cos, 2, 0, half), v.part(sin, 2, 0, half)
    cos, sin = (v.reshape(a, (a.shape[0], 1, *a.shape[1:])) for a in (cos, sin))
    if interleaved:
        a, b = v.every(turned, 3, 2), v.every(v.part(turned, 3, 1, size), 3, 2)
        a, b = a * cos - b * sin, b * cos + a * sin
        out = v.reshape(v.stack([a, b], 4), turned.shape)
    else:
        a, b = v.part(turned, 3, 0, half), v.part(turned, 3, half, size)
        out = v.concat([a * cos - b * sin, b * cos + a * sin], 3)
    out = v.concat([out, rest], 3) if size < y.shape[-1] else out
    return v.reshape(v.permute(out, (0, 2, 1, 3)), x.shape) if flat else out
