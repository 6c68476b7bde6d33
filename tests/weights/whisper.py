"""A Whisper of two layers a side under the names of each layout, spelled without our tables."""

from __future__ import annotations

import numpy as np

from tests.weights import models

MELS, AUDIO, STATE, LAYERS, VOCAB, TEXT = 4, 6, 128, 2, 7, 5  # STATE: two heads of 64
DIMS = {
    "n_mels": MELS, "n_audio_ctx": AUDIO, "n_audio_state": STATE, "n_audio_head": 2,
    "n_audio_layer": LAYERS, "n_vocab": VOCAB, "n_text_ctx": TEXT, "n_text_state": STATE,
    "n_text_head": 2, "n_text_layer": LAYERS,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """OpenAI's keys."""
    out: dict[str, tuple[int, ...]] = {
        "encoder.positional_embedding": (AUDIO, STATE),
        "encoder.conv1.weight": (STATE, MELS, 3), "encoder.conv1.bias": (STATE,),
        "encoder.conv2.weight": (STATE, STATE, 3), "encoder.conv2.bias": (STATE,),
        "encoder.ln_post.weight": (STATE,), "encoder.ln_post.bias": (STATE,),
        "decoder.token_embedding.weight": (VOCAB, STATE),
        "decoder.positional_embedding": (TEXT, STATE),
        "decoder.ln.weight": (STATE,), "decoder.ln.bias": (STATE,),
    }  # fmt: skip
    for side, kinds in (("encoder", ("attn",)), ("decoder", ("attn", "cross_attn"))):
        for n in range(LAYERS):
            block = f"{side}.blocks.{n}."
            for kind in kinds:
                for part in ("query", "key", "value", "out"):
                    out[f"{block}{kind}.{part}.weight"] = (STATE, STATE)
                    if part != "key":
                        out[f"{block}{kind}.{part}.bias"] = (STATE,)
            for norm in (*(f"{kind}_ln" for kind in kinds), "mlp_ln"):
                out |= {f"{block}{norm}.weight": (STATE,), f"{block}{norm}.bias": (STATE,)}
            out |= {f"{block}mlp.0.weight": (4 * STATE, STATE), f"{block}mlp.0.bias": (4 * STATE,)}
            out |= {f"{block}mlp.2.weight": (STATE, 4 * STATE), f"{block}mlp.2.bias": (STATE,)}
    return out


HF_WORDS = {
    "encoder.positional_embedding": "model.encoder.embed_positions.weight",
    "encoder.conv1": "model.encoder.conv1", "encoder.conv2": "model.encoder.conv2",
    "encoder.ln_post": "model.encoder.layer_norm",
    "decoder.token_embedding": "model.decoder.embed_tokens",
    "decoder.positional_embedding": "model.decoder.embed_positions.weight",
    "decoder.ln": "model.decoder.layer_norm",
    "attn.query": "self_attn.q_proj", "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj", "attn.out": "self_attn.out_proj",
    "attn_ln": "self_attn_layer_norm", "cross_attn.query": "encoder_attn.q_proj",
    "cross_attn.key": "encoder_attn.k_proj", "cross_attn.value": "encoder_attn.v_proj",
    "cross_attn.out": "encoder_attn.out_proj", "cross_attn_ln": "encoder_attn_layer_norm",
    "mlp.0": "fc1", "mlp.2": "fc2", "mlp_ln": "final_layer_norm",
}  # fmt: skip


def hf_name(key: str) -> str:
    stem, last = key, ""
    if key.endswith((".weight", ".bias")):
        stem, _, last = key.rpartition(".")
        last = "." + last
    if ".blocks." not in stem:
        return HF_WORDS[stem] + last
    side, _, number, rest = stem.split(".", 3)
    return f"model.{side}.layers.{number}.{HF_WORDS[rest]}{last}"


def in_ggml(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """OpenAI's names, but the biases of the convolutions are columns."""
    columns = ("encoder.conv1.bias", "encoder.conv2.bias")
    return {key: w[:, None] if key in columns else w for key, w in arrays.items()}


def in_ctranslate2(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Projections of one input are one matrix, and that of the keys has a bias of zeros."""
    out: dict[str, np.ndarray] = {
        "encoder/position_encodings/encodings": arrays["encoder.positional_embedding"],
        "decoder/position_encodings/encodings": arrays["decoder.positional_embedding"],
        "decoder/embeddings/weight": arrays["decoder.token_embedding.weight"],
    }
    for conv in ("conv1", "conv2"):
        for last in ("weight", "bias"):
            out[f"encoder/{conv}/{last}"] = arrays[f"encoder.{conv}.{last}"]

    def norm(there: str, here: str) -> None:
        out[f"{there}/layer_norm/gamma"] = arrays[f"{here}.weight"]
        out[f"{there}/layer_norm/beta"] = arrays[f"{here}.bias"]

    def linear(there: str, here: str, parts: tuple[str, ...]) -> None:
        out[f"{there}/weight"] = np.concatenate([arrays[f"{here}.{p}.weight"] for p in parts])
        zeros = np.zeros_like(arrays["encoder.conv1.bias"])
        biases = [arrays.get(f"{here}.{part}.bias", zeros) for part in parts]
        out[f"{there}/bias"] = np.concatenate(biases)

    norm("encoder", "encoder.ln_post")
    norm("decoder", "decoder.ln")
    for side in ("encoder", "decoder"):
        for n in range(LAYERS):
            there, here = f"{side}/layer_{n}", f"{side}.blocks.{n}"
            norm(f"{there}/self_attention", f"{here}.attn_ln")
            linear(f"{there}/self_attention/linear_0", f"{here}.attn", ("query", "key", "value"))
            linear(f"{there}/self_attention/linear_1", f"{here}.attn", ("out",))
            norm(f"{there}/ffn", f"{here}.mlp_ln")
            linear(f"{there}/ffn/linear_0", f"{here}.mlp", ("0",))
            linear(f"{there}/ffn/linear_1", f"{here}.mlp", ("2",))
            if side == "decoder":
                norm(f"{there}/attention", f"{here}.cross_attn_ln")
                linear(f"{there}/attention/linear_0", f"{here}.cross_attn", ("query",))
                linear(f"{there}/attention/linear_1", f"{here}.cross_attn", ("key", "value"))
                linear(f"{there}/attention/linear_2", f"{here}.cross_attn", ("out",))
    return out


def layouts() -> dict[str, dict[str, np.ndarray]]:
    """The same random model in every layout."""
    ours = models.random(shapes())
    return {
        "openai": ours,
        "hf": {hf_name(key): w for key, w in ours.items()},
        "ggml": in_ggml(ours),
        "ctranslate2": in_ctranslate2(ours),
    }
