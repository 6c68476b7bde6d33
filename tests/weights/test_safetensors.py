"""The safetensors reader: files, folders, and what it must refuse."""

from __future__ import annotations

import json
import struct
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.weights import build as b
from tests.weights.test_gguf import QUICK, mutations
from weights import WeightError, load

SMALL = {
    "a.weight": ("F32", (2, 3), np.arange(6, dtype="<f4").tobytes()),
    "a.bias": ("BF16", (2,), struct.pack("<2H", 0x3F80, 0xC000)),  # 1, -2
}


def opened(tmp_path, raw: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    return load(path, device="reference")


def test_reads_shape_type_and_metadata(tmp_path):
    checkpoint = opened(tmp_path, b.safetensors(SMALL, {"format": "pt"}))
    assert checkpoint.format == "safetensors" and checkpoint.metadata == {"format": "pt"}
    info = checkpoint.info("a.weight")
    assert (info.shape, info.type, info.nbytes) == ((2, 3), "F32", 24)
    assert checkpoint["a.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint["a.bias"].tolist() == [1, -2]


@pytest.mark.parametrize(
    "name", "float32 float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
)
def test_each_type_equals_the_safetensors_packages(name, tmp_path):
    oracle = pytest.importorskip("safetensors.numpy", reason="the package is the oracle")
    values = (np.random.default_rng(0).normal(size=(3, 5)) * 50).astype(name)
    oracle.save_file({"x": values, "empty": values[:0]}, tmp_path / "m")
    checkpoint = load(tmp_path / "m", device="reference")
    assert checkpoint["x"].dtype.name == name
    np.testing.assert_array_equal(checkpoint["x"].numpy(), values)
    assert checkpoint.info("empty").shape == (0, 5)


def test_data_at_an_odd_byte_is_read(tmp_path):
    tensors = {"flag": ("U8", (1,), b"\1"), "x": ("F32", (1,), struct.pack("<f", 2.5))}
    assert opened(tmp_path, b.safetensors(tensors))["x"].tolist() == [2.5]


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("F64", struct.pack("<2d", 1.5, -3)),
        ("F8_E4M3", b"\x3c\xc4"),
        ("F8_E5M2", b"\x3e\xc2"),
    ],
)
def test_floats_that_the_engine_lacks_are_read_as_float32(kind, raw, tmp_path):
    odd = {"flag": ("U8", (1,), b"\1"), "x": (kind, (2,), raw)}  # and at an odd byte
    x = opened(tmp_path, b.safetensors(odd))["x"]
    assert x.dtype.name == "float32" and x.tolist() == [1.5, -3]


def row(kind="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": kind, "shape": shape, "data_offsets": offsets}


def table(data: int = 8, **rows) -> bytes:
    return b.framed(json.dumps(rows).encode(), bytes(data))


