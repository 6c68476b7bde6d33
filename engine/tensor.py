"""Tensor: what users hold. Every method only builds graph nodes; nothing runs until it is read."""

from __future__ import annotations

import builtins
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as numbered
from typing import Any

import numpy as np

from engine import dtype as dt
from engine import graph as g
from engine.dtype import DType
from engine.graph import Node, Op, ShapeError, Storage
from engine.realize import realize
from engine.runtime import LOCK, default_device, get_device
from engine.symbolic import Expr, Int, bounds, product, upper
from engine.windows import windows

Scalar = int | float | bool | Expr

LONG_SUM, PART_SUM = 1 << 16, 1 << 12  # elements: from where on a sum is made in parts, and of what
# tanh(x) / x in x²; the square of where it is as good as 1
TANH_P = (1.3265823e-8, 2.0545087e-5, 3.4917018e-3, 0.13377753, 1.0)
TANH_Q = (7.740238e-7, 3.2792776e-4, 0.025862198, 0.4671107, 1.0)
TANH_END = 81.9

_births = numbered()  # tells a program which tensors were there before its capture
_pending: dict[int, weakref.ref[Tensor]] = {}  # tensors with writes that haven't run


@dataclass
class Recorder:
    """What a program's capture must know: the tensors written to, and when it began."""

    written: list[Tensor] = field(default_factory=list)
    before: list[tuple[Tensor, Node]] = field(default_factory=list)  # what each was at first
    begun: int = field(default_factory=lambda: next(_births))

    def undo(self) -> None:
        """The capture failed: tensors are what they were."""
        for tensor, node in self.before:
            tensor.node = node


class _Captures(threading.local):
    """The captures under way in this thread: what other threads do meanwhile is no part of them."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


captures = _Captures()


def flush() -> None:
    """Run all writes that wait, so that a program's kernels find them done."""
    waiting = [t for ref in list(_pending.values()) if (t := ref()) is not None]
    _pending.clear()
    for t in waiting:
        t.realize()


