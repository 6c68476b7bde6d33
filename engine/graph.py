"""The lazy graph: interned nodes (op, sources, arg).

Nodes are built through the functions below, which check shapes and drop no-ops. A shape is a
tuple of `int | Expr`. A node never changes; `Tensor` is what gets rebound.

Halves (float16, bfloat16) are storage formats: arithmetic on them is done in float32 and rounded
to nearest even by CAST and by the store into a buffer, on every backend.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from itertools import count
from typing import Any

from engine import dtype as dt
from engine.dtype import DType
from engine.symbolic import Expr, Int, bounds, product, variables


class ShapeError(ValueError):
    """Shapes that don't fit together; the message holds both."""


class Op(Enum):
    """Every operation. An op exists only if the others can't express it."""

    __hash__ = object.__hash__  # Enum's own is Python code, and nodes are looked up all the time

    # sources
    BUFFER = auto()  # arg: (Storage or parameter slot, version)
    CONST = auto()  # arg: a number or an Expr
    IOTA = auto()  # 0, 1, 2, … along the one axis
    # movement: which element, never its value
    RESHAPE = auto()  # arg: shape
    PERMUTE = auto()  # arg: axes
    EXPAND = auto()  # arg: shape; source axes of size 1 repeat
    PAD = auto()  # arg: ((before, after), …); the new elements are 0
    SHRINK = auto()  # arg: ((start, end), …)
    FLIP = auto()  # arg: axes
    # unary
    CAST = auto()
    BITCAST = auto()  # the last axis scales when the item size changes
    RECIP = auto()
    SQRT = auto()
    EXP2 = auto()
    LOG2 = auto()
    SIN = auto()
    TRUNC = auto()
    # binary
    ADD = auto()
    MUL = auto()
    IDIV = auto()  # ints, floor; x // 0 is 0
    MOD = auto()  # ints, sign of the divisor; x % 0 is 0
    MAX = auto()
    CMPLT = auto()
    CMPNE = auto()
    AND = auto()
    OR = auto()
    XOR = auto()
    SHL = auto()
    SHR = auto()
    # other
    WHERE = auto()  # (condition, if true, if false)
    REDUCE = auto()  # arg: ("add" | "max", axes); the axes stay, with size 1
    GATHER = auto()  # (source, index), arg: axis; an index outside is clamped
    ASSIGN = auto()  # (base, value), arg: ((start, end), …): base with that box replaced;
    # (base, value, index): base with the slices that the index names replaced
    CONTIGUOUS = auto()  # the same values in a buffer of their own; arg: which copy
    INTRINSIC = auto()  # arg: an Intrinsic, which says by `meaning` what it computes


UNARY = frozenset({Op.RECIP, Op.SQRT, Op.EXP2, Op.LOG2, Op.SIN, Op.TRUNC})
BINARY = frozenset(
    {
        Op.ADD,
        Op.MUL,
        Op.IDIV,
        Op.MOD,
        Op.MAX,
        Op.CMPLT,
        Op.CMPNE,
        Op.AND,
        Op.OR,
        Op.XOR,
        Op.SHL,
        Op.SHR,
    }
)
MOVEMENT = frozenset({Op.RESHAPE, Op.PERMUTE, Op.EXPAND, Op.PAD, Op.SHRINK, Op.FLIP})
ELEMENTWISE = UNARY | BINARY | {Op.CAST, Op.BITCAST, Op.WHERE}
TRANSCENDENTAL = frozenset({Op.EXP2, Op.LOG2, Op.SIN})


MOST_BYTES = 1 << 60  # beyond it allocators don't say that memory is short, but fail otherwise


class Storage:
    """A place in a device's memory that BUFFER nodes name.

    size is in elements, constant says that nobody writes it (a weight), version counts the writes
    that earlier readers must not see, data is the backend's allocation (None until one is made).
    """

    __slots__ = ("__weakref__", "constant", "data", "device", "dtype", "size", "version")

    def __init__(self, device: str, dtype: DType, size: int, constant: bool = False) -> None:
        if size * dtype.itemsize > MOST_BYTES:
            raise MemoryError(f"no memory holds {size} numbers of {dtype.name}")
        self.device = device
        self.dtype = dtype
        self.size = size
        self.constant = constant
        self.version = 0
        self.data: Any = None

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"Storage({self.device}, {self.dtype}, {self.size})"


