"""Element types, how they promote, and how NumPy arrays carry them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)  # each is one object, and they are hashed all the time
class DType:
    """One element type: `itemsize` in bytes; `kind` is "f"loat, "i"nt, "u"nsigned or "b"ool."""

    name: str
    itemsize: int
    kind: str
    rank: int  # position in the promotion order

    def __repr__(self) -> str:
        return self.name

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iu"

    @property
    def numpy(self) -> np.dtype:
        """The NumPy type that holds the same bytes; bfloat16 has none and travels as uint16."""
        return np.dtype("uint16" if self is bfloat16 else self.name)

    @property
    def bits(self) -> int:
        return self.itemsize * 8

    @property
    def min(self) -> int | float:
        """The value that loses every `maximum`: the identity of REDUCE(MAX)."""
        if self.is_float:
            return -float("inf")
        return -(1 << (self.bits - 1)) if self.kind == "i" else 0


bool_ = DType("bool", 1, "b", 0)
uint8 = DType("uint8", 1, "u", 1)
int8 = DType("int8", 1, "i", 2)
uint16 = DType("uint16", 2, "u", 3)
int16 = DType("int16", 2, "i", 4)
uint32 = DType("uint32", 4, "u", 5)
int32 = DType("int32", 4, "i", 6)
uint64 = DType("uint64", 8, "u", 7)
int64 = DType("int64", 8, "i", 8)
float16 = DType("float16", 2, "f", 9)
bfloat16 = DType("bfloat16", 2, "f", 10)
float32 = DType("float32", 4, "f", 11)

ALL = (
    bool_,
    uint8,
    int8,
    uint16,
    int16,
    uint32,
    int32,
    uint64,
    int64,
    float16,
    bfloat16,
    float32,
)
BY_NAME = {d.name: d for d in ALL}


def promote(a: DType, b: DType) -> DType:
    """The type of `a op b`, by NumPy's rules for ints; any float beside an int wins as it is.

    Two different halves, and a signed beside an unsigned of the same size, widen one step.
    There is no float64: uint64 beside a signed int gives int64.
    """
    if a is b:
        return a
    low, high = (a, b) if a.rank < b.rank else (b, a)
    if high.is_float:
        return float32 if low is float16 and high is bfloat16 else high
    if low.kind == high.kind or low is bool_ or (low.kind == "u" and low.itemsize < high.itemsize):
        return high
    return BY_NAME[f"int{min(64, 2 * high.bits)}"]  # a signed int beside a wider unsigned


def from_numpy(array_dtype: np.dtype) -> DType:
    """The engine's type for a NumPy array's; float64 is read as float32."""
    name = np.dtype(array_dtype).name
    if name == "float64":
        return float32
    if name not in BY_NAME:
        raise TypeError(f"no engine type for NumPy's {name}; cast to one of {', '.join(BY_NAME)}")
    return BY_NAME[name]


def float32_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 -> the uint16 bits of bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """The uint16 bits of bfloat16 -> float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
