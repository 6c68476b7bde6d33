"""The key/value pairs of a GGUF file to be written: a model's sizes and its vocabulary.

Source: the GGUF specification; llama.cpp's `convert_hf_to_gguf.py` for what a LLaMA needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weights import config
from weights.checkpoint import Checkpoint, Entry, TensorInfo, WeightError, printable
from weights.hf_vocabulary import UNUSED, Vocabulary, read
from weights.mapped import decoded
from weights.pretokenizers import GPT2, GPT4O, LLAMA3, QWEN2, SINGLE_DIGITS, TEKKEN

# A file's layout, which the new one doesn't share, and what a file is made of.
_OWN = ("general.alignment", "split.no", "split.count", "split.tensors.count")
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10,
    "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32,
}  # fmt: skip

# GGUF's key behind the architecture, Hugging Face's in config.json, Meta's in params.json.
_SIZES = (
    ("context_length", "max_position_embeddings", None),
    ("embedding_length", "hidden_size", "dim"),
    ("block_count", "num_hidden_layers", "n_layers"),
    ("feed_forward_length", "intermediate_size", None),
    ("attention.head_count", "num_attention_heads", "n_heads"),
    ("attention.head_count_kv", "num_key_value_heads", "n_kv_heads"),
    ("attention.key_length", "head_dim", None),
)
_NUMBERS = (
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", "norm_eps", 1e-6),
    ("rope.freq_base", "rope_theta", "rope_theta", 10000.0),
)

_LARGE = 1e38  # float32 ends at 3.4e38

# Names of the pre-tokenizers: (pattern, words taken whole) -> `tokenizer.ggml.pre`.
_PRE = {
    (GPT2, False): "gpt-2",
    (SINGLE_DIGITS, False): "smollm",
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (QWEN2, False): "qwen2",
    (TEKKEN, True): "tekken",
    (GPT4O, False): "gpt-4o",
}


def for_gguf(checkpoint: Checkpoint, model: str | None) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The metadata of `checkpoint` as GGUF pairs, and tensors that GGUF needs beside the others.

    `model` is what `names` recognised; of another model than LLaMA only the name is written.
    WeightError for a LLaMA without sizes or with a vocabulary that GGUF has no name for.
    """
    metadata = checkpoint.metadata
    if "general.architecture" in metadata:
        typed = getattr(metadata, "typed", metadata.get)
        pairs = {key: typed(key) for key in metadata if key not in _OWN}
        if "tokenizer.ggml.token_type" in pairs:  # llama.cpp reads this one as int32, unseen
            pairs["tokenizer.ggml.token_type"] = _token_types(checkpoint, pairs)
        return pairs, {}
    if model != "llama":
        return {"general.architecture": model or checkpoint.architecture or "unknown"}, {}
    pairs = {"general.architecture": "llama", "general.name": checkpoint.path.stem}
    sizes = _sizes(checkpoint)
    pairs |= {f"llama.{key}": value for key, value in sizes.items()}
    scaling, factors = _rope(checkpoint, sizes)
    pairs |= scaling
    files = config.tokenizer_files(checkpoint)
    if "tokenizer.json" in files or "tokenizer.model" in files:
        pairs |= vocabulary(read(files, checkpoint.path), sizes["vocab_size"], checkpoint)
    return pairs, factors


def _token_types(checkpoint: Checkpoint, pairs: Mapping[str, Any]) -> np.ndarray:
    key = "tokenizer.ggml.token_type"
    types = pairs[key].tolist() if isinstance(pairs[key], np.ndarray) else pairs[key]
    if not isinstance(types, list) or not all(type(t) is int and 0 <= t < 1 << 31 for t in types):
        raise WeightError(f"bad '{key}'", file=checkpoint.path, expected="small numbers", got=types)
    return np.array(types, "<i4")


def file_type(infos: list[TensorInfo]) -> dict[str, int]:
    """The pairs that name the type of most of a file's values."""
    counts: dict[str, int] = {}
    for info in infos:
        counts[info.type] = counts.get(info.type, 0) + math.prod(info.shape)
    most = max(counts, key=counts.__getitem__, default="F32")
    found = {"general.file_type": _FILE_TYPES[most]} if most in _FILE_TYPES else {}
    return found | {"general.quantization_version": 2}


# --- sizes -----------------------------------------------------------------------------------