class Node:
    """One interned graph node; compare with `is`."""

    __slots__ = ("__weakref__", "arg", "dtype", "op", "shape", "src")

    op: Op
    src: tuple[Node, ...]
    arg: Any
    dtype: DType
    shape: tuple[Int, ...]

    def __repr__(self) -> str:
        arg = "" if self.arg is None else f" {self.arg}"
        return f"{self.op.name}{arg} {self.dtype}{list(self.shape)}"

    @property
    def numel(self) -> Int:
        return product(self.shape)


_nodes: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()


def make(op: Op, src: tuple[Node, ...], arg: Any, dtype: DType, shape: tuple[Int, ...]) -> Node:
    """The one node with these parts. Everything else in this file ends here."""
    # repr tells 0.0 from -0.0 and 1 from True, and makes a NaN equal to itself
    plain_number = op is Op.CONST and not isinstance(arg, Expr)
    key = (op, src, repr(arg) if plain_number else arg, dtype, shape)
    found = _nodes.get(key)
    if found is None:
        found = Node()
        found.op = op
        found.src = src
        found.arg = arg
        found.dtype = dtype
        found.shape = shape
        _nodes[key] = found
    return found


def buffer(storage: Storage, shape: tuple[Int, ...]) -> Node:
    """The present contents of a storage, row-major."""
    return make(Op.BUFFER, (), (storage, storage.version), storage.dtype, shape)


def const(value: int | float | bool | Expr, dtype: DType, shape: tuple[Int, ...] = ()) -> Node:
    """One number (or symbolic int) in every element of `shape`."""
    if not isinstance(value, Expr):
        value = _as_python(value, dtype)
    if any(bounds(n)[0] < 0 for n in shape):
        raise ShapeError(f"{_show(shape)} has a negative size")
    node = make(Op.CONST, (), value, dtype, ())
    return expand(reshape(node, (1,) * len(shape)), shape) if shape else node


def _as_python(value: Any, dtype: DType) -> int | float | bool:
    if dtype is dt.bool_:
        return bool(value)
    if dtype.is_float:
        return float(value)
    span = 1 << dtype.bits
    wrapped = int(value) % span  # ints wrap as NumPy's do
    return wrapped - span if dtype.kind == "i" and wrapped >= span // 2 else wrapped


def iota(n: Int) -> Node:
    """0 … n-1 as int32, shape (n,)."""
    low, high = bounds(n)
    if low < 0 or high > 1 << 31:
        raise ShapeError(f"arange: {n} isn't between 0 and 2**31")
    return make(Op.IOTA, (), None, dt.int32, (n,))


def reshape(x: Node, shape: tuple[Int, ...]) -> Node:
    if shape == x.shape:
        return x
    if product(shape) != x.numel:
        raise ShapeError(
            f"reshape: {_show(x.shape)} has {x.numel} elements, {_show(shape)} has {product(shape)}"
        )
    if x.op is Op.RESHAPE:
        return reshape(x.src[0], shape)
    return make(Op.RESHAPE, (x,), shape, x.dtype, shape)


def permute(x: Node, axes: tuple[int, ...]) -> Node:
    if sorted(axes) != list(range(len(x.shape))):
        raise ShapeError(f"permute: {axes} is no order of the axes of {_show(x.shape)}")
    if axes == tuple(range(len(axes))):
        return x
    if x.op is Op.PERMUTE:
        return permute(x.src[0], tuple(x.arg[a] for a in axes))
    return make(Op.PERMUTE, (x,), axes, x.dtype, tuple(x.shape[a] for a in axes))


def expand(x: Node, shape: tuple[Int, ...]) -> Node:
    if shape == x.shape:
        return x
    if len(shape) != len(x.shape) or any(a not in (1, b) for a, b in zip(x.shape, shape)):
        raise ShapeError(f"expand: {_show(x.shape)} doesn't broadcast to {_show(shape)}")
    if x.op is Op.EXPAND:
        return expand(x.src[0], shape)
    return make(Op.EXPAND, (x,), shape, x.dtype, shape)


