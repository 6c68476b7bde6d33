"""Every sampling step leaves what llama.cpp's own sampler leaves, on random logits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from zoo.llama.sampling import SamplingOptions, adjusted, candidates

pytestmark = pytest.mark.peers

llama_cpp = pytest.importorskip("llama_cpp.llama_cpp", reason="needs llama-cpp-python")

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def applied(logits: np.ndarray, samplers: list, accept: list[int]) -> dict[int, float]:
    """Token -> logit, of the tokens that a chain of llama.cpp's samplers leaves."""
    entries = [llama_cpp.llama_token_data(i, x, 0.0) for i, x in enumerate(logits.tolist())]
    data = (llama_cpp.llama_token_data * len(entries))(*entries)
    array = llama_cpp.llama_token_data_array(data=data, size=len(data), selected=-1, sorted=False)
    for sampler in samplers:
        for token in accept:
            llama_cpp.llama_sampler_accept(sampler, token)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        llama_cpp.llama_sampler_free(sampler)
    return {array.data[i].id: array.data[i].logit for i in range(array.size)}


def chain(options: SamplingOptions, size: int) -> list:
    """llama.cpp's samplers, in its default order."""
    penalties = options.repeat_penalty, options.frequency_penalty, options.presence_penalty
    return [
        llama_cpp.llama_sampler_init_penalties(size, options.repeat_last_n, *penalties),
        llama_cpp.llama_sampler_init_top_k(options.top_k),
        llama_cpp.llama_sampler_init_typical(options.typical_p, 0),
        llama_cpp.llama_sampler_init_top_p(options.top_p, 0),
        llama_cpp.llama_sampler_init_min_p(options.min_p, 0),
    ]


def drawn_options(random: np.random.Generator) -> dict:
    choices = {
        "top_k": int(random.integers(0, 60)),
        "typical_p": float(random.uniform(0.05, 1)),
        "top_p": float(random.uniform(0.05, 1)),
        "min_p": float(random.uniform(0, 0.5)),
        "repeat_penalty": float(random.uniform(0.8, 2)),
        "frequency_penalty": float(random.normal()),
        "presence_penalty": float(random.normal()),
    }
    return OFF | {name: value for name, value in choices.items() if random.random() < 0.5}


@pytest.mark.parametrize("seed", range(200))
def test_chain_leaves_what_llama_cpp_leaves(seed):
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 300))
    logits = (random.normal(size=size) * random.uniform(0.5, 6)).astype(np.float32)
    context = random.integers(0, size, 40).tolist()
    options = SamplingOptions(repeat_last_n=int(random.integers(0, 50)), **drawn_options(random))
    right = applied(logits, chain(options, size), context)
    ids, kept = candidates(adjusted(logits, context, None, options), options)
    assert set(ids.tolist()) == set(right)
    for token, logit in zip(ids.tolist(), kept):
        assert logit == pytest.approx(right[token], abs=1e-4)
