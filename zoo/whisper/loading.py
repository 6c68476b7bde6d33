"""Load a Whisper checkpoint: sizes, weights, vocabulary, heads, each checked before it is used."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from importlib import resources
from typing import Any

import weights
from engine import get_device
from weights import Params, WeightError, names
from weights.names import whisper as whisper_names
from zoo.errors import UsageError
from zoo.whisper import model
from zoo.whisper.context import Network
from zoo.whisper.tokenizer import tokenizer_of
from zoo.whisper.whisper import Whisper

DTYPES = ("auto", "f32")
Heads = tuple[tuple[int, int], ...]  # (layer, head)
_SIZES = {(4, 6): "tiny", (6, 8): "base", (12, 12): "small", (24, 16): "medium", (32, 20): "large",
          (4, 20): "large-v3-turbo"}  # fmt: skip


def load(
    name_or_path: str | os.PathLike[str] = "base",
    device: str | None = None,
    dtype: str = "auto",
    tune: bool = False,
) -> Whisper:
    """A model by registry or hub name, or by path: OpenAI's `.pt`, a Hugging Face or CTranslate2
    folder, a whisper.cpp file, or what `weights convert` makes of one.

    `tune` looks for faster kernels on this device, for a minute or two: they are kept, and later
    loads use them without it. WeightError for a file that can't be used, DeviceError without the
    device, UsageError for an empty name.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if isinstance(name_or_path, str) and not name_or_path.strip():
        raise UsageError("the model name is empty")
    get_device(device)  # no device, no sense in reading weights
    checkpoint = weights.load(weights.resolve(name_or_path), device)
    kind = names.recognise(checkpoint)
    if kind is None or kind[0] != "whisper":
        got = kind[0] if kind else checkpoint.architecture or "something else"
        raise WeightError("not a Whisper model", file=checkpoint.path, got=got)
    tensors = names.canonical(checkpoint)
    config = model.Config(**whisper_names.dims(tensors))
    weights.check(tensors, model.expected_shapes(config))
    tokenizer = tokenizer_of(checkpoint, config.n_vocab)
    heads = heads_of(config, checkpoint.metadata, checkpoint.path.name)
    network = Network(Params(tensors), config, heads, device, dtype)
    whisper = Whisper(network, tokenizer, checkpoint.path.name)
    if tune:
        from zoo import cli

        with cli.tuning(device):
            whisper.rehearse()
    return whisper


# Which attention heads of a decoder follow the audio, and so tell when a word is said.


def measured() -> dict[str, Heads]:
    """What OpenAI measured for its models, by name. Source: openai/whisper, `__init__.py`."""
    text = (resources.files("zoo.whisper") / "data" / "heads.json").read_text("utf-8")
    return {name: tuple(map(tuple, pairs)) for name, pairs in json.loads(text).items()}


def heads_of(config: model.Config, metadata: Mapping[str, Any], name: str = "") -> Heads:
    """The alignment heads that the metadata name, or else those of OpenAI's model of that size.

    `name` (of the file) tells large-v1 from large-v2. A model of another size has all heads of the
    last half of its layers, as in the reference. WeightError for metadata whose heads are none of
    this model.
    """
    layers, heads = config.n_text_layer, config.n_text_head
    every = list(itertools.product(range(layers), range(heads)))
    if named := metadata.get("alignment_heads"):
        known = set(map(repr, every))
        if isinstance(named, (list, tuple)) and len(named) <= len(every):
            pairs = [tuple(pair) for pair in named if isinstance(pair, (list, tuple))]
            if len(pairs) == len(named) and known.issuperset(map(repr, pairs)):
                return tuple(pairs)
        expected = f"pairs of a layer below {layers} and a head below {heads}"
        raise WeightError(
            "alignment_heads are not heads of this model", expected=expected, got=named
        )
    size = _SIZES.get((layers, heads))
    if size == "large":
        size += "-v3" if config.n_vocab > 51865 else "-v1" if "v1" in name else "-v2"
    if config.n_vocab == 51864:
        size = f"{size}.en"
    return measured().get(size, tuple(every[layers // 2 * heads :]))