def pad(x: Node, amounts: tuple[tuple[Int, Int], ...]) -> Node:
    if len(amounts) != len(x.shape) or any(bounds(n)[0] < 0 for pair in amounts for n in pair):
        raise ShapeError(f"pad: {amounts} doesn't fit {_show(x.shape)}; amounts are >= 0 per axis")
    if all(pair == (0, 0) for pair in amounts):
        return x
    shape = tuple(before + n + after for n, (before, after) in zip(x.shape, amounts))
    if 0 in x.shape:
        return const(0, x.dtype, shape)
    return make(Op.PAD, (x,), amounts, x.dtype, shape)


def shrink(x: Node, ranges: tuple[tuple[Int, Int], ...]) -> Node:
    if len(ranges) != len(x.shape):
        raise ShapeError(f"shrink: {ranges} has another rank than {_show(x.shape)}")
    for n, (start, end) in zip(x.shape, ranges):
        if bounds(start)[0] < 0 or bounds(end - start)[0] < 0 or bounds(n - end)[0] < 0:
            raise ShapeError(f"shrink: {start}:{end} is outside an axis of size {n}")
    if all((start, end) == (0, n) for n, (start, end) in zip(x.shape, ranges)):
        return x
    shape = tuple(end - start for start, end in ranges)
    return make(Op.SHRINK, (x,), ranges, x.dtype, shape)


def flip(x: Node, axes: tuple[int, ...]) -> Node:
    axes = tuple(a for a in sorted(set(axes)) if x.shape[a] != 1)
    return make(Op.FLIP, (x,), axes, x.dtype, x.shape) if axes else x


def cast(x: Node, dtype: DType) -> Node:
    return x if x.dtype is dtype else make(Op.CAST, (x,), None, dtype, x.shape)


