"""A limit on what reading one file may allocate, so that no small file makes a large heap."""

from __future__ import annotations

from pathlib import Path

from weights.checkpoint import WeightError

_PER_BYTE = 8  # bytes of objects per byte of file; names and shapes of real models take under 4
_AT_LEAST = 2**20  # for files so small that a handful of objects outweighs them
TENSOR = 900  # bytes of memory for the entry of one tensor
_AT_MOST = 2**27  # opening costs megabytes, whatever the size of the file


class Budget:
    """Bytes that may still be allocated, and nodes still be walked, for a file of `size` bytes."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.total = min(_PER_BYTE * size + _AT_LEAST, _AT_MOST)
        self.left = self.total

    def spend(self, nbytes: int) -> None:
        """Take `nbytes`; WeightError when that is more than is left."""
        self.left -= nbytes
        if self.left < 0:
            problem = "it unfolds into far more objects than a checkpoint of its size holds"
            raise WeightError(problem, file=self.path, remedy="it is damaged or hostile")
