"""Each quantised type equals the gguf package's NumPy, bit for bit, and the pinned blocks."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from tests.weights import build as b
from weights import WeightError, load, quant

QUANTISED = [f.name for f in quant.FORMATS if f.decode and f.block > 1]
READ_FROM_GGUF = [f.name for f in quant.FORMATS if f.decode and f.ggml is not None]


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def opened(tmp_path, name: str, shape: tuple[int, ...], raw: bytes, device: str = "reference"):
    path = tmp_path / f"{name}.gguf"
    number = quant.BY_NAME[name].ggml
    path.write_bytes(b.gguf([], [b.header("w", shape, number, 0)], raw))
    return load(path, device=device)["w"]


# Where the half-precision numbers of a block lie.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))


def random_blocks(rng: np.random.Generator, name: str, count: int) -> np.ndarray:
    """Random bytes, but scales as weights have them."""
    form = quant.BY_NAME[name]
    raw = rng.integers(0, 256, (count, form.nbytes), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        scales = rng.normal(size=count).astype("<f2")
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return raw


def same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit; one NaN is as good as another, none of them is a weight."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    kept = ~np.isnan(expected)
    np.testing.assert_array_equal(got.view(np.uint32)[kept], expected.view(np.uint32)[kept])


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (1, 1, 2)])
@pytest.mark.parametrize("name", QUANTISED)
def test_blocks_equal_the_gguf_packages_bit_for_bit(name, lead, device, tmp_path):
    oracle = pytest.importorskip("gguf", reason="the gguf package (extra `test`) is the oracle")
    rng = np.random.default_rng(len(lead))
    shape = (*lead, quant.BY_NAME[name].block * (1 + len(lead)))
    count = int(np.prod(shape)) // quant.BY_NAME[name].block
    raw = random_blocks(rng, name, count).reshape(*lead, -1)
    expected = oracle.dequantize(raw, getattr(oracle.GGMLQuantizationType, name))
    w = opened(tmp_path, name, shape, raw.tobytes(), device)
    assert w.shape == shape and w.dtype.name == "float32"
    same_bits(w.numpy(), expected)


@pytest.mark.parametrize("name", QUANTISED)
def test_any_bytes_equal_the_gguf_packages(name, device):
    """Scales that are infinite, NaN, denormal or zero too."""
    oracle = pytest.importorskip("gguf", reason="the gguf package (extra `test`) is the oracle")
    form = quant.BY_NAME[name]
    raw = np.random.default_rng(3).integers(0, 256, (400, form.nbytes), dtype=np.uint8)
    special = np.array([0, 0x8000, 1, 0x83FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E00], "<u2")
    for row, bits in enumerate(special):
        for at in HALVES.get(name, (0,)):
            raw[row, at : at + 2] = bits[None].view(np.uint8)
    with np.errstate(all="ignore"):
        expected = oracle.dequantize(raw, getattr(oracle.GGMLQuantizationType, name))
        got = form.decode(raw.reshape(-1), expected.shape, device).numpy()
    same_bits(got, expected)


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
    "Q4_K": (
        half(1) * 2 + b"\x01" * 8 + b"\x11" * 4 + b"\x21" * 128,
        {k: 1 for k in range(256) if k // 32 % 2},
        0,
    ),
    "IQ4_NL": (half(1) + b"\xf0" + bytes(15), {0: -127, 16: 113}, -127),
}


@pytest.mark.parametrize("name", PINNED)
def test_pinned_block(name, device, tmp_path):
    raw, some, rest = PINNED[name]
    size = quant.BY_NAME[name].block
    expected = [some.get(k, rest) for k in range(size)]
    assert opened(tmp_path, name, (size,), raw, device).tolist() == expected


def test_doubles_are_read_as_float32(device, tmp_path):
    values = np.array([1 / 3, -2.5, 1e300, -0.0, 1e-46])
    got = opened(tmp_path, "F64", (5,), values.tobytes(), device).numpy()
    with np.errstate(over="ignore", under="ignore"):
        same_bits(got, values.astype(np.float32))


def eight_bit_float(bits: int, exponent_bits: int, bias: int) -> float:
    """By the definition, for finite values: OCP 8-bit floating point specification, table 1."""
    mantissa_bits = 7 - exponent_bits
    exponent, mantissa = (
        bits >> mantissa_bits & (1 << exponent_bits) - 1,
        bits & ((1 << mantissa_bits) - 1),
    )
    value = mantissa / 2**mantissa_bits + (exponent > 0)
    return (-1) ** (bits >> 7) * value * 2.0 ** (max(exponent, 1) - bias)


@pytest.mark.parametrize(
    ("name", "exponent_bits", "bias", "special"),
    [
        ("F8_E4M3", 4, 7, {0x7F: np.nan, 0xFF: np.nan}),
        (
            "F8_E5M2",
            5,
            15,
            {0x7C: np.inf, 0xFC: -np.inf}
            | {sign | n: np.nan for sign in (0, 0x80) for n in (0x7D, 0x7E, 0x7F)},
        ),
    ],
)
def test_every_float_of_one_byte_is_its_value(name, exponent_bits, bias, special, device):
    raw = np.arange(256, dtype=np.uint8)
    got = quant.BY_NAME[name].decode(raw, (16, 16), device).numpy().reshape(-1)
    values = [special.get(b, eight_bit_float(b, exponent_bits, bias)) for b in range(256)]
    same_bits(got, np.array(values, np.float32))


def test_unsupported_type_names_tensor_type_and_what_is_supported(tmp_path):
    with pytest.raises(WeightError) as caught:
        opened(tmp_path, "TQ1_0", (256,), bytes(54))
    line = str(caught.value)
    assert "TQ1_0.gguf: tensor 'w': its type TQ1_0 can't be read yet" in line
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
