"""Where the entries of an uncompressed zip archive lie, so that they can be mapped.

Not Python's `zipfile`: that one keeps half a kilobyte per entry, allows entries that share bytes,
and does not tell where the data begins. Sizes come from the central directory; local headers are
read for the position of the data only. Source: PKWARE's APPNOTE, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, NoReturn

from weights.budget import Budget
from weights.checkpoint import WeightError, printable

MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s4H2IH")  # the end record: disks, counts, size, offset, comment length
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_MAGIC = b"PK\x06\x07"
_LOCATOR_64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_MAX_COMMENT = 65535
_MAX_ENTRIES = 65535  # what a zip held before zip64; a checkpoint has a few thousand
_FULL_32 = 0xFFFFFFFF  # "see the zip64 field"
_ENCRYPTED = 1  # a bit of the flags
_COST = 500  # bytes of memory per entry


Place = tuple[int, int]  # offset and length of an entry's data


def entries(path: Path, file: BinaryIO, size: int, budget: Budget) -> dict[str, Place | None]:
    """Name -> where its data lies, None when compressed; `file` is the archive of `size` bytes.

    WeightError for an archive that is damaged, encrypted or in several parts, whose entries
    overlap or appear twice, or whose names leave the folder that they are unpacked to.
    """
    return _Archive(path, file, size, budget).entries()


class _Archive:
    def __init__(self, path: Path, file: BinaryIO, size: int, budget: Budget) -> None:
        self.path, self.file, self.size, self.budget = path, file, size, budget

    def fail(self, problem: str, **facts: object) -> NoReturn:
        raise WeightError(f"its zip archive {problem}", file=self.path, **facts)

    def at(self, offset: int, count: int, what: str) -> bytes:
        if offset < 0 or offset + count > self.size:
            self.fail(f"is cut short: {what} is missing", remedy="fetch the file again")
        self.file.seek(offset)
        return self.file.read(count)

    def entries(self) -> dict[str, Place | None]:
        count, start, end = self.directory()
        if not 0 < count <= _MAX_ENTRIES or count * _CENTRAL.size > end - start:
            expected = f"1 to {_MAX_ENTRIES}, as many as its directory has room for"
            self.fail("claims a wrong number of entries", expected=expected, got=count)
        self.budget.spend(end - start + _COST * count)
        raw, at = self.at(start, end - start, "the directory"), 0
        found: dict[str, Place | None] = {}
        extents: list[tuple[int, int, str]] = []
        for _ in range(count):
            name, header, place, stored, at = self.entry(raw, at)
            if name in found:
                self.fail(f"has '{printable(name)}' twice")
            found[name] = place if stored else None
            extents.append((header, sum(place), name))
        if at != len(raw):
            self.fail("has a directory of the wrong size")
        self.check_apart(extents, start)
        return found

    def directory(self) -> tuple[int, int, int]:
        """The number of entries and the bytes of the central directory."""
        tail = min(self.size, _END.size + _MAX_COMMENT)
        raw = self.at(self.size - tail, tail, "its end")
        at = raw.rfind(b"PK\x05\x06")
        if at < 0 or at + _END.size > tail:
            self.fail("is cut short: its end is missing", remedy="fetch the file again")
        _, disk, first, here, count, length, start, comment = _END.unpack_from(raw, at)
        end = self.size - tail + at
        if end + _END.size + comment != self.size:
            self.fail("has bytes after its end")
        where = end - _LOCATOR_64.size  # torch writes the zip64 end into every archive
        if where >= 0 and self.at(where, 4, "its end") == _LOCATOR_MAGIC:
            end, disk, first, here, count, length, start = self.directory_64(where)
        if disk or first or here != count:
            self.fail("is in several parts", remedy="join them first")
        if start + length != end:
            problem = "has its directory in the wrong place"
            self.fail(problem, expected=f"bytes up to {end}", got=(start, length))
        return count, start, end

    def directory_64(self, where: int) -> tuple[int, ...]:
        _, disk, at, disks = _LOCATOR_64.unpack(self.at(where, _LOCATOR_64.size, "zip64"))
        if disk or disks > 1 or at + _END_64.size > where:
            self.fail("has a damaged zip64 end")
        record = _END_64.unpack(self.at(at, _END_64.size, "zip64"))
        magic, length, _, _, disk, first, here, count, size, start = record
        if magic != b"PK\x06\x06" or at + 12 + length != where:
            self.fail("has a damaged zip64 end")
        return at, disk, first, here, count, size, start

    def entry(self, raw: bytes, at: int) -> tuple[str, int, Place, bool, int]:
        """Name, local header, place of the data, whether uncompressed; where the next row is."""
        if at + _CENTRAL.size > len(raw):
            self.fail("has a directory of the wrong size")
        row = _CENTRAL.unpack_from(raw, at)
        magic, _, _, flags, method, _, _, _, packed, full, n_name, n_extra, n_comment = row[:13]
        disk, header = row[13], row[16]
        at += _CENTRAL.size
        spelled, extra = raw[at : at + n_name], raw[at + n_name : at + n_name + n_extra]
        at += n_name + n_extra + n_comment
        if magic != b"PK\x01\x02" or at > len(raw):
            self.fail("has a damaged directory")
        name = self.name(spelled)
        full, packed, header = self.wide(name, extra, (full, packed, header))
        if flags & _ENCRYPTED or disk:
            self.fail(f"has '{printable(name)}' encrypted or in another part")
        place = self.data(name, spelled, header), packed
        return name, header, place, method == 0 and packed == full, at

    def name(self, raw: bytes) -> str:
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            name = raw.decode("latin-1")  # older tools use the code page of their system
        parts = name.replace("\\", "/").split("/")
        if not name or name.startswith("/") or ".." in parts or ":" in parts[0] or "\0" in name:
            self.fail("names a path outside its folder", got=name)
        return name

    def wide(self, name: str, extra: bytes, fields: tuple[int, ...]) -> list[int]:
        """Put the 64-bit values of the zip64 field where the 32-bit ones say so."""
        full = [n for n, value in enumerate(fields) if value == _FULL_32]
        values, at = list(fields), 0
        while full and at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            at += 4
            if kind == 1 and 8 * len(full) <= length <= len(extra) - at:
                for n, value in zip(full, struct.unpack_from(f"<{len(full)}Q", extra, at)):
                    values[n] = value
                return values
            at += length
        if full:
            self.fail(f"lacks the zip64 sizes of '{printable(name)}'")
        return values

    def data(self, name: str, spelled: bytes, header: int) -> int:
        """Where the data of an entry begins, from its local header."""
        raw = self.at(header, _LOCAL.size + len(spelled), f"'{printable(name)}'")
        row = _LOCAL.unpack_from(raw)
        if row[0] != MAGIC or row[9] != len(spelled) or raw[_LOCAL.size :] != spelled:
            self.fail(f"has a damaged header of '{printable(name)}'")
        return header + _LOCAL.size + row[9] + row[10]

    def check_apart(self, extents: list[tuple[int, int, str]], limit: int) -> None:
        last = 0
        for header, end, name in sorted(extents):
            if header < last:
                self.fail(f"has '{printable(name)}' overlapping another entry")
            last = end
        if last > limit:
            self.fail("has an entry past the end of the data", expected=limit, got=last)
