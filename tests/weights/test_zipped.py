"""Zip archives: where the data lies, and tricks with the directory."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest

from tests.weights import build_torch as t
from weights import WeightError, zipped
from weights.budget import Budget

ENTRIES = {"a/data.pkl": b"pickle", "a/data/0": bytes(range(50)), "a/empty": b""}


def found(tmp_path, raw: bytes) -> dict[str, bytes | None]:
    path = tmp_path / "model.pt"
    path.write_bytes(raw)
    with open(path, "rb") as file:
        places = zipped.entries(path, file, len(raw), Budget(path, len(raw)))
    return {name: place and raw[place[0] : sum(place)] for name, place in places.items()}


def test_entries_are_found_where_zipfile_put_them(tmp_path):
    assert found(tmp_path, t.zipped(ENTRIES)) == ENTRIES


def test_compressed_entry_has_no_place(tmp_path):
    raw = t.zipped({"a/x": bytes(100)}, zipfile.ZIP_DEFLATED)
    assert found(tmp_path, raw) == {"a/x": None}
    two_sizes = changed(t.zipped({"a/x": bytes(100)}), CENTRAL, 24, word(10**9))
    assert found(tmp_path, two_sizes) == {"a/x": None}


def test_comment_and_extra_fields_are_skipped(tmp_path):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        info = zipfile.ZipInfo("x")
        info.extra, info.comment = struct.pack("<2H5s", 0x4246, 5, b"ZZZZZ"), b"about x"
        file.writestr(info, b"data")
        file.comment = b"a comment that names PK\x05\x06 and goes on for long enough to be one"
    with pytest.raises(WeightError):  # the last magic counts, and here that is in the comment
        found(tmp_path, out.getvalue())
    plain = out.getvalue().replace(b"PK\x05\x06 and", b"PK\x05\x07 and")
    assert found(tmp_path, plain) == {"x": b"data"}


def test_data_after_a_descriptor_is_found(tmp_path):
    class Stream(io.BytesIO):
        def seekable(self):
            return False

        def seek(self, *args):
            raise io.UnsupportedOperation

    out = Stream()
    with zipfile.ZipFile(out, "w") as file:  # sizes follow the data, as in torch's own files
        for name, raw in ENTRIES.items():
            file.writestr(name, raw)
    assert found(tmp_path, out.getvalue()) == ENTRIES


def test_zip64_sizes_and_offsets_are_read(tmp_path):
    raw = t.zipped({"x": b"data"})
    at = raw.index(b"PK\x01\x02")
    row = bytearray(raw[at : at + 46])
    row[20:28] = row[42:46] * 0 + b"\xff" * 8  # both sizes
    row[42:46] = b"\xff" * 4
    struct.pack_into("<H", row, 30, 28)
    directory = bytes(row) + b"x" + struct.pack("<2H3Q", 1, 24, 4, 4, 0)
    end = at + len(directory)
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(directory), at)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    last = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0)
    assert found(tmp_path, raw[:at] + directory + wide + locator + last) == {"x": b"data"}
    bad = wide[:-8] + struct.pack("<Q", at + 1)
    with pytest.raises(WeightError, match="its directory in the wrong place"):
        found(tmp_path, raw[:at] + directory + bad + locator + last)
    lacking = bytes(row) + b"x" + struct.pack("<2H3Q", 2, 24, 4, 4, 0)
    with pytest.raises(WeightError, match="lacks the zip64 sizes of 'x'"):
        found(tmp_path, raw[:at] + lacking + wide + locator + last)


def twice() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a", b"1")
        file.writestr("b", b"2")
    return out.getvalue().replace(b"b", b"a")


def changed(raw: bytes, magic: bytes, at: int, value: bytes, last: bool = False) -> bytes:
    """`raw` with `value` put `at` bytes after the first or last place of `magic`."""
    start = (raw.rindex(magic) if last else raw.index(magic)) + at
    return raw[:start] + value + raw[start + len(value) :]


def word(number: int) -> bytes:
    return struct.pack("<I", number)


GOOD = t.zipped(ENTRIES)
CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"
TRICKS = {
    "cut short": (GOOD[:-30], "is cut short: its end is missing"),
    "only a magic": (LOCAL, "is cut short: its end is missing"),
    "bytes after the end": (GOOD + b"x", "has bytes after its end"),
    "bytes before the archive": (b"PK\x03\x04" + GOOD, "its directory in the wrong place"),
    "no entries": (b"PK\x05\x06" + bytes(18), "claims a wrong number of entries"),
    "65,534 entries": (changed(GOOD, END, 8, b"\xfe\xff" * 2), "a wrong number of entries"),
    "fewer entries than rows": (changed(GOOD, END, 8, b"\2\0\2\0"), "directory of the wrong size"),
    "second of two disks": (changed(GOOD, END, 4, b"\1\0"), "is in several parts"),
    "directory past the end": (changed(GOOD, END, 16, word(2**31)), "in the wrong place"),
    "encrypted": (changed(GOOD, CENTRAL, 8, b"\1\0"), "encrypted or in another part"),
    "size past the end": (
        changed(changed(GOOD, CENTRAL, 20, word(2**30)), CENTRAL, 24, word(2**30)),
        "has 'a/data/0' overlapping another entry",
    ),
    "last one past the end": (
        changed(changed(GOOD, CENTRAL, 20, word(2**30), True), CENTRAL, 24, word(2**30), True),
        "has an entry past the end of the data",
    ),
    "two rows for one header": (
        changed(GOOD, CENTRAL, 42, word(0), True),
        "has a damaged header of 'a/empty'",
    ),
    "header past the end": (changed(GOOD, CENTRAL, 42, word(2**31)), "'a/data.pkl' is missing"),
    "header that is none": (changed(GOOD, CENTRAL, 42, word(1)), "has a damaged header"),
    "another name in the header": (changed(GOOD, LOCAL, 30, b"b"), "has a damaged header"),
    "long name in the directory": (changed(GOOD, CENTRAL, 28, b"\xff\xff"), "damaged directory"),
    "row that is none": (changed(GOOD, CENTRAL, 0, b"PK\1\1"), "has a damaged directory"),
    "name twice": (twice(), "has 'a' twice"),
    "leaves its folder": (t.zipped({"../x": b""}), "names a path outside its folder"),
    "leaves it further in": (t.zipped({"a/../../x": b""}), "names a path outside its folder"),
    "leaves it on Windows": (t.zipped({"a\\..\\x": b""}), "names a path outside its folder"),
    "absolute": (t.zipped({"/etc/x": b""}), "names a path outside its folder"),
    "on a drive": (t.zipped({"c:x": b""}), "names a path outside its folder"),
}


@pytest.mark.parametrize("case", TRICKS)
def test_trick_is_refused(case, tmp_path):
    raw, message = TRICKS[case]
    with pytest.raises(WeightError) as caught:
        found(tmp_path, raw)
    line = str(caught.value)
    assert message in line and "model.pt: its zip archive" in line and line.isprintable(), line


def test_entries_that_share_bytes_are_refused(tmp_path):
    inner = t.zipped({"b": b"x"})
    outer = t.zipped({"a": inner[: inner.index(CENTRAL)]})  # a's data is b's header and data
    at, end = outer.index(CENTRAL), outer.index(END)
    row = inner[inner.index(CENTRAL) : inner.index(END)]
    row = changed(row, CENTRAL, 42, word(outer.index(LOCAL, 1)))
    directory = outer[at:end] + row
    last = struct.pack("<4s4H2IH", END, 0, 0, 2, 2, len(directory), at, 0)
    with pytest.raises(WeightError, match="has 'b' overlapping another entry"):
        found(tmp_path, outer[:at] + directory + last)
