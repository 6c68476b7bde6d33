"""Names of Stable Diffusion's text encoders: Hugging Face's CLIPTextModel, and OpenCLIP's."""

from __future__ import annotations

from weights import entries
from weights.checkpoint import Entry
from weights.names.table import Change, Counts, Row, under


def _turned(entry: Entry, counts: Counts) -> Entry:
    return entries.transposed(entry)


_LAYER = (
    "layer_norm1.{p}", "self_attn.q_proj.{p}", "self_attn.k_proj.{p}", "self_attn.v_proj.{p}",
    "self_attn.out_proj.{p}", "layer_norm2.{p}", "mlp.fc1.{p}", "mlp.fc2.{p}",
)  # fmt: skip
_MODEL = (
    "embeddings.token_embedding.weight", "embeddings.position_embedding.weight",
    *(f"encoder.layers.{{n}}.{name}" for name in _LAYER), "final_layer_norm.{p}",
)  # fmt: skip
_HF = tuple(Row(name, name) for name in _MODEL)

# OpenCLIP's block is torch's multi-head attention, whose projections are one matrix.
_OPENCLIP_LAYER = (
    Row("ln_1.{p}", "layer_norm1.{p}"),
    Row(
        ("attn.in_proj_{p}",),
        ("self_attn.q_proj.{p}", "self_attn.k_proj.{p}", "self_attn.v_proj.{p}"),
    ),
    Row("attn.out_proj.{p}", "self_attn.out_proj.{p}"),
    Row("ln_2.{p}", "layer_norm2.{p}"),
    Row("mlp.c_fc.{p}", "mlp.fc1.{p}"),
    Row("mlp.c_proj.{p}", "mlp.fc2.{p}"),
)
_OPENCLIP = (
    Row("token_embedding.weight", "embeddings.token_embedding.weight"),
    Row("positional_embedding", "embeddings.position_embedding.weight"),
    *under("transformer.resblocks.{n}.", "encoder.layers.{n}.", _OPENCLIP_LAYER),
    Row("ln_final.{p}", "final_layer_norm.{p}"),
)
# A parameter there, multiplied from the right; the weight of a linear layer here.
_PROJECTION = Row("text_projection", "text_projection.weight", Change(_turned, _turned))

_TEXT_MODEL = "text_model."  # newer versions of transformers leave it out


def hugging_face(ours: str, theirs: str) -> tuple[Row, ...]:
    """Rows of an encoder that is a CLIPTextModel on both sides, under these prefixes."""
    return (
        *under(ours + _TEXT_MODEL, theirs + _TEXT_MODEL, _HF),
        *under(ours + _TEXT_MODEL, theirs, _HF),
    )


def openclip(ours: str, theirs: str) -> tuple[Row, ...]:
    """Rows of an encoder that is OpenCLIP's on our side and a CLIPTextModel on theirs."""
    return (
        *under(ours, theirs + _TEXT_MODEL, _OPENCLIP),
        *under(ours, theirs, (*_OPENCLIP, _PROJECTION)),
    )
