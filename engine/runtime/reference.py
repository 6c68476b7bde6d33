"""The NumPy backend: evaluates each kernel's graph directly. Slow, plain, and the oracle.

Halves are held as float32 between a load and a store, as generated code holds them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np

from engine import dtype as dt
from engine.dtype import DType
from engine.graph import Node, Op, toposort
from engine.runtime import DEBUG, Found, Step
from engine.symbolic import Expr, Int, evaluate

BINARY = {
    Op.ADD: np.add,
    Op.MUL: np.multiply,
    Op.MAX: np.maximum,
    Op.IDIV: np.floor_divide,
    Op.MOD: np.remainder,
    Op.CMPLT: np.less,
    Op.CMPNE: np.not_equal,
    Op.AND: np.bitwise_and,
    Op.OR: np.bitwise_or,
    Op.XOR: np.bitwise_xor,
    Op.SHL: np.left_shift,
    Op.SHR: np.right_shift,
}
UNARY = {
    Op.RECIP: lambda x: np.float32(1) / x,
    Op.SQRT: np.sqrt,
    Op.EXP2: np.exp2,
    Op.LOG2: np.log2,
    Op.SIN: np.sin,
    Op.TRUNC: np.trunc,
}


class ReferenceDevice:
    """Handles are uint8 arrays; an executable is the kernel itself."""

    name = "reference"
    identity = "reference"
    target = None
    fresh_is_zero = True

    def allocate(self, nbytes: int, large_pages: bool = False) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def part(self, handle: np.ndarray, offset: int, nbytes: int) -> np.ndarray:
        return handle[offset : offset + nbytes]

    def wrap(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(-1).view(np.uint8)

    def read(self, handle: np.ndarray, nbytes: int) -> np.ndarray:
        return handle[:nbytes].copy()

    def write(self, handle: np.ndarray, data: np.ndarray) -> None:
        handle[: data.nbytes] = data.reshape(-1).view(np.uint8)

    def copy(self, source: np.ndarray, target: np.ndarray, nbytes: int) -> None:
        target[:nbytes] = source[:nbytes]

    def forget(self, handle: np.ndarray) -> None:
        pass

    def prepare(self, steps: Sequence[Step]) -> None:
        pass

    def replay(self, steps: Sequence[Step], repeated: bool) -> _Replay:
        return _Replay(list(steps))


class _Replay:
    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    def __call__(self, values: Mapping[Expr, int]) -> None:
        with np.errstate(all="ignore"):
            for step in self.steps:
                begun = time.perf_counter()
                _run(step, values)
                if DEBUG >= 1:
                    taken = (time.perf_counter() - begun) * 1e6
                    print(step.report(taken, values), file=sys.stderr)


def _run(step: Step, values: Mapping[Expr, int]) -> None:
    kernel = step.function
    result = _evaluate(kernel.root, step.buffers, values)
    target = kernel.target
    shape = _numbers(target.shape, values)
    whole = step.buffers[target.arg[0]].view(target.dtype.numpy)[: int(np.prod(shape))]
    whole = whole.reshape(shape)
    if kernel.rows is not None:
        rows = _evaluate(kernel.rows, step.buffers, values)
        whole[np.clip(rows, 0, shape[0] - 1)] = store(result, target.dtype)
        return
    box = [(0, n) for n in shape] if kernel.box is None else kernel.box
    ranges = tuple(slice(*_numbers(pair, values)) for pair in box)
    whole[ranges] = store(result, target.dtype)


def load(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Bytes in memory -> values to calculate with."""
    if dtype is dt.bfloat16:
        return dt.bfloat16_to_float32(stored)
    return stored.astype(np.float32) if dtype is dt.float16 else stored


def store(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Values -> what lies in memory."""
    if dtype is dt.bfloat16:
        return dt.float32_to_bfloat16(values)
    return values.astype(dtype.numpy)


def _numbers(shape: Sequence[Int], values: Mapping[Expr, int]) -> tuple[int, ...]:
    return tuple(evaluate(n, values) for n in shape)


def _evaluate(root: Node, buffers: Sequence[np.ndarray], values: Mapping[Expr, int]) -> np.ndarray:
    done: dict[Node, np.ndarray] = {}
    order = toposort([root])
    last = {s: n for n in order for s in n.src}  # where a value is needed for the last time
    for node in order:
        if node.op is Op.BUFFER:
            shape = _numbers(node.shape, values)
            raw = buffers[node.arg[0]].view(node.dtype.numpy)[: int(np.prod(shape))]
            done[node] = load(raw.reshape(shape), node.dtype)
        else:
            done[node] = _apply(node, [done[s] for s in node.src], values)
        for s in set(node.src):
            if last[s] is node and s is not root:
                del done[s]
    return done[root]


def _apply(node: Node, src: list[np.ndarray], values: Mapping[Expr, int]) -> np.ndarray:
    match node.op:
        case Op.CONST:
            value = evaluate(node.arg, values) if isinstance(node.arg, Expr) else node.arg
            kind = np.float32 if node.dtype.is_float else node.dtype.numpy
            return np.asarray(value).astype(kind)
        case Op.IOTA:
            return np.arange(evaluate(node.shape[0], values), dtype=np.int32)
        case Op.RESHAPE:
            return src[0].reshape(_numbers(node.shape, values))
        case Op.PERMUTE:
            return src[0].transpose(node.arg)
        case Op.EXPAND:
            return np.broadcast_to(src[0], _numbers(node.shape, values))
        case Op.PAD:
            return np.pad(src[0], [_numbers(pair, values) for pair in node.arg])
        case Op.SHRINK:
            return src[0][tuple(slice(*_numbers(pair, values)) for pair in node.arg)]
        case Op.FLIP:
            return np.flip(src[0], node.arg)
        case Op.CAST:
            return _cast(src[0], node.dtype)
        case Op.BITCAST:
            stored = np.ascontiguousarray(store(src[0], node.src[0].dtype))
            return load(stored.view(node.dtype.numpy), node.dtype)
        case Op.WHERE:
            return np.where(*src)
        case Op.REDUCE:
            kind, axes = node.arg
            if kind == "max":
                return src[0].max(axes, keepdims=True)
            return src[0].sum(axes, keepdims=True, dtype=src[0].dtype)
        case Op.GATHER:
            limit = src[0].shape[node.arg] - 1
            return np.take(src[0], np.clip(src[1], 0, limit), axis=node.arg)
    if node.op in UNARY:
        return UNARY[node.op](src[0])
    return BINARY[node.op](src[0], src[1])


def _cast(x: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype in (dt.float16, dt.bfloat16):
        return load(store(x.astype(np.float32), dtype), dtype)
    if x.dtype.kind == "f" and dtype.is_int:  # truncate, then wrap: what C does for values in range
        return np.trunc(x).astype(np.int64).astype(dtype.numpy)
    return x.astype(dtype.numpy)


def devices() -> list[Found]:
    """The one that is always there."""
    return [Found("reference", "NumPy", f"NumPy {np.__version__}", 0)]
