"""Each type is written as the gguf package or ggml itself writes it, bit for bit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from weights import quant
from weights.quantise import BLOCKS, encode


def samples(seed: int = 0, rows: int = 64, columns: int = 512) -> dict[str, np.ndarray]:
    """Values as weights have them, and the cases at the edges."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((rows, columns)).astype(np.float32)
    edges = normal.copy()
    edges[0], edges[1], edges[2] = 0, 1, -1  # blocks of one value
    edges[3, ::2], edges[4, :32] = 0, 1e-30
    edges[5] = np.abs(edges[5])
    edges[6] = -np.abs(edges[6])
    edges[7] = np.round(edges[7] * 4) / 4  # ties
    edges[8, 3] = 1e4
    heavy = rng.standard_t(2, (rows, columns)).astype(np.float32)
    return {"normal": normal, "small": normal * 1e-3, "large": normal * 1e3, "heavy": heavy,
            "edges": edges}  # fmt: skip


def wrapped(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8).reshape(-1)


@pytest.mark.parametrize("case", samples())
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_bytes_equal_the_gguf_packages(kind, case):
    oracle = pytest.importorskip("gguf", reason="the gguf package (extra `test`) is the oracle")
    x = samples()[case]
    expected = oracle.quantize(x, getattr(oracle.GGMLQuantizationType, kind))
    np.testing.assert_array_equal(encode(x, kind), wrapped(expected))


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_is_quantised_comes_back_near(kind):
    x = samples()["normal"]
    form = quant.BY_NAME[kind]
    raw = encode(x, kind)
    assert raw.nbytes == form.size(x.shape)
    error = form.decode(raw, x.shape, "reference").numpy() - x
    bits = int(kind[1])
    # A step of b bits over about 4 standard deviations, rounded: its variance is step^2 / 12.
    assert np.sqrt((error**2).mean()) < 6 / 2**bits / 12**0.5


@pytest.mark.parametrize("kind", BLOCKS)
def test_scales_survive_zero_blocks(kind):
    form = quant.BY_NAME[kind]
    raw = encode(np.zeros((2, 256), np.float32), kind)
    assert not form.decode(raw, (2, 256), "reference").numpy().any()


def test_more_blocks_at_once_change_nothing():
    x = samples()["heavy"]
    for kind in BLOCKS:
        apart = np.concatenate([encode(row, kind) for row in x])
        np.testing.assert_array_equal(encode(x, kind), apart)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", BLOCKS)
def test_nan_and_infinity_are_refused(kind, value):
    x = np.ones(256, np.float32)
    x[77] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        encode(x, kind)


def test_floats_round_to_even_and_keep_nan():
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, np.nan, np.inf, -np.inf, -0.0], np.float32)
    half = encode(x, "F16").view("<f2").astype(np.float32)
    np.testing.assert_array_equal(half, [1, 1 + 2**-9, np.nan, np.inf, -np.inf, -0.0])
    x[:2] = 1 + 2**-8, 1 + 3 * 2**-8
    bits = encode(x, "BF16").view("<u2")
    np.testing.assert_array_equal(bits[[0, 1, 3, 4, 5]], [0x3F80, 0x3F82, 0x7F80, 0xFF80, 0x8000])
    assert bits[2] & 0x7F80 == 0x7F80 and bits[2] & 0x7F


def test_value_beyond_float16_is_an_error_not_infinity():
    with pytest.raises(ValueError, match="70000 is beyond the range of F16"):
        encode(np.array([1, 70000], np.float32), "F16")


@pytest.mark.peers
@pytest.mark.parametrize("case", samples())
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K"])
def test_bytes_equal_ggmls_own(kind, case):
    """llama.cpp's library; it has no fused multiplications, so that sums round as ours do."""
    llama_cpp = pytest.importorskip("llama_cpp")
    ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    quantize = ggml.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3]
    quantize.argtypes += [ctypes.c_void_p]
    x = samples(rows=256)[case]
    form = quant.BY_NAME[kind]
    expected = np.zeros(form.size(x.shape), np.uint8)
    quantize(form.ggml, x.ctypes.data, expected.ctypes.data, 0, *x.shape, None)
    np.testing.assert_array_equal(encode(x, kind), expected)


@pytest.mark.parametrize("kind", BLOCKS)
def test_scale_beyond_float16_is_an_error_not_infinity(kind):
    with pytest.raises(ValueError, match="beyond the range of F16"):
        encode(np.linspace(-1e8, 1e8, 256, dtype=np.float32), kind)
