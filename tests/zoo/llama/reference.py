"""LLaMA in plain NumPy and float64, one token after another, written from the papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zoo.llama.model import Config


def logits(w: Mapping[str, np.ndarray], c: Config, ids: Sequence[int]) -> np.ndarray:
    """(len(ids), vocab) next-token logits; no cache of activations but keys and values."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    keys = [[] for _ in range(c.n_layers)]
    values = [[] for _ in range(c.n_layers)]
    rows = []
    for position, token in enumerate(ids):
        x = w["tok_embeddings.weight"][token]
        for n in range(c.n_layers):
            p = {k.split(".", 2)[2]: v for k, v in w.items() if k.startswith(f"layers.{n}.")}
            h = _norm(x, p["attention_norm.weight"], c.norm_eps)
            q = (p["attention.wq.weight"] @ h).reshape(c.n_heads, c.head_dim)
            k = (p["attention.wk.weight"] @ h).reshape(c.n_kv_heads, c.head_dim)
            v = (p["attention.wv.weight"] @ h).reshape(c.n_kv_heads, c.head_dim)
            keys[n].append([_rotate(head, position, c.rope_theta) for head in k])
            values[n].append(v)
            out = []
            for head in range(c.n_heads):
                shared = head // (c.n_heads // c.n_kv_heads)
                query = _rotate(q[head], position, c.rope_theta)
                scores = np.array([past[shared] @ query for past in keys[n]])
                chance = np.exp((scores - scores.max()) / np.sqrt(c.head_dim))
                chance /= chance.sum()
                out.append(sum(a * past[shared] for a, past in zip(chance, values[n])))
            x = x + p["attention.wo.weight"] @ np.concatenate(out)
            h = _norm(x, p["ffn_norm.weight"], c.norm_eps)
            gate = p["feed_forward.w1.weight"] @ h
            up = p["feed_forward.w3.weight"] @ h
            x = x + p["feed_forward.w2.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        out = w.get("output.weight", w["tok_embeddings.weight"])
        rows.append(out @ _norm(x, w["norm.weight"], c.norm_eps))
    return np.stack(rows)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + eps) * weight


def _rotate(head: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Each pair (2j, 2j + 1) as a complex number, turned by position / theta^(2j / D)."""
    pairs = head[0::2] + 1j * head[1::2]
    turned = pairs * np.exp(1j * position * theta ** -(np.arange(0, len(head), 2) / len(head)))
    return np.stack([turned.real, turned.imag], -1).reshape(-1)
