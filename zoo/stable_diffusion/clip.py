"""The text encoders: CLIP's ViT-L/14 under Hugging Face's names, and OpenCLIP's under its own.

Papers: Radford et al. 2021 (CLIP), Cherti et al. 2022 (OpenCLIP). Axes: B prompts, T = 77 tokens,
C channels.
"""

from __future__ import annotations

from engine import Tensor
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
from zoo.stable_diffusion.layers import Params

HEAD = 64  # elements of a head in every published encoder


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), as OpenAI trained CLIP with."""
    return x * (x * 1.702).sigmoid()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in heads of 64; all (B, T, C)."""
    t, heads = q.shape[1], q.shape[2] // HEAD
    q, k, v = (split_heads(x, heads) for x in (q, k, v))
    return join_heads(attention(q, k, v, causal_mask(t, t, 0)), heads)


def tokens(p: Params, ids: Tensor, extra: Tensor | None) -> Tensor:
    """The vectors of ids (B, T); of ids beyond the vocabulary those at their place in extra."""
    x = embedding(p, ids)  # (B, T, C)
    known = (ids < p.weight.shape[0]).unsqueeze(-1)
    return x if extra is None else Tensor.where(known, x, extra)


def hugging_face(p: Params, ids: Tensor, extra: Tensor | None = None) -> list[Tensor]:
    """The states (B, T, C) before the first layer and after each, of ids (B, T).

    Ids beyond the vocabulary stand for the vectors at their place in extra (B, T, C).
    """
    x = tokens(p.embeddings.token_embedding, ids, extra) + p.embeddings.position_embedding.weight
    states = [x]
    for layer in p.encoder.layers:
        a, h = layer.self_attn, layer_norm(layer.layer_norm1, x)
        h = attend(linear(a.q_proj, h), linear(a.k_proj, h), linear(a.v_proj, h))
        x = x + linear(a.out_proj, h)
        h = layer_norm(layer.layer_norm2, x)
        x = x + linear(layer.mlp.fc2, quick_gelu(linear(layer.mlp.fc1, h)))
        states.append(x)
    return states


def openclip(p: Params, ids: Tensor, extra: Tensor | None = None) -> list[Tensor]:
    """The same of OpenCLIP's, whose queries, keys and values are one matrix."""
    x = tokens(p.token_embedding, ids, extra) + p.positional_embedding
    states = [x]
    for layer in p.transformer.resblocks:
        h = layer_norm(layer.ln_1, x)
        qkv = h @ layer.attn.in_proj_weight.transpose() + layer.attn.in_proj_bias
        q, k, v = qkv.split(*[x.shape[-1]] * 3, axis=-1)
        x = x + linear(layer.attn.out_proj, attend(q, k, v))
        x = x + linear(layer.mlp.c_proj, gelu(linear(layer.mlp.c_fc, layer_norm(layer.ln_2, x))))
        states.append(x)
    return states


def pooled(p: Params, state: Tensor, last: Tensor) -> Tensor:
    """(B, C): OpenCLIP's last state, projected, where the text ends: at positions last (B,)."""
    x = layer_norm(p.ln_final, state)  # (B, T, C)
    here = (Tensor.arange(x.shape[1]) == last.unsqueeze(-1)).unsqueeze(-1)  # (B, T, 1)
    return Tensor.where(here, x, 0.0).sum(1) @ p.text_projection
