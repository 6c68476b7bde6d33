"""What `bench kernels` measures: operations at the sizes that models use, as data.

Every side makes the same numbers from a case: activations and weights are normal, drawn with a
seed of their own, and rounded to the case's type. Activations lie as models keep them, channels
last, and weights as checkpoints do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.dtype import bfloat16_to_float32, float32_to_bfloat16

ITEMSIZE = {"f32": 4.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_1": 20 / 32}
SHORT_S, MOST_COPIES = 2e-3, 16  # steps that are shorter are repeated, so often at most

OURS, NUMPY = "menagerie", "numpy"
F32, BF16, BF16_PACKED = "torch f32", "torch bf16", "torch bf16 packed"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from NumPy's in float32, as a part of its largest value, and why."""

    value: float
    reason: str


EXACT = Tolerance(2e-5, "float32 throughout, summed in another order")
HALVES = Tolerance(1e-2, "results (and attention's weights) are rounded to bfloat16, by 1/512")
BLOCKS = Tolerance(1e-2, "activations, and torch's weights, are rounded to bfloat16 or int8 twice")
CHAIN = Tolerance(2e-2, "torch rounds each of the chain's three steps to bfloat16")
WINOGRAD = Tolerance(2e-4, "float32, but Winograd's transforms cost two digits")


@dataclass(frozen=True)
class Case:
    """One operation. `kind` names what the sides do; `dtype` is that of weights or of all.

    flops counts a multiplication and an addition as two, a convolution as if done directly.
    """

    name: str
    kind: str
    dtype: str
    activations: dict[str, Shape]
    weights: dict[str, Shape]
    result: Shape
    peers: tuple[str, ...]
    tolerance: Tolerance
    flops: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def is_quantised(self) -> bool:
        return self.dtype.startswith("q")

    @property
    def held(self) -> str:
        """The type of activations and result: float32 beside quantised weights."""
        return "f32" if self.is_quantised else self.dtype

    @property
    def moved(self) -> float:
        """Bytes of activations and result."""
        shapes = (*self.activations.values(), self.result)
        return sum(map(math.prod, shapes)) * ITEMSIZE[self.held]

    @property
    def nbytes(self) -> float:
        """Bytes that one step has to touch: activations, weights and result, each once."""
        return self.moved + sum(map(math.prod, self.weights.values())) * ITEMSIZE[self.dtype]

    @property
    def copies(self) -> int:
        """Steps timed as one call, with activations of their own and the same weights.

        A model's program has hundreds of steps, so that starting it weighs little on each.
        """
        estimate = self.flops / (2e11 if self.dtype == "f32" else 1e12) + self.nbytes / 3e10
        return max(1, min(MOST_COPIES, round(SHORT_S / estimate)))


def draw(case: Case) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """(activations of each copy, weights), float32; quantised weights as their file's blocks."""
    source = np.random.default_rng(zlib.crc32(case.name.encode()))
    weights = {k: _weight(case, s, source) for k, s in case.weights.items()}
    activations = [
        {k: _rounded(_normal(source, s), case.held) for k, s in case.activations.items()}
        for _ in range(case.copies)
    ]
    return activations, weights


def _weight(case: Case, shape: Shape, source: np.random.Generator) -> np.ndarray:
    if case.is_quantised:
        return BLOCK_FORMATS[case.dtype].draw(shape, source)
    spread = math.sqrt(math.prod(shape[1:]))  # so that sums are about 1
    return _rounded(_normal(source, shape) / np.float32(spread), case.dtype)


def _normal(source: np.random.Generator, shape: Shape) -> np.ndarray:
    return source.standard_normal(shape, dtype=np.float32)


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_to_float32(float32_to_bfloat16(x)) if dtype == "bf16" else x


@dataclass(frozen=True)
class BlockFormat:
    """draw(shape, source) gives blocks (…, n / 32, bytes) uint8, values(blocks) what they mean."""

    draw: Callable[[Shape, np.random.Generator], np.ndarray]
    values: Callable[[np.ndarray], np.ndarray]