class Tensor:
    """A lazy n-dimensional array on one device.

    `shape` is a tuple of ints and symbolic ints. Operators broadcast and promote as in NumPy,
    except that there is no float64 and a Python number takes the tensor's type.
    """

    __slots__ = ("__weakref__", "_left", "_node", "born", "device")
    __array_priority__ = 100  # NumPy leaves `array op tensor` to us

    def __init__(self, data: Any, dtype: DType | None = None, device: str | None = None) -> None:
        self.device = device or default_device()
        self.born = next(_births)
        if isinstance(data, Node):
            self.node = data
            return
        if isinstance(data, (bool, int, float, Expr)):
            self.node = g.const(data, dtype or _scalar_dtype(data))
            return
        array = np.array(data, order="C")  # a copy: the caller may go on writing to theirs
        if array.dtype.kind == "f" and not isinstance(data, (np.ndarray, np.generic)):
            array = array.astype(np.float32)
        if array.dtype == np.int64 and not isinstance(data, (np.ndarray, np.generic)):
            if not array.size or (abs(array) < 1 << 31).all():
                array = array.astype(np.int32)
        self.node = _load(array, self.device, constant=False)
        if dtype is not None:
            self.node = g.cast(self.node, dtype)

    @staticmethod
    def from_numpy(
        array: np.ndarray, device: str | None = None, dtype: DType | None = None
    ) -> Tensor:
        """A constant over the array's own memory, without a copy where the device can read it.

        The array must stay as it is. dtype bfloat16 reads a uint16 array as those bits.
        """
        device = device or default_device()
        return Tensor(_load(array, device, constant=True, dtype=dtype), device=device)

    @property
    def node(self) -> Node:
        """The graph node that this tensor stands for."""
        if self._node is None:
            left, version = self._left
            self._node = g.make(Op.BUFFER, (), (left.arg[0], version), left.dtype, left.shape)
        return self._node

    @node.setter
    def node(self, node: Node) -> None:
        self._node = node

    def left_in(self, node: Node) -> None:
        """Become what a program's run left in a BUFFER's storage.

        The node with the storage's present version is made when somebody asks for it: a reply's
        program leaves dozens of states with each token, and nobody looks at them.
        """
        self._left, self._node = (node, node.arg[0].version), None

    def lies_in(self, storage: Storage) -> bool:
        """Whether this is computed, and its values are those of a version of `storage`."""
        if self._node is None:
            return self._left[0].arg[0] is storage
        return self._node.op is Op.BUFFER and self._node.arg[0] is storage

    # --- making ------------------------------------------------------------------------------

    @staticmethod
    def full(
        shape: Sequence[Int], value: Scalar, dtype: DType | None = None, device: str | None = None
    ) -> Tensor:
        return Tensor(g.const(value, dtype or _scalar_dtype(value), tuple(shape)), device=device)

    @staticmethod
    def zeros(*shape: Int, dtype: DType = dt.float32, device: str | None = None) -> Tensor:
        return Tensor.full(_sizes(shape), 0, dtype, device)

    @staticmethod
    def ones(*shape: Int, dtype: DType = dt.float32, device: str | None = None) -> Tensor:
        return Tensor.full(_sizes(shape), 1, dtype, device)

    @staticmethod
    def arange(n: Int, dtype: DType = dt.int32, device: str | None = None) -> Tensor:
        """0, 1, … n-1."""
        if isinstance(n, int) and n == 0:
            return Tensor.zeros(0, dtype=dtype, device=device)
        return Tensor(g.cast(g.iota(n), dtype), device=device)

    def _new(self, node: Node) -> Tensor:
        return Tensor(node, device=self.device)

    # --- reading -----------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[Int, ...]:
        return self.node.shape

    @property
    def dtype(self) -> DType:
        return self.node.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Int:
        return product(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Tensor({list(self.shape)}, {self.dtype}, {self.device})"

    def __bool__(self) -> bool:
        return bool(self.item())

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    __hash__ = object.__hash__

    def realize(self, *others: Tensor) -> Tensor:
        """Compute it now, and the others in the same go; return self."""
        lazy = [t for t in (self, *others) if t.node.op is not Op.BUFFER]
        if lazy:
            for t, node in zip(lazy, realize([t.node for t in lazy], self.device)):
                t.node = node
        return self

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array of the same shape; bfloat16 comes as float32."""
        self.realize()
        count = product(self.shape)
        if isinstance(count, Expr):
            raise ValueError(f"a tensor of symbolic shape {list(self.shape)} can't be read whole")
        with LOCK:
            storage, version = self.node.arg
            if version != storage.version:
                raise ValueError(
                    "a tensor is read after its buffer was overwritten; "
                    "realize() it before the write"
                )
            raw = get_device(self.device).read(storage.data, count * self.dtype.itemsize)
        array = raw.view(self.dtype.numpy).reshape(self.shape)
        return dt.bfloat16_to_float32(array) if self.dtype is dt.bfloat16 else array

    def item(self) -> int | float | bool:
        """The one value of a tensor with one element."""
        if self.numel != 1:
            raise ShapeError(f"item: a tensor of shape {list(self.shape)} has {self.numel} values")
        return self.numpy().reshape(()).item()

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def to(self, device: str) -> Tensor:
        """A copy on another device."""
        if device == self.device:
            return self
        array = self.numpy()
        copied = _load(array, device, constant=False)
        return Tensor(g.cast(copied, self.dtype), device=device)

    def contiguous(self) -> Tensor:
        """The same values in a buffer of their own, which may then be written to."""
        return self._new(g.copy(self.node))

    # --- movement ----------------------------------------------------------------------------

    def reshape(self, *shape: Int) -> Tensor:
        sizes = _sizes(shape)
        if any(isinstance(n, int) and n < -1 for n in sizes):
            raise ShapeError(f"reshape: {list(sizes)} has a negative size")
        if -1 in sizes:
            known = product(n for n in sizes if n != -1)
            if sizes.count(-1) > 1 or (isinstance(known, int) and known == 0):
                raise ShapeError(f"reshape: can't tell -1 in {list(sizes)} for {list(self.shape)}")
            sizes = tuple(self.numel // known if n == -1 else n for n in sizes)
        return self._new(g.reshape(self.node, sizes))

    def permute(self, *axes: int) -> Tensor:
        return self._new(g.permute(self.node, tuple(_axis(a, self.ndim) for a in _sizes(axes))))

    def transpose(self, a: int = -2, b: int = -1) -> Tensor:
        axes = list(range(self.ndim))
        a, b = _axis(a, self.ndim), _axis(b, self.ndim)
        axes[a], axes[b] = axes[b], axes[a]
        return self.permute(*axes)

    @property
    def T(self) -> Tensor:
        return self.permute(*reversed(range(self.ndim)))

    def expand(self, *shape: Int) -> Tensor:
        """Broadcast to shape; -1 keeps an axis."""
        sizes = _sizes(shape)
        node = self._lead(len(sizes))
        sizes = tuple(n if n != -1 else m for n, m in zip(sizes, node.shape))
        return self._new(g.expand(node, sizes))

    def _lead(self, rank: int) -> Node:
        """The node with axes of size 1 put in front, up to `rank`."""
        return g.reshape(self.node, (1,) * (rank - self.ndim) + self.shape)

    def pad(self, amounts: Sequence[tuple[Int, Int]], value: Scalar = 0) -> Tensor:
        """(before, after) new elements on each axis."""
        pairs = tuple((b, a) for b, a in amounts)
        padded = self._new(g.pad(self.node, pairs))
        if isinstance(value, (int, float)) and value == 0:
            return padded
        inside = g.pad(g.const(True, dt.bool_, self.shape), pairs)
        return Tensor.where(self._new(inside), padded, value)

    def shrink(self, ranges: Sequence[tuple[Int, Int]]) -> Tensor:
        return self._new(g.shrink(self.node, tuple((s, e) for s, e in ranges)))

    def flip(self, *axes: int) -> Tensor:
        return self._new(g.flip(self.node, tuple(_axis(a, self.ndim) for a in _sizes(axes))))

    def unsqueeze(self, axis: int) -> Tensor:
        axis = axis + self.ndim + 1 if axis < 0 else axis
        return self.reshape(*self.shape[:axis], 1, *self.shape[axis:])

    def squeeze(self, axis: int | None = None) -> Tensor:
        if axis is None:
            return self.reshape(*(n for n in self.shape if n != 1))
        axis = _axis(axis, self.ndim)
        if self.shape[axis] != 1:
            raise ShapeError(f"squeeze: axis {axis} of {list(self.shape)} isn't 1")
        return self.reshape(*self.shape[:axis], *self.shape[axis + 1 :])

    def flatten(self, start: int = 0) -> Tensor:
        return self.reshape(*self.shape[:start], product(self.shape[start:]))

    def windows(
        self,
        axes: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
        dilations: Sequence[int],
    ) -> Tensor:
        """Windows that slide along axes, overlapping, without a copy.

        An axis of N becomes (N - dilation * (size - 1) - 1) // stride + 1 places of its window; the
        windows are new axes at the end: element k of the one at y is y * stride + k * dilation.
        Raises ShapeError if a window doesn't fit its axis.
        """
        places = [_axis(a, self.ndim) for a in axes]
        return self._new(windows(self.node, places, sizes, strides, dilations))

    @staticmethod
    def cat(*tensors: Tensor, axis: int = 0) -> Tensor:
        """Tensors one after the other along an axis."""
        if not tensors:
            raise ShapeError("cat: no tensors")
        axis = _axis(axis, tensors[0].ndim)
        dtype = tensors[0].dtype
        for t in tensors[1:]:
            dtype = dt.promote(dtype, t.dtype)
            if t.shape[:axis] + t.shape[axis + 1 :] != (
                tensors[0].shape[:axis] + tensors[0].shape[axis + 1 :]
            ):
                raise ShapeError(f"cat: {list(tensors[0].shape)} and {list(t.shape)} on {axis}")
        total = sum((t.shape[axis] for t in tensors[1:]), start=tensors[0].shape[axis])
        out: Tensor | None = None
        start: Int = 0
        for t in tensors:
            end = start + t.shape[axis]
            amounts = [(0, 0)] * t.ndim
            amounts[axis] = (start, total - end)
            padded = t.cast(dtype).pad(amounts)
            out = padded if out is None else Tensor.where(_from(t, axis, start, total), padded, out)
            start = end
        return out

    @staticmethod
    def stack(*tensors: Tensor, axis: int = 0) -> Tensor:
        axis = axis + tensors[0].ndim + 1 if axis < 0 else axis
        return Tensor.cat(*(t.unsqueeze(axis) for t in tensors), axis=axis)

    def split(self, *sizes: int, axis: int = 0) -> tuple[Tensor, ...]:
        """Pieces of the given sizes along an axis."""
        axis = _axis(axis, self.ndim)
        out = []
        start: Int = 0
        for n in _sizes(sizes):
            ranges = [(0, m) for m in self.shape]
            ranges[axis] = (start, start + n)
            out.append(self.shrink(ranges))
            start = start + n
        return tuple(out)

    def __getitem__(self, key: Any) -> Tensor:
        keys = _full_key(key, self.ndim, self.device)
        indices = [k for k in keys if isinstance(k, Tensor)]
        if len(indices) > 1:
            raise TypeError("indexing takes one Tensor at most")
        ranges, shape, flips, gathered = _plan_index(keys, self.shape)
        node = g.flip(g.shrink(self.node, ranges), flips)
        out = self._new(g.reshape(node, shape))
        if gathered is not None:
            index = indices[0]
            n = out.shape[gathered]
            if index.device != out.device:
                out, index = _one_device(out, index)
            if index.dtype.kind == "i":
                index = index.cast(dt.promote(index.dtype, dt.int32))
                index = Tensor.where(index < 0, index + n, index)
            out = out._new(g.gather(out.node, index.node, gathered))
        return out

    def __setitem__(self, key: Any, value: Tensor | Scalar) -> None:
        """Write into a box of this tensor; whoever reads the tensor later sees it."""
        keys = _full_key(key, self.ndim, self.device)
        if any(k is None or isinstance(k, Tensor) for k in keys):
            raise TypeError("assignment takes ints and slices only")
        ranges, shape, flips, _ = _plan_index(keys, self.shape)
        if flips:
            raise TypeError("assignment takes slices with step 1 only")
        value = value if isinstance(value, Tensor) else Tensor(value, self.dtype, self.device)
        box = tuple(end - start for start, end in ranges)
        new = g.reshape(value.cast(self.dtype).expand(*shape).node, box)
        self._written(lambda base: g.assign(base, new, ranges))

    def _written(self, write: Callable[[Node], Node]) -> None:
        """Become what `write` makes of this tensor's present node."""
        for r in captures.recorders:  # a program's state is made once, not anew in each replay
            if self.born < r.begun and all(t is not self for t in r.written):
                self.realize()
                r.before.append((self, self.node))
        own = self.node.op in (Op.BUFFER, Op.ASSIGN, Op.CONTIGUOUS) and not _is_constant(self.node)
        self.node = write(self.node if own else g.copy(self.node))
        for recorder in captures.recorders:
            recorder.written.append(self)
        if not captures.recorders:
            _pending[id(self)] = weakref.ref(self)

    def put(self, index: Tensor, value: Tensor) -> None:
        """Write value (M, D) into slices of the last axis, which index (M,) names by number.

        The slices are numbered through all other axes; a number outside is clamped.
        """
        new = value.cast(self.dtype).node
        self._written(lambda base: g.scatter(base, new, index.cast(dt.int32).node))

    # --- elementwise -------------------------------------------------------------------------

    def cast(self, dtype: DType) -> Tensor:
        return self._new(g.cast(self.node, dtype))

    def float(self) -> Tensor:
        """As float32, which halves must be before sums."""
        return self.cast(dt.float32)

    def bitcast(self, dtype: DType) -> Tensor:
        """The same bits as another type; the last axis scales with the item size."""
        return self._new(g.bitcast(self.node, dtype))

    def _unary(self, op: Op) -> Tensor:
        x = self if self.dtype.is_float else self.cast(dt.float32)
        return self._new(g.unary(op, x.node))

    def _binary(self, op: Op, other: Tensor | Scalar, swap: bool = False) -> Tensor:
        a, b = broadcast(self, other)
        if op is Op.CMPLT and a.dtype is dt.bool_:
            a, b = a.cast(dt.uint8), b.cast(dt.uint8)
        if swap:
            a, b = b, a
        return a._new(g.binary(op, a.node, b.node))

    def __add__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary(Op.OR if _both_bool(self, other) else Op.ADD, other)

    def __mul__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary(Op.AND if _both_bool(self, other) else Op.MUL, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Tensor:
        return self * -1

    def __sub__(self, other: Tensor | Scalar) -> Tensor:
        a, b = broadcast(self, other)
        return a + (-b)

    def __rsub__(self, other: Tensor | Scalar) -> Tensor:
        return -self + other

    def __truediv__(self, other: Tensor | Scalar) -> Tensor:
        a, b = broadcast(self, other)
        if not a.dtype.is_float:
            a, b = a.float(), b.float()
        return a * b.reciprocal()

    def __rtruediv__(self, other: Tensor | Scalar) -> Tensor:
        a, b = broadcast(self, other)
        return b / a

    def __floordiv__(self, other: Tensor | Scalar) -> Tensor:
        a, b = broadcast(self, other)
        return (a / b).floor() if a.dtype.is_float else a._binary(Op.IDIV, b)

    def __rfloordiv__(self, other: Tensor | Scalar) -> Tensor:
        a, b = broadcast(self, other)
        return b // a

    def __mod__(self, other: Tensor | Scalar) -> Tensor:
        a, b = broadcast(self, other)
        return a - (a / b).floor() * b if a.dtype.is_float else a._binary(Op.MOD, b)

    def __rmod__(self, other: Tensor | Scalar) -> Tensor:
        a, b = broadcast(self, other)
        return b % a

    def __pow__(self, exponent: Tensor | Scalar) -> Tensor:
        """Small whole powers by multiplication; otherwise exp2(e * log2(x)), NaN below 0."""
        if isinstance(exponent, (int, float)) and exponent == int(exponent) and abs(exponent) <= 8:
            out = Tensor.full(self.shape, 1, self.dtype, self.device)
            for _ in range(abs(int(exponent))):
                out = out * self
            return out if exponent >= 0 else out.reciprocal()
        if isinstance(exponent, float) and exponent == 0.5:
            return self.sqrt()
        return (self.log2() * exponent).exp2()

    def __rpow__(self, base: Tensor | Scalar) -> Tensor:
        a, b = broadcast(self, base)
        return b**a

    def __and__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary(Op.AND, other)

    def __or__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary(Op.OR, other)

    def __xor__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary(Op.XOR, other)

    __rand__ = __and__
    __ror__ = __or__
    __rxor__ = __xor__

    def __invert__(self) -> Tensor:
        return self ^ (True if self.dtype is dt.bool_ else -1)

    def __lshift__(self, other: Tensor | Scalar) -> Tensor:
        """Shift left by 0 … bits-1."""
        return self._binary(Op.SHL, other)

    def __rshift__(self, other: Tensor | Scalar) -> Tensor:
        """Shift right by 0 … bits-1; signed types keep their sign."""
        return self._binary(Op.SHR, other)

    def __lt__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary(Op.CMPLT, other)

    def __gt__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary(Op.CMPLT, other, swap=True)

    def __le__(self, other: Tensor | Scalar) -> Tensor:
        return (self < other) | (self == other)

    def __ge__(self, other: Tensor | Scalar) -> Tensor:
        return (self > other) | (self == other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return self._binary(Op.CMPNE, other)  # type: ignore[arg-type]

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return ~(self != other)

    def reciprocal(self) -> Tensor:
        return self._unary(Op.RECIP)

    def sqrt(self) -> Tensor:
        return self._unary(Op.SQRT)

    def rsqrt(self) -> Tensor:
        return self.sqrt().reciprocal()

    def exp2(self) -> Tensor:
        return self._unary(Op.EXP2)

    def log2(self) -> Tensor:
        return self._unary(Op.LOG2)

    def sin(self) -> Tensor:
        return self._unary(Op.SIN)

    def cos(self) -> Tensor:
        """1 - 2 sin²(x / 2): half an angle is exact, one moved by pi / 2 would be rounded."""
        cosine = (self.float() * 0.5).sin().square() * -2 + 1
        return cosine.cast(self.dtype) if self.dtype.is_float else cosine

    def exp(self) -> Tensor:
        return (self if self.dtype.is_float else self.float()).__mul__(1 / np.log(2)).exp2()

    def log(self) -> Tensor:
        return self.log2() * float(np.log(2))

    def sigmoid(self) -> Tensor:
        x = self if self.dtype.is_float else self.float()
        return ((x * (-1 / np.log(2))).exp2() + 1).reciprocal()

    def tanh(self) -> Tensor:
        """x P(x²) / Q(x²), a minimax fit on -9 … 9: relative error below 4e-7."""
        x = self.float()
        square = x.square()
        square = Tensor.where(square < TANH_END, square, TANH_END)  # from there on it is 1
        out = x * polynomial(square, TANH_P) * polynomial(square, TANH_Q).reciprocal()
        out = out.clip(-1, 1)
        return out.cast(self.dtype) if self.dtype.is_float else out

    def relu(self) -> Tensor:
        return self.maximum(0)

    def square(self) -> Tensor:
        return self * self

    def abs(self) -> Tensor:
        return self if self.dtype.kind in "ub" else self.maximum(-self)

    def maximum(self, other: Tensor | Scalar) -> Tensor:
        return self._binary(Op.OR if _both_bool(self, other) else Op.MAX, other)

    def minimum(self, other: Tensor | Scalar) -> Tensor:
        a, b = broadcast(self, other)
        never_nan = isinstance(other, (int, float)) and other == other
        if a.dtype.is_float and not never_nan:
            return -((-a).maximum(-b))
        return Tensor.where(b < a, b, a)

    def clip(self, low: Scalar, high: Scalar) -> Tensor:
        return self.maximum(low).minimum(high)

    def trunc(self) -> Tensor:
        return self._new(g.unary(Op.TRUNC, self.node)) if self.dtype.is_float else self

    def floor(self) -> Tensor:
        down = self.trunc()
        return Tensor.where(self < down, down - 1, down) if self.dtype.is_float else self

    def ceil(self) -> Tensor:
        up = self.trunc()
        return Tensor.where(self > up, up + 1, up) if self.dtype.is_float else self

    def round(self) -> Tensor:
        """To the nearest whole number, halves to even."""
        if not self.dtype.is_float:
            return self
        near = (self + 0.5).floor()
        odd = (near * 0.5).floor() * 2 != near
        return Tensor.where((near - self == 0.5) & odd, near - 1, near)

    @staticmethod
    def where(condition: Tensor, a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor:
        """a where the condition holds, else b; all three broadcast."""
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            a = Tensor(a, device=condition.device)
        if isinstance(a, Tensor):
            a, b = broadcast(a, b)
        else:
            b, a = broadcast(b, a)
        if condition.device != a.device:
            condition, a = _one_device(condition, a)
        shape = broadcast_shape(condition.shape, a.shape)
        node = g.where(
            condition.cast(dt.bool_).expand(*shape).node,
            a.expand(*shape).node,
            b.expand(*shape).node,
        )
        return a._new(node)

    # --- reductions --------------------------------------------------------------------------

    def _reduce(self, kind: str, axis: int | Sequence[int] | None, keepdim: bool) -> Tensor:
        if axis is None:
            axes = tuple(range(self.ndim))
        else:
            axes = tuple(_axis(a, self.ndim) for a in ((axis,) if isinstance(axis, int) else axis))
        if len(set(axes)) != len(axes):
            raise ShapeError(f"an axis is named twice in {axes}")
        inside = self.dtype
        if inside in (dt.float16, dt.bfloat16):
            inside = dt.float32  # sums of halves are exact enough only there
        elif inside is dt.bool_:
            inside = dt.uint8
        x = self.cast(inside)
        total = _sum_in_parts(x, axes) if kind == "add" and inside.is_float else x
        out = self._new(g.cast(g.reduce(total.node, kind, axes), self.dtype))
        if not keepdim:
            out = out.reshape(*(n for i, n in enumerate(self.shape) if i not in axes))
        return out

    def sum(self, axis: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        """The sum; bools and small ints count in int32."""
        small = self.dtype.kind in "biu" and self.dtype.itemsize < 4
        return (self.cast(dt.int32) if small else self)._reduce("add", axis, keepdim)

    def max(self, axis: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        return self._reduce("max", axis, keepdim)

    def min(self, axis: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        if self.dtype.is_float:
            return -((-self).max(axis, keepdim))
        return ~((~self).max(axis, keepdim))  # ~ reverses the order of ints and bools

    def mean(self, axis: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        x = self if self.dtype.is_float else self.float()
        total = x._reduce("add", axis, keepdim)
        count = self.numel // total.numel if total.numel != 0 else 1
        return total / count

    def argmax(self, axis: int | None = None, keepdim: bool = False) -> Tensor:
        """The first place of the largest value along an axis (of the flat tensor for None)."""
        if axis is None:
            return self.flatten().argmax(0)
        axis = _axis(axis, self.ndim)
        n = self.shape[axis]
        best = self == self.max(axis, keepdim=True)
        if self.dtype.is_float:
            best = best | (self != self)  # the first NaN, as in NumPy
        shape = [1] * self.ndim
        shape[axis] = n
        backwards = (n - Tensor.arange(n, device=self.device)).reshape(*shape)  # n … 1
        first = Tensor.where(best, backwards, 0).max(axis, keepdim=True)
        out = n - first
        return out if keepdim else out.squeeze(axis)

    def argmin(self, axis: int | None = None, keepdim: bool = False) -> Tensor:
        return (-self if self.dtype.is_float else ~self).argmax(axis, keepdim)

    def __matmul__(self, other: Tensor) -> Tensor:
        """(…, M, K) @ (…, K, N) -> (…, M, N), or with one vector; halves multiply in float32."""
        a, b = self, other
        if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
            raise ShapeError(f"matmul: {list(a.shape)} @ {list(b.shape)}")
        out_dtype = dt.promote(a.dtype, b.dtype)
        if out_dtype in (dt.float16, dt.bfloat16):
            a, b = a.float(), b.float()
        row, column = a.ndim == 1, b.ndim == 1
        a = a.unsqueeze(0) if row else a
        b = b.unsqueeze(1) if column else b
        product_ = a.unsqueeze(-2) * b.transpose().unsqueeze(-3)  # (…, M, N, K)
        out = product_._reduce("add", -1, keepdim=False).cast(out_dtype)
        out = out.squeeze(-2) if row else out
        return out.squeeze(-1) if column else out


def polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """By Horner's scheme, the coefficient of the highest power first."""
    first, second, *rest = coefficients
    out = x * first + second
    for c in rest:
        out = out * x + c
    return out


def _sum_in_parts(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """x with a very long axis of a sum summed in parts already.

    One running float32 sum of millions of numbers loses percents; sums of sums don't.
    """
    for a in axes:
        n = x.shape[a]
        if isinstance(n, int) and n > LONG_SUM:
            amounts = [(0, 0)] * x.ndim
            amounts[a] = (0, -n % PART_SUM)
            padded = x.pad(amounts)
            many = padded.shape[a] // PART_SUM
            parts = padded.reshape(*x.shape[:a], many, PART_SUM, *x.shape[a + 1 :])
            summed = g.reduce(parts.node, "add", (a + 1,))
            x = x._new(g.reshape(summed, (*parts.shape[: a + 1], *x.shape[a + 1 :])))
    return x


def broadcast_shape(*shapes: tuple[Int, ...]) -> tuple[Int, ...]:
    """The shape that all shapes expand to. Raises ShapeError naming them."""
    rank = builtins.max(len(s) for s in shapes)
    out: list[Int] = [1] * rank
    for s in shapes:
        for i, n in enumerate(s, rank - len(s)):
            if out[i] == 1:
                out[i] = n
            elif n not in (1, out[i]):
                shown = " and ".join(str(list(s)) for s in shapes)
                raise ShapeError(f"shapes {shown} don't broadcast")
    return tuple(out)


def broadcast(a: Tensor, b: Tensor | Scalar) -> tuple[Tensor, Tensor]:
    """Both with one shape and one type."""
    if isinstance(b, np.ndarray):
        b = Tensor(b, device=a.device)
    if not isinstance(b, Tensor):
        b = Tensor(_number(b), _type_beside(a.dtype, b), a.device)
    if a.device != b.device:
        a, b = _one_device(a, b)
    dtype = dt.promote(a.dtype, b.dtype)
    shape = broadcast_shape(a.shape, b.shape)
    return a.cast(dtype).expand(*shape), b.cast(dtype).expand(*shape)


def _one_device(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor over no buffer (arange, zeros, …) belongs anywhere."""
    for x, other in ((a, b), (b, a)):
        if not any(n.op is Op.BUFFER for n in g.toposort([x.node])):
            moved = Tensor(x.node, device=other.device)
            return (moved, b) if x is a else (a, moved)
    raise ValueError(f"tensors on {a.device} and {b.device}; move one with .to()")


def _number(value: Any) -> Scalar:
    return value.item() if isinstance(value, np.generic) else value


def _scalar_dtype(value: Scalar) -> DType:
    if isinstance(value, bool):
        return dt.bool_
    if isinstance(value, float):
        return dt.float32
    return dt.int32 if -(1 << 31) <= bounds(value)[0] and bounds(value)[1] < 1 << 31 else dt.int64


def _type_beside(dtype: DType, value: Scalar) -> DType:
    """The type a Python number takes beside a tensor: the tensor's, unless it can't hold it."""
    if isinstance(value, (float, np.floating)) and not dtype.is_float:
        return dt.float32
    if dtype is dt.bool_ and not isinstance(value, (bool, np.bool_)):
        return _scalar_dtype(value)
    return dtype


def _both_bool(a: Tensor, b: Tensor | Scalar) -> bool:
    return a.dtype is dt.bool_ and (b.dtype is dt.bool_ if isinstance(b, Tensor) else b is True)


def _load(array: np.ndarray, device: str, constant: bool, dtype: DType | None = None) -> Node:
    """A BUFFER node over the bytes of an array."""
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    dtype = dtype or dt.from_numpy(array.dtype)
    if dtype.numpy != array.dtype:
        raise TypeError(f"a {array.dtype} array doesn't hold {dtype}")
    array = np.ascontiguousarray(array).reshape(array.shape)
    storage = Storage(device, dtype, array.size, constant)
    storage.data = get_device(device).wrap(array if array.size else np.zeros(1, array.dtype))
    return g.buffer(storage, array.shape)


def _is_constant(node: Node) -> bool:
    return node.op is Op.BUFFER and node.arg[0].constant


def _from(t: Tensor, axis: int, start: Int, total: Int) -> Tensor:
    """Where an index along `axis` is at least start; broadcasts against t."""
    shape = [1] * t.ndim
    shape[axis] = total
    return (Tensor.arange(total, device=t.device) >= start).reshape(*shape)


def _sizes(shape: tuple) -> tuple:
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ShapeError(f"axis {axis} of a tensor with {rank}")
    return axis % rank


def _full_key(key: Any, rank: int, device: str) -> list[Any]:
    """An indexing key with the Ellipsis written out and slices for the axes left over."""
    keys = list(key) if isinstance(key, tuple) else [key]
    keys = [Tensor(k, device=device) if isinstance(k, (list, np.ndarray)) else k for k in keys]
    used = builtins.sum(k is not None and k is not Ellipsis for k in keys)
    if used > rank:
        raise IndexError(f"{used} indices for a tensor with {rank} axes")
    if not any(k is Ellipsis for k in keys):
        keys.append(Ellipsis)
    at = next(i for i, k in enumerate(keys) if k is Ellipsis)
    return keys[:at] + [slice(None)] * (rank - used) + keys[at + 1 :]


def _plan_index(
    keys: list[Any], shape: tuple[Int, ...]
) -> tuple[tuple, tuple[Int, ...], tuple[int, ...], int | None]:
    """(ranges per axis, shape afterwards, axes to flip, position of a Tensor index)."""
    ranges: list[tuple[Int, Int]] = []
    out: list[Int] = []
    flips: list[int] = []
    gathered = None
    for k in keys:
        if k is None:
            out.append(1)
            continue
        n = shape[len(ranges)]
        if isinstance(k, slice):
            if k.step == -1 and k.start is None and k.stop is None:
                flips.append(len(ranges))
            elif k.step not in (None, 1):
                raise TypeError(f"slices have step 1 (or a bare ::-1), not {k.step}")
            start, end = _slice_ends(k if k.step != -1 else slice(None), n)
            ranges.append((start, end))
            out.append(end - start)
        elif isinstance(k, Tensor):
            gathered = len(out)
            ranges.append((0, n))
            out.append(n)
        else:
            k = k + n if isinstance(k, (int, np.integer)) and k < 0 else k
            low, high = bounds(k)
            if low < 0 or high >= upper(n):
                raise IndexError(f"index {k} outside an axis of size {n}")
            ranges.append((k, k + 1))
    return tuple(ranges), tuple(out), tuple(flips), gathered


def _slice_ends(k: slice, n: Int) -> tuple[Int, Int]:
    ends = (int(e) if isinstance(e, np.integer) else e for e in (k.start, k.stop))
    k = slice(*ends)
    if isinstance(n, int) and all(isinstance(e, (int, type(None))) for e in (k.start, k.stop)):
        start, end, _ = k.indices(n)
        return start, builtins.max(start, end)

    def end_of(e: Int | None, default: Int) -> Int:
        if e is None:
            return default
        return e + n if isinstance(e, int) and e < 0 else e

    return end_of(k.start, 0), end_of(k.stop, n)
