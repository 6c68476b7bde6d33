"""Each quantised type equals the gguf package's NumPy, bit for bit, and the pinned blocks."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from engine import DeviceError, get_device
from tests.weights import build as b
from weights import WeightError, load, quant

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
READ_FROM_GGUF = [f.name for f in quant.FORMATS if f.decode and f.ggml is not None]


def half(value: float) -> bytes:
    return struct.pack("<e", value)


@pytest.fixture(params=["reference", "opencl"])
def device(request) -> str:
    """Each device that this machine has."""
    try:
        get_device(request.param)
    except DeviceError as error:
        pytest.skip(f"no {request.param} device: {error}")
    return request.param


def opened(tmp_path, name: str, shape: tuple[int, ...], raw: bytes, device: str = "reference"):
    path = tmp_path / f"{name}.gguf"
    number = quant.BY_NAME[name].ggml
    path.write_bytes(b.gguf([], [b.header("w", shape, number, 0)], raw))
    return load(path, device=device)["w"]


def random_blocks(rng: np.random.Generator, name: str, count: int) -> np.ndarray:
    """Random bytes, but finite scales: NaN has many bit patterns and none of them is a weight."""
    form = quant.BY_NAME[name]
    raw = rng.integers(0, 256, (count, form.nbytes), dtype=np.uint8)
    for at in (0, 2) if name.endswith("_1") else (0,):
        scales = rng.normal(size=count).astype("<f2")
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return raw


@pytest.mark.parametrize("shape", [(32,), (5, 64), (2, 3, 96), (1, 1, 2, 32)])
@pytest.mark.parametrize("name", QUANTISED)
def test_blocks_equal_the_gguf_packages_bit_for_bit(name, shape, device, tmp_path):
    oracle = pytest.importorskip("gguf", reason="the gguf package (extra `test`) is the oracle")
    rng = np.random.default_rng(len(shape))
    raw = random_blocks(rng, name, int(np.prod(shape)) // 32).reshape(*shape[:-1], -1)
    expected = oracle.dequantize(raw, getattr(oracle.GGMLQuantizationType, name))
    w = opened(tmp_path, name, shape, raw.tobytes(), device)
    assert w.shape == shape and w.dtype.name == "float32"
    np.testing.assert_array_equal(w.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_equal_the_gguf_packages_bit_for_bit(name, device, tmp_path):
    oracle = pytest.importorskip("gguf", reason="the gguf package (extra `test`) is the oracle")
    kind = getattr(oracle.GGMLQuantizationType, name)
    values = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)
    raw = oracle.quantize(values, kind)
    got = opened(tmp_path, name, values.shape, raw.tobytes(), device).numpy().astype(np.float32)
    expected = oracle.dequantize(raw, kind)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_block_sizes_equal_the_gguf_packages():
    oracle = pytest.importorskip("gguf", reason="the gguf package (extra `test`) is the oracle")
    sizes = {k.value: (k.name, *v) for k, v in oracle.GGML_QUANT_SIZES.items()}
    for form in quant.BY_GGML.values():
        if form.ggml in sizes:
            assert sizes[form.ggml] == (form.name, form.block, form.nbytes)


PINNED = {
    "Q8_0": (half(2) + bytes(range(1, 33)), {k: 2.0 * (k + 1) for k in range(32)}, 0),
    "Q4_0": (half(1) + b"\xf0" + bytes(15), {0: -8, 16: 7}, -8),
    "Q5_0": (half(1) + struct.pack("<I", 0x00010001) + b"\x21" + bytes(15), {0: 1, 16: 2}, -16),
    "Q4_1": (half(2) + half(0.5) + b"\xf3" + bytes(15), {0: 6.5, 16: 30.5}, 0.5),
    "Q5_1": (
        half(2) + half(0.5) + struct.pack("<I", 0x00010001) + b"\xf3" + bytes(15),
        {0: 38.5, 16: 62.5},
        0.5,
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_pinned_block(name, device, tmp_path):
    raw, some, rest = PINNED[name]
    expected = [some.get(k, rest) for k in range(32)]
    assert opened(tmp_path, name, (32,), raw, device).tolist() == expected


def test_unsupported_type_names_tensor_type_and_what_is_supported(tmp_path):
    with pytest.raises(WeightError) as caught:
        opened(tmp_path, "Q4_K", (256,), bytes(144))
    line = str(caught.value)
    assert "Q4_K.gguf: tensor 'w': its type Q4_K can't be read yet" in line
    assert all(name in line for name in READ_FROM_GGUF)


def test_opening_a_huge_tensor_unpacks_and_copies_nothing(tmp_path):
    path, rows, columns = tmp_path / "big.gguf", 2**15, 2**15  # 640 MiB packed, 4 GiB unpacked
    nbytes = rows * columns // 32 * 20
    with open(path, "wb") as file:
        file.write(b.gguf([], [b.header("w", (rows, columns), quant.BY_NAME["Q4_1"].ggml, 0)]))
        file.truncate(file.tell() + nbytes)  # a sparse file: it takes no room on the disk
    tracemalloc.start()
    w = load(path, device="reference")["w"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert w.shape == (rows, columns)
    assert peak < 1e6  # bytes


@pytest.fixture(scope="module")
def oracles_tensors(smollm2) -> dict:
    """The real model's tensors as the gguf package reads them."""
    oracle = pytest.importorskip("gguf", reason="the gguf package (extra `test`) is the oracle")
    return {tensor.name: tensor for tensor in oracle.GGUFReader(smollm2).tensors}


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "token_embd.weight"])
def test_real_tensor_equals_the_gguf_packages_bit_for_bit(name, device, smollm2, oracles_tensors):
    import gguf

    rows = 64  # enough for every lane of a block, quick on the reference device
    tensor = oracles_tensors[name]
    expected = gguf.dequantize(tensor.data[:rows], tensor.tensor_type)
    got = load(smollm2, device=device)[name][:rows].numpy()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
