"""The writer of PyTorch's zip format: read back by us and by zipfile; by torch in tests/peers."""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from weights import WeightError, load, pytorch_write
from weights.checkpoint import TensorInfo
from weights.pytorch_write import TYPES, write
from weights.quant import BY_NAME
from weights.stored import Stored

SHAPES = ((), (3,), (0, 4), (2, 3, 4))
METADATA = {
    "dims": {"n_mels": 80, "rate": 0.5, "big": 2**40, "negative": -300, "none": None, "yes": True},
    "names": ["é", ("a", 1)],
}


def stored(name: str, kind: str, shape: tuple[int, ...]) -> tuple[Stored, bytes]:
    """A tensor of seeded bytes, given in two pieces."""
    nbytes = BY_NAME[kind].size(shape)
    raw = np.random.default_rng(len(name)).integers(0, 2, nbytes, np.uint8)
    half = nbytes // 2
    return (name, TensorInfo(shape, kind, nbytes), lambda: [raw[:half], raw[half:]]), raw.tobytes()


def some() -> list[tuple[Stored, bytes]]:
    return [stored(f"{k}.{len(s)}.w", k, s) for k in sorted(TYPES) for s in SHAPES]


@pytest.mark.parametrize("metadata", [{}, METADATA])
def test_what_was_written_is_read_back(metadata, tmp_path):
    path, tensors = tmp_path / "model.pt", some()
    write(path, [tensor for tensor, _ in tensors], metadata)
    checkpoint = load(path)
    assert list(checkpoint) == [name for (name, _, _), _ in tensors]
    for (name, info, _), raw in tensors:
        assert checkpoint.info(name) == info
        got = checkpoint.entries[name].raw()
        assert got.tobytes() == raw
        assert not got.size or (got.__array_interface__["data"][0] % 64 == 0)
    expected = dict(metadata)
    if metadata:
        expected["names"] = ["é", ["a", 1]]
    assert checkpoint.metadata == expected


def test_archive_is_sound_and_uncompressed(tmp_path):
    write(tmp_path / "model.pt", [tensor for tensor, _ in some()], METADATA)
    with zipfile.ZipFile(tmp_path / "model.pt") as file:
        assert file.testzip() is None  # every checksum is right
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}


def test_tensor_is_written_piece_by_piece(tmp_path):
    piece, count = bytes(2**20), 64
    info = TensorInfo((count, 2**18), "F32", count * 2**20)
    tracemalloc.start()
    write(tmp_path / "model.pt", [("x", info, lambda: (piece for _ in range(count)))], {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6  # bytes; the tensor has 67e6
    assert load(tmp_path / "model.pt").info("x") == info


class Sparse:
    """A file that notes how long it is and keeps what isn't zeros: stands for one past 4 GB."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")

    def write(self, data) -> int:
        if len(data) > 2**20 and not any(data[:64]):
            self.file.seek(len(data), 1)
            self.file.truncate()  # which makes it longer here
            return len(data)
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_offsets_and_sizes_past_4_gb_are_kept(tmp_path, monkeypatch):
    path, piece = tmp_path / "big.pt", bytes(2**26)
    count = 2**32 // len(piece) + 1  # the first tensor alone is longer than 32 bits hold
    big = TensorInfo((count, 2**26), "U8", count * 2**26)
    small, raw = stored("small", "F32", (2, 3))
    monkeypatch.setattr(pytorch_write.zlib, "crc32", lambda data, start: 0)  # seconds, not needed

    archive = pytorch_write._Archive(Sparse(path))
    tensors = [("big", big, lambda: (piece for _ in range(count))), small]
    archive.add_bytes("data.pkl", pytorch_write._pickle(path, tensors, {}))
    for number, (_, info, pieces) in enumerate(tensors):
        archive.add(f"data/{number}", info.nbytes, pieces)
    archive.finish()
    archive.file.close()

    checkpoint = load(path)
    assert checkpoint.info("big") == big and path.stat().st_size > 2**32
    assert checkpoint.entries["small"].raw().tobytes() == raw
    with zipfile.ZipFile(path) as file:
        assert [i.file_size for i in file.infolist()][1:] == [big.nbytes, 24]


def test_type_that_torch_lacks_is_refused(tmp_path):
    tensor, _ = stored("x", "Q4_0", (32,))
    with pytest.raises(WeightError, match="tensor 'x': torch has no type Q4_0"):
        write(tmp_path / "model.pt", [tensor], {})


@pytest.mark.parametrize("value", [np.zeros(3), object(), {"a": [b"bytes"]}])
def test_metadata_that_is_not_plain_is_refused(value, tmp_path):
    with pytest.raises(WeightError, match="metadata 'odd' can't be written"):
        write(tmp_path / "model.pt", [], {"odd": value})


def test_metadata_may_not_take_the_models_place(tmp_path):
    with pytest.raises(WeightError, match="a key model_state_dict of its own"):
        write(tmp_path / "model.pt", [], {"model_state_dict": {}})