def bitcast(x: Node, dtype: DType) -> Node:
    if x.dtype is dtype:
        return x
    if dt.bool_ in (x.dtype, dtype):
        raise TypeError("bitcast: bool has no bit pattern of its own; cast it")
    shape = x.shape
    if x.dtype.itemsize != dtype.itemsize:
        if not shape or shape[-1] * x.dtype.itemsize % dtype.itemsize != 0:
            raise ShapeError(
                f"bitcast: the last axis of {_show(shape)} {x.dtype} doesn't divide into {dtype}"
            )
        shape = (*shape[:-1], shape[-1] * x.dtype.itemsize // dtype.itemsize)
    return make(Op.BITCAST, (x,), None, dtype, shape)


def unary(op: Op, x: Node) -> Node:
    return make(op, (x,), None, x.dtype, x.shape)


_BITWISE = frozenset({Op.AND, Op.OR, Op.XOR, Op.SHL, Op.SHR})


def binary(op: Op, a: Node, b: Node) -> Node:
    if a.dtype is not b.dtype or a.shape != b.shape:
        raise ShapeError(f"{op.name}: {a!r} and {b!r} differ in shape or type")
    if op in _BITWISE and a.dtype.is_float:
        raise TypeError(f"{op.name}: {a.dtype.name} numbers have no bits to combine; cast them")
    dtype = dt.bool_ if op in (Op.CMPLT, Op.CMPNE) else a.dtype
    return make(op, (a, b), None, dtype, a.shape)


def where(condition: Node, a: Node, b: Node) -> Node:
    if a.dtype is not b.dtype or not condition.shape == a.shape == b.shape:
        raise ShapeError(f"WHERE: {condition!r}, {a!r} and {b!r} differ in shape or type")
    return make(Op.WHERE, (condition, a, b), None, a.dtype, a.shape)


def reduce(x: Node, kind: str, axes: tuple[int, ...]) -> Node:
    """kind "add" or "max" over axes, which stay with size 1; an empty sum is 0."""
    axes = tuple(sorted(axes))
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    if any(x.shape[a] == 0 for a in axes):
        if kind == "max":
            raise ShapeError(f"max over an empty axis of {_show(x.shape)}")
        return const(0, x.dtype, shape)
    axes = tuple(a for a in axes if x.shape[a] != 1)
    return make(Op.REDUCE, (x,), (kind, axes), x.dtype, shape) if axes else x


def gather(source: Node, index: Node, axis: int) -> Node:
    """source's slices along `axis` at `index`, whose shape takes that axis's place."""
    if not index.dtype.is_int:
        raise TypeError(f"gather: the index must be ints, not {index.dtype}")
    shape = source.shape[:axis] + index.shape + source.shape[axis + 1 :]
    if source.shape[axis] == 0 and 0 not in shape:
        raise ShapeError(f"gather: axis {axis} of {_show(source.shape)} is empty")
    return make(Op.GATHER, (source, index), axis, source.dtype, shape)


def assign(base: Node, value: Node, ranges: tuple[tuple[Int, Int], ...]) -> Node:
    """base (a BUFFER, a copy or an earlier ASSIGN) with the box `ranges` replaced by value."""
    box = tuple(end - start for start, end in ranges)
    if value.shape != box or value.dtype is not base.dtype:
        raise ShapeError(f"assign: {value!r} into a box of shape {_show(box)} {base.dtype}")
    shrink(base, ranges)  # checks the bounds
    return make(Op.ASSIGN, (base, value), ranges, base.dtype, base.shape)


def scatter(base: Node, value: Node, index: Node) -> Node:
    """base (as for `assign`) with slices of its last axis replaced by those of value (M, D).

    index (M,), ints, says which: they are numbered through all the other axes, and one outside is
    clamped. Where two are the same, either may stay.
    """
    count, size = value.shape
    if size != base.shape[-1] or index.shape != (count,) or value.dtype is not base.dtype:
        raise ShapeError(f"scatter: {value!r} at {index!r} into {base!r}")
    whole = tuple((0, n) for n in base.shape)
    return make(Op.ASSIGN, (base, packed(value), packed(index)), whole, base.dtype, base.shape)


_copies = count()


def copy(x: Node) -> Node:
    """The same values in a buffer that no other node has, so that it may be written to."""
    return make(Op.CONTIGUOUS, (x,), next(_copies), x.dtype, x.shape)


def packed(x: Node) -> Node:
    """The same values in a buffer: an operand laid out for an INTRINSIC. Equal ones are one."""
    return x if x.op is Op.BUFFER else make(Op.CONTIGUOUS, (x,), "packed", x.dtype, x.shape)


def intrinsic(spec: Any, src: tuple[Node, ...]) -> Node:
    """What `spec` computes, in float32, of operands that lie in buffers."""
    return make(Op.INTRINSIC, src, spec, dt.float32, spec.shape(*src))


def spelled_out(root: Node) -> Node:
    """The same value with every INTRINSIC replaced by its meaning: the oracle for its recipe."""
    new: dict[Node, Node] = {}
    for n in toposort([root]):
        built = rebuild(n, new)
        new[n] = built.arg.meaning(*built.src) if n.op is Op.INTRINSIC else built
    return new[root]


def rebuild(node: Node, new: Mapping[Node, Node]) -> Node:
    """The node over the sources that `new` gives in place of its own."""
    src = tuple(new[s] for s in node.src)
    return node if src == node.src else make(node.op, src, node.arg, node.dtype, node.shape)


def toposort(sinks: Iterable[Node], leaves: frozenset[Node] | set[Node] = frozenset()) -> list:
    """Every node below `sinks`, sources first; nodes in `leaves` are not entered."""
    order: list[Node] = []
    done: set[Node] = set()
    stack: list[tuple[Node, Iterator[Node]]] = []
    for sink in sinks:
        if sink in done:
            continue
        done.add(sink)
        stack.append((sink, iter(() if sink in leaves else sink.src)))
        while stack:
            node, rest = stack[-1]
            for child in rest:
                if child not in done:
                    done.add(child)
                    stack.append((child, iter(() if child in leaves else child.src)))
                    break
            else:
                order.append(node)
                stack.pop()
    return order


def graph_variables(nodes: Iterable[Node]) -> set[Expr]:
    """The symbolic ints in the shapes and arguments of nodes."""
    found: set[Expr] = set()
    for node in nodes:
        for n in node.shape:
            found |= variables(n)
        if node.op is Op.CONST:
            found |= variables(node.arg) if isinstance(node.arg, Expr) else frozenset()
        elif node.op in (Op.SHRINK, Op.PAD, Op.ASSIGN):
            for pair in node.arg:
                found |= variables(pair[0]) | variables(pair[1])
    return found


def _show(shape: tuple[Int, ...]) -> str:
    return "(" + ", ".join(str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
