"""Load a LLaMA checkpoint: configuration, weights and tokenizer, each checked before it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import weights
from weights import Checkpoint, Params, WeightError, names
from weights import config as weights_config
from zoo import cli
from zoo.errors import UsageError
from zoo.llama import gguf_config, gguf_tokenizer, hf_config, hf_tokenizer, model
from zoo.llama.context import Context
from zoo.llama.embedder import Embedder
from zoo.llama.generate import Llama
from zoo.llama.tokenizer import Tokenizer
from zoo.opening import open_model

DEFAULT_CTX = 4096  # tokens; a longer context has to be asked for, because its cache costs memory


def load(
    name_or_path: str | os.PathLike[str],
    device: str | None = None,
    dtype: str = "auto",
    ctx: int | None = None,
    tune: bool = False,
    make: Callable[..., Any] = Context,
) -> Llama:
    """A model by registry or hub name, GGUF file or Hugging Face folder, ready to generate.

    `ctx` is the most tokens of prompt and reply together (None: 4096, or less if the model's
    limit is lower). `tune` looks for faster kernels on this device, for a minute or two: they are
    kept, and later loads use them without it. `make` makes the context, or what takes its place.
    WeightError for a file that can't be used, DeviceError without the device, UsageError for an
    empty name and for a ctx beyond the model's.
    """
    if ctx is not None and ctx < 1:
        raise UsageError(f"ctx must be 1 or more, got {ctx}")
    checkpoint = open_model(name_or_path, device, dtype)
    config = read_config(checkpoint)
    if ctx is not None and ctx > config.max_context:
        raise UsageError(f"ctx {ctx} is more than the model's limit of {config.max_context}")
    tensors = names.llama(checkpoint, config.n_heads, config.n_kv_heads)
    weights.check(tensors, _expected(config, tensors))
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer.vocab_size > config.vocab_size:
        expected, got = f"at most {config.vocab_size}", tokenizer.vocab_size
        problem = "more tokens in the vocabulary than rows in the embedding"
        raise WeightError(problem, file=checkpoint.path, expected=expected, got=got)
    size = min(config.max_context, DEFAULT_CTX) if ctx is None else ctx
    given = Params(tensors), config, size, device, dtype
    context = make(*given)
    if tune:
        with cli.tuning(device):
            context.rehearse()
    return Llama(config, tokenizer, context, checkpoint.path.name, Embedder(*given))


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that comes with a checkpoint; WeightError when it is missing or broken."""
    if _speaks_gguf(checkpoint):
        return gguf_tokenizer.from_gguf(checkpoint.metadata, checkpoint.path)
    files = weights_config.tokenizer_files(checkpoint)
    return hf_tokenizer.from_files(files, checkpoint.path)


def _speaks_gguf(checkpoint: Checkpoint) -> bool:
    """Whether the metadata is GGUF's, as it also is in what was converted from such a file."""
    return checkpoint.format == "gguf" or "general.architecture" in checkpoint.metadata


def read_config(checkpoint: Checkpoint) -> model.Config:
    """What GGUF metadata or config.json say of the network; WeightError names file and key."""
    return (gguf_config if _speaks_gguf(checkpoint) else hf_config).read(checkpoint)


def _expected(config: model.Config, tensors: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The keys and shapes that the model reads from this checkpoint.

    The output matrix may be absent (it is then the embedding); a linear layer may have a bias;
    the factors of the rotations have been read with the configuration.
    """
    expected = model.expected_shapes(config)
    if "output.weight" in tensors:
        expected["output.weight"] = (config.vocab_size, config.dim)
    if "rope_freqs.weight" in tensors:
        expected["rope_freqs.weight"] = (config.head_dim // 2,)
    for key in tensors:
        weight = key.removesuffix("bias") + "weight"
        if key.endswith(".bias") and weight in expected:
            expected[key] = expected[weight][:1]
    return expected
