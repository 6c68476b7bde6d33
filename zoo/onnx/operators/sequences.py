"""Sequences of arrays, and values that may be missing. All of them stay on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from zoo.onnx.registry import operator
from zoo.onnx.values import Known


@operator("SequenceEmpty")
def sequence_empty(*, dtype: int = 1):
    """No arrays."""
    return []


@operator("SequenceConstruct")
def sequence_construct(*xs: Known):
    """The inputs as a sequence."""
    return list(xs)


@operator("SequenceInsert")
def sequence_insert(xs: Known, x: Known, position: Known = None):
    """With one more, at the end unless the position is given."""
    at = len(xs) if position is None else int(position.reshape(-1)[0])
    return [*xs[:at], x, *xs[at:]]


@operator("SequenceErase")
def sequence_erase(xs: Known, position: Known = None):
    """Without one, the last unless the position is given."""
    out = list(xs)
    del out[-1 if position is None else int(position.reshape(-1)[0])]
    return out


@operator("SequenceAt")
def sequence_at(xs: Known, position: Known):
    """One of them."""
    return xs[int(position.reshape(-1)[0])]


@operator("SequenceLength")
def sequence_length(xs: Known):
    """How many there are."""
    return np.array(len(xs), np.int64)


@operator("SplitToSequence")
def split_to_sequence(x: Known, split: Known = None, *, axis: int = 0, keepdims: int = 1):
    """Parts along an axis: of one size, or of the sizes given; single slices by default."""
    n = x.shape[axis]
    if split is None:
        parts = [x.take([i], axis) for i in range(n)]
        return parts if keepdims else [part.squeeze(axis) for part in parts]
    ends = np.arange(int(split), n, int(split)) if split.ndim == 0 else np.cumsum(split)[:-1]
    return np.split(x, ends, axis)


@operator("ConcatFromSequence")
def concat_from_sequence(xs: Known, *, axis: int, new_axis: int = 0):
    """Joined along an axis, or along a new one."""
    return np.stack(xs, axis) if new_axis else np.concatenate(xs, axis)


@operator("SequenceMap")
def sequence_map(xs: Known, *more: Known, body: Any, call):
    """A graph for each element (the other inputs' elements, or the input itself, beside it)."""
    rows = []
    for i, x in enumerate(xs):
        given = [x, *(other[i] if isinstance(other, list) else other for other in more)]
        rows.append([call.numbers(y) for y in call.run(body, given)])
    return tuple([row[i] for row in rows] for i in range(len(body.outputs)))


@operator("Optional")
def optional(x: Known = None, *, type: Any = None):
    """The input, or nothing."""
    return x


@operator("OptionalHasElement")
def optional_has_element(x: Known = None):
    """Whether there is something."""
    return np.array(x is not None)


@operator("OptionalGetElement")
def optional_get_element(x: Known):
    """What there is."""
    return x


# --- texts -----------------------------------------------------------------------------------


def _each(function, *xs: np.ndarray, dtype: Any = object) -> np.ndarray:
    xs = np.broadcast_arrays(*xs)
    flat = [function(*row) for row in zip(*(x.reshape(-1) for x in xs))]
    out = np.empty(len(flat), dtype)
    out[:] = flat
    return out.reshape(xs[0].shape)


@operator("StringConcat")
def string_concat(a: Known, b: Known):
    """Texts one after the other."""
    return _each(lambda x, y: str(x) + str(y), a, b)


@operator("StringSplit")
def string_split(x: Known, *, delimiter: str | None = None, maxsplit: int | None = None):
    """(the parts of each text, padded with empty ones; how many there are)."""
    parts = [str(t).split(delimiter or None, -1 if maxsplit is None else maxsplit)
             for t in x.reshape(-1)]  # fmt: skip
    width = max(map(len, parts), default=0)
    out = np.full((len(parts), width), "", object)
    for row, texts in zip(out, parts):
        row[: len(texts)] = texts
    counts = np.array([len(texts) for texts in parts], np.int64)
    return out.reshape(*x.shape, width), counts.reshape(x.shape)


@operator("StringNormalizer")
def string_normalizer(x: Known, *, case_change_action: str = "NONE", is_case_sensitive: int = 0,
                      locale: str = "", stopwords: tuple = ()):  # fmt: skip
    """Without stop words, in one case."""

    def plain(text: str) -> str:
        return text if is_case_sensitive else text.lower()

    stops = set(map(plain, stopwords))
    rows = [[t for t in map(str, row) if plain(t) not in stops] for row in np.atleast_2d(x)]
    change = {"LOWER": str.lower, "UPPER": str.upper, "NONE": str}[case_change_action]
    out = np.array([list(map(change, row)) or [""] for row in rows], object)
    return out if x.ndim == 2 else out.reshape(-1)


@operator("LabelEncoder", domain="ai.onnx.ml")
def label_encoder(x: Known, *, keys_strings: tuple = (), keys_int64s: tuple = (),
                  keys_floats: tuple = (), keys_tensor: Any = None, values_strings: tuple = (),
                  values_int64s: tuple = (), values_floats: tuple = (), values_tensor: Any = None,
                  default_string: str = "_Unused", default_int64: int = -1,
                  default_float: float = -0.0, default_tensor: Any = None):  # fmt: skip
    """By a table from keys to values."""
    keys = keys_tensor if keys_tensor is not None else keys_strings or keys_int64s or keys_floats
    if values_tensor is not None:
        values, dtype = values_tensor, values_tensor.dtype
        default = default_tensor.reshape(-1)[0] if default_tensor is not None else 0
    else:
        rows = ((values_strings, object, default_string), (values_int64s, np.int64, default_int64),
                (values_floats, np.float32, default_float))  # fmt: skip
        values, dtype, default = next((row for row in rows if len(row[0])), rows[0])
    table = {_key(k): value for k, value in zip(keys, values)}
    return _each(lambda t: table.get(_key(t), default), x, dtype=dtype)


def _key(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return "NaN" if value != value else value
