"""Read what `torch.save` writes, without torch: the zip format, and the one before torch 1.6.

The zip archive holds `ROOT/data.pkl`, the pickle of the object, and `ROOT/data/KEY`, the bytes of
each storage, uncompressed; `ROOT/byteorder` says `little` or `big`. The older file is a row of
pickles (magic number, version, facts of the machine, the object, the keys of the storages) and
then each storage: its element count in 8 bytes, its bytes. The pickle names storages by key, so
tensors stay in the mapped file until they are used. Source: `torch/serialization.py`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from weights import zipped
from weights.budget import Budget
from weights.checkpoint import Checkpoint, Entry, TensorInfo, WeightError, printable
from weights.mapped import decoded, open_mapped
from weights.nested import find_model
from weights.pickle_machine import Malformed
from weights.pickled import load as unpickle
from weights.quant import BY_NAME, countable
from weights.stand_ins import KNOWN, Storage, StorageKind, TensorRef

PROTO = b"\x80"  # how every pickle since protocol 2 begins, and so the older format
_MAGIC_NUMBER, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_MAX_KEY = 255  # characters of a storage's key
_TENSOR, _STORAGE = 1400, 200  # bytes of memory for a tensor's entry and a storage's place


@dataclass(frozen=True)
class _File:
    """One mapped file: `places` says where each storage lies, by key (offset, bytes)."""

    path: Path
    data: mmap.mmap
    places: dict[str, tuple[int, int]]
    big_endian: bool
    budget: Budget


def load(path: Path, device: str | None = None) -> Checkpoint:
    """Open a file of `torch.save`; `.metadata` is what lies beside the tensors, as plain values.

    The model is what `state_dict`, `model_state_dict`, `model` or `module` holds, else the whole;
    dicts in dicts are joined by dots. WeightError, naming the file, for what is malformed, unsafe
    or holds no tensors.
    """
    data = open_mapped(path)
    zip_file = data[:4] == zipped.MAGIC
    file, root = (_read_zip if zip_file else _read_legacy)(path, data, Budget(path, len(data)))
    state, rest = find_model(root, file.budget)
    entries: dict[str, Entry] = {}
    for name, ref in state:
        if name in entries:
            raise WeightError("two nested keys spell the same name", file=path, tensor=name)
        entries[name] = _entry(file, name, ref)
    if not entries:
        raise WeightError("it holds no tensors", file=path, expected="a state_dict")
    return Checkpoint(path, "pytorch", rest, entries, device)


def _read_zip(path: Path, data: mmap.mmap, budget: Budget) -> tuple[_File, Any]:
    with open(path, "rb", buffering=0) as file:  # its pages are not counted as ours, unlike mapped
        found = zipped.entries(path, file, len(data), budget)
    pickles = [n for n in found if n.rpartition("/")[2] == "data.pkl" and n.count("/") < 2]
    if len(pickles) != 1:
        problem = "a zip archive, but not one of torch.save"
        expected = "one data.pkl in its top folder"
        raise WeightError(problem, file=path, expected=expected, got=len(pickles))
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in found:
        remedy = "save the state_dict of the module instead"
        raise WeightError("a TorchScript program, not a checkpoint", file=path, remedy=remedy)
    compressed = next((name for name, place in found.items() if place is None), None)
    if compressed is not None:
        problem = f"its zip archive has '{printable(compressed)}' compressed"
        remedy = "unpack it, and pack it again without compression (`zip -0 -r`)"
        raise WeightError(problem, file=path, remedy=remedy)
    at, length = found.get(f"{root}byteorder", (0, 0))
    order = data[at : at + min(length, 8)] or b"little"
    if order not in (b"little", b"big"):
        raise WeightError("unknown byte order", file=path, expected="little or big", got=order)
    prefix = f"{root}data/"
    places = {n.removeprefix(prefix): p for n, p in found.items() if n.startswith(prefix)}
    start, length = found[pickles[0]]
    value, _ = unpickle(data, start, start + length, KNOWN, _storage, budget)
    return _File(path, data, places, order == b"big", budget), value


def _read_legacy(path: Path, data: mmap.mmap, budget: Budget) -> tuple[_File, Any]:
    storages: dict[str, Storage] = {}

    def persistent(key: Any) -> Storage:
        storage = _storage(key)
        whole = storages.setdefault(storage.key, storage)
        if whole.type != storage.type:
            raise Malformed("one storage of two types")
        return storage

    def following(at: int) -> tuple[Any, int]:
        return unpickle(data, at, len(data), KNOWN, persistent, budget)

    magic, at = following(0)
    if magic != _MAGIC_NUMBER:
        problem = "a pickle, but not one of torch.save"
        raise WeightError(problem, file=path, remedy="use the model's safetensors version")
    version, at = following(at)
    if version != _VERSION:
        raise WeightError("unknown version", file=path, expected=_VERSION, got=version)
    machine, at = following(at)
    big = isinstance(machine, dict) and machine.get("little_endian") is False
    value, at = following(at)
    keys, at = following(at)
    if type(keys) is not list or any(type(k) is not str or k not in storages for k in keys):
        raise WeightError("its list of storages does not fit its tensors", file=path)
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        count = int.from_bytes(data[at : at + 8], "big" if big else "little")
        nbytes = count * BY_NAME[storages[key].type].nbytes
        if nbytes > len(data) - at - 8 or key in places:
            problem = "a storage runs past the end of the file"
            raise WeightError(problem, file=path, remedy="it is cut short: fetch it again")
        budget.spend(_STORAGE)
        places[key] = at + 8, nbytes
        at += 8 + nbytes
    return _File(path, data, places, big, budget), value


def _storage(key: Any) -> Storage:
    """A persistent id: ("storage", kind, key, device, count), and perhaps a view of that."""
    if type(key) is not tuple or len(key) not in (5, 6) or key[0] != "storage":
        raise Malformed("a persistent id that is not a storage")
    kind, name, count = key[1], key[2], key[4]
    named = type(kind) is StorageKind and type(name) is str and len(name) <= _MAX_KEY
    if not named or not _is_count(count):
        raise Malformed("a persistent id that is not a storage")
    itemsize = BY_NAME[kind.type].nbytes
    view = key[5] if len(key) == 6 else None
    if view is None:
        return Storage(name, kind.type, 0, count * itemsize)
    if type(view) is not tuple or len(view) != 3 or not all(map(_is_count, view[1:])):
        raise Malformed("a view of a storage that is not (key, offset, count)")
    return Storage(name, kind.type, view[1] * itemsize, view[2] * itemsize)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _entry(file: _File, name: str, ref: TensorRef) -> Entry:
    """Check one tensor against the bytes of its storage, and make its Entry."""
    file.budget.spend(_TENSOR)

    def fail(problem: str, **facts: object) -> None:
        raise WeightError(problem, file=file.path, tensor=name, **facts)

    storage, itemsize = ref.storage, BY_NAME[ref.type].nbytes
    start, room = file.places.get(storage.key, (0, -1))
    if room < 0:
        fail(f"its storage '{printable(storage.key)}' is missing")
    if storage.start + storage.nbytes > room:
        expected = f"{storage.start + storage.nbytes} bytes"
        fail("its storage is cut short", expected=expected, got=room)
    count = math.prod(ref.shape)
    last = ref.offset + sum((n - 1) * s for n, s in zip(ref.shape, ref.strides))
    if count and (last + 1) * itemsize > storage.nbytes:
        expected = f"{(last + 1) * itemsize} bytes"
        fail("it reaches past the end of its storage", expected=expected, got=storage.nbytes)
    if not count and not countable(ref.shape):
        fail("its shape is larger than any array", got=ref.shape)
    nbytes = count * itemsize
    # An expanded axis repeats values without bytes of its own; a copy must stay in proportion.
    if nbytes > max(storage.nbytes, file.budget.total):
        fail("its strides repeat values beyond all measure", got=f"{nbytes} bytes")
    info = TensorInfo(ref.shape, ref.type, nbytes)
    at = start + storage.start + ref.offset * itemsize if count else start
    if count == 0 or (not file.big_endian and _is_contiguous(ref)):
        raw: Callable[[], np.ndarray] = partial(np.frombuffer, file.data, np.uint8, nbytes, at)
    else:
        raw = partial(_gather, file, ref, at)
    return decoded(file.path, name, info, raw)


def _is_contiguous(ref: TensorRef) -> bool:
    step = 1
    for n, stride in zip(ref.shape[::-1], ref.strides[::-1]):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


# Elements are moved as what has the same size; the halves of a complex number swap on their own.
_CARRIERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def _gather(file: _File, ref: TensorRef, at: int) -> np.ndarray:
    """The values of a strided or big-endian tensor, row by row, little-endian."""
    parts = 2 if ref.type in ("C64", "C128") else 1
    itemsize = BY_NAME[ref.type].nbytes
    carrier = np.dtype(_CARRIERS[itemsize // parts])
    reach = sum((n - 1) * s for n, s in zip(ref.shape, ref.strides)) + 1
    flat = np.frombuffer(file.data, carrier.newbyteorder("<"), reach * parts, at)
    steps = (s * itemsize if n > 1 else 0 for n, s in zip(ref.shape, ref.strides))  # any s fits 1
    shape, strides = (*ref.shape, parts), (*steps, carrier.itemsize)
    view = np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)
    values = view.byteswap() if file.big_endian else view
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
