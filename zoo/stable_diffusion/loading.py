"""Load Stable Diffusion: which version it is, its weights checked, its LoRAs merged."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import weights
from weights import Checkpoint, Params, WeightError, names
from zoo.errors import UsageError
from zoo.opening import open_model
from zoo.stable_diffusion import clip, structure, unet
from zoo.stable_diffusion.layers import GROUPS
from zoo.stable_diffusion.lora import Lora, merged
from zoo.stable_diffusion.networks import Kind, Networks

PREDICTIONS = {"epsilon": "epsilon", "eps": "epsilon", "v": "v", "v_prediction": "v"}
_SCALE = {"1": 0.18215, "2": 0.18215, "xl": 0.13025}
_UNET = structure.UNET
# A weight whose spread tells the two SD 2 models apart that have the same keys and shapes.
_TELLING = f"{_UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"
_SPREAD = 0.09

# What people also have in files of this kind, by a part of a key.
_OTHERS = (
    ("joint_blocks.", "Stable Diffusion 3"),
    ("double_blocks.", "Flux"),
    ("double_stream_modulation", "Flux"),
    ("transformer_blocks.0.norm1_context.", "Stable Diffusion 3 or Flux"),
    ("effnet.", "Stable Cascade"),
    ("control_model.", "a ControlNet"),
    ("controlnet_cond_embedding.", "a ControlNet"),
    ("zero_convs.", "a ControlNet"),
    ("lora_", "a LoRA"),
    ("lora.", "a LoRA"),
    ("string_to_param", "a textual inversion"),
    ("emb_params", "a textual inversion"),
    ("decoder.conv_in.", "an autoencoder alone"),
    ("time_embed", "a UNet alone"),
    ("text_model.", "a text encoder alone"),
)

Opened = tuple[Networks, Checkpoint]


def load(
    name_or_path: str | os.PathLike[str] = "stable-diffusion-emoji",
    device: str | None = None,
    dtype: str = "auto",
    loras: Sequence[tuple[str | os.PathLike[str], float]] = (),
    prediction: str | None = None,
    note: Callable[[str], None] | None = None,
) -> Opened:
    """The networks of a model by registry or hub name, or by path, and the checkpoint as it lies.

    A path is a diffusers folder or a CompVis single file. `loras` are files with the strength of
    each; what of one matches nothing is told to `note`. `prediction` ("epsilon" or "v") overrides
    what the model says of itself. WeightError for a file that can't be used, DeviceError without
    the device, UsageError for a wrong option.
    """
    if prediction is not None and prediction not in PREDICTIONS:
        raise UsageError(f"prediction must be epsilon or v, got {prediction!r}")
    checkpoint = open_model(name_or_path, device, dtype)
    ours, version = identified(checkpoint)
    weights.check(ours, structure.expected(ours, version))
    kind = kind_of(checkpoint, ours, version, prediction)
    _check_widths(ours, kind)
    params = Params(merged(ours, [Lora.load(path, s) for path, s in loras], note))
    return Networks(params, kind, device, dtype), checkpoint


def identified(checkpoint: Checkpoint) -> tuple[Checkpoint, str]:
    """The checkpoint under canonical names, and its version; WeightError for other models."""
    found = names.recognise(checkpoint)
    if found is None or found[0] != "stable_diffusion":
        got = found[0] if found else checkpoint.architecture or _guess(checkpoint)
        raise WeightError("not a Stable Diffusion model", file=checkpoint.path, got=got)
    ours = names.canonical(checkpoint)
    version = names.stable_diffusion.version(checkpoint)
    if version == "refiner":
        problem = "XL's refiner makes no pictures of its own"
        raise WeightError(problem, file=checkpoint.path, remedy="use XL's base model")
    return ours, version


def _guess(checkpoint: Checkpoint) -> str:
    for mark, what in _OTHERS:
        if any(mark in key for key in checkpoint):
            return what
    return "something else"


def kind_of(
    given: Checkpoint, ours: Checkpoint, version: str, prediction: str | None = None
) -> Kind:
    """What there is to know of a model; the files' configurations count before the version."""
    config = {part: _object(given.metadata.get(part)) for part in ("unet", "vae", "scheduler")}
    channels = ours.info(f"{_UNET}input_blocks.0.0.weight").shape[1]
    says = PREDICTIONS.get(str(prediction or config["scheduler"].get("prediction_type")))
    says = says or _prediction(given, ours, version, channels)
    size = config["unet"].get("sample_size")
    if not isinstance(size, int) or not 1 <= size <= 1024:
        size = {"1": 64, "2": 96 if says == "v" else 64, "xl": 128}[version]
    scale = config["vae"].get("scaling_factor")
    if not isinstance(scale, float) or not 0 < scale < 100:
        scale = _SCALE[version]
    heads = _heads(given, ours, config["unet"], version)
    return Kind(version, says, scale, 8 * size, channels, heads, config["scheduler"])


def _check_widths(ours: Checkpoint, kind: Kind) -> None:
    """WeightError for channels that don't divide into the groups of norms, or into heads."""
    heads = kind.unet.heads or kind.unet.head_size
    parts = (
        (".transformer_blocks.0.norm1.weight", heads, "attention heads"),
        (".self_attn.out_proj.bias", clip.HEAD, "attention heads"),
        (".attn.out_proj.bias", clip.HEAD, "attention heads"),
        (".0.in_layers.0.weight", GROUPS, "groups"),
        (".block.0.norm1.weight", GROUPS, "groups"),
    )
    for key in ours:
        for end, divisor, what in parts:
            channels = ours.info(key).shape[0] if key.endswith(end) else 0
            if channels % divisor:
                problem, expected = (
                    f"its channels don't divide into {what}",
                    f"a multiple of {divisor}",
                )
                raise WeightError(
                    problem, file=ours.path, tensor=key, expected=expected, got=channels
                )


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _prediction(given: Checkpoint, ours: Checkpoint, version: str, channels: int) -> str:
    """What a single file's UNet predicts.

    The file says it (a key `v_pred`, as XL's have, or modelspec's metadata); else SD 1 and XL
    predict the noise, and of SD 2 the one for 768 pixels predicts v. That one is told by a weight,
    as ComfyUI does; inpainting models predict the noise.
    """
    said = str(given.metadata.get("modelspec.prediction_type", ""))
    if "v_pred" in given or said in PREDICTIONS:
        return "v" if "v_pred" in given else PREDICTIONS[said]
    if version != "2" or channels != 4 or _TELLING not in ours:
        return "epsilon"
    spread = np.std(ours[_TELLING].float().numpy(), ddof=1)
    return "v" if spread > _SPREAD else "epsilon"


def _heads(
    given: Checkpoint, ours: Checkpoint, config: Mapping[str, Any], version: str
) -> unet.Config:
    """Attention heads: 8 in SD 1, of 64 elements in the others, unless diffusers's says otherwise.

    What is called `attention_head_dim` there is the number of heads, one or one for each level.
    """
    said = config.get("num_attention_heads") or config.get("attention_head_dim")
    widths = config.get("block_out_channels")
    if isinstance(said, int) and said > 0:
        return unet.Config(heads=said)
    if isinstance(said, list) and isinstance(widths, list) and len(said) == len(widths):
        if all(isinstance(n, int) and n > 0 for n in (*said, *widths)):
            sizes = {wide // heads for wide, heads in zip(widths, said)}
            if len(sizes) == 1:
                return unet.Config(head_size=sizes.pop())
        raise WeightError("heads of different sizes", file=given.path, got=said)
    return unet.Config(heads=8 if version == "1" else None)
