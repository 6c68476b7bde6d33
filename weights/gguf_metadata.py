"""The key/value pairs of a GGUF file to be written; those of a vocabulary are made here.

Source: the GGUF specification; llama.cpp's `convert_hf_to_gguf.py` for what a LLaMA needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weights import config, gguf_llama
from weights.checkpoint import Checkpoint, Entry, TensorInfo, WeightError, printable
from weights.hf_vocabulary import UNUSED, Vocabulary, read
from weights.names.llama import family as family_of
from weights.pretokenizers import GPT2, GPT4O, LLAMA3, QWEN2, SINGLE_DIGITS, TEKKEN

# A file's layout, which the new one doesn't share, and what a file is made of.
_OWN = ("general.alignment", "split.no", "split.count", "split.tensors.count")
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10,
    "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32,
}  # fmt: skip

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
    family, (keys, factors) = family_of(checkpoint), gguf_llama.keys(checkpoint)
    pairs = {"general.architecture": family, "general.name": checkpoint.path.stem}
    pairs |= {f"{family}.{key}": value for key, value in keys.items()}
    files = config.tokenizer_files(checkpoint)
    if "tokenizer.json" in files or "tokenizer.model" in files:
        pairs |= vocabulary(read(files, checkpoint.path), keys["vocab_size"], checkpoint)
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
        for text, i in v.added.items():
            tokens[i] = text  # runs of spaces are spelt as such, in llama.cpp too
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
