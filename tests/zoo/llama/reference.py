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
        x = w["tok_embeddings.weight"][token] * c.embedding_scale
        for n in range(c.n_layers):
            p = {k.split(".", 2)[2]: v for k, v in w.items() if k.startswith(f"layers.{n}.")}
            h = _attention(p, c, _norm(x, p["attention_norm.weight"], c), position, n, keys, values)
            x = x + (_norm(h, p["attention_post_norm.weight"], c) if c.post_norms else h)
            h = _feed_forward(p, c, _norm(x, p["ffn_norm.weight"], c))
            x = x + (_norm(h, p["ffn_post_norm.weight"], c) if c.post_norms else h)
        out = w.get("output.weight", w["tok_embeddings.weight"])
        rows.append(_cap(out @ _norm(x, w["norm.weight"], c), c.logit_cap))
    return np.stack(rows)


def _attention(p, c, h, position, n, keys, values) -> np.ndarray:
    """One token's attention to itself and those before it; it adds its key and value."""
    window = c.windows[n] if c.windows else None
    theta = c.rope_theta if window is None or c.local_theta is None else c.local_theta
    q = _project(p, "q", h).reshape(c.n_heads, c.head_dim)
    k = _project(p, "k", h).reshape(c.n_kv_heads, c.head_dim)
    if c.qk_norm:
        q = np.stack([_norm(head, p["attention.q_norm.weight"], c) for head in q])
        k = np.stack([_norm(head, p["attention.k_norm.weight"], c) for head in k])
    keys[n].append([_rotate(head, position, theta) for head in k])
    values[n].append(_project(p, "v", h).reshape(c.n_kv_heads, c.head_dim))
    seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
    out = []
    for head in range(c.n_heads):
        shared = head // (c.n_heads // c.n_kv_heads)
        query = _rotate(q[head], position, theta)
        scores = np.array([past[shared] @ query for past in keys[n][seen]])
        scores = _cap(scores * (c.attention_scale or c.head_dim**-0.5), c.attention_cap)
        chance = np.exp(scores - scores.max())
        chance /= chance.sum()
        out.append(sum(a * past[shared] for a, past in zip(chance, values[n][seen])))
    return p["attention.wo.weight"] @ np.concatenate(out)


def _project(p, name: str, h: np.ndarray) -> np.ndarray:
    return p[f"attention.w{name}.weight"] @ h + p.get(f"attention.w{name}.bias", 0)


def _feed_forward(p, c, h: np.ndarray) -> np.ndarray:
    if not c.n_experts:
        return _network(*(p[f"feed_forward.w{i}.weight"] for i in (1, 2, 3)), h, c)
    gates = p["feed_forward.gate.weight"] @ h
    chosen = np.argsort(-gates, kind="stable")[: c.n_chosen]
    share = np.exp(gates[chosen] - gates.max())
    experts = [p[f"feed_forward.experts.w{i}.weight"] for i in (1, 2, 3)]
    outs = [_network(*(w[e] for w in experts), h, c) for e in chosen]
    return sum(a * out for a, out in zip(share / share.sum(), outs))


def _network(w1, w2, w3, h, c) -> np.ndarray:
    gate = w1 @ h
    if c.tanh_gelu:
        gate *= (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
    else:
        gate /= 1 + np.exp(-gate)
    return w2 @ (gate * (w3 @ h))


def _cap(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _norm(x: np.ndarray, weight: np.ndarray, c: Config) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + c.norm_eps) * weight


def _rotate(head: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Each pair (2j, 2j + 1) as a complex number, turned by position / theta^(2j / D)."""
    pairs = head[0::2] + 1j * head[1::2]
    turned = pairs * np.exp(1j * position * theta ** -(np.arange(0, len(head), 2) / len(head)))
    return np.stack([turned.real, turned.imag], -1).reshape(-1)
