"""Read whisper.cpp's models: ggml `.bin` files of Whisper.

Layout (little-endian): the magic, 11 whole numbers of configuration, the mel filter bank (two
sizes and float32), the vocabulary (a count; each token's length in bytes, and these), then tensors
to the end of the file: number of axes, length of the name, type, the axes (innermost first), the
name, the values. Source: `convert-pt-to-ggml.py` and the quantiser of whisper.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weights.budget import TENSOR
from weights.checkpoint import Checkpoint, Entry, TensorInfo, printable
from weights.cursor import Cursor
from weights.mapped import entry, open_mapped
from weights.quant import BY_GGML

MAGIC = b"lmgg"  # 'ggml' as a little-endian number
# The configuration, under OpenAI's names; `ftype` is the type of most tensors.
_DIMS = (
    "n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer", "n_text_ctx",
    "n_text_state", "n_text_head", "n_text_layer", "n_mels", "ftype",
)  # fmt: skip
_QUANT_VERSION = 2  # of ggml's blocks, in the thousands of `ftype`; older blocks differ
_MAX_DIMS = 4
_MAX_TENSORS = 1 << 16  # the largest Whisper has 1,260; bounds memory and time
_MAX_TOKENS = 1 << 18  # Whisper has 51,866


def load(path: Path, device: str | None = None) -> Checkpoint:
    """Open a ggml file of Whisper; `.metadata` has its sizes, under OpenAI's names, and tokens.

    `vocabulary` lists the tokens as text; one that isn't UTF-8 encodes back to its bytes with
    `surrogateescape`. WeightError, naming the file, for anything that breaks the format.
    """
    cursor = Cursor(path, open_mapped(path), pos=len(MAGIC))
    metadata: dict[str, Any] = {"model_type": "whisper"}
    metadata |= {name: cursor.unsigned(4, f"'{name}'") for name in _DIMS}
    bands, bins = (cursor.unsigned(4, "the mel filter bank") for _ in range(2))
    if bands != metadata["n_mels"]:
        expected = f"a Whisper model with {metadata['n_mels']} mel bands"
        remedy = "of ggml files only Whisper's can be read; for others use their GGUF version"
        cursor.fail("not Whisper's filter bank", expected=expected, got=bands, remedy=remedy)
    cursor.need(4 * bands * bins, "the mel filter bank")
    cursor.pos += 4 * bands * bins
    metadata |= {"mel_filters": [bands, bins], "vocabulary": _vocabulary(cursor)}
    entries = _tensors(cursor, old_blocks=metadata["ftype"] // 1000 != _QUANT_VERSION)
    return Checkpoint(path, "ggml", metadata, entries, device)


def _vocabulary(cursor: Cursor) -> list[str]:
    count = cursor.unsigned(4, "the vocabulary")
    if count > _MAX_TOKENS:
        cursor.fail("too many tokens", expected=f"at most {_MAX_TOKENS}", got=count)
    tokens = (cursor.take(cursor.unsigned(4, "a token"), "a token") for _ in range(count))
    return [token.decode("utf-8", "surrogateescape") for token in tokens]


def _tensors(cursor: Cursor, old_blocks: bool) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    while cursor.left:
        if len(entries) == _MAX_TENSORS:
            cursor.fail("too many tensors", expected=f"at most {_MAX_TENSORS}")
        cursor.budget.spend(TENSOR)
        rank, length, number = (cursor.unsigned(4, "a tensor header") for _ in range(3))
        if not 1 <= rank <= _MAX_DIMS:
            cursor.fail(
                "a tensor's number of axes is wrong", expected=f"1 to {_MAX_DIMS}", got=rank
            )
        shape = tuple(cursor.unsigned(4, "a tensor header") for _ in range(rank))[::-1]
        name = cursor.text(length, "a tensor's name")
        if name in entries:
            cursor.fail("the name appears twice", tensor=name)
        if number not in BY_GGML:
            known = ", ".join(kind.name for kind in BY_GGML.values())
            cursor.fail("unknown tensor type", tensor=name, expected=f"one of {known}", got=number)
        kind = BY_GGML[number]
        if kind.block > 1 and old_blocks:
            remedy = "quantise the model again with a current whisper.cpp"
            cursor.fail("its blocks are of an old form", tensor=name, got=kind.name, remedy=remedy)
        nbytes = kind.size(shape)
        if 0 in shape or nbytes is None:
            expected = f"rows of {kind.name} in multiples of {kind.block}"
            cursor.fail("its shape is wrong", tensor=name, expected=expected, got=shape)
        cursor.need(nbytes, f"tensor '{printable(name)}'")
        info = TensorInfo(shape, kind.name, nbytes)
        entries[name] = entry(cursor.path, cursor.data, name, info, cursor.pos)
        cursor.pos += nbytes
    return entries
