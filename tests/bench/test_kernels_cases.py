"""Cases are what they say, and every side computes the same from them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from bench.kernels import SIDES
from bench.kernels_cases import BLOCK_FORMATS, CASES, Case, draw
from bench.kernels_peers import NUMPY, Numpy, Torch
from bench.kernels_sides import OPERATIONS, Menagerie, Side

SMALL = {  # each kind with odd sizes: shapes of its activations, weights and result
    "gemm": ({"x": (5, 64)}, {"weight": (64, 7)}, (5, 7)),
    "linear": ({"x": (5, 64)}, {"weight": (6, 64), "bias": (6,)}, (5, 6)),
    "conv": ({"x": (2, 6, 4, 3)}, {"weight": (5, 3, 3, 3), "bias": (5,)}, (2, 3, 2, 5)),
    "attention": ({"q": (2, 5, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8)}, {}, (2, 5, 4, 8)),
    "softmax": ({"x": (3, 17)}, {}, (3, 17)),
    "rmsnorm": ({"x": (3, 17)}, {"weight": (17,)}, (3, 17)),
    "layernorm": ({"x": (3, 17)}, {"weight": (17,), "bias": (17,)}, (3, 17)),
    "groupnorm-silu": ({"x": (2, 3, 2, 64)}, {"weight": (64,), "bias": (64,)}, (2, 3, 2, 64)),
    "gelu": ({"x": (33,), "y": (33,)}, {}, (33,)),
}
OPTIONS = {"linear": {"silu": True}, "conv": {"stride": 2}, "attention": {"causal": True}}
KINDS = [(kind, dtype) for kind in SMALL for dtype in ("f32", "bf16")]
KINDS += [("linear", dtype) for dtype in BLOCK_FORMATS]
BY_NAME = {case.name: case for case in CASES}


def small(kind: str, dtype: str) -> Case:
    """A case of a few numbers. Its estimated time is tiny, so that it has several copies."""
    a_case_of_its_kind = next(case for case in CASES if case.kind == kind)
    activations, weights, result = SMALL[kind]
    if dtype.startswith("q"):
        weights = {"weight": weights["weight"]}
    return replace(
        a_case_of_its_kind, name=f"small/{kind}-{dtype}", dtype=dtype, activations=activations,
        weights=weights, result=result, flops=0, options=OPTIONS.get(kind, {}),
    )  # fmt: skip


def result(side: Side, case: Case) -> np.ndarray:
    side.case = case
    return side.array(side.build(case, *draw(case))())


def off(side: Side, case: Case) -> float:
    """How far a side is from NumPy, as a part of the largest value."""
    expected = result(Numpy(), case)
    assert expected.shape == case.result and expected.dtype == np.float32
    return float(np.abs(result(side, case) - expected).max() / np.abs(expected).max())


def test_names_are_unique_and_what_they_refer_to_exists() -> None:
    assert len(BY_NAME) == len(CASES)
    for case in CASES:
        assert case.kind in OPERATIONS and case.kind in NUMPY and case.kind in SMALL
        assert hasattr(Torch, case.kind.replace("-", "_"))
        assert case.peers and set(case.peers) <= set(SIDES)
        assert case.tolerance.value < 0.05 and case.tolerance.reason
        assert 1 <= case.copies <= 16


def test_work_is_counted() -> None:
    conv = BY_NAME["conv/bf16-320@64-s2"]
    assert conv.result == (1, 32, 32, 320)
    assert conv.flops == 2 * 32 * 32 * 320 * 320 * 9
    assert conv.nbytes == 2 * (64 * 64 * 320 + 32 * 32 * 320 + 320 * 320 * 9 + 320)
    gemv = BY_NAME["gemv/q8_0-576x49152"]
    assert gemv.flops == 2 * 576 * 49152
    assert gemv.nbytes == 576 * 49152 // 32 * 34 + 4 * (576 + 49152)
    causal = BY_NAME["attention/causal-512"]
    assert causal.flops == sum(4 * 9 * 64 * seen for seen in range(1, 513))


def test_numbers_are_the_same_each_time_and_of_the_type() -> None:
    case = small("linear", "bf16")
    (first, weights), (again, _) = draw(case), draw(case)
    assert len(first) == case.copies > 1
    assert (first[0]["x"] == again[0]["x"]).all() and (first[0]["x"] != first[1]["x"]).any()
    for x in (first[0]["x"], weights["weight"], weights["bias"]):
        assert x.dtype == np.float32 and not (x.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("dtype", BLOCK_FORMATS)
def test_blocks_are_read_as_files_are(dtype: str) -> None:
    from weights.quant import BY_NAME as formats

    blocks = BLOCK_FORMATS[dtype].draw((6, 64), np.random.default_rng(0))
    assert blocks.dtype == np.uint8 and blocks.size == formats[dtype.upper()].size((6, 64))
    read = formats[dtype.upper()].decode(blocks.reshape(-1), (6, 64), "reference").numpy()
    # float32 products and sums, in another order at most
    np.testing.assert_allclose(BLOCK_FORMATS[dtype].values(blocks), read, rtol=1e-6, atol=1e-7)
    assert 0.02 < np.abs(read).max() < 0.2


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_our_operations_equal_numpys(kind: str, dtype: str) -> None:
    side = Menagerie()
    side.load(1, device="reference")
    # float32: sums in another order; bfloat16: the result is rounded, by up to 2**-8 of it
    assert off(side, small(kind, dtype)) < (2**-8 if dtype == "bf16" else 1e-5)


@pytest.mark.peers
@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "packed": True}]
)
@pytest.mark.parametrize("kind", SMALL)
def test_torchs_operations_equal_numpys(kind: str, options: dict) -> None:
    pytest.importorskip("torch", reason="needs the peers extra: torch")
    side = Torch()
    side.load(1, **options)
    dtype = "f32" if options["dtype"] == "float32" else "bf16"
    # bfloat16: torch rounds after each of gelu's three steps, by up to 2**-8 each
    assert off(side, small(kind, dtype)) < (3 * 2**-8 if dtype == "bf16" else 1e-5)


def test_side_measures_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)  # a second each look
    side = Numpy()
    side.case = small("softmax", "f32")
    assert side.case.copies == 16
    calls = []
    side.run = lambda: calls.append(0)
    us = side.measure(10)
    assert len(calls) == 10  # one to warm up, nine until ten seconds are over
    assert us == pytest.approx(10 / 9 / 16 * 1e6)


def test_side_prepares_saves_and_compares(tmp_path: object) -> None:
    side = Numpy()
    side.load(1)
    side.prepare("gemv/q4_1-576x576")
    path = str(tmp_path / "expected.npy")
    side.save(path)
    assert side.error(path) == 0
    side.result = side.result.copy()
    side.result[0, 0] += 0.5 * np.abs(side.result).max()
    assert math.isclose(side.error(path), 0.5, rel_tol=1e-3)
    side.result = side.result[:, :1]
    with pytest.raises(ValueError, match=r"shape \(1, 1\), not \(1, 576\)"):
        side.error(path)
