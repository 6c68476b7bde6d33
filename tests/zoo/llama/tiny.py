"""A LLaMA of a few thousand random weights, as a GGUF file and as a Hugging Face folder."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from tests.weights import build as b
from tests.zoo.llama import vocab
from zoo.llama import model

FLOAT32, BOOL = 6, 7
SIZES = {
    "embedding_length": 24,
    "block_count": 2,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,  # fewer than heads: the case that mix-ups show in
    "feed_forward_length": 40,
    "context_length": 300,
    "rope.dimension_count": 4,
}


def config(vocab_size: int) -> model.Config:
    return model.Config(
        dim=24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=4, hidden_dim=40,
        vocab_size=vocab_size, norm_eps=1e-5, rope_theta=10000.0, max_context=300,
    )  # fmt: skip


def tensors(vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under the canonical names, big enough that logits differ widely."""
    draw = np.random.default_rng(seed)
    shapes = model.expected_shapes(config(vocab_size))
    out = {name: draw.normal(size=shape) * 2 / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {name: w.astype(np.float32) for name, w in out.items()}


def gguf_pairs(metadata: dict, sizes: dict | None = None) -> list[bytes]:
    """Key/value pairs of a tiny model; `sizes` overrides entries, None leaves one out."""
    pairs = [b.string("general.architecture", "llama")]
    for key, value in (SIZES | (sizes or {})).items():
        if isinstance(value, int):
            pairs.append(b.u32(f"llama.{key}", value))
    for key, value in (("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 10000.0)):
        pairs.append(b.pair(f"llama.{key}", FLOAT32, struct.pack("<f", value)))
    for key, value in metadata.items():
        pairs.append(_pair(key, value))
    return pairs


def _pair(key: str, value) -> bytes:
    match value:
        case bool():
            return b.pair(key, BOOL, bytes([value]))
        case int():
            return b.u32(key, value)
        case str():
            return b.string(key, value)
        case [str(), *_]:
            return b.strings(key, list(value))
        case [int(), *_]:
            items = struct.pack(f"<{len(value)}i", *value)
            return b.pair(key, b.ARRAY, b.array(5, len(value), items))
    raise TypeError(f"no GGUF type for {value!r}")


GGUF_WORDS = {
    "tok_embeddings": "token_embd", "norm": "output_norm", "output": "output",
    "attention_norm": "attn_norm", "ffn_norm": "ffn_norm", "attention.wq": "attn_q",
    "attention.wk": "attn_k", "attention.wv": "attn_v", "attention.wo": "attn_output",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
}  # fmt: skip
HF_WORDS = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip


def gguf_name(canonical: str) -> str:
    """The GGUF spelling of a canonical key."""
    return _spelled(canonical, GGUF_WORDS, "blk")


def hf_name(canonical: str) -> str:
    """The Hugging Face spelling of a canonical key."""
    return _spelled(canonical, HF_WORDS, "model.layers")


def _spelled(canonical: str, words: dict[str, str], layers: str) -> str:
    stem = canonical.removesuffix(".weight")
    if not stem.startswith("layers."):
        return words[stem] + ".weight"
    _, number, rest = stem.split(".", 2)
    return f"{layers}.{number}.{words[rest]}.weight"


def write_gguf(
    path: Path, sizes: dict | None = None, drop: str = "", extra: dict | None = None
) -> Path:
    """A tiny model's file; `drop` leaves a tensor out, `extra` overrides vocabulary keys."""
    metadata = vocab.tiny() | (extra or {})
    count = len(metadata["tokenizer.ggml.tokens"])
    headers, data = [], b""
    for name, w in tensors(count).items():
        if gguf_name(name) != drop:
            headers.append(b.header(gguf_name(name), w.shape, b.F32, len(data)))
            data += w.tobytes() + bytes(-w.nbytes % 32)
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path.write_bytes(b.gguf(gguf_pairs(metadata, sizes), headers, data))
    return path


def halves(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of interleaved pairs put into Hugging Face's order of rotated halves."""
    rows, columns = w.shape
    return w.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_folder(folder: Path) -> Path:
    """The same model as `write_gguf` writes, as config.json, safetensors and tokenizer.json."""
    metadata = vocab.tiny()
    tokens = metadata["tokenizer.ggml.tokens"]
    folder.mkdir()
    rows = {}
    for name, w in tensors(len(tokens)).items():
        if name.endswith(("wq.weight", "wk.weight")):
            w = halves(w, 6 if name.endswith("wq.weight") else 2)
        rows[hf_name(name)] = ("F32", w.shape, w.tobytes())
    (folder / "model.safetensors").write_bytes(b.safetensors(rows))
    _write_json(folder / "config.json", {
        "model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": len(tokens),
        "max_position_embeddings": 300, "tie_word_embeddings": True,
    })  # fmt: skip
    special = [
        {"id": i, "content": tokens[i], "special": True}
        for i, kind in enumerate(metadata["tokenizer.ggml.token_type"])
        if kind == vocab.CONTROL
    ]
    _write_json(folder / "tokenizer.json", {
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "use_regex": True},
        ]},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    })  # fmt: skip
    _write_json(
        folder / "tokenizer_config.json",
        {"bos_token": tokens[0], "eos_token": {"content": tokens[1]}},
    )
    return folder


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value), "utf-8")
