"""Whisper's names: OpenAI's are canonical; beside them Hugging Face, ggml and CTranslate2."""

from __future__ import annotations

import math

from weights import entries
from weights.checkpoint import Checkpoint, Entry, WeightError
from weights.names.table import Change, Counts, Layout, Row, identity, translate, under

_HEAD_SIZE = 64  # of every published model

_HF_SELF = (
    Row("attn_ln.{p}", "self_attn_layer_norm.{p}"),
    Row("attn.query.{p}", "self_attn.q_proj.{p}"),
    Row("attn.key.weight", "self_attn.k_proj.weight"),
    Row("attn.value.{p}", "self_attn.v_proj.{p}"),
    Row("attn.out.{p}", "self_attn.out_proj.{p}"),
    Row("mlp_ln.{p}", "final_layer_norm.{p}"),
    Row("mlp.0.{p}", "fc1.{p}"),
    Row("mlp.2.{p}", "fc2.{p}"),
)
_HF_CROSS = (
    Row("cross_attn_ln.{p}", "encoder_attn_layer_norm.{p}"),
    Row("cross_attn.query.{p}", "encoder_attn.q_proj.{p}"),
    Row("cross_attn.key.weight", "encoder_attn.k_proj.weight"),
    Row("cross_attn.value.{p}", "encoder_attn.v_proj.{p}"),
    Row("cross_attn.out.{p}", "encoder_attn.out_proj.{p}"),
)
_HF = (
    Row("encoder.conv1.{p}", "model.encoder.conv1.{p}"),
    Row("encoder.conv2.{p}", "model.encoder.conv2.{p}"),
    Row("encoder.positional_embedding", "model.encoder.embed_positions.weight"),
    *under("encoder.blocks.{n}.", "model.encoder.layers.{n}.", _HF_SELF),
    Row("encoder.ln_post.{p}", "model.encoder.layer_norm.{p}"),
    Row("decoder.token_embedding.weight", "model.decoder.embed_tokens.weight"),
    Row("decoder.positional_embedding", "model.decoder.embed_positions.weight"),
    *under("decoder.blocks.{n}.", "model.decoder.layers.{n}.", _HF_SELF + _HF_CROSS),
    Row("decoder.ln.{p}", "model.decoder.layer_norm.{p}"),
)

# CTranslate2 joins the projections that read the same tensor. Theirs of the keys has a bias of
# zeros; whatever it were, it adds one number to all scores of a query, which softmax ignores.
_CT2_SELF = (
    Row("attn_ln.weight", "self_attention/layer_norm/gamma"),
    Row("attn_ln.bias", "self_attention/layer_norm/beta"),
    Row(
        ("attn.query.{w}", "attn.key.{w}", "attn.value.{w}"),
        ("self_attention/linear_0/{w}",),
    ),
    Row(("attn.query.bias", None, "attn.value.bias"), "self_attention/linear_0/bias"),
    Row("attn.out.{s}", "self_attention/linear_1/{s}"),
    Row("mlp_ln.weight", "ffn/layer_norm/gamma"),
    Row("mlp_ln.bias", "ffn/layer_norm/beta"),
    Row("mlp.0.{s}", "ffn/linear_0/{s}"),
    Row("mlp.2.{s}", "ffn/linear_1/{s}"),
)
_CT2_CROSS = (
    Row("cross_attn_ln.weight", "attention/layer_norm/gamma"),
    Row("cross_attn_ln.bias", "attention/layer_norm/beta"),
    Row("cross_attn.query.{s}", "attention/linear_0/{s}"),
    Row(("cross_attn.key.{w}", "cross_attn.value.{w}"), "attention/linear_1/{w}"),
    Row((None, "cross_attn.value.bias"), "attention/linear_1/bias"),
    Row("cross_attn.out.{s}", "attention/linear_2/{s}"),
)
_CT2 = (
    Row("encoder.conv1.{s}", "encoder/conv1/{s}"),
    Row("encoder.conv2.{s}", "encoder/conv2/{s}"),
    Row("encoder.positional_embedding", "encoder/position_encodings/encodings"),
    *under("encoder.blocks.{n}.", "encoder/layer_{n}/", _CT2_SELF),
    Row("encoder.ln_post.weight", "encoder/layer_norm/gamma"),
    Row("encoder.ln_post.bias", "encoder/layer_norm/beta"),
    Row("decoder.token_embedding.{w}", "decoder/embeddings/{w}"),
    Row("decoder.positional_embedding", "decoder/position_encodings/encodings"),
    *under("decoder.blocks.{n}.", "decoder/layer_{n}/", _CT2_SELF + _CT2_CROSS),
    Row("decoder.ln.weight", "decoder/layer_norm/gamma"),
    Row("decoder.ln.bias", "decoder/layer_norm/beta"),
)


def _vector(entry: Entry, counts: Counts) -> Entry:
    return entries.reshaped(entry, entry.info.shape[:1])


def _column(entry: Entry, counts: Counts) -> Entry:
    return entries.reshaped(entry, (*entry.info.shape, 1))


_COLUMN = Change(_vector, _column)  # whisper.cpp adds a convolution's bias to (channels, frames)
_GGML = (
    Row("encoder.conv1.bias", "encoder.conv1.bias", _COLUMN),
    Row("encoder.conv2.bias", "encoder.conv2.bias", _COLUMN),
    *identity(_HF),
)

