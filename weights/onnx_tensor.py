"""The tensors of an ONNX model, read when they are asked for: from it, or from a file beside it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from weights.checkpoint import WeightError
from weights.mapped import open_mapped
from weights.onnx_schema import FIELDS, TYPES
from weights.protobuf import varints

_MAX_AXES, _MOST = 32, 1 << 58
_BITS = dict(TYPES.values())


def dtype_of(name: str) -> np.dtype:
    """NumPy's type of that name. WeightError if it takes a package that isn't there."""
    if name == "str":
        return np.dtype(object)
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        remedy = "pip install 'menagerie[onnx]'"
        raise WeightError(f"NumPy has no type {name}", remedy=remedy) from None
    return np.dtype(getattr(ml_dtypes, name))


class External:
    """The files with tensors beside a model; none outside its folder is opened."""

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, dict[str, mmap.mmap]()

    def open(self, location: str, name: str) -> mmap.mmap:
        """The file at a location that the model states, mapped once."""
        if location not in self.opened:
            folder = self.path.parent.resolve()
            pure = PurePosixPath(location.replace("\\", "/"))
            stays = not (pure.is_absolute() or PureWindowsPath(location).anchor)
            if not location or not stays or ".." in pure.parts or "\0" in location:
                self._refuse(location, name)
            try:
                file = (folder / pure).resolve()
                inside = file.is_relative_to(folder)
            except (OSError, RuntimeError):  # a loop of links, a name that is too long
                inside = False
            if not inside:
                self._refuse(location, name)
            self.opened[location] = open_mapped(file)
        return self.opened[location]

    def _refuse(self, location: str, name: str) -> None:
        problem = "its data lies outside the model's folder, where nothing is read"
        raise WeightError(problem, file=self.path, tensor=name, got=location)


class OnnxTensor:
    """One tensor: name, shape and type as stated, its bytes checked against them; `read()` it."""

    __slots__ = ("external", "fields", "name", "path", "shape", "type")

    def __init__(self, path: Path, fields: Mapping[str, Any], external: External) -> None:
        self.path, self.fields, self.external = path, fields, external
        self.name: str = fields.get("name", "")
        self.shape = tuple(fields.get("dims", ()))
        number = fields.get("data_type", 0)
        if number not in TYPES:
            self._fail("its element type is unknown", got=number)
        self.type = TYPES[number][0]
        most = math.prod(max(n, 1) for n in self.shape)  # NumPy can't hold more, though one is 0
        if len(self.shape) > _MAX_AXES or min(self.shape, default=0) < 0 or most > _MOST:
            self._fail("its shape is no shape", got=self.shape)
        if self.type == "str" and len(fields.get("string_data", ())) != self.size:
            self._fail("it has another number of strings than its shape", expected=self.size)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def read(self) -> np.ndarray:
        """The values, read-only and over the mapped file where they lie in it as NumPy has them.

        WeightError if they aren't as many as its shape says, or lie outside the model's folder.
        """
        if self.type == "str":
            texts = [bytes(raw).decode("utf-8", "replace") for raw in self._strings()]
            return np.array(texts, object).reshape(self.shape)
        bits, dtype = _BITS[self.type], dtype_of(self.type)
        if self.fields.get("data_location") == 1:
            return self._of_bytes(self._beside(bits), bits, dtype)
        if "raw_data" in self.fields:
            return self._of_bytes(np.frombuffer(self.fields["raw_data"], np.uint8), bits, dtype)
        field, code = FIELDS.get(self.type, ("int32_data", ""))
        raw = self.fields.get(field, memoryview(b""))
        if code:
            return self._of_bytes(np.frombuffer(raw, np.uint8), bits, dtype)
        return self._of_varints(raw, bits, dtype)

    def _strings(self) -> list[memoryview]:
        return self.fields.get("string_data", [])

    def _of_bytes(self, raw: np.ndarray, bits: int, dtype: np.dtype) -> np.ndarray:
        expected = -(-self.size * bits // 8)
        if len(raw) != expected:
            self._fail(
                "its data has another length than its shape", expected=expected, got=len(raw)
            )
        if bits < 8:
            return _unpacked(raw, bits, self.size).view(dtype).reshape(self.shape)
        little = dtype.newbyteorder("<") if dtype.kind in "iufc" else dtype
        return raw.view(little).reshape(self.shape)

    def _of_varints(self, raw: memoryview, bits: int, dtype: np.dtype) -> np.ndarray:
        count = self.size if bits >= 8 else -(-self.size * bits // 8)
        values = varints(raw, count) if count <= len(raw) else None
        if values is None:
            self._fail("its data has another length than its shape", expected=count)
        if bits < 8:
            values = _unpacked(values.astype(np.uint8), bits, self.size).view(dtype)
        elif dtype.kind not in "iu":  # halves, eighths and bools are stored as their bits
            values = values.astype(f"uint{bits}").view(dtype)
        return values.astype(dtype).reshape(self.shape)

    def _beside(self, bits: int) -> np.ndarray:
        facts = {pair.get("key", ""): pair.get("value", "") for pair in
                 self.fields.get("external_data", ())}  # fmt: skip
        needed, numbers = -(-self.size * bits // 8), []
        for key, default in (("offset", 0), ("length", needed)):
            text = facts.get(key, str(default))
            if not text.isdecimal() or len(text) > 18:
                self._fail(f"the {key} of its data is no number", got=text)
            numbers.append(int(text))
        offset, length = numbers
        if not needed:
            return np.zeros(0, np.uint8)
        data = self.external.open(facts.get("location", ""), self.name)
        if offset + length > len(data) or length < needed:
            remedy = "the file is cut short: fetch it again"
            got = f"{len(data)} bytes in {facts['location']}"
            expected = f"{offset + max(length, needed)} bytes"
            self._fail("its data isn't all there", expected=expected, got=got, remedy=remedy)
        return np.frombuffer(data, np.uint8, needed, offset)

    def _fail(self, problem: str, **facts: object) -> None:
        raise WeightError(problem, file=self.path, tensor=self.name, **facts)


def _unpacked(raw: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Small numbers, the lowest bits first, each in a byte of its own with its sign spread."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (raw[:, None] >> shifts & (1 << bits) - 1).reshape(-1)[:count]