HOSTILE = {
    "header of 2^63 bytes": (struct.pack("<Q", 2**63) + b"{}", "not a checkpoint"),
    "header past the end": (struct.pack("<Q", 50) + b"{}", "not a checkpoint"),
    "cut inside the data": (b.safetensors(SMALL)[:-5], "its data runs past the end of the file"),
    "bytes left over": (b.safetensors(SMALL) + b"x", "bytes after the last tensor"),
    "not JSON": (b.framed(b"{nonsense}"), "its JSON can't be read"),
    "not UTF-8": (b.framed(b'{"\xff":1}'), "its JSON can't be read"),
    "nested too deep": (b.framed(b'{"a":' * 5000 + b"1" + b"}" * 5000), "nested too deep"),
    "a number of a million digits": (b.framed(b'{"a":' + b"9" * 10**6 + b"}"), "too long"),
    "key twice": (b.framed(b'{"a":1,"a":1}'), "a key appears twice"),
    "row not an object": (table(x=5), "tensor 'x': its header is malformed"),
    "negative axis": (table(x=row(shape=(-2,))), "its header is malformed"),
    "axis a float": (table(x=row(shape=(2.0,))), "its header is malformed"),
    "axis true": (table(x=row(shape=(True,), offsets=(0, 4))), "its header is malformed"),
    "a thousand axes": (table(x=row(shape=(2,) * 1000)), "its header is malformed"),
    "axes whose product overflows": (table(x=row(shape=(2**63, 2))), "its data does not fit"),
    "unknown type": (table(x=row(kind="F4")), "tensor 'x': unknown tensor type"),
    "a GGUF block type": (table(x=row(kind="Q8_0")), "unknown tensor type"),
    "end before begin": (table(x=row(offsets=(8, 0))), "its data does not fit"),
    "three offsets": (table(x=row(offsets=(0, 8, 9))), "its data does not fit"),
    "offsets past the end": (table(x=row(offsets=(2**62, 2**62 + 8))), "a hole before it"),
    "overlap": (table(x=row(), y=row(offsets=(4, 12)), data=12), "overlaps"),
    "hole": (table(x=row(), y=row(offsets=(12, 20)), data=20), "a hole before it"),
    "metadata a list": (table(0, __metadata__=[1]), "__metadata__ is not an object"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_at_once(case, tmp_path):
    raw, message = HOSTILE[case]
    start = time.perf_counter()
    with pytest.raises(WeightError) as caught:
        opened(tmp_path, raw)
    assert message in str(caught.value) and "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - start < QUICK


@given(raw=mutations(b.safetensors(SMALL, {"format": "pt"})))
@settings(
    max_examples=400,
    deadline=1000,  # milliseconds
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_mutated_file_opens_or_raises_weight_error(raw, tmp_path):
    try:
        checkpoint = opened(tmp_path, raw)
    except WeightError as error:
        assert "\n" not in str(error)
    else:
        assert all(checkpoint.info(name) for name in checkpoint)


def part(*names: str) -> bytes:
    return b.safetensors({name: SMALL[name] for name in names})


def folder(tmp_path, files: dict[str, bytes], weight_map: object = None):
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    if weight_map is not None:
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_folder_with_one_file_takes_its_metadata_from_the_config(tmp_path):
    folder(tmp_path, {"model.safetensors": part(*SMALL), "other.safetensors": b"broken"})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    checkpoint = load(tmp_path)
    assert checkpoint.format == "huggingface" and checkpoint.architecture == "llama"
    assert checkpoint.metadata["num_hidden_layers"] == 2
    assert set(checkpoint) == set(SMALL)


def test_sharded_folder_reads_each_tensor_from_its_shard(tmp_path):
    files = {"s-1.safetensors": part("a.weight"), "s-2.safetensors": part("a.bias")}
    weight_map = {"a.weight": "s-1.safetensors", "a.bias": "s-2.safetensors"}
    checkpoint = load(folder(tmp_path, files, weight_map), device="reference")
    assert checkpoint["a.weight"].shape == (2, 3)
    assert checkpoint["a.bias"].tolist() == [1, -2]


def test_folder_without_an_index_takes_all_files(tmp_path):
    files = {"s-1.safetensors": part("a.weight"), "s-2.safetensors": part("a.bias")}
    assert set(load(folder(tmp_path, files))) == set(SMALL)
    (tmp_path / "s-3.safetensors").write_bytes(part("a.bias"))
    with pytest.raises(WeightError, match="tensor 'a.bias': another file of the folder has it too"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["../s-1.safetensors", "/s-1.safetensors", "c:x", "a\\b", "..", "", "a\0b", 5, None]
)
def test_index_that_leaves_its_folder_is_refused(name, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "s-1.safetensors").write_bytes(part("a.weight"))
    with pytest.raises(WeightError, match="the index points outside its folder"):
        load(folder(inside, {}, {"a.weight": name}))


def test_missing_shard_and_missing_tensor_are_named(tmp_path):
    weight_map = {"a.weight": "s-1.safetensors"}
    with pytest.raises(WeightError, match="s-1.safetensors: tensor 'a.weight': a shard is m"):
        load(folder(tmp_path, {}, weight_map))
    with pytest.raises(WeightError, match="which has no such tensor"):
        load(folder(tmp_path, {"s-1.safetensors": part("a.bias")}, weight_map))


@pytest.mark.parametrize("weight_map", [[], {}, 5])
def test_index_without_a_weight_map_is_refused(weight_map, tmp_path):
    with pytest.raises(WeightError, match="it has no weight_map"):
        load(folder(tmp_path, {}, weight_map))


def test_empty_folder_and_broken_config_are_named(tmp_path):
    with pytest.raises(WeightError, match="no \\*.safetensors or \\*.bin file in this folder"):
        load(tmp_path)
    folder(tmp_path, {"model.safetensors": part(*SMALL), "config.json": b"{"})
    with pytest.raises(WeightError, match="config.json: its JSON can't be read"):
        load(tmp_path)
