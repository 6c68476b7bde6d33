"""The neural-network functions equal torch's."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.peers

torch = pytest.importorskip("torch", reason="needs the peers extra: torch")

from engine import Tensor  # noqa: E402 - after the peer, which this file can't do without
from engine import functional as F  # noqa: E402

# Both sides compute in float32, on values near 1, with other orders of sums and other exp and erf.
CLOSE = {"rtol": 2e-5, "atol": 5e-6}


class Tree(dict):
    """Weights by attribute; `"bias" in p` says which are there."""

    __getattr__ = dict.__getitem__


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def both(x: np.ndarray) -> tuple[Tensor, torch.Tensor]:
    return Tensor(x), torch.from_numpy(x)


ELEMENTWISE = {
    "silu": (F.silu, torch.nn.functional.silu),
    "gelu": (F.gelu, torch.nn.functional.gelu),
    "gelu tanh": (
        lambda x: F.gelu(x, approximate=True),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    ),
    "relu": (F.relu, torch.relu),
    "sigmoid": (Tensor.sigmoid, torch.sigmoid),
    "tanh": (Tensor.tanh, torch.tanh),
    "exp": (Tensor.exp, torch.exp),
    "round": (Tensor.round, torch.round),
    "softmax": (F.softmax, lambda x: torch.softmax(x, -1)),
    "softmax of the first axis": (lambda x: F.softmax(x, 0), lambda x: torch.softmax(x, 0)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("shape", [(3, 17), (1, 1), (2, 5, 64)], ids=str)
def test_activations(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = ELEMENTWISE[name]
    x, t = both(draw(*shape, scale=3))
    np.testing.assert_allclose(ours(x).numpy(), theirs(t).numpy(), **CLOSE)


@pytest.mark.parametrize("width", [3, 64, 577])
def test_norms(width: int) -> None:
    x, t = both(draw(5, width))
    (w, tw), (b, tb) = both(draw(width, seed=1)), both(draw(width, seed=2))
    p = Tree(weight=w, bias=b)
    want = torch.nn.functional.layer_norm(t, (width,), tw, tb, 1e-5)
    np.testing.assert_allclose(F.layer_norm(p, x, 1e-5).numpy(), want.numpy(), **CLOSE)
    want = torch.nn.functional.rms_norm(t, (width,), tw, 1e-5)
    np.testing.assert_allclose(F.rms_norm(p, x, 1e-5).numpy(), want.numpy(), **CLOSE)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_embedding(bias: bool) -> None:
    x, t = both(draw(2, 7, 33))
    w, tw = both(draw(19, 33, seed=1))
    b, tb = both(draw(19, seed=2))
    p = Tree(weight=w, bias=b) if bias else Tree(weight=w)
    want = torch.nn.functional.linear(t, tw, tb if bias else None)
    np.testing.assert_allclose(F.linear(p, x).numpy(), want.numpy(), rtol=1e-5, atol=2e-5)
    ids = np.array([[3, 0], [18, 3]], np.int32)
    want = torch.nn.functional.embedding(torch.from_numpy(ids), tw)
    np.testing.assert_array_equal(F.embedding(p, Tensor(ids)).numpy(), want.numpy())


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (9, 9), (5, 33)])
def test_attention(heads: int, groups: int, queries: int, keys: int) -> None:
    q, tq = both(draw(heads, queries, 16))
    k, tk = both(draw(groups, keys, 16, seed=1))
    v, tv = both(draw(groups, keys, 16, seed=2))
    tk, tv = (t.repeat_interleave(heads // groups, 0) for t in (tk, tv))
    want = torch.nn.functional.scaled_dot_product_attention(tq, tk, tv)
    np.testing.assert_allclose(F.attention(q, k, v).numpy(), want.numpy(), **CLOSE)
    start = keys - queries
    seen = torch.arange(keys)[None] <= torch.arange(queries)[:, None] + start
    want = torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, attn_mask=seen)
    got = F.attention(q, k, v, F.causal_mask(queries, keys, start))
    np.testing.assert_allclose(got.numpy(), want.numpy(), **CLOSE)
