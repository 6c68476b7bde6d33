"""Write safetensors files, one tensor after the other: nothing but the header is held in memory.

Source: the format's specification, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from weights.checkpoint import WeightError
from weights.safetensors import MAX_HEADER
from weights.stored import Stored, write_all

_ALIGN = 8  # bytes, of the first tensor


def write(path: Path, tensors: Iterable[Stored], metadata: Mapping[str, str]) -> None:
    """Write a file; `metadata` becomes `__metadata__`. OSError when the disk is full."""
    tensors = sorted(tensors, key=lambda t: -t[1].nbytes % _ALIGN)  # the aligned ones first
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, info, _ in tensors:
        offsets = [end, end + info.nbytes]
        table[name] = {"dtype": info.type, "shape": info.shape, "data_offsets": offsets}
        end += info.nbytes
    head = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGN)
    if len(head) > MAX_HEADER:
        problem = "the header, with configuration and tokenizer in it, gets too long"
        expected = f"at most {MAX_HEADER} bytes"
        raise WeightError(problem, file=path, expected=expected, got=len(head))
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors:
            write_all(file, tensor)