# The output matrix is the embedding, which some files name or hold twice.
LAYOUTS = {
    "openai": Layout("openai", identity(_HF)),
    "hf": Layout("hf", _HF, (r"proj_out\.weight",)),
    "ggml": Layout("ggml", _GGML),
    "ctranslate2": Layout("ctranslate2", _CT2, (r"decoder/projection/(?:weight|weight_scale)",)),
}


def recognise(checkpoint: Checkpoint) -> str | None:
    """The layout of a Whisper checkpoint, or None."""
    if checkpoint.architecture not in (None, "whisper"):
        return None
    if "encoder/conv1/weight" in checkpoint:
        return "ctranslate2"
    if "model.encoder.conv1.weight" in checkpoint:
        return "hf"
    if "encoder.conv1.bias" in checkpoint and "decoder.token_embedding.weight" in checkpoint:
        return "ggml" if len(checkpoint.info("encoder.conv1.bias").shape) > 1 else "openai"
    return None


def canonical(checkpoint: Checkpoint, layout: str) -> Checkpoint:
    """The checkpoint in OpenAI's layout; whole numbers become what their scales make of them."""
    if layout != "ctranslate2":
        return translate(checkpoint, LAYOUTS[layout], to_ours=True)
    table = checkpoint.entries
    single = {  # int16 has one scale for the whole matrix: one for each row divides like it
        name: entries.repeated(entry, table[name.removesuffix("_scale")].info.shape[0])
        for name, entry in table.items()
        if _is_scale(name, checkpoint) and math.prod(entry.info.shape) == 1
    }
    per_row = _with(checkpoint, {**table, **single})
    renamed = translate(per_row, LAYOUTS[layout], to_ours=True)
    made = dict(renamed.entries)
    for name in [name for name in made if _is_scale(name, renamed)]:
        weight, scale = name.removesuffix("_scale"), made.pop(name)
        try:
            made[weight] = entries.scaled(made[weight], scale)
        except WeightError as error:
            error.file, error.tensor = checkpoint.path, weight
            raise
    return _with(renamed, made)


def in_layout(ours: Checkpoint, layout: str) -> Checkpoint:
    """The inverse of `canonical`, but for whole numbers, which stay what they stand for."""
    return translate(ours, LAYOUTS[layout], to_ours=False)


def _is_scale(name: str, checkpoint: Checkpoint) -> bool:
    weight = name.removesuffix("_scale")
    return weight != name and weight in checkpoint and bool(checkpoint.info(weight).shape)


def _with(checkpoint: Checkpoint, made: dict[str, Entry]) -> Checkpoint:
    path, form, metadata = checkpoint.path, checkpoint.format, checkpoint.metadata
    return Checkpoint(path, form, metadata, made, checkpoint.device)


def dims(ours: Checkpoint) -> dict[str, int]:
    """OpenAI's `dims` of a canonical checkpoint, from its shapes and, for heads, its metadata.

    WeightError when a tensor that shows a size is missing or has another rank.
    """
    _, n_mels, _ = _shape(ours, "encoder.conv1.weight", 3)
    audio_ctx, audio_state = _shape(ours, "encoder.positional_embedding", 2)
    text_ctx, _ = _shape(ours, "decoder.positional_embedding", 2)
    n_vocab, text_state = _shape(ours, "decoder.token_embedding.weight", 2)
    return {
        "n_mels": n_mels,
        "n_audio_ctx": audio_ctx,
        "n_audio_state": audio_state,
        "n_audio_head": _heads(ours, "audio", "encoder", audio_state),
        "n_audio_layer": _layers(ours, "encoder"),
        "n_vocab": n_vocab,
        "n_text_ctx": text_ctx,
        "n_text_state": text_state,
        "n_text_head": _heads(ours, "text", "decoder", text_state),
        "n_text_layer": _layers(ours, "decoder"),
    }


def _shape(ours: Checkpoint, name: str, rank: int) -> tuple[int, ...]:
    if name not in ours:
        raise WeightError("the tensor is missing", file=ours.path, tensor=name)
    shape = ours.info(name).shape
    if len(shape) != rank:
        expected = f"{rank} axes"
        raise WeightError("wrong shape", file=ours.path, tensor=name, expected=expected, got=shape)
    return shape


def _layers(ours: Checkpoint, part: str) -> int:
    ends = ".attn.query.weight"
    return sum(name.startswith(f"{part}.blocks.") and name.endswith(ends) for name in ours)


def _heads(ours: Checkpoint, part: str, side: str, state: int) -> int:
    """What OpenAI's, Hugging Face's or CTranslate2's metadata say, or else heads of 64."""
    metadata = ours.metadata
    inner = metadata.get("dims")
    places = (
        (inner if isinstance(inner, dict) else {}, f"n_{part}_head"),
        (metadata, f"n_{part}_head"),
        (metadata, f"{side}_attention_heads"),
        (metadata, f"{side}/num_heads"),
    )
    named = (where.get(key) for where, key in places)
    heads = next((n for n in named if type(n) is int and n > 0), max(state // _HEAD_SIZE, 1))
    if state % heads:
        problem = f"{state} columns do not divide into heads"
        raise WeightError(problem, file=ours.path, tensor=f"{side}.positional_embedding", got=heads)
    return heads
