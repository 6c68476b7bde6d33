"""A checkpoint: names mapped to lazily read tensors, whatever the file format."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from engine import Tensor


_SHORT = reprlib.Repr()  # of a list in lists, of which only the first few are spelled
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 400, 400
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 16


def printable(value: object, limit: int = 120) -> str:
    """`value` as one line of at most `limit` characters; a hostile file chooses its own names.

    What a value would say beyond that is not spelled out: lists that share lists have no end.
    """
    if isinstance(value, (str, bytes)):
        value = value[: limit + 1]
    elif isinstance(value, (list, tuple, dict, set, frozenset)):
        value = _SHORT.repr(value)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value)[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


class WeightError(Exception):
    """A checkpoint that can't be used; `str()` is one line: file, tensor, problem, remedy."""

    def __init__(
        self,
        problem: str,
        *,
        file: object = None,
        tensor: str | None = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem, self.file, self.tensor = problem, file, tensor
        self.expected, self.got, self.remedy = expected, got, remedy
        super().__init__(problem)

    def __str__(self) -> str:
        where = "" if self.file is None else f"{printable(self.file, 400)}: "
        if self.tensor is not None:
            where += f"tensor '{printable(self.tensor)}': "
        pairs = (("expected", self.expected), ("got", self.got))
        facts = ", ".join(f"{name} {printable(v, 400)}" for name, v in pairs if v is not None)
        line = where + printable(self.problem, 1000) + (f" ({facts})" if facts else "")
        return f"{line}; {self.remedy}" if self.remedy else line


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says of one tensor: logical shape, the format's type name, bytes stored."""

    shape: tuple[int, ...]
    type: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint: its header, its bytes, and the lazy Tensor over them.

    `raw()` gives (info.nbytes,) uint8: the values row by row, encoded as info.type says, mapped
    where the file has them like that. `read(device)` gives the Tensor.
    """

    info: TensorInfo
    raw: Callable[[], np.ndarray]
    read: Callable[[str | None], Tensor]


class Checkpoint(Mapping[str, "Tensor"]):
    """A read-only mapping name -> Tensor over one opened file or folder.

    A Tensor is made anew on each access and reads the mapped file only when it is realised;
    `info(name)` answers shape, type and bytes without touching the data.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        metadata: Mapping[str, Any],
        entries: Mapping[str, Entry],
        device: str | None = None,
    ) -> None:
        self.path, self.format, self.metadata = Path(path), format, metadata
        self.entries, self.device = entries, device

    def __getitem__(self, name: str) -> Tensor:
        return self.entries[name].read(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.format}, {len(self)} tensors)"

    def info(self, name: str) -> TensorInfo:
        """The header of tensor `name`; KeyError when there is none."""
        return self.entries[name].info

    @property
    def architecture(self) -> str | None:
        """The model family that the file names (`llama`), or None where it names none."""
        meta = self.metadata
        name = meta.get("general.architecture") or meta.get("model_type")
        return name if isinstance(name, str) else None
