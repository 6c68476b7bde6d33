"""Read CTranslate2 models: a folder with `model.bin`, or that file alone.

Layout (little-endian, binary version 6; a string is its length in 2 bytes, its UTF-8, a zero):
version, the specification's name, its revision, the number of variables; of each the name, rank,
axes, type, size in bytes and the values; then the number of aliases and of each its name and
that of the variable it stands for. Whole numbers of rank 0 are settings: they become `.metadata`.
A quantised `weight` stays whole numbers, to be divided by the `weight_scale` beside it.
Source: the `model_spec` module of CTranslate2's converters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weights.budget import TENSOR
from weights.checkpoint import Checkpoint, Entry, TensorInfo, WeightError, printable
from weights.cursor import Cursor
from weights.jsonfile import read_json, read_object
from weights.mapped import entry, open_file, open_mapped
from weights.quant import BY_NAME

MODEL = "model.bin"
_VERSION = 6
_TYPES = ("F32", "I8", "I16", "I32", "F16", "BF16")
_MAX_RANK = 8
_MAX_COUNT = 1 << 16  # variables, aliases: the largest Whisper has 1,300; bounds memory and time
_SPECS = {"WhisperSpec": "whisper"}
_VOCABULARIES = ("vocabulary.json", "vocabulary.txt")


def looks_like(head: bytes) -> bool:
    """Whether a file that begins with `head` (32 bytes) is such a model: `…Spec` after a version.

    The format has no magic number; the name of a specification serves.
    """
    version, length = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:6], "little")
    name = head[6 : 6 + length]
    return 0 < version < 256 and length > 5 and name.endswith(b"Spec\0") and len(name) == length


def is_folder(path: Path) -> bool:
    """Whether the folder's `model.bin` is such a model."""
    try:
        with open_file(path / MODEL) as file:
            return looks_like(file.read(32))
    except (WeightError, OSError):
        return False


def load(path: Path, device: str | None = None) -> Checkpoint:
    """Open a `model.bin`; WeightError, naming the file, for anything that breaks the format."""
    cursor = Cursor(path, open_mapped(path))
    metadata = _header(cursor)
    entries = _variables(cursor)
    _aliases(cursor, entries)
    if cursor.left:
        cursor.fail("bytes after the last alias", expected=cursor.pos, got=cursor.size)
    for name in [name for name, e in entries.items() if not e.info.shape and e.info.type[0] == "I"]:
        raw = entries.pop(name).raw()
        metadata[name] = int.from_bytes(raw.tobytes(), "little", signed=True)
    return Checkpoint(path, "ctranslate2", metadata, entries, device)


def load_folder(path: Path, device: str | None = None) -> Checkpoint:
    """Open a model's folder; `.metadata` has `config.json` and the list `vocabulary` too."""
    checkpoint = load(path / MODEL, device)
    config = path / "config.json"
    metadata: dict[str, Any] = read_object(config) if config.is_file() else {}
    metadata = checkpoint.metadata | metadata
    for name in _VOCABULARIES:
        if (path / name).is_file():
            metadata["vocabulary"] = _vocabulary(path / name)
            break
    return Checkpoint(path, checkpoint.format, metadata, checkpoint.entries, device)


def _header(cursor: Cursor) -> dict[str, Any]:
    version = cursor.unsigned(4, "the version")
    if version != _VERSION:
        remedy = "convert the model again with a current CTranslate2"
        problem = "unsupported binary version"
        cursor.fail(problem, expected=_VERSION, got=version, remedy=remedy)
    spec = _string(cursor, "the specification's name")
    metadata = {"spec": spec, "revision": cursor.unsigned(4, "the revision")}
    return metadata | ({"model_type": _SPECS[spec]} if spec in _SPECS else {})


def _count(cursor: Cursor, what: str) -> int:
    count = cursor.unsigned(4, what)
    if count > _MAX_COUNT:
        cursor.fail(f"{what} can't be right", expected=f"at most {_MAX_COUNT}", got=count)
    return count


def _string(cursor: Cursor, what: str) -> str:
    length = cursor.unsigned(2, what)
    text = cursor.text(length, what)
    if text.find("\0") != len(text) - 1 or len(text) == 1:
        cursor.fail(f"{what} is not a name ended by a zero")
    return text[:-1]


def _variables(cursor: Cursor) -> dict[str, Entry]:
    count = _count(cursor, "the number of variables")
    entries: dict[str, Entry] = {}
    for _ in range(count):
        cursor.budget.spend(TENSOR)
        name = _string(cursor, "a variable's name")
        if name in entries:
            cursor.fail("the name appears twice", tensor=name)
        rank = cursor.unsigned(1, "a variable's rank")
        if rank > _MAX_RANK:
            expected = f"at most {_MAX_RANK}"
            cursor.fail("too many axes", tensor=name, expected=expected, got=rank)
        shape = tuple(cursor.unsigned(4, "a variable's shape") for _ in range(rank))
        number = cursor.unsigned(1, "a variable's type")
        nbytes = cursor.unsigned(4, "a variable's size")
        if number >= len(_TYPES):
            known = ", ".join(f"{k} ({kind})" for k, kind in enumerate(_TYPES))
            cursor.fail("unknown type", tensor=name, expected=f"one of {known}", got=number)
        info = TensorInfo(shape, _TYPES[number], nbytes)
        if 0 in shape or nbytes != BY_NAME[info.type].size(shape):
            problem, expected = "its size is wrong", f"that of {info.type} {shape}"
            cursor.fail(problem, tensor=name, expected=expected, got=f"{nbytes} bytes")
        cursor.need(nbytes, f"tensor '{printable(name)}'")
        entries[name] = entry(cursor.path, cursor.data, name, info, cursor.pos)
        cursor.pos += nbytes
    return entries


def _aliases(cursor: Cursor, entries: dict[str, Entry]) -> None:
    """Add the further names; that of a quantised weight means its scale too."""
    count = _count(cursor, "the number of aliases")
    for _ in range(count):
        name = _string(cursor, "an alias")
        target = _string(cursor, "an alias's variable")
        if name in entries:
            cursor.fail("the name appears twice", tensor=name)
        if target not in entries:
            cursor.fail("an alias of a variable that isn't there", tensor=name, got=target)
        entries[name] = entries[target]
        if f"{target}_scale" in entries:
            entries.setdefault(f"{name}_scale", entries[f"{target}_scale"])


def _vocabulary(path: Path) -> list[str]:
    """The tokens in order: one a line, or a JSON list."""
    if path.suffix == ".json":
        tokens = read_json(path)
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise WeightError("not a list of tokens", file=path)
        return tokens
    try:
        return path.read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightError(f"can't be read: {error}", file=path) from None
