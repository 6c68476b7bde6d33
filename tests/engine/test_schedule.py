"""How graphs are cut into kernels: how many, in which order, and where their buffers lie."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Tensor, Var
from engine import dtype as dt
from engine.functional import attention, layer_norm, linear, rms_norm, rope, silu, softmax
from engine.graph import Op, toposort
from engine.schedule import Kernel, cost, schedule
from weights.quant import BY_NAME

DEVICE = "reference"
RANDOM = np.random.default_rng(0)


class Tree(dict):
    """Parameters by attribute, as the functions of engine.functional want them."""

    __getattr__ = dict.__getitem__


def weight(*shape: int) -> Tensor:
    return Tensor.from_numpy(RANDOM.normal(size=shape).astype(np.float32), DEVICE)


def value(*shape: int) -> Tensor:
    return Tensor(RANDOM.normal(size=shape).astype(np.float32), device=DEVICE)


def cache(*shape: int) -> Tensor:
    return Tensor.zeros(*shape, device=DEVICE).contiguous().realize()


def kernels(*tensors: Tensor) -> list[Kernel]:
    return schedule([t.node for t in tensors], DEVICE).kernels


def count(*tensors: Tensor) -> int:
    return len(kernels(*tensors))


# --- how many kernels ------------------------------------------------------------------------

TOKENS = pytest.mark.parametrize("tokens", [1, 7])


@TOKENS
def test_an_elementwise_chain_is_one_kernel(tokens: int) -> None:
    x = value(tokens, 64)
    assert count((x * 2 + 1).exp().sqrt() * x.transpose().reshape(tokens, 64)) == 1


@TOKENS
def test_rms_norm_is_one_kernel(tokens: int) -> None:
    assert count(rms_norm(Tree(weight=weight(64)), value(tokens, 64), 1e-5)) == 1


@TOKENS
def test_softmax_is_one_kernel(tokens: int) -> None:
    assert count(softmax(value(tokens, 64))) == 1
    assert count(softmax(value(2, 3, tokens, 64) * 0.5)) == 1


@TOKENS
def test_layer_norm_is_one_kernel(tokens: int) -> None:
    p = Tree(weight=weight(64), bias=weight(64))
    assert count(layer_norm(p, value(tokens, 64))) == 1


@TOKENS
def test_linear_is_one_kernel_with_its_bias(tokens: int) -> None:
    assert count(linear(Tree(weight=weight(96, 64)), value(tokens, 64))) == 1
    assert count(linear(Tree(weight=weight(96, 64), bias=weight(96)), value(tokens, 64))) == 1


@TOKENS
def test_a_residual_and_its_linear_are_one_kernel(tokens: int) -> None:
    x = value(tokens, 64)
    assert count(x + linear(Tree(weight=weight(64, 64)), x)) == 1


@TOKENS
def test_the_gate_of_swiglu_is_one_kernel(tokens: int) -> None:
    """Both products share a loop; the whole feed-forward takes the second for w2."""
    x = value(tokens, 64)
    w1, w2, w3 = (Tree(weight=weight(*s)) for s in ((96, 64), (64, 96), (96, 64)))
    gate = silu(linear(w1, x)) * linear(w3, x)
    assert count(gate) == 1
    assert count(x + linear(w2, gate)) == 2


def quantised(name: str, *shape: int) -> Tensor:
    form = BY_NAME[name]
    raw = RANDOM.integers(0, 256, form.size(shape), np.uint8)
    return form.decode(raw, shape, DEVICE)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@TOKENS
def test_q4_linear_adds_no_kernel(name: str, tokens: int) -> None:
    """A quantised weight is read packed, by the kernel that an f32 weight would have."""
    x = value(tokens, 64)
    packed, flat = (linear(Tree(weight=w), x) for w in (quantised(name, 96, 64), weight(96, 64)))
    assert count(packed) == count(flat) == 1
    (kernel,) = kernels(packed)
    assert {n.dtype for n in kernel.reads} == {dt.float32, dt.uint8}


def test_an_embedding_of_a_quantised_table_is_one_kernel() -> None:
    ids = Tensor(np.array([3, 1], np.int32), device=DEVICE)
    assert count(quantised("Q4_1", 96, 64)[ids]) == 1


def test_a_shared_reduction_is_computed_once() -> None:
    total = value(8, 64).sum(-1, keepdim=True)
    found = kernels(total * 2, total.exp())
    assert len(found) == 3
    assert sum(_reductions(k) for k in found) == 1
    x = value(8, 64)
    one = x / x.sum(-1, keepdim=True) + x.sum(-1, keepdim=True)  # both uses in one kernel
    assert count(one) == 1
    assert _reductions(kernels(one)[0]) == 1


def _reductions(kernel: Kernel) -> int:
    return sum(n.op is Op.REDUCE for n in toposort([kernel.root]))


def test_a_norm_that_two_linears_read_is_stored_once() -> None:
    x = value(7, 64)
    normed = rms_norm(Tree(weight=weight(64)), x, 1e-5)
    q, k = (linear(Tree(weight=weight(64, 64)), normed) for _ in range(2))
    assert count(q, k) == 3


@TOKENS
def test_rope_is_one_kernel(tokens: int) -> None:
    assert count(rope(value(4, tokens, 16), weight(tokens, 8), weight(tokens, 8))) == 1


@TOKENS
def test_attention_is_three_kernels(tokens: int) -> None:
    """Scores; softmax over their rows; the sum of values. No copy of the grouped keys."""
    q, k, v = value(6, tokens, 16), value(2, 9, 16), value(2, 9, 16)
    assert count(attention(q, k, v)) == 3


def test_a_whole_llama_layer_for_one_token() -> None:
    """13: norm; q, k and v (v writes its cache); rope of q, and of k into the cache; scores,
    softmax, weighted values; wo + residual; norm; w1, w3 and the gate; w2 + residual."""
    assert count(*_llama_layer(1)) == 13


def test_a_llama_layer_takes_no_more_kernels_for_many_tokens() -> None:
    assert count(*_llama_layer(5)) == count(*_llama_layer(1))


def _llama_layer(tokens: int) -> list[Tensor]:
    """The layer's output and both caches: 4 query heads over 2 key heads of 16."""
    start = Var("start", 0, 32 - tokens)
    end = start + tokens
    x, table = value(tokens, 64), weight(2, 32, 8)
    keys, values = cache(2, 16, 32), cache(2, 32, 16)
    h = rms_norm(Tree(weight=weight(64)), x, 1e-5)

    def heads(n: int) -> Tensor:
        out = linear(Tree(weight=weight(n * 16, 64)), h)
        return out.reshape(tokens, n, 16).permute(1, 0, 2)

    q, k, v = heads(4), heads(2), heads(2)
    cos, sin = table[0, start:end], table[1, start:end]
    keys[:, :, start:end] = rope(k, cos, sin).transpose()
    values[:, start:end] = v
    at = Tensor.arange(tokens, device=DEVICE).reshape(tokens, 1) + Tensor(start, device=DEVICE)
    mask = Tensor.arange(end, device=DEVICE).reshape(1, end) <= at
    seen = attention(rope(q, cos, sin), keys[:, :, :end].transpose(), values[:, :end], mask)
    x = x + linear(Tree(weight=weight(64, 64)), seen.permute(1, 0, 2).reshape(tokens, 64))
    h = rms_norm(Tree(weight=weight(64)), x, 1e-5)
    w1, w2, w3 = (Tree(weight=weight(*s)) for s in ((96, 64), (64, 96), (96, 64)))
    return [x + linear(w2, silu(linear(w1, h)) * linear(w3, h)), keys, values]


def test_what_is_empty_takes_no_kernel() -> None:
    assert count(value(0, 4) * 2) == 0
    assert count(value(3, 4)[1:1].exp()) == 0


def test_a_buffer_and_its_reshape_take_no_kernel() -> None:
    x = value(6, 4)
    assert count(x, x.reshape(24), x.reshape(2, 3, 4)) == 0


def test_costs_count_operations_and_bytes() -> None:
    (kernel,) = kernels(linear(Tree(weight=weight(96, 64)), value(1, 64)))
    flops, nbytes = cost(kernel)
    assert flops == 2 * 96 * 64  # a product and a sum each
    assert nbytes == 4 * (96 * 64 + 64 + 96)
