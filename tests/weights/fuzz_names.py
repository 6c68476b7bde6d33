"""What the fuzzer opens that is no checkpoint: keys, folders of diffusers, ONNX models."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import numpy as np

from tests.weights import build as b
from tests.weights import sd, whisper
from weights import WeightError, load, names, onnx
from weights.checkpoint import Checkpoint, TensorInfo
from weights.entries import from_raw
from weights.onnx_tensor import dtype_of
from weights.quant import FORMATS

_LINE = re.compile(r"(.*)\t([0-9]{1,2})\t([0-9 ]{1,20})", re.DOTALL)
_MORE = re.compile(r"transformer_blocks|[./_](?:blocks|levels|up|down|layers?)[./_][1-9]|\.[2-9]\.")
_METADATA = {"n_heads": 2, "n_kv_heads": 1}
_LLAMA = {"tok_embeddings.weight": (2, 4), "layers.0.attention.wq.weight": (8, 4),
          "layers.0.attention.wk.bias": (4,), "norm.weight": (4,)}  # fmt: skip

with contextlib.suppress(WeightError):
    dtype_of("int4")  # imports a package, whose memory is not a model's


def _lines(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Keys, each with its type's number and its shape, one a line."""
    return "\n".join(f"{k}\t0\t{' '.join(map(str, s))}" for k, s in shapes.items()).encode()


def key_lists() -> list[bytes]:
    """Keys of every layout of every model; of Stable Diffusion's hundreds the first blocks."""
    arrays = [*whisper.layouts().values()]
    for model in map(sd.Model, sd.VERSIONS):
        arrays += [model.compvis, model.diffusers]
    shapes = [
        {k: tuple(-(-n // 16) if n >= 16 else n for n in w.shape) for k, w in some.items()
         if not _MORE.search(k)} for some in arrays
    ]  # fmt: skip
    llama = names.in_layout(_checkpoint(_lines(_LLAMA).decode()), "hf")
    hf = {key: llama.info(key).shape for key in llama}
    return [_lines(some) for some in (_LLAMA, hf, *shapes)]


def _checkpoint(text: str) -> Checkpoint:
    entries = {}
    for line in text.split("\n"):
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        kind = FORMATS[int(match[2]) % len(FORMATS)]
        shape = tuple(map(int, match[3].split()))[:6]
        nbytes = kind.size(shape)
        if nbytes is not None and nbytes < 4096:
            raw = np.zeros(nbytes, np.uint8)
            info = TensorInfo(shape, kind.name, nbytes)
            entries[match[1]] = from_raw(info, lambda raw=raw: raw)
    return Checkpoint(Path("keys"), "test", _METADATA, entries)


def translate_keys(raw: bytes, path: Path) -> None:
    """Into canonical names and from there into every layout; every tensor's bytes are read."""
    given = _checkpoint(raw.decode("latin-1"))
    found = names.recognise(given)
    ours = names.canonical(given)
    for layout in names.LAYOUTS[found[0]]:
        made = names.in_layout(ours, layout)
        for key in made:
            assert made.entries[key].raw().nbytes == made.info(key).nbytes


def folder_texts() -> list[bytes]:
    """A pipeline's two JSON files, one after the other."""
    index = {"_class_name": "P", "unet": ["diffusers", "U"], "vae": [None, None], "text_encoder": 0}
    shards = {"metadata": {}, "weight_map": {"x": "one", "y": "one"}}
    return [json.dumps(index).encode() + b"\0" + json.dumps(shards).encode()]


def open_folder(raw: bytes, path: Path) -> None:
    """A folder whose `model_index.json` and shard index are the two halves of `raw`."""
    folder = path.with_name("pipeline")
    (folder / "unet").mkdir(parents=True, exist_ok=True)
    index, _, shards = raw.partition(b"\0")
    tensor = ("F32", (1,), bytes(4))
    (folder / "unet" / "one").write_bytes(b.safetensors({"x": tensor, "y": tensor}))
    (folder / "model_index.json").write_bytes(index)
    (folder / "unet" / "model.safetensors.index.json").write_bytes(shards)
    checkpoint = load(folder, "reference")
    assert all(checkpoint.entries[key].raw().nbytes == 4 for key in checkpoint)


def open_onnx(raw: bytes, path: Path) -> None:
    """An ONNX model, of which all tensors are read."""
    path.write_bytes(raw)
    model = onnx.load(path)
    for tensor in model.graph.initializers.values():
        assert tensor.read().shape == tensor.shape
