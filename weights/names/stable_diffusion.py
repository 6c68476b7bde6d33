"""Stable Diffusion's names: CompVis's single file is canonical, diffusers's folder beside it.

The parts of the folder are the prefixes `unet.`, `vae.`, `text_encoder.` and `text_encoder_2.`. SD
1, 2, XL and XL's refiner differ in their text encoders and in how many blocks the UNet has where,
which is read off the keys. SD 2's text encoder has one layer and a projection that diffusers's
own conversion leaves out because nothing reads them; they stay, so that nothing is lost.
"""

from __future__ import annotations

from functools import lru_cache

from weights import entries
from weights.checkpoint import Checkpoint, Entry
from weights.names import clip
from weights.names.table import Change, Counts, Layout, Row, identity, matching, translate, under

_UNET, _VAE = "model.diffusion_model.", "first_stage_model."
_MOST = 8  # levels of a network, and layers of a level, that are looked for

_UNET_RESNET = (
    Row("in_layers.0.{p}", "norm1.{p}"),
    Row("in_layers.2.{p}", "conv1.{p}"),
    Row("emb_layers.1.{p}", "time_emb_proj.{p}"),
    Row("out_layers.0.{p}", "norm2.{p}"),
    Row("out_layers.3.{p}", "conv2.{p}"),
    Row("skip_connection.{p}", "conv_shortcut.{p}"),
)
_TRANSFORMER_BLOCK = (
    *(f"attn{k}.to_{x}.weight" for k in (1, 2) for x in "qkv"),
    *(f"attn{k}.to_out.0.{{p}}" for k in (1, 2)),
    *("ff.net.0.proj.{p}", "ff.net.2.{p}", "norm1.{p}", "norm2.{p}", "norm3.{p}"),
)
_TRANSFORMER = tuple(
    Row(name, name)
    for name in (
        *("norm.{p}", "proj_in.{p}", "proj_out.{p}"),
        *(f"transformer_blocks.{{n}}.{name}" for name in _TRANSFORMER_BLOCK),
    )
)
_UNET_ENDS = (
    Row("time_embed.0.{p}", "time_embedding.linear_1.{p}"),
    Row("time_embed.2.{p}", "time_embedding.linear_2.{p}"),
    Row("label_emb.0.0.{p}", "add_embedding.linear_1.{p}"),
    Row("label_emb.0.2.{p}", "add_embedding.linear_2.{p}"),
    Row("input_blocks.0.0.{p}", "conv_in.{p}"),
    *under("middle_block.0.", "mid_block.resnets.0.", _UNET_RESNET),
    *under("middle_block.1.", "mid_block.attentions.0.", _TRANSFORMER),
    *under("middle_block.2.", "mid_block.resnets.1.", _UNET_RESNET),
    Row("out.0.{p}", "conv_norm_out.{p}"),
    Row("out.2.{p}", "conv_out.{p}"),
)


def _unet(per_level: int, attention_before_upsampling: tuple[bool, ...]) -> tuple[Row, ...]:
    """The UNet's rows, with `per_level` layers on the way down and one more on the way up.

    CompVis counts blocks through, diffusers within a level; an upsampling comes third in its block
    where attention comes second.
    """
    rows = list(_UNET_ENDS)
    for level, attention in enumerate(attention_before_upsampling):
        down, up = 1 + level * (per_level + 1), level * (per_level + 1)
        for j in range(per_level):
            here, there = f"input_blocks.{down + j}", f"down_blocks.{level}"
            rows += under(f"{here}.0.", f"{there}.resnets.{j}.", _UNET_RESNET)
            rows += under(f"{here}.1.", f"{there}.attentions.{j}.", _TRANSFORMER)
        here = f"input_blocks.{down + per_level}.0.op.{{p}}"
        rows.append(Row(here, f"down_blocks.{level}.downsamplers.0.conv.{{p}}"))
        for j in range(per_level + 1):
            here, there = f"output_blocks.{up + j}", f"up_blocks.{level}"
            rows += under(f"{here}.0.", f"{there}.resnets.{j}.", _UNET_RESNET)
            rows += under(f"{here}.1.", f"{there}.attentions.{j}.", _TRANSFORMER)
        here = f"output_blocks.{up + per_level}.{2 if attention else 1}.conv.{{p}}"
        rows.append(Row(here, f"up_blocks.{level}.upsamplers.0.conv.{{p}}"))
    return tuple(rows)


