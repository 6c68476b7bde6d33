"""What the pickles of real checkpoints may name, and what stands for it here.

One row per name. A name that is not in `KNOWN` is refused by `weights.pickled`; the rows below do
nothing but check their arguments and put them in a plain value. Sources: `torch/_utils.py`,
`torch/storage.py`, NumPy's `multiarray` reductions, and the names met in released checkpoints of
LLaMA (tensors only), Whisper (tensors and `dims`) and Stable Diffusion (Lightning's state).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weights.pickle_machine import Known, Malformed, checked_key

MAX_DIMS = 16
_MAX_FLAGS = 8  # of a tensor's metadata; torch has two


@dataclass(frozen=True, slots=True)
class ElementType:
    """torch's name of an element type, and ours in `weights.quant`."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class StorageKind:
    """A storage class: the type of its elements; an untyped one counts bytes."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of bytes elsewhere in the file: `key` says which, `start` and `nbytes` what of it."""

    key: str
    type: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor's view of a storage; `offset` and `strides` count elements of `type`."""

    storage: Storage
    type: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Record:
    """An instance of a harmless class: nothing but its attributes."""

    def __init__(self) -> None:
        self.fields: dict[Any, Any] = {}

    def build(self, state: Any) -> None:
        if type(state) is not dict:
            raise Malformed("the state of an object is not a dict")
        self.fields = state


class NumpyType:
    """A NumPy element type; BUILD gives it its byte order."""

    def __init__(self, code: str) -> None:
        self.dtype = np.dtype(code)

    def build(self, state: Any) -> None:
        order = state[1] if type(state) is tuple and len(state) > 1 else None
        if order not in ("<", ">", "|", "="):
            raise Malformed("the state of a numpy.dtype")
        self.dtype = self.dtype.newbyteorder(order)


class NumpyArray:
    """A NumPy array; BUILD gives it its contents."""

    def __init__(self) -> None:
        self.values = np.zeros(0)

    def build(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise Malformed("the state of a numpy.ndarray")
        _, shape, kind, by_columns, raw = state
        _check_counts(shape, "the shape of a numpy.ndarray")
        if not isinstance(kind, NumpyType) or type(raw) is not bytes:
            raise Malformed("the contents of a numpy.ndarray")
        count = 1
        for n in shape:
            count *= n
        if count * kind.dtype.itemsize != len(raw):
            raise Malformed("the shape of a numpy.ndarray does not fit its bytes")
        if count:  # NumPy can't hold every shape of nothing
            values = np.frombuffer(raw, kind.dtype, count)
            self.values = values.reshape(shape, order="F" if by_columns is True else "C")


def _check_counts(value: Any, what: str) -> None:
    few = type(value) is tuple and len(value) <= MAX_DIMS  # first: looking at many takes time
    if not few or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise Malformed(f"{what}: not a tuple of at most {MAX_DIMS} counts")


# torch's element types, ours, and the storage classes that hold them; the newer ones have none.
_ELEMENTS = (
    ("float32", "F32", "FloatStorage"),
    ("float64", "F64", "DoubleStorage"),
    ("float16", "F16", "HalfStorage"),
    ("bfloat16", "BF16", "BFloat16Storage"),
    ("int8", "I8", "CharStorage"),
    ("int16", "I16", "ShortStorage"),
    ("int32", "I32", "IntStorage"),
    ("int64", "I64", "LongStorage"),
    ("uint8", "U8", "ByteStorage"),
    ("bool", "BOOL", "BoolStorage"),
    ("complex64", "C64", "ComplexFloatStorage"),
    ("complex128", "C128", "ComplexDoubleStorage"),
    ("uint16", "U16", None),
    ("uint32", "U32", None),
    ("uint64", "U64", None),
    ("float8_e4m3fn", "F8_E4M3", None),
    ("float8_e5m2", "F8_E5M2", None),
)
UNTYPED = "U8"  # an untyped storage counts its bytes
TORCH_NAMES = {ours: (torch, storage) for torch, ours, storage in _ELEMENTS}


def tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorRef:
    """`_rebuild_tensor` and `_rebuild_tensor_v2`: rest is requires_grad, hooks, metadata."""
    if type(storage) is not Storage:
        raise Malformed("a tensor without a storage")
    return _view(storage, storage.type, offset, shape, strides, rest[2:])


def typed_tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    kind: Any,
    *rest: Any,
) -> TensorRef:
    """`_rebuild_tensor_v3`: an untyped storage, and the element type beside it."""
    if type(storage) is not Storage or type(kind) is not ElementType:
        raise Malformed("a tensor without a storage or an element type")
    return _view(storage, kind.type, offset, shape, strides, rest[3:])


