"""GGUF files that we write, read by the gguf package and by our own reader."""

from __future__ import annotations

import numpy as np
import pytest

from weights import WeightError, gguf_write, load
from weights.checkpoint import TensorInfo

SCALARS = {
    f"number.{kind}": np.dtype(kind).type(1)
    for kind in ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", "u8", "i8", "f8")
}
METADATA = SCALARS | {
    "general.architecture": "llama",
    "text": "naïve 🦙",
    "texts": ["a", "é", ""],
    "none": [],
    "types": np.array([1, 3, 6], "<i4"),
    "plain": [1, 2, 3],
    "negative": [-1, 2],
    "wide": 1 << 40,
    "floats": [0.5, -0.25],
    "flag": True,
}


def tensor(name: str, values: np.ndarray, kind: str = "F32"):
    raw = values.reshape(-1).view(np.uint8)
    halves = raw[: raw.nbytes // 2], raw[raw.nbytes // 2 :]
    return name, TensorInfo(values.shape, kind, values.nbytes), lambda: iter(halves)


TENSORS = {
    "x": np.arange(6, dtype="<f4").reshape(2, 3),
    "y": np.arange(3, dtype="<f4"),
    "z": np.arange(64, dtype="<f4").reshape(1, 2, 32),
}


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_write.write(path, [tensor(*item) for item in TENSORS.items()], METADATA)
    return path


def test_gguf_package_reads_every_kind_of_value_and_each_tensor(written):
    oracle = pytest.importorskip("gguf", reason="the gguf package (extra `test`) is the oracle")
    reader = oracle.GGUFReader(written)
    for key, value in METADATA.items():
        if key != "none":  # the package can't tell what an empty list holds
            np.testing.assert_array_equal(reader.fields[key].contents(), np.asarray(value))
    for read, (name, values) in zip(reader.tensors, TENSORS.items()):
        assert read.name == name and read.data_offset % 32 == 0
        np.testing.assert_array_equal(read.data.reshape(values.shape), values)


def test_values_keep_their_types(written):
    metadata = load(written).metadata
    for key, value in SCALARS.items():
        assert metadata.typed(key).dtype == value.dtype
    kinds = {key: metadata.typed(key).dtype.name for key in ("plain", "negative", "wide", "floats")}
    assert kinds == {"plain": "uint32", "negative": "int32", "wide": "uint64", "floats": "float32"}
    assert metadata["texts"] == ["a", "é", ""] and metadata["none"] == []
    assert metadata["flag"] is True


def test_tensors_come_back(written):
    checkpoint = load(written, device="reference")
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(checkpoint[name].numpy(), values)


@pytest.mark.parametrize(
    ("tensors", "metadata", "problem"),
    [
        ([], {"a": ["x", 1.5]}, "'a' mixes types in a list"),
        ([], {"a": {"b": 1}}, "'a' doesn't fit into GGUF .got dict"),
        ([tensor("w", np.zeros((1,) * 5, "<f4"))], {}, "tensor 'w': a tensor of F32"),
        ([tensor("w", np.zeros(4, "u1"), "U8")], {}, "a tensor of U8 .4,. doesn't fit into GGUF"),
    ],
)
def test_what_gguf_lacks_is_named(tensors, metadata, problem, tmp_path):
    with pytest.raises(WeightError, match=problem):
        gguf_write.write(tmp_path / "m.gguf", tensors, metadata)