def _convolution(entry: Entry, counts: Counts) -> Entry:
    shape = entry.info.shape
    return entries.reshaped(entry, (*shape, 1, 1)) if len(shape) == 2 else entry


def _linear(entry: Entry, counts: Counts) -> Entry:
    shape = entry.info.shape
    return entries.reshaped(entry, shape[:2]) if shape[2:] == (1, 1) else entry


_CONVOLUTION = Change(_convolution, _linear)  # 1x1 in CompVis's, a linear layer in diffusers's
_VAE_RESNET = (
    *(Row(name, name) for name in ("norm1.{p}", "conv1.{p}", "norm2.{p}", "conv2.{p}")),
    Row("nin_shortcut.{p}", "conv_shortcut.{p}"),
)
_VAE_ATTENTION = (
    Row("norm.{p}", "group_norm.{p}"),
    *(
        row
        for names in (  # theirs, and theirs before version 0.17
            (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")),
            (("q", "query"), ("k", "key"), ("v", "value"), ("proj_out", "proj_attn")),
        )
        for ours, theirs in names
        for row in (
            Row(f"{ours}.weight", f"{theirs}.weight", _CONVOLUTION),
            Row(f"{ours}.bias", f"{theirs}.bias"),
        )
    ),
)
_VAE_HALF = (
    Row("conv_in.{p}", "conv_in.{p}"),
    *under("mid.block_1.", "mid_block.resnets.0.", _VAE_RESNET),
    *under("mid.attn_1.", "mid_block.attentions.0.", _VAE_ATTENTION),
    *under("mid.block_2.", "mid_block.resnets.1.", _VAE_RESNET),
    Row("norm_out.{p}", "conv_norm_out.{p}"),
    Row("conv_out.{p}", "conv_out.{p}"),
)


def _vae(levels: int) -> tuple[Row, ...]:
    """The autoencoder's rows; CompVis counts the decoder's levels from its end."""
    rows = [Row(name, name) for name in ("quant_conv.{p}", "post_quant_conv.{p}")]
    rows += under("encoder.", "encoder.", _VAE_HALF) + under("decoder.", "decoder.", _VAE_HALF)
    down = "encoder.down.{n}.", "encoder.down_blocks.{n}."
    rows += under(down[0] + "block.{m}.", down[1] + "resnets.{m}.", _VAE_RESNET)
    rows.append(Row(down[0] + "downsample.conv.{p}", down[1] + "downsamplers.0.conv.{p}"))
    for level in range(levels):
        up = f"decoder.up.{levels - 1 - level}.", f"decoder.up_blocks.{level}."
        rows += under(up[0] + "block.{m}.", up[1] + "resnets.{m}.", _VAE_RESNET)
        rows.append(Row(up[0] + "upsample.conv.{p}", up[1] + "upsamplers.0.conv.{p}"))
    return tuple(rows)


# The text encoders that each version has.
_TEXT = {
    "1": clip.hugging_face("cond_stage_model.transformer.", "text_encoder."),
    "2": clip.openclip("cond_stage_model.model.", "text_encoder."),
    "xl": (
        *clip.hugging_face("conditioner.embedders.0.transformer.", "text_encoder."),
        *clip.openclip("conditioner.embedders.1.model.", "text_encoder_2."),
    ),
    "refiner": clip.openclip("conditioner.embedders.0.model.", "text_encoder_2."),
}


def version(checkpoint: Checkpoint) -> str:
    """ "1", "2", "xl" or "refiner", by the text encoders and, in diffusers, the UNet's layers."""
    marks = (
        ("xl", "conditioner.embedders.1.model.token_embedding.weight"),
        ("refiner", "conditioner.embedders.0.model.token_embedding.weight"),
        ("2", "cond_stage_model.model.token_embedding.weight"),
    )
    for name, key in marks:
        if key in checkpoint:
            return name
    first, second = (
        any(f"{part}{middle}embeddings.token_embedding.weight" in checkpoint for middle in
            ("", "text_model."))
        for part in ("text_encoder.", "text_encoder_2.")
    )  # fmt: skip
    if second:
        return "xl" if first else "refiner"
    # SD 2 came with OpenCLIP and with linear layers where SD 1 has 1x1 convolutions.
    entry = checkpoint.entries.get("unet.mid_block.attentions.0.proj_in.weight")
    return "2" if entry is not None and len(entry.info.shape) == 2 else "1"


def _rows(checkpoint: Checkpoint, to_ours: bool) -> tuple[Row, ...]:
    """The table between the two layouts for the blocks that this checkpoint has."""

    def first_absent(start: int, key: str) -> int:
        here = ("unet." + key, "vae." + key) if to_ours else (_UNET + key, _VAE + key)
        ends = (k for k in range(start, _MOST) if not any(h.format(k) in checkpoint for h in here))
        return next(ends, _MOST)

    if to_ours:
        per_level = first_absent(0, "down_blocks.0.resnets.{}.norm1.weight")
        levels = first_absent(0, "decoder.up_blocks.{}.resnets.0.norm1.weight")
        last = f"unet.up_blocks.{{}}.attentions.{per_level}.norm.weight"
        attention = tuple(last.format(level) in checkpoint for level in range(_MOST))
    else:
        per_level = first_absent(1, "input_blocks.{}.0.in_layers.0.weight") - 1
        levels = first_absent(0, "decoder.up.{}.block.0.norm1.weight")
        last = [per_level + level * (per_level + 1) for level in range(_MOST)]
        attention = tuple(f"{_UNET}output_blocks.{k}.1.norm.weight" in checkpoint for k in last)
    return _table(per_level, attention, levels, version(checkpoint))


@lru_cache(maxsize=8)
def _table(per_level: int, attention: tuple[bool, ...], levels: int, text: str) -> tuple[Row, ...]:
    """All rows for one structure."""
    return (
        *under(_UNET, "unet.", _unet(per_level, attention)),
        *under(_VAE, "vae.", _vae(levels)),
        *_TEXT[text],
    )


def _own_rows(checkpoint: Checkpoint, to_ours: bool) -> tuple[Row, ...]:
    return _identity(_rows(checkpoint, False))


_identity = lru_cache(maxsize=8)(identity)


_POSITIONS = r".*\.position_ids"  # 0 to 76: older versions of transformers stored them
_LEFT_OVER = (  # from training, and tables that a sampler computes
    r"model_ema\..*",
    r"first_stage_model\.(?:loss|model_ema)\..*",
    r"(?:cond_stage_model|conditioner\.embedders\.[01])\.(?:model\.)?(?:logit_scale|attn_mask)",
    r"(?:sqrt_|log_)?(?:one_minus_)?(?:betas|alphas_cumprod|alphas_cumprod_prev)",
    r"sqrt_recip(?:m1)?_alphas_cumprod",
    r"posterior_(?:variance|log_variance_clipped|mean_coef[12])",
    r"logvar|lvlb_weights|scale_factor|denoiser\.sigmas|v_pred|ztsnr",
)

LAYOUTS = {
    "compvis": Layout("compvis", _own_rows, (_POSITIONS, *_LEFT_OVER)),
    "diffusers": Layout("diffusers", _rows, (_POSITIONS,)),
}


def recognise(checkpoint: Checkpoint) -> str | None:
    """The layout of a Stable Diffusion checkpoint that has a UNet, or None."""
    if f"{_UNET}time_embed.0.weight" in checkpoint:
        return "compvis"
    return "diffusers" if "unet.time_embedding.linear_1.weight" in checkpoint else None


def canonical(checkpoint: Checkpoint, layout: str) -> Checkpoint:
    """The checkpoint in CompVis's layout."""
    return translate(checkpoint, LAYOUTS[layout], to_ours=True)


def in_layout(ours: Checkpoint, layout: str) -> Checkpoint:
    """The inverse of `canonical`."""
    return translate(ours, LAYOUTS[layout], to_ours=False)


def diffusers_names(ours: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Each key of a canonical checkpoint -> what diffusers calls it: several where it splits it."""
    rows = _rows(ours, False)
    return {key: matching(rows, key) for key in ours}
