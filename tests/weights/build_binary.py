"""Files of CTranslate2 and of whisper.cpp, written byte by byte so that they can also be wrong."""

from __future__ import annotations

import struct

import numpy as np

CT2_TYPES = {"<f4": 0, "i1": 1, "<i2": 2, "<i4": 3, "<f2": 4, "bf16": 5}
F32, F16, Q8_0 = 0, 1, 8  # ggml's numbers


def name(text: str | bytes) -> bytes:
    """A string of CTranslate2: length in 2 bytes, the bytes, a zero."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<H", len(raw) + 1) + raw + b"\0"


def variable(key: str | bytes, shape: tuple[int, ...], kind: int, raw: bytes) -> bytes:
    """One variable; the size is that of `raw`, whatever the shape says."""
    dims = struct.pack(f"<B{len(shape)}I", len(shape), *shape)
    return name(key) + dims + struct.pack("<BI", kind, len(raw)) + raw


def of_array(key: str, array: np.ndarray) -> bytes:
    code = next(c for c in CT2_TYPES if c != "bf16" and np.dtype(c) == array.dtype)
    return variable(key, array.shape, CT2_TYPES[code], array.tobytes())


def ctranslate2(
    variables: list[bytes],
    aliases: dict[str, str] | None = None,
    spec: str = "WhisperSpec",
    version: int = 6,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A `model.bin`; `counts` overrides the numbers of variables and aliases that it claims."""
    aliases = aliases or {}
    n_variables, n_aliases = counts or (len(variables), len(aliases))
    head = struct.pack("<I", version) + name(spec) + struct.pack("<II", 3, n_variables)
    pairs = (name(alias) + name(target) for alias, target in aliases.items())
    return head + b"".join(variables) + struct.pack("<I", n_aliases) + b"".join(pairs)


GGML_DIMS = {
    "n_vocab": 7, "n_audio_ctx": 6, "n_audio_state": 64, "n_audio_head": 1, "n_audio_layer": 1,
    "n_text_ctx": 5, "n_text_state": 64, "n_text_head": 1, "n_text_layer": 1, "n_mels": 4,
    "ftype": 0,
}  # fmt: skip


def ggml_tensor(key: str | bytes, shape: tuple[int, ...], kind: int, raw: bytes) -> bytes:
    """One tensor; `shape` is NumPy's order, the file's is reversed."""
    text = key.encode() if isinstance(key, str) else key
    head = struct.pack("<3I", len(shape), len(text), kind)
    return head + struct.pack(f"<{len(shape)}I", *shape[::-1]) + text + raw


def ggml(
    tensors: list[bytes],
    tokens: list[bytes] = (b"a", b"\xf0\x9f", b""),
    bands: int | None = None,
    n_tokens: int | None = None,
    **dims: int,
) -> bytes:
    """A file of whisper.cpp; `bands` and `n_tokens` override what it says of itself."""
    dims = GGML_DIMS | dims
    bands = dims["n_mels"] if bands is None else bands
    n_tokens = len(tokens) if n_tokens is None else n_tokens
    filters = struct.pack("<II", bands, 3) + bytes(4 * 3 * dims["n_mels"])
    vocabulary = b"".join(struct.pack("<I", len(token)) + token for token in tokens)
    head = b"lmgg" + struct.pack("<11I", *dims.values()) + filters
    return head + struct.pack("<I", n_tokens) + vocabulary + b"".join(tensors)


SETTINGS = [variable("encoder/num_heads", (), 2, struct.pack("<h", 2)),
            variable("decoder/alignment_layer", (), 2, struct.pack("<h", -1)),
            variable("decoder/pre_norm", (), 1, b"\1")]  # fmt: skip


def small_ctranslate2() -> bytes:
    """One variable of each type, settings, and an alias of a quantised weight."""
    tensors = [of_array(f"x/{code[-2:]}", np.arange(6, dtype=code).reshape(2, 3))
               for code in ("<f4", "<f2", "<i2", "<i4")]  # fmt: skip
    tensors += [
        variable("x/bf16", (2,), 5, struct.pack("<2H", 0x3F80, 0xC000)),
        of_array("a/weight", np.array([[-2, 4]], "i1")),
        of_array("a/weight_scale", np.array([2], "<f4")),
        of_array("b/weight_scale", np.array(0.5, "<f4")),  # one for a whole matrix
    ]
    return ctranslate2([*tensors, *SETTINGS], {"c/weight": "a/weight", "d": "x/f4"})


FLOATS = ggml_tensor("x", (2, 3), F32, np.arange(6, dtype="<f4").tobytes())
HALVES = ggml_tensor("h", (3,), F16, np.arange(3, dtype="<f2").tobytes())
BLOCKS = ggml_tensor("q", (2, 32), Q8_0, struct.pack("<e32b", 2, *range(1, 33)) * 2)


def small_ggml() -> bytes:
    return ggml([FLOATS, HALVES, BLOCKS], ftype=2007)
