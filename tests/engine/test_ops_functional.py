"""The neural-network functions equal their formulas in float64 NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import strategies as st

from engine import Tensor
from engine import dtype as dt
from engine import functional as F
from tests.engine.oracle import FLOATS, each_device, property_test, rng, same, small, tensor


class Tree(dict):
    """Weights by attribute; `"bias" in p` says which are there."""

    __getattr__ = dict.__getitem__


# Everything below is float32 with values near 1 and a handful of roundings after each other.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def rows(data: st.DataObject) -> np.ndarray:
    shape = (data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 7, 16, 65])))
    return rng(data).standard_normal(shape).astype(np.float32)


@property_test(opencl=7)
def test_linear(device: str, data: st.DataObject) -> None:
    r = rng(data)
    n, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    lead = data.draw(st.sampled_from([(), (1,), (5,), (2, 3)]))
    x, w, b = small(r, (*lead, k)), small(r, (n, k)), small(r, (n,))
    p = Tree(weight=tensor(w, device))
    same(F.linear(p, tensor(x, device)), x @ w.T)
    p["bias"] = tensor(b, device)
    same(F.linear(p, tensor(x, device)), x @ w.T + b)


@property_test(opencl=8)
def test_embedding(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    w = small(rng(data), (data.draw(st.integers(1, 20)), 8), dtype)
    ids = rng(data).integers(0, len(w), data.draw(st.sampled_from([(), (1,), (5,), (2, 3)])))
    p = Tree(weight=tensor(w, device, dtype))
    same(F.embedding(p, tensor(ids.astype(np.int32), device)), w[ids].astype(np.float32))


@property_test(opencl=10)
def test_norms(device: str, data: st.DataObject) -> None:
    x = rows(data)
    r = rng(data)
    w, b = (r.standard_normal(x.shape[-1]).astype(np.float32) for _ in range(2))
    p = Tree(weight=tensor(w, device), bias=tensor(b, device))
    x64 = x.astype(np.float64)
    rms = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * w
    same(F.rms_norm(p, tensor(x, device), 1e-5), rms, dt.float32, **CLOSE)
    if x.shape[-1] > 2:  # of one or two values the centred ones are all rounding
        scaled = (x64 - x64.mean(-1, keepdims=True)) / np.sqrt(x64.var(-1, keepdims=True) + 1e-5)
        same(F.layer_norm(p, tensor(x, device), 1e-5), scaled * w + b, dt.float32, **CLOSE)


@property_test(opencl=10)
def test_softmax(device: str, data: st.DataObject) -> None:
    x = rows(data) * data.draw(st.sampled_from([1, 30]))
    axis = data.draw(st.sampled_from([0, 1, -1]))
    e = np.exp(x.astype(np.float64) - x.max(axis, keepdims=True))
    want = e / e.sum(axis, keepdims=True)
    same(F.softmax(tensor(x, device), axis), want, dt.float32, rtol=2e-5, atol=1e-6)


@each_device
def test_softmax_of_large_and_masked_scores(device: str) -> None:
    x = np.array([[1e4, 1e4, -1e4], [-np.inf, 3, 3], [0, -np.inf, -np.inf]], np.float32)
    want = np.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [1, 0, 0]], np.float32)
    same(F.softmax(tensor(x, device)), want, rtol=1e-6)


@property_test(opencl=5)
def test_activations(device: str, data: st.DataObject) -> None:
    a = rows(data) * 4
    x, x64 = tensor(a, device), a.astype(np.float64)
    same(F.relu(x), np.maximum(a, 0))
    same(F.silu(x), x64 / (1 + np.exp(-x64)), dt.float32, **CLOSE)
    exact = x64 * 0.5 * (1 + np.vectorize(math.erf)(x64 / np.sqrt(2)))
    # The approximation of erf is good to 3e-7, times |x| / 2 up to about 8.
    same(F.gelu(x), exact, dt.float32, rtol=1e-5, atol=3e-6)
    inner = np.sqrt(2 / np.pi) * (x64 + 0.044715 * x64**3)
    close = x64 / 2 * (1 + np.tanh(inner))
    same(F.gelu(x, approximate=True), close, dt.float32, rtol=1e-5, atol=1e-5)


@property_test(opencl=8)
def test_rope_rotates_neighbouring_pairs(device: str, data: st.DataObject) -> None:
    heads, t = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    d = 2 * data.draw(st.integers(1, 8))
    x = rng(data).standard_normal((heads, t, d)).astype(np.float32)
    angle = np.arange(t)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    want = np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)
    cos, sin = (tensor(f(angle).astype(np.float32), device) for f in (np.cos, np.sin))
    same(F.rope(tensor(x, device), cos, sin), want, dt.float32, **CLOSE)
    table = F.rope_table(t, d, 10000.0)
    np.testing.assert_allclose(table, np.stack([np.cos(angle), np.sin(angle)]), atol=1e-7)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    k, v = (np.repeat(a.astype(np.float64), len(q) // len(k), axis=0) for a in (k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


@property_test(opencl=5)
def test_attention_with_grouped_heads(device: str, data: st.DataObject) -> None:
    groups, per_group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    t, past = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))
    d = data.draw(st.sampled_from([2, 8, 13]))
    r = rng(data)
    q = r.standard_normal((groups * per_group, t, d)).astype(np.float32)
    k, v = (r.standard_normal((groups, t + past, d)).astype(np.float32) for _ in range(2))
    causal = np.arange(t + past)[None] <= np.arange(t)[:, None] + past
    args = [tensor(a, device) for a in (q, k, v)]
    same(F.attention(*args), attend(q, k, v, None), dt.float32, **CLOSE)
    mask = F.causal_mask(t, t + past, past)
    np.testing.assert_array_equal((mask & True).numpy(), causal)
    same(F.attention(*args, mask), attend(q, k, v, causal), dt.float32, **CLOSE)


@each_device
@pytest.mark.parametrize("draw", [0.0, 0.05, 0.35, 0.95, 0.9999])
def test_multinomial_inverts_the_cumulative_sum(device: str, draw: float) -> None:
    p = np.array([0.1, 0.2, 0.0, 0.3, 0.4], np.float32)
    got = F.multinomial(tensor(p, device), Tensor(np.float32(draw), device=device))
    assert got.item() == np.searchsorted(np.cumsum(p), draw, side="right")
