"""Load a Whisper checkpoint: sizes, weights and vocabulary, each checked before it is used."""

from __future__ import annotations

import os

import weights
from engine import get_device
from weights import Params, WeightError, names
from weights.names import whisper as whisper_names
from zoo.errors import UsageError
from zoo.whisper import model
from zoo.whisper.context import Network
from zoo.whisper.heads import heads_of
from zoo.whisper.tokenizer import tokenizer_of
from zoo.whisper.whisper import Whisper

DTYPES = ("auto", "f32")


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
