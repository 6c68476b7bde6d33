"""Saved sessions: the tokens of a context with their keys and values, to go on without computing.

A safetensors file: `ids` (n,) int32 and by layer `k.0`, `v.0` … (K, n, D), as the cache has them
(of a q8_0 cache also `k.0.scale` …); its metadata names the model, and has the messages of a chat.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from engine import Tensor
from weights import Checkpoint, WeightError, safetensors, safetensors_write
from weights.checkpoint import TensorInfo
from weights.mapped import open_file
from weights.whole import check_target, whole_file
from zoo.llama.cache import tensors
from zoo.llama.context import Context

FORMAT = "menagerie-session-1"
TYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "int32": "I32"}
EDGE = 4096  # bytes of each of a model's tensors that tell it from others
REMEDY = "name another file"


def fingerprint(checkpoint: Checkpoint, config: object) -> str:
    """What tells a model from others: its configuration, and both ends of every tensor."""
    digest = hashlib.sha256(repr(config).encode())
    for name in sorted(checkpoint):
        info, raw = checkpoint.info(name), checkpoint.entries[name].raw()
        digest.update(f"{name} {info.type} {info.shape}".encode("utf-8", "surrogatepass"))
        digest.update(raw[:EDGE].tobytes() + raw[-EDGE:].tobytes())
    return digest.hexdigest()


def save(path: Path, context: Context, model: str, messages: str = "[]") -> None:
    """Write what the context holds, whole or not at all; a file of that name is replaced.

    `model` is its fingerprint, `messages` JSON of a chat's. WeightError when it can't be written.
    """
    count = len(context.ids)
    arrays = {"ids": np.array(context.ids, np.int32)}
    for name, kept in _buffers(context):
        arrays[name] = np.ascontiguousarray(kept.numpy()[:, :count])
    metadata = {"format": FORMAT, "model": model, "cache_type": context.cache_type}
    metadata |= {"messages": messages, "sha256": _digest(arrays, messages)}
    stored = [
        (name, TensorInfo(a.shape, TYPES[a.dtype.name], a.nbytes), lambda a=a: [a.tobytes()])
        for name, a in arrays.items()
    ]
    with whole_file(path, force=True) as partial:
        safetensors_write.write(partial, stored, metadata)


def load(path: Path, context: Context, model: str, vocab_size: int) -> str:
    """Have the context hold what the file does; return the messages' JSON, which is unchecked.

    WeightError, and the context is as it was, when the file is no session of this model, is
    damaged, or holds more than the context.
    """
    checkpoint = _opened(path)
    metadata = checkpoint.metadata
    if metadata.get("model") != model:
        raise WeightError("a session of another model", file=path, remedy=REMEDY)
    if metadata.get("cache_type") != context.cache_type:
        kind, remedy = metadata.get("cache_type"), "--cache-type sets it"
        problem = "a session with another type of cache"
        raise WeightError(problem, file=path, expected=context.cache_type, got=kind, remedy=remedy)
    arrays = _arrays(checkpoint, context)
    messages, ids = metadata.get("messages"), arrays["ids"]
    if not isinstance(messages, str) or metadata.get("sha256") != _digest(arrays, messages):
        raise WeightError("the session is damaged", file=path, remedy=REMEDY)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise WeightError("token ids outside the vocabulary", file=path, expected=vocab_size)
    context.reset()
    for name, kept in _buffers(context):
        whole = np.zeros(kept.shape, arrays[name].dtype)  # so that one kernel serves every length
        whole[:, : len(ids)] = arrays[name]
        kept[:] = Tensor(whole, device=kept.device)
        kept.realize()
    context.ids = ids.tolist()
    return messages


def check(path: Path) -> None:
    """WeightError when a session can't be written there, before anything is computed for it."""
    check_target(path, force=True)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise WeightError(f"can't be written: {error.strerror or error}", file=path) from None


def _opened(path: Path) -> Checkpoint:
    with open_file(path) as file:
        head, size = file.read(9), os.fstat(file.fileno()).st_size
    if safetensors.looks_like(head, size):
        checkpoint = safetensors.load(path, "reference")
        if checkpoint.metadata.get("format") == FORMAT:
            return checkpoint
    raise WeightError("not a saved session, or cut short", file=path, remedy=REMEDY)


def _arrays(checkpoint: Checkpoint, context: Context) -> dict[str, np.ndarray]:
    """All tensors by name, once their number, types and shapes are those of the context."""
    path = checkpoint.path
    shape = checkpoint.info("ids").shape if "ids" in checkpoint else (-1, -1)
    if len(shape) == 1 and shape[0] > context.size:
        problem, expected = "the session is longer than the context", f"--ctx {shape[0]} or more"
        raise WeightError(problem, file=path, expected=expected, got=f"--ctx {context.size}")
    wanted = {"ids": ("I32", np.dtype(np.int32), (*shape,))}
    for name, kept in _buffers(context):
        dtype = np.dtype(kept.dtype.numpy)
        wanted[name] = TYPES[dtype.name], dtype, (kept.shape[0], shape[0], *kept.shape[2:])
    found = {name: (checkpoint.info(name).type, checkpoint.info(name).shape) for name in checkpoint}
    if len(shape) != 1 or found != {name: (kind, s) for name, (kind, _, s) in wanted.items()}:
        problem = "the session's tensors are not those of this model's cache"
        raise WeightError(problem, file=path, remedy=REMEDY)
    return {
        name: np.frombuffer(checkpoint.entries[name].raw().tobytes(), dtype).reshape(s)
        for name, (_, dtype, s) in wanted.items()
    }


def _buffers(context: Context) -> Iterator[tuple[str, Tensor]]:
    for letter, layers in (("k", context.cache.k), ("v", context.cache.v)):
        for n, kept in enumerate(layers):
            for end, tensor in zip(("", ".scale"), tensors(kept)):
                yield f"{letter}.{n}{end}", tensor


def _digest(arrays: Mapping[str, np.ndarray], messages: str) -> str:
    digest = hashlib.sha256(messages.encode("utf-8", "surrogatepass"))
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