def _view(storage, kind, offset, shape, strides, metadata) -> TensorRef:
    _check_counts((offset,), "an offset")
    _check_counts(shape, "a shape")
    _check_counts(strides, "strides")
    if len(shape) != len(strides):
        raise Malformed("a shape and strides of different lengths")
    # metadata: {"conj": True}, {"neg": True}; none of our models' tensors are such views.
    # One of many keys is none of torch's, and looking at all of them takes time in each tensor.
    if len(metadata) > 1 or any(
        type(m) is not dict or len(m) > _MAX_FLAGS or any(m.values()) for m in metadata
    ):
        raise Malformed("a conjugated or negated view")
    return TensorRef(storage, kind, offset, shape, strides)


def _same_tensor(value: Any, *rest: Any) -> TensorRef:
    """A Parameter is its tensor; rest is requires_grad, hooks, state."""
    if type(value) is not TensorRef:
        raise Malformed("a parameter without a tensor")
    return value


def _tensor_of_type(function: Any, kind: Any, args: Any, state: Any) -> TensorRef:
    """`_rebuild_from_type_v2`: a tensor with attributes, which are dropped."""
    if function not in _REBUILDERS or type(args) is not tuple:
        raise Malformed("a tensor that is rebuilt in an unknown way")
    return function.call(*args)


def _ordered(*args: Any) -> dict[Any, Any]:
    """Python 3 gives OrderedDict no arguments and then sets items; Python 2 gave it a list."""
    pairs = args[0] if len(args) == 1 and type(args[0]) is list else []
    if len(args) > 1 or any(type(p) not in (list, tuple) or len(p) != 2 for p in pairs):
        raise Malformed("not a list of pairs")
    return {checked_key(key): value for key, value in pairs}


def _counter(counts: Any) -> dict[Any, Any]:
    if type(counts) is not dict:
        raise Malformed("not a dict")
    return counts


def _default(factory: Any = None) -> dict[Any, Any]:
    return {}


def _members(values: Any = ()) -> list[Any]:
    """A set, kept as the list of its members: nothing here looks them up."""
    if type(values) is not list:
        raise Malformed("not a list")
    return values


def _size(shape: Any = ()) -> tuple[int, ...]:
    _check_counts(shape, "a shape")
    return shape


def _device(kind: Any, index: Any = None) -> str:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise Malformed("not a kind and an index")
    return kind if index is None else f"{kind}:{index}"


def _complex(real: Any, imaginary: Any) -> str:
    if type(real) is not float or type(imaginary) is not float:
        raise Malformed("not two floats")
    return str(complex(real, imaginary))


