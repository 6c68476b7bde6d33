"""A checkpoint's configuration and tokenizer, wherever its format keeps them.

A file that `convert` wrote carries both: what the source had as metadata, with the files of its
tokenizer under `tokenizer_files` (text, or base64 for those that are none). That is what
`Checkpoint.metadata` is again; safetensors has it as JSON under `config` in `__metadata__`,
PyTorch files beside `model_state_dict`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from weights.checkpoint import Checkpoint, WeightError
from weights.hf_vocabulary import files_of

FORMAT = "menagerie"  # what `__metadata__` has as its "format"
FILES = "tokenizer_files"
_BINARY = ("tokenizer.model",)


def gathered(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's metadata as plain values, with the files of its tokenizer if it has any."""
    config = _plain(checkpoint.metadata)
    if FILES not in config and "general.architecture" not in config:
        files = tokenizer_files(checkpoint)
        files.pop("config.json", None)
        if files:
            config[FILES] = {name: _text(name, raw) for name, raw in files.items()}
    return config


def carried(checkpoint: Checkpoint) -> dict[str, str]:
    """The same as the `__metadata__` of a safetensors file."""
    text = gathered(checkpoint)
    config = json.dumps(text, ensure_ascii=False)
    if not _is_utf8(config):  # tokens of whisper.cpp that are parts of letters
        config = json.dumps(text)
    return {"format": FORMAT, "config": config}


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of a Hugging Face tokenizer that come with a checkpoint, by name; maybe none.

    `config.json` is among them, since it may name the tokens that end a text.
    """
    files = checkpoint.metadata.get(FILES)
    if files is None:
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        return files_of(folder)
    if not isinstance(files, Mapping) or not all(isinstance(f, str) for f in files.values()):
        raise WeightError(f"'{FILES}' is not a table of texts", file=checkpoint.path)
    config = {key: value for key, value in checkpoint.metadata.items() if key != FILES}
    return {name: _raw(checkpoint, name, text) for name, text in files.items()} | {
        "config.json": json.dumps(config).encode()
    }


def whisper_dims(checkpoint: Checkpoint) -> dict[str, int]:
    """What OpenAI's files say of a Whisper under `dims`, from the tensors under their names.

    A head has 64 elements in every Whisper. Empty when the tensors are not there.
    """
    names = ("encoder.conv1.weight", "encoder.positional_embedding",
             "decoder.token_embedding.weight", "decoder.positional_embedding")  # fmt: skip
    if not all(name in checkpoint for name in names):
        return {}
    shapes = [checkpoint.info(name).shape for name in names]
    if [len(shape) for shape in shapes] != [3, 2, 2, 2]:
        return {}
    mels, audio, words, text = shapes
    layers = {tuple(key.split(".")[:3]) for key in checkpoint if ".blocks." in key}
    return {
        "n_mels": mels[1],
        "n_vocab": words[0],
        **_side("audio", audio, sum(layer[0] == "encoder" for layer in layers)),
        **_side("text", text, sum(layer[0] == "decoder" for layer in layers)),
    }


def _side(name: str, positions: tuple[int, ...], layers: int) -> dict[str, int]:
    length, width = positions
    sizes = {"ctx": length, "state": width, "head": width // 64, "layer": layers}
    return {f"n_{name}_{key}": value for key, value in sizes.items()}


def rope(metadata: Mapping[str, Any], layers: str = "full_attention") -> Mapping[str, Any]:
    """What a Hugging Face configuration says of rotary positions; empty when nothing.

    Gemma 3 says it for each kind of `layers` apart.
    """
    found = metadata.get("rope_parameters") or metadata.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        return {"rope_type": str(found)}
    part = found.get(layers, found)
    return part if isinstance(part, Mapping) else {}


# What the classes that read config.json put in place of keys that are missing.
_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"query_pre_attn_scalar": 256, "sliding_window": 4096}
_DEFAULTS: dict[Any, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gemma2": _GEMMA
    | {
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA
    | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
}


def complete(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A LLaMA's config.json with what its family has for keys that are missing."""
    kind = metadata.get("model_type")
    return {**_DEFAULTS.get(kind if isinstance(kind, str) else None, {}), **metadata}


def stretched(config: Mapping[str, Any], limit: int) -> float:
    """The context, in tokens, of a model made for `limit` before its positions were scaled.

    Llama 3 and Gemma 3 name the scaled context as their limit.
    """
    scaling = rope(config)
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if type(factor) not in (int, float) or config.get("model_type") == "gemma3_text":
        return limit
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn":
        return max(limit, (original if type(original) is int else limit) * factor)
    return max(limit, limit * factor) if kind in ("linear", "dynamic") else limit


def local_layers(config: Mapping[str, Any], layers: int) -> list[bool]:
    """By layer, of a `complete` configuration: whether it sees only `sliding_window` tokens."""
    kind, types = config.get("model_type"), config.get("layer_types")
    qwen = kind in ("qwen2", "qwen3")
    if kind in ("llama", "gemma") or (qwen and not config.get("use_sliding_window")):
        return []
    if isinstance(types, list):
        return [one == "sliding_attention" for one in types]
    if qwen:
        first = config["max_window_layers"]
        return [type(first) is int and n >= first for n in range(layers)]
    every = config.get("sliding_window_pattern")
    if type(every) is not int or every < 1:
        return [True] * layers
    return [(n + 1) % every != 0 for n in range(layers)]  # the last of each group sees all


def _text(name: str, raw: bytes) -> str:
    return base64.b64encode(raw).decode() if name in _BINARY else raw.decode("utf-8", "replace")


def _raw(checkpoint: Checkpoint, name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True) if name in _BINARY else text.encode()
    except (binascii.Error, ValueError):
        problem = f"'{name}' in its metadata can't be read"
        raise WeightError(problem, file=checkpoint.path) from None


def _is_utf8(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _plain(value: Any) -> Any:
    """What JSON holds of a value; the rest, such as what a pickle may have, as text."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)  # no reader of JSON takes it
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value}
    return str(value)