def _draw_q8_0(shape: Shape, source: np.random.Generator) -> np.ndarray:
    count = (*shape[:-1], shape[-1] // 32)
    q = source.integers(-127, 128, (*count, 32), dtype=np.int8)
    return np.concatenate([_scales(source, count, 127), q.view(np.uint8)], -1)


def _values_q8_0(blocks: np.ndarray) -> np.ndarray:
    q = blocks[..., 2:].view(np.int8) * _half(blocks, 0)
    return q.reshape(*blocks.shape[:-2], -1)


def _draw_q4_1(shape: Shape, source: np.random.Generator) -> np.ndarray:
    count = (*shape[:-1], shape[-1] // 32)
    scale = _scales(source, count, 7.5)
    least = (scale.view(np.float16) * np.float16(-7.5)).view(np.uint8)
    q = source.integers(0, 256, (*count, 16), dtype=np.uint8)
    return np.concatenate([scale, least, q], -1)


def _values_q4_1(blocks: np.ndarray) -> np.ndarray:
    q = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
    return (q * _half(blocks, 0) + _half(blocks, 2)).reshape(*blocks.shape[:-2], -1)


def _scales(source: np.random.Generator, count: Shape, largest: float) -> np.ndarray:
    """Half-precision scales as bytes, such that values are up to about 0.1."""
    scales = source.uniform(0.05 / largest, 0.1 / largest, (*count, 1))
    return scales.astype(np.float16).view(np.uint8)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


BLOCK_FORMATS = {
    "q8_0": BlockFormat(_draw_q8_0, _values_q8_0),
    "q4_1": BlockFormat(_draw_q4_1, _values_q4_1),
}


# --- the cases -------------------------------------------------------------------------------


def _gemm(n: int, dtype: str) -> Case:
    peers = (F32, NUMPY) if dtype == "f32" else (BF16, BF16_PACKED)
    return Case(
        f"gemm/{dtype}-{n}", "gemm", dtype, {"x": (n, n)}, {"weight": (n, n)}, (n, n), peers,
        EXACT if dtype == "f32" else HALVES, 2 * n**3,
    )  # fmt: skip


def _quantised(family: str, rows: int, ins: int, outs: int, dtype: str) -> Case:
    return Case(
        f"{family}/{dtype}-{ins}x{outs}", "linear", dtype, {"x": (rows, ins)},
        {"weight": (outs, ins)}, (rows, outs), (BF16,), BLOCKS, 2 * rows * ins * outs,
    )  # fmt: skip


def _conv(size: int, ins: int, batch: int = 1, stride: int = 1, dtype: str = "bf16") -> Case:
    name = f"conv/{dtype}-{ins}@{size}" + (f"-b{batch}" if batch > 1 else "")
    shape = (batch, size, size, ins)
    result = (batch, size // stride, size // stride, ins)
    return Case(
        name + (f"-s{stride}" if stride > 1 else ""), "conv", dtype, {"x": shape},
        {"weight": (ins, ins, 3, 3), "bias": (ins,)}, result,
        (F32,) if dtype == "f32" else (BF16_PACKED,), WINOGRAD if dtype == "f32" else HALVES,
        2 * math.prod(result) * ins * 9, {"stride": stride},
    )  # fmt: skip


def _linear(rows: int, ins: int, outs: int, silu: bool) -> Case:
    return Case(
        f"linear{'-silu' if silu else ''}/bf16-{rows}x{ins}x{outs}", "linear", "bf16",
        {"x": (rows, ins)}, {"weight": (outs, ins), "bias": (outs,)}, (rows, outs),
        (BF16_PACKED,), HALVES, 2 * rows * ins * outs, {"silu": silu},
    )  # fmt: skip


def _attention(
    name: str, batch: int, queries: int, keys: int, heads: int, groups: int, depth: int,
    causal: bool = False,
) -> Case:  # fmt: skip
    q, kv = (batch, queries, heads, depth), (batch, keys, groups, depth)
    pairs = queries * (queries + 1) // 2 if causal else queries * keys
    return Case(
        f"attention/{name}", "attention", "bf16", {"q": q, "k": kv, "v": kv}, {}, q, (BF16,),
        HALVES, 4 * batch * heads * pairs * depth, {"causal": causal},
    )  # fmt: skip


def _rows(name: str, dtype: str, shape: Shape, *weights: str) -> Case:
    given = dict.fromkeys(weights, (shape[-1],))
    peers, tolerance = ((F32, NUMPY), EXACT) if dtype == "f32" else ((BF16,), HALVES)
    return Case(
        f"norm/{name}-{dtype}", name, dtype, {"x": shape}, given, shape, peers, tolerance
    )  # fmt: skip


def _gelu(dtype: str) -> Case:
    peers, tolerance = ((F32, NUMPY), EXACT) if dtype == "f32" else ((BF16,), CHAIN)
    shape = (1 << 20,)
    given = {"x": shape, "y": shape}
    return Case(f"elementwise/gelu-{dtype}", "gelu", dtype, given, {}, shape, peers, tolerance)


CASES = (
    *(_gemm(n, dtype) for dtype in ("f32", "bf16") for n in (512, 1024, 2048)),
    _quantised("gemv", 1, 576, 49152, "q8_0"),
    *(_quantised("gemv", 1, *s, "q4_1") for s in ((576, 1536), (1536, 576), (576, 576))),
    *(_quantised("prefill", 512, *s, "q4_1") for s in ((576, 1536), (1536, 576), (576, 576))),
    *(_conv(n, c, b) for n, c in ((64, 320), (32, 640), (16, 1280)) for b in (1, 2)),
    _conv(64, 512),
    _conv(512, 128),
    _conv(64, 320, stride=2),
    _conv(32, 640, stride=2),
    _conv(64, 320, dtype="f32"),
    *(
        _linear(*s, silu)
        for silu in (False, True)
        for s in ((4096, 320, 320), (4096, 320, 2560), (1024, 640, 640))
    ),
    _attention("whisper-6", 1, 1500, 1500, 6, 6, 64),
    _attention("whisper-8", 1, 1500, 1500, 8, 8, 64),
    _attention("sd-self", 2, 4096, 4096, 8, 8, 40),
    _attention("sd-cross", 2, 4096, 77, 8, 8, 40),
    _attention("causal-512", 1, 512, 512, 9, 3, 64, causal=True),
    *(_rows("softmax", d, (1500, 1536)) for d in ("f32", "bf16")),
    *(_rows("rmsnorm", d, (1024, 1024), "weight") for d in ("f32", "bf16")),
    *(_rows("layernorm", d, (2 * 64 * 64, 320), "weight", "bias") for d in ("f32", "bf16")),
    *(_rows("groupnorm-silu", d, (2, 64, 64, 320), "weight", "bias") for d in ("f32", "bf16")),
    *(_gelu(d) for d in ("f32", "bf16")),
)