def _sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """A LLaMA's sizes: as the configuration has them, or failing that as its tensors do."""
    metadata, out = checkpoint.metadata, _from_shapes(checkpoint)
    columns = out["embedding_length"]
    for key, hf, meta in _SIZES:
        value = _first(metadata, hf, meta)
        if value is not None:
            if type(value) is not int or not 0 < value < 1 << 31:
                problem = f"bad '{hf}'"
                raise WeightError(problem, file=checkpoint.path, expected="a size", got=value)
            out[key] = value
    heads = out.get("attention.head_count")
    if heads is None:
        problem = "the number of attention heads is not named"
        remedy = "give the folder that has config.json, or params.json"
        raise WeightError(problem, file=checkpoint.path, remedy=remedy)
    out.setdefault("attention.head_count_kv", heads)
    out.setdefault("context_length", 2048)
    out.setdefault("attention.key_length", out["embedding_length"] // heads)
    if out["attention.key_length"] > columns:  # else a number of the configuration sizes an array
        facts = {"expected": f"at most {columns}", "got": out["attention.key_length"]}
        raise WeightError("heads longer than the embedding", file=checkpoint.path, **facts)
    out["attention.value_length"] = out["rope.dimension_count"] = out["attention.key_length"]
    for key, hf, meta, default in _NUMBERS:
        value = _first(config.rope(metadata), hf) or _first(metadata, hf, meta) or default
        if type(value) not in (int, float) or not 0 < value < _LARGE:
            raise WeightError(f"bad '{hf}'", file=checkpoint.path, expected="a number", got=value)
        out[key] = float(value)
    return out


def _from_shapes(checkpoint: Checkpoint) -> dict[str, int]:
    layers = {key.split(".")[1] for key in checkpoint if key.startswith("layers.")}
    layers |= {key.split(".")[1] for key in checkpoint if key.startswith("blk.")}
    out = {"block_count": len(layers)}
    for key, of in (("token_embd.weight", "vocab_size"), ("blk.0.ffn_gate.weight", None)):
        if key not in checkpoint or len(checkpoint.info(key).shape) != 2:
            raise WeightError("not a LLaMA's tensor", file=checkpoint.path, tensor=key)
        rows, columns = checkpoint.info(key).shape
        out |= {of or "feed_forward_length": rows, "embedding_length": columns}
    return out


def _first(metadata: Mapping[str, Any], *keys: str | None) -> Any:
    found = (metadata.get(key) for key in keys if key is not None)
    return next((value for value in found if value is not None), None)


def _rope(checkpoint: Checkpoint, sizes: dict) -> tuple[dict[str, Any], dict[str, Entry]]:
    """How positions are scaled: pairs, and for Llama 3 a tensor that divides the frequencies."""
    scaling = config.rope(checkpoint.metadata)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {}, {}
    if kind == "llama3" and "rope_freqs.weight" in checkpoint:
        return {}, {}
    try:
        if kind == "linear":
            return {"llama.rope.scaling.type": kind,
                    "llama.rope.scaling.factor": float(scaling["factor"])}, {}  # fmt: skip
        if kind == "llama3":
            size, theta = sizes["rope.dimension_count"], sizes["rope.freq_base"]
            values = llama3_factors(size, theta, scaling)
            info = TensorInfo(values.shape, "F32", values.nbytes)
            name, raw = "rope_freqs.weight", values.view(np.uint8)
            return {}, {name: decoded(checkpoint.path, name, info, lambda: raw)}
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        problem = f"bad rope_scaling of type {kind}: {type(error).__name__} {error}"
        raise WeightError(problem, file=checkpoint.path) from None
    expected = "default, linear or llama3"
    problem = "this scaling of positions has no conversion"
    raise WeightError(problem, file=checkpoint.path, expected=expected, got=kind)


def llama3_factors(size: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """(size / 2,) float32: by what each rotation's frequency is divided.

    Fast ones stay as they are, slow ones are divided by `factor`, between them it goes over.
    Source: `_compute_llama3_parameters` in transformers.
    """
    turns = theta ** -(np.arange(0, size, 2) / size) / (2 * math.pi)  # per position
    turns = turns * float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    share = ((turns - low) / (high - low)).clip(0, 1)
    return (1 / ((1 - share) / float(scaling["factor"]) + share)).astype("<f4")


# --- vocabulary ------------------------------------------------------------------------------


def vocabulary(v: Vocabulary, rows: int, checkpoint: Checkpoint) -> dict[str, Any]:
    """`tokenizer.*` of a vocabulary; an embedding of more `rows` gets tokens without a use."""
    if len(v.tokens) > rows:
        problem = "more tokens in the vocabulary than rows in the embedding"
        raise WeightError(
            problem, file=checkpoint.path, expected=f"at most {rows}", got=len(v.tokens)
        )
    missing = range(len(v.tokens), rows)
    types = [*v.types, *[UNUSED for _ in missing]]
    tokens = [*v.tokens, *[f"[PAD{i}]" for i in missing]]
    out: dict[str, Any] = {"model": "gpt2" if v.scores is None else "llama"}
    if v.scores is None:
        out |= {"pre": _pre(v, checkpoint), "merges": v.merges}
    else:
        out |= {"pre": "default", "add_space_prefix": v.prefix}
        out["scores"] = np.array([*v.scores, *[-1e4 for _ in missing]], "<f4")
    out |= {"tokens": tokens, "token_type": np.array(types, "<i4"), "add_bos_token": v.add_bos}
    ids = {"bos_token_id": v.bos, "eos_token_id": v.eos, "unknown_token_id": v.unknown}
    turn = [i for i in sorted(v.stop) if i != v.eos]
    ids["eot_token_id"] = turn[0] if turn else None
    out |= {key: i for key, i in ids.items() if i is not None}
    out = {f"tokenizer.ggml.{key}": value for key, value in out.items()}
    return out | ({} if v.template is None else {"tokenizer.chat_template": v.template})


def _pre(v: Vocabulary, checkpoint: Checkpoint) -> str:
    name = _PRE.get((v.pattern, v.whole_words)) or _PRE.get((v.pattern, not v.whole_words))
    if name is None:
        problem = f"GGUF has no name for the pre-tokenizer {printable(v.pattern)}"
        raise WeightError(problem, file=checkpoint.path, expected=", ".join(_PRE.values()))
    return name
