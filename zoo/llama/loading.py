"""Load a LLaMA checkpoint: configuration, weights and tokenizer, each checked before it is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import weights
from engine import get_device
from weights import Checkpoint, Params, WeightError, names
from weights import config as weights_config
from zoo import cli
from zoo.errors import UsageError
from zoo.llama import gguf_tokenizer, hf_tokenizer, model
from zoo.llama.context import Context
from zoo.llama.generate import Llama
from zoo.llama.tokenizer import Tokenizer

DEFAULT_CTX = 4096  # tokens; a longer context has to be asked for, because its cache costs memory
DTYPES = ("auto", "f32")
_GGUF_ARCHITECTURES = ("llama",)
_HF_TYPES = ("llama", "mistral")
_EMBEDDINGS = ("token_embd.weight", "tok_embeddings.weight", "model.embed_tokens.weight")
_LARGEST = 1 << 24  # of any one size: keeps made-up numbers out of the arithmetic


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
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if ctx is not None and ctx < 1:
        raise UsageError(f"ctx must be 1 or more, got {ctx}")
    if isinstance(name_or_path, str) and not name_or_path.strip():
        raise UsageError("the model name is empty")
    get_device(device)  # no device, no sense in reading 98 MB
    checkpoint = weights.load(weights.resolve(name_or_path), device)
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
    context = make(Params(tensors), config, size, device, dtype)
    if tune:
        with cli.tuning(device):
            context.rehearse()
    return Llama(config, tokenizer, context, checkpoint.path.name)


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
    """The model's sizes from GGUF metadata or config.json; WeightError names file and key."""
    fields = _Fields(checkpoint)
    values = _from_gguf(fields) if _speaks_gguf(checkpoint) else _from_hf(fields)
    layers, heads, kv_heads = values["n_layers"], values["n_heads"], values["n_kv_heads"]
    if layers > len(checkpoint):
        expected = f"at most the file's {len(checkpoint)} tensors"
        fields.fail("the number of layers can't be right", expected, layers)
    if heads % kv_heads:
        fields.fail("key/value heads don't divide the heads", f"a divisor of {heads}", kv_heads)
    if values["head_dim"] % 2:
        fields.fail("the head size is odd, so it can't be rotated in pairs", got=values["head_dim"])
    return model.Config(**values)


def _from_gguf(fields: _Fields) -> dict[str, Any]:
    architecture = fields.checkpoint.metadata.get("general.architecture")
    if architecture not in _GGUF_ARCHITECTURES:
        expected = " or ".join(_GGUF_ARCHITECTURES)
        fields.fail("unsupported architecture", expected, architecture or "none")
    prefix = f"{architecture}."
    if fields.checkpoint.metadata.get(f"{prefix}expert_count"):
        fields.fail("a mixture of experts, which is not supported")
    if "rope_freqs.weight" in fields.checkpoint or fields.scaled(f"{prefix}rope.scaling.type"):
        fields.fail("scaled rotary embeddings (RoPE scaling), which are not supported yet")
    dim = fields.integer(f"{prefix}embedding_length")
    heads = fields.integer(f"{prefix}attention.head_count")
    head_dim = fields.head_dim(f"{prefix}attention.key_length", dim, heads)
    rotated = fields.integer(f"{prefix}rope.dimension_count", head_dim)
    if rotated != head_dim:
        fields.fail(f"bad '{prefix}rope.dimension_count'", f"the head size {head_dim}", rotated)
    return {
        "dim": dim,
        "n_layers": fields.integer(f"{prefix}block_count"),
        "n_heads": heads,
        "n_kv_heads": fields.integer(f"{prefix}attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_dim": fields.integer(f"{prefix}feed_forward_length"),
        "vocab_size": fields.rows(*_EMBEDDINGS),
        "norm_eps": fields.number(f"{prefix}attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number(f"{prefix}rope.freq_base", 10000.0),
        "max_context": fields.integer(f"{prefix}context_length"),
    }


def _from_hf(fields: _Fields) -> dict[str, Any]:
    config = fields.checkpoint.metadata
    if config.get("model_type") not in _HF_TYPES:
        expected = " or ".join(_HF_TYPES)
        fields.fail("unsupported model_type", expected, config.get("model_type") or "none")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else rope
    if kind not in (None, "default"):
        fields.fail("scaled rotary embeddings (RoPE scaling) are not supported yet", got=kind)
    if config.get("hidden_act", "silu") != "silu":
        fields.fail("unsupported hidden_act", "silu", config["hidden_act"])
    if config.get("model_type") == "mistral" and config.get("sliding_window"):
        fields.fail("sliding-window attention, which is not supported")
    dim = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    nested = rope if isinstance(rope, Mapping) and "rope_theta" in rope else config
    return {
        "dim": dim,
        "n_layers": fields.integer("num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.head_dim("head_dim", dim, heads),
        "hidden_dim": fields.integer("intermediate_size"),
        "vocab_size": fields.integer("vocab_size"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": fields.number("rope_theta", 10000.0, nested),
        "max_context": fields.integer("max_position_embeddings", 2048),
    }


class _Fields:
    """Checked reading of a checkpoint's metadata."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.checkpoint.metadata.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= _LARGEST:
            self.fail(f"bad '{key}'", f"1 to {_LARGEST}", "nothing" if value is None else value)
        return value

    def number(
        self, key: str, default: float | None = None, source: Mapping[str, Any] | None = None
    ) -> float:
        value = (self.checkpoint.metadata if source is None else source).get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.fail(f"bad '{key}'", "more than 0", "nothing" if value is None else value)
        return float(value)

    def head_dim(self, key: str, dim: int, heads: int) -> int:
        if self.checkpoint.metadata.get(key) is None and dim % heads:
            self.fail(f"the width {dim} does not divide into heads", got=heads)
        return self.integer(key, dim // heads)

    def rows(self, *tensors: str) -> int:
        """The length of the first axis of whichever tensor there is."""
        for tensor in tensors:
            if tensor in self.checkpoint:
                return self.checkpoint.info(tensor).shape[0]
        raise WeightError("the tensor is missing", file=self.checkpoint.path, tensor=tensors[0])

    def scaled(self, key: str) -> bool:
        return self.checkpoint.metadata.get(key) not in (None, "none")

    def fail(self, problem: str, expected: object = None, got: object = None) -> None:
        raise WeightError(problem, file=self.checkpoint.path, expected=expected, got=got)


def _expected(config: model.Config, tensors: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The keys and shapes that the model reads from this checkpoint.

    The output matrix may be absent (it is then the embedding); a linear layer may have a bias.
    """
    expected = model.expected_shapes(config)
    if "output.weight" in tensors:
        expected["output.weight"] = (config.vocab_size, config.dim)
    for key in tensors:
        weight = key.removesuffix("bias") + "weight"
        if key.endswith(".bias") and weight in expected:
            expected[key] = expected[weight][:1]
    return expected
