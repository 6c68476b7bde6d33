"""Small PyTorch files for the tests, written opcode by opcode so that they can be wrong."""

from __future__ import annotations

import io
import struct
import zipfile

MARK, STOP, REDUCE, NEWOBJ, BUILD, PERSISTENT = b"(", b".", b"R", b"\x81", b"b", b"Q"
NONE, TRUE, FALSE, EMPTY_TUPLE, EMPTY_LIST, EMPTY_DICT = b"N", b"\x88", b"\x89", b")", b"]", b"}"
TUPLE_1, TUPLE_2, APPEND, APPENDS, SET_ITEM, SET_ITEMS = b"\x85", b"\x86", b"a", b"e", b"s", b"u"
DUP, POP, MEMOIZE = b"2", b"0", b"\x94"
ORDERED = b"ccollections\nOrderedDict\n" + EMPTY_TUPLE + REDUCE
MAGIC_NUMBER, VERSION = 0x1950A86A20F9469CFC6C, 1001


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def integers(*values: int) -> bytes:
    return sequence(*map(integer, values))


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def sequence(*items: bytes) -> bytes:
    """A tuple."""
    return MARK + b"".join(items) + b"t"


def call(module: str, attribute: str, *args: bytes) -> bytes:
    return name(module, attribute) + sequence(*args) + REDUCE


def mapping(**items: bytes) -> bytes:
    return EMPTY_DICT + MARK + b"".join(text(k) + v for k, v in items.items()) + SET_ITEMS


def storage(key: str = "0", count: int = 6, kind: str = "FloatStorage") -> bytes:
    where = text("storage"), name("torch", kind), text(key), text("cpu"), integer(count)
    return sequence(*where) + PERSISTENT


def tensor(
    shape: tuple[int, ...] = (2, 3),
    strides: tuple[int, ...] = (3, 1),
    offset: int = 0,
    where: bytes | None = None,
    *more: bytes,
) -> bytes:
    """A call of `_rebuild_tensor_v2`; `more` are arguments past the usual ones."""
    args = where or storage(), integer(offset), integers(*shape), integers(*strides), FALSE, ORDERED
    return call("torch._utils", "_rebuild_tensor_v2", *args, *more)


def pickled(value: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + value + STOP


SIX = struct.pack("<6f", *range(6))


def archive(
    value: bytes,
    storages: dict[str, bytes] | None = None,
    others: dict[str, bytes] | None = None,
    root: str = "archive/",
) -> bytes:
    """The zip format around a pickled value; storage "0" is six floats unless told otherwise."""
    entries = {"data.pkl": pickled(value), "version": b"3\n"} | (others or {})
    entries |= {
        f"data/{k}": raw for k, raw in ({"0": SIX} if storages is None else storages).items()
    }
    return zipped({f"{root}{k}": raw for k, raw in entries.items()})


def zipped(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        for key, raw in entries.items():
            file.writestr(zipfile.ZipInfo(key), raw, compression)
    return out.getvalue()


def legacy(
    value: bytes, storages: dict[str, tuple[int, bytes]] | None = None, little: bool = True
) -> bytes:
    """The format before zip around a pickled value; storages: key -> (elements, bytes)."""
    storages = {"0": (6, SIX)} if storages is None else storages
    machine = mapping(protocol_version=integer(VERSION), little_endian=TRUE if little else FALSE)
    keys = EMPTY_LIST + MARK + b"".join(map(text, storages)) + APPENDS
    values = integer(MAGIC_NUMBER), integer(VERSION), machine, value, keys
    order = "<" if little else ">"
    data = [struct.pack(f"{order}q", count) + raw for count, raw in storages.values()]
    return b"".join(map(pickled, values)) + b"".join(data)