def _encode(text: Any, encoding: Any = None) -> bytes:
    """How protocol 2 spells bytes: as text in Latin-1."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise Malformed("not text in latin1")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise Malformed("not text in latin1") from None


def _bytes() -> bytes:
    return b""  # Python 3 spells empty bytes so; others come by `_codecs.encode`


def _numpy_type(code: Any, *rest: Any) -> NumpyType:
    """rest is align and copy; only numbers are known, no objects, strings or records."""
    if type(code) is not str or not re.fullmatch("[<>=|]?(b1|[iu][1248]|f[248]|c8|c16)", code):
        raise Malformed("not a number's type")
    return NumpyType(code)


def _numpy_scalar(kind: Any, raw: Any) -> Any:
    if not isinstance(kind, NumpyType) or type(raw) is not bytes:
        raise Malformed("not a type and bytes")
    if len(raw) != kind.dtype.itemsize:
        raise Malformed("bytes that do not fit the type")
    value = np.frombuffer(raw, kind.dtype)[0].item()
    return str(value) if isinstance(value, complex) else value


def _numpy_array(kind: Any, shape: Any, code: Any) -> NumpyArray:
    """`_reconstruct`: an empty array, whose contents come by BUILD."""
    return NumpyArray()


def _known() -> dict[tuple[str, str], Known]:
    rows: list[tuple[str, str, Callable | None, Any]] = [
        # module, name, what a call gives, what the name itself stands for
        ("collections", "OrderedDict", _ordered, None),  # every state_dict
        ("collections", "Counter", _counter, None),  # milestones of a learning rate schedule
        ("collections", "defaultdict", _default, None),  # the state of torch's optimisers
        ("torch._utils", "_rebuild_tensor", tensor, None),  # before torch 0.4
        ("torch._utils", "_rebuild_tensor_v2", tensor, None),
        ("torch._utils", "_rebuild_tensor_v3", typed_tensor, None),  # types without a storage
        ("torch._utils", "_rebuild_parameter", _same_tensor, None),
        ("torch._utils", "_rebuild_parameter_with_state", _same_tensor, None),
        ("torch._tensor", "_rebuild_from_type_v2", _tensor_of_type, None),
        ("torch", "Tensor", None, None),  # its second argument
        ("torch.nn.parameter", "Parameter", None, None),  # the same
        ("torch.storage", "UntypedStorage", None, StorageKind("UntypedStorage", UNTYPED)),
        ("torch", "UntypedStorage", None, StorageKind("UntypedStorage", UNTYPED)),
        ("torch", "Size", _size, None),
        ("torch", "device", _device, None),
        ("numpy", "dtype", _numpy_type, None),  # losses and seeds that were NumPy scalars
        ("numpy", "ndarray", None, None),  # the first argument of _reconstruct
        ("_codecs", "encode", _encode, None),  # bytes, under protocol 2
        ("argparse", "Namespace", Record, None),  # options of a training run
        ("whisper.model", "ModelDimensions", Record, None),  # Whisper's `dims`, not as a dict
    ]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # NumPy 1 and 2
        rows.append((module, "scalar", _numpy_scalar, None))
        rows.append((module, "_reconstruct", _numpy_array, None))
    for module in ("builtins", "__builtin__"):  # Python 3 and 2
        rows.append((module, "set", _members, None))
        rows.append((module, "frozenset", _members, None))
        rows.append((module, "complex", _complex, None))
        rows.append((module, "bytes", _bytes, None))
        # Factories of defaultdict.
        rows += [(module, name, None, None) for name in ("dict", "list", "int", "float")]
    for package in ("pytorch_lightning", "lightning.pytorch"):
        # Keys of Lightning's `callbacks`, in the checkpoints of Stable Diffusion.
        rows.append((f"{package}.callbacks.model_checkpoint", "ModelCheckpoint", None, None))
        rows.append((f"{package}.callbacks.early_stopping", "EarlyStopping", None, None))
        rows.append((f"{package}.utilities.parsing", "AttributeDict", _default, None))
    for name, ours, storage in _ELEMENTS:
        rows.append(("torch", name, None, ElementType(name, ours)))
        if storage is not None:
            kind = StorageKind(storage, ours)
            rows += [("torch", storage, None, kind), ("torch.cuda", storage, None, kind)]
    return {(m, n): Known(f"{m}.{n}", call, value) for m, n, call, value in rows}


KNOWN = _known()
_REBUILDERS = [KNOWN["torch._utils", name] for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")]
