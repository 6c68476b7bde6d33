"""Small checkpoints for the tests, written byte by byte so that they can also be wrong."""

from __future__ import annotations

import json
import struct

import numpy as np

F32, F16, Q8_0, STRING, ARRAY, UINT32 = 0, 1, 8, 8, 9, 4


def text(value: str | bytes) -> bytes:
    """A GGUF string: 8-byte length, then the bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def u32(key: str, value: int) -> bytes:
    return pair(key, UINT32, struct.pack("<I", value))


def u16(key: str, value: int) -> bytes:
    return pair(key, 2, struct.pack("<H", value))


def i32(key: str, value: int) -> bytes:
    return pair(key, 5, struct.pack("<i", value))


def string(key: str, value: str | bytes) -> bytes:
    return pair(key, STRING, text(value))


def strings(key: str, values: list[str]) -> bytes:
    return pair(key, ARRAY, array(STRING, len(values), b"".join(map(text, values))))


def header(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A GGUF tensor header; `shape` is NumPy's order, the file's is reversed."""
    dims = struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def gguf(
    pairs: list[bytes] = (),
    headers: list[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    align: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A GGUF file; `counts` overrides the (tensor, pair) counts that the file claims."""
    n_tensors, n_pairs = counts or (len(headers), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs)
    head += b"".join(pairs) + b"".join(headers)
    return head + bytes(-len(head) % align) + data


def small_gguf() -> bytes:
    """Two tensors, a vocabulary and one pair of each value type."""
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
    numbers |= {10: "Q", 11: "q", 12: "d"}
    pairs = [
        string("general.architecture", "llama"),
        u32("llama.block_count", 1),
        strings("tokenizer.ggml.tokens", ["a", "é", "", "🦙"]),
        pair("nested", ARRAY, array(ARRAY, 2, array(0, 2, b"\1\2") + array(0, 1, b"\3"))),
    ]
    pairs += [pair(f"number.{k}", k, struct.pack(f"<{c}", 1)) for k, c in numbers.items()]
    x = np.arange(6, dtype="<f4").tobytes() + bytes(8)
    y = np.arange(3, dtype="<f2").tobytes()
    return gguf(pairs, [header("x", (2, 3), F32, 0), header("y", (3,), F16, 32)], x + y)


def safetensors(
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str] | None = None
) -> bytes:
    """A safetensors file from name -> (dtype, shape, bytes)."""
    table: dict = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        table[name] = {"dtype": kind, "shape": list(shape), "data_offsets": offsets}
        data += raw
    return framed(json.dumps(table).encode(), data)


def framed(head: bytes, data: bytes = b"") -> bytes:
    """A safetensors file with this JSON, whatever it says."""
    return struct.pack("<Q", len(head)) + head + data
