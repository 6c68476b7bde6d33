"""Folders of diffusers: which files are taken, and what must be refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.weights import build as b
from tests.weights import models
from tests.weights.sd import VERSIONS, Model
from weights import WeightError, diffusers, load, names

CLASSES = {
    "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "scheduler": ["diffusers", "PNDMScheduler"], "tokenizer": ["transformers", "CLIPTokenizer"],
    "safety_checker": [None, None],
}  # fmt: skip
STEM = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}


def file_of(arrays: dict[str, np.ndarray]) -> bytes:
    return b.safetensors({key: ("F32", w.shape, w.tobytes()) for key, w in arrays.items()})


def one(value: float) -> bytes:
    """A file whose tensor `x` says which file it is."""
    return file_of({"x": np.full(1, value, "<f4")})


def write(folder: Path, parts: dict[str, dict[str, bytes]]) -> Path:
    """A pipeline: part -> its files, beside a config.json that has its name."""
    index = {name: CLASSES[name] for name in ("scheduler", "tokenizer", "safety_checker", *parts)}
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Pipeline"} | index))
    for name, files in parts.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"name": name}))
        for file, raw in files.items():
            (folder / name / file).write_bytes(raw)
    return folder


def split_by_part(arrays: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    parts: dict[str, dict[str, np.ndarray]] = {}
    for key, w in arrays.items():
        part, _, rest = key.partition(".")
        parts.setdefault(part, {})[rest] = w
    return parts


@pytest.mark.parametrize("version", VERSIONS)
def test_the_parts_of_a_folder_are_one_checkpoint(version, tmp_path):
    model = Model(version)
    parts = split_by_part(model.diffusers)
    files = {p: {f"{STEM.get(p, 'model')}.safetensors": file_of(w)} for p, w in parts.items()}
    folder = write(tmp_path / "m", files)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text('{"beta_start": 0.00085}')
    checkpoint = load(folder, "reference")
    assert checkpoint.format == "diffusers" and checkpoint.path == folder
    models.assert_equal(checkpoint, model.diffusers)
    assert checkpoint.metadata["scheduler"] == {"beta_start": 0.00085}
    assert checkpoint.metadata["unet"] == {"name": "unet"}
    assert checkpoint.metadata["tokenizer"] == CLASSES["tokenizer"]
    assert checkpoint.metadata["_class_name"] == "Pipeline"
    models.assert_equal(names.canonical(checkpoint), model.compvis)


FULL, HALF = "diffusion_pytorch_model", "diffusion_pytorch_model.fp16"
INDEXED = json.dumps({"weight_map": {"x": "part-1"}}).encode()


@pytest.mark.parametrize(
    ("files", "variant", "wanted"),
    [
        ({f"{FULL}.safetensors": one(1), f"{HALF}.safetensors": one(2)}, None, 1),
        ({f"{FULL}.safetensors": one(1), f"{HALF}.safetensors": one(2)}, "fp16", 2),
        ({f"{FULL}.safetensors": one(1), f"{HALF}.safetensors": one(2)}, "", 1),
        ({f"{HALF}.safetensors": one(2)}, None, 2),
        ({f"{FULL}.bin": one(1), f"{HALF}.safetensors": one(2)}, None, 1),
        ({f"{FULL}.bin": one(1), f"{FULL}.safetensors": one(2)}, None, 2),
        ({"pytorch_model.bin": one(3), f"{FULL}.non_ema.safetensors": one(2)}, None, 3),
        ({f"{FULL}.safetensors": one(1), f"{FULL}.non_ema.safetensors": one(2)}, "non_ema", 2),
        ({f"{FULL}.safetensors.index.json": INDEXED, "part-1": one(4)}, None, 4),
        (
            {f"{FULL}.safetensors.index.fp16.json": INDEXED, "part-1": one(4)}
            | {f"{FULL}.bin": one(1)},
            "fp16",
            4,
        ),
    ],
)
def test_full_precision_is_preferred_and_a_variant_can_be_asked_for(
    files, variant, wanted, tmp_path
):
    folder = write(tmp_path / "m", {"unet": files})
    checkpoint = diffusers.load(folder, load, "reference", variant)
    assert checkpoint["unet.x"].tolist() == [wanted]


def broken(**rows: object) -> bytes:
    return json.dumps(rows).encode()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model_index.json": b"{"}, "model_index.json: its JSON can't be read"),
        ({"model_index.json": b"[]"}, "model_index.json: its JSON is not an object"),
        ({"model_index.json": broken(transformer=["diffusers", "Flux"])}, "without Stable Diff"),
        ({"model_index.json": broken(unet=[None, None])}, "without Stable Diffusion's networks"),
        ({"model_index.json": broken(unet=["a", "b"], vae=["a", "b"])}, "vae: .*but it is not th"),
        ({"unet/config.json": b"[1]"}, "unet/config.json: its JSON is not an object"),
        ({"unet/model.safetensors": b""}, "unet/model.safetensors: not a checkpoint"),
        ({"unet/model.safetensors": None}, "unet: no weights in this folder"),
        (
            {"unet/model.safetensors.index.json": broken(weight_map={"x": "../vae/x"})},
            "the index points outside its folder",
        ),
        (
            {"unet/model.safetensors.index.json": broken(weight_map={"x": "no"})},
            "unet/no: tensor 'x': a shard is missing",
        ),
        (
            {"unet/model.safetensors.index.json": broken(weight_map={"x": "n" * 5000})},
            "a shard is missing",
        ),
        (
            {"unet/model.safetensors.index.json": broken(weight_map={"x": "\ud800"})},
            "a shard is missing",
        ),
        (
            {"unet/model.safetensors.index.json": broken(weight_map={"y": "model.safetensors"})},
            "'y': the index says it is in model.safetensors, which has no such tensor",
        ),
    ],
)
def test_damaged_folder_is_one_clear_line(files, message, tmp_path):
    folder = write(tmp_path / "m", {"unet": {"model.safetensors": one(1)}})
    for name, raw in files.items():
        (folder / name).unlink(missing_ok=True)
        if raw is not None:
            (folder / name).write_bytes(raw)
    with pytest.raises(WeightError, match=message) as caught:
        load(folder)
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)


def test_a_variant_that_is_not_there_is_named(tmp_path):
    folder = write(tmp_path / "m", {"unet": {"model.safetensors": one(1)}})
    with pytest.raises(WeightError, match="unet: no weights of variant 'fp16' in this folder"):
        diffusers.load(folder, load, variant="fp16")
