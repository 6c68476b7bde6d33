"""The pickle interpreter: what it builds, and what it must refuse without running or growing."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.weights import build_torch as t
from weights import WeightError
from weights.budget import Budget
from weights.pickled import load
from weights.stand_ins import KNOWN, Record

QUICK = 1.0  # seconds that any rejection may take
ROOM = 10, 4e6  # memory: bytes per byte of file, and a start


def loaded(raw: bytes):
    budget = Budget(Path("model.pt"), len(raw))
    value, end = load(raw, 0, len(raw), KNOWN, lambda key: key, budget)
    assert end == len(raw)
    return value


PLAIN = {
    "constants": [None, True, False],
    "integers": [0, 255, 256, 65536, -1, 2**31, -(2**31), 2**63, -(2**70)],
    "floats": [0.5, -1e300, float("inf")],
    "text": ["", "a", "é🦙", "x" * 300],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "nested": {"a": {"b": [1, [2, (3,)]]}, "c": {}},
    "shared": [[1]] * 3,
    "many": list(range(3000)),
    "keys": {1: "a", "b": 2, None: 3, 2.5: 4, b"c": 5},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("case", PLAIN)
def test_plain_values_equal_pythons(case, protocol):
    assert loaded(pickle.dumps(PLAIN[case], protocol)) == PLAIN[case]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_bytes_sets_and_dicts_with_manners_become_plain(protocol):
    values = [b"", b"\x00\xff", {1}, OrderedDict(a=1), Counter("aab"), defaultdict(list, a=[1])]
    got = loaded(pickle.dumps(values, protocol))
    assert got[:2] == values[:2] and set(got[2]) == {1} and got[3:] == values[3:]
    assert all(type(value) is dict for value in got[3:])


@pytest.mark.parametrize("kind", ["?", "i1", "<u2", ">i4", "<i8", "<f2", "<f4", ">f8"])
def test_numpy_scalars_and_arrays_keep_their_values(kind):
    array = np.arange(6).astype(kind).reshape(2, 3)
    got = loaded(pickle.dumps([array[1, 2], array, np.asfortranarray(array)], 2))
    assert got[0] == array[1, 2] and type(got[0]) in (bool, int, float)
    for part in got[1:]:
        np.testing.assert_array_equal(part.values, array)


def test_object_of_a_harmless_class_is_its_attributes_only():
    class_and_state = t.name("argparse", "Namespace") + t.EMPTY_TUPLE + t.NEWOBJ
    got = loaded(t.pickled(class_and_state + t.mapping(lr=t.integer(1)) + t.BUILD))
    assert type(got) is Record and got.fields == {"lr": 1}


def test_pickle_of_python_2_is_read():
    pairs = b"](](U\x01aK\x01e](U\x01bU\x02\xff\xfeee"
    got = loaded(b"\x80\x02ccollections\nOrderedDict\nq\x01" + pairs + b"\x85R.")
    assert got == {"a": 1, "b": b"\xff\xfe"}  # no UTF-8, so bytes


RUNNING = {
    "os.system": b"cos\nsystem\n(X\x07\x00\x00\x00echo hitR.",
    "posix.system": b"\x80\x02cposix\nsystem\nX\x01\x00\x00\x00a\x85R.",
    "subprocess.Popen": b"\x80\x04\x8c\nsubprocess\x8c\x05Popen\x93.",
    "builtins.eval": t.pickled(t.call("builtins", "eval", t.text("1"))),
    "__builtin__.getattr": t.pickled(t.name("__builtin__", "getattr")),
    "builtins.__import__": t.pickled(t.name("builtins", "__import__")),
    "torch.storage._load_from_bytes": t.pickled(t.name("torch.storage", "_load_from_bytes")),
    "torch.load": t.pickled(t.name("torch", "load")),
    "torch.nn.modules.linear.Linear": t.pickled(t.name("torch.nn.modules.linear", "Linear")),
    "numpy.load": t.pickled(t.name("numpy", "load")),
    "collections.OrderedDict.__class__": t.pickled(t.name("collections", "OrderedDict.__class__")),
    "argparse.FileType": t.pickled(t.name("argparse", "FileType")),
}


@pytest.mark.parametrize("name", RUNNING)
def test_unknown_name_is_refused_by_name(name):
    with pytest.raises(WeightError) as caught:
        loaded(RUNNING[name])
    line = str(caught.value)
    assert f"its pickle names {name}, which no checkpoint needs; nothing was run" in line
    assert line.startswith("model.pt: ") and "\n" not in line


def memo(index: int) -> bytes:
    return b"r" + index.to_bytes(4, "little")


def laughs(levels: int) -> bytes:
    """[[...]] where each level holds the one below ten times."""
    out = t.EMPTY_LIST + b"q\x00"
    for n in range(1, levels):
        out += t.EMPTY_LIST + t.MARK + (b"h" + bytes([n - 1])) * 10 + t.APPENDS + b"q" + bytes([n])
    return t.EMPTY_LIST + t.MARK + out + t.APPENDS


COLLIDING = b"".join(t.integer(n * (2**61 - 1)) + t.NONE for n in range(4000))
FEW_ARGS = t.integer(0), t.integers(1)
LONG_TEXT = t.text("x" * 10**6) + b"q\x00" + t.POP
REFUSED = {
    "nothing": (b"", "it ends before its STOP"),
    "no STOP": (b"\x80\x02N", "it ends before its STOP"),
    "two values at STOP": (t.pickled(b"NN"), "stops in the middle"),
    "a mark at STOP": (t.pickled(b"N("), "stops in the middle"),
    "no value at STOP": (t.pickled(b""), "stops in the middle"),
    "protocol 6": (t.pickled(b"N", 6), "protocol 6"),
    "unknown opcode": (t.pickled(b"\xff"), "instruction 0xff has no place"),
    "extension": (t.pickled(b"\x82\x01"), "instruction EXT1 has no place"),
    "out-of-band buffer": (t.pickled(b"\x97"), "instruction NEXT_BUFFER has no place"),
    "text opcode": (t.pickled(b"I01\n"), "instruction INT has no place"),
    "text persistent id": (t.pickled(b"Pa\n"), "instruction PERSID has no place"),
    "class made by INST": (t.pickled(b"(ios\nsystem\n"), "instruction INST has no place"),
    "frame past the end": (t.pickled(b"\x95" + b"\xff" * 8), "a frame runs past its end"),
    "string past the end": (t.pickled(b"X\xff\xff\xff\x7fabc"), "a value runs past its end"),
    "string of 2^64 - 1": (t.pickled(b"\x8d" + b"\xff" * 8), "a value runs past its end"),
    "bytes of 2^63": (t.pickled(b"\x8e" + bytes(7) + b"\x80"), "a value runs past its end"),
    "bytearray of 2^63": (t.pickled(b"\x96" + bytes(7) + b"\x80"), "a value runs past its end"),
    "negative integer size": (t.pickled(b"\x8b\xff\xff\xff\xff"), "a value runs past its end"),
    "integer of a megabyte": (
        t.pickled(b"\x8b" + (10**6).to_bytes(4, "little") + b"\x7f" * 10**6),
        "an integer is too long",
    ),
    "not UTF-8": (t.pickled(b"X\x01\x00\x00\x00\xff"), "not valid UTF-8 at byte 0"),
    "name without an end": (t.pickled(b"cos"), "a name is too long or runs past"),
    "name of a megabyte": (b"c" + b"a" * 10**6 + b"\n\n.", "a name is too long"),
    "name by numbers": (t.pickled(b"K\x01K\x02\x93"), "not by strings"),
    "name by cyclic lists": (t.pickled(b"]2a2\x93"), "not by strings"),
    "pop from nothing": (t.pickled(b"0"), "from an empty stack"),
    "pop below a mark": (t.pickled(b"N(\x85"), "from an empty stack"),
    "duplicate of nothing": (t.pickled(b"2"), "from an empty stack"),
    "no mark": (t.pickled(b"]e"), "a mark that was not set"),
    "memo of nothing": (t.pickled(b"h\x00"), "did not store"),
    "memo far ahead": (t.pickled(b"N" + memo(2**32 - 1)), "out of order"),
    "append to a number": (t.pickled(b"K\x01Na"), "appends to a int"),
    "append to a tuple": (t.pickled(b")Na"), "appends to a tuple"),
    "item of a list": (t.pickled(b"]NNs"), "sets items of a list"),
    "odd number of items": (t.pickled(b"}(Nu"), "sets items"),
    "member of a list": (t.pickled(b"](N\x90"), "adds members to a list"),
    "list as a key": (t.pickled(b"}]Ns"), "a list is a key"),
    "tuple as a key": (t.pickled(b"})Ns"), "a tuple is a key"),
    "colliding keys": (t.pickled(b"}(" + COLLIDING + b"u"), "is a key, or a key is too long"),
    "key of a megabyte": (t.pickled(LONG_TEXT + b"}h\x00Ns"), "a key is too long"),
    "call of a number": (t.pickled(b"K\x01)R"), "calls a int"),
    "call of a text": (t.pickled(t.text("os.system") + b")R"), "calls a str"),
    "call without a tuple": (t.pickled(t.name("torch", "Size") + b"]R"), "calls a Known"),
    "call of a class": (t.pickled(t.call("torch", "Tensor")), "torch.Tensor is called"),
    "call of an element type": (t.pickled(t.call("torch", "float32")), "calls a ElementType"),
    "keywords": (t.pickled(t.name("torch", "Size") + b")}NNs\x92"), "with keywords"),
    "state of a number": (t.pickled(b"K\x01}b"), "gives a state to a int"),
    "state of a class": (t.pickled(t.name("argparse", "Namespace") + b"}b"), "a state to a Known"),
    "state that is no dict": (
        t.pickled(t.name("argparse", "Namespace") + b")\x81]b"),
        "the state of an object is not a dict",
    ),
    "tensor of a number": (
        t.pickled(t.call("torch._utils", "_rebuild_tensor_v2", t.integer(1), *FEW_ARGS, b")")),
        "_rebuild_tensor_v2: a tensor without a storage",
    ),
    "tensor without arguments": (
        t.pickled(t.call("torch._utils", "_rebuild_tensor_v2")),
        "_rebuild_tensor_v2: tensor() missing",
    ),
    "parameter of a parameter": (
        t.pickled(t.call("torch._utils", "_rebuild_parameter", b"N", b"N", b"N")),
        "a parameter without a tensor",
    ),
    "rebuilt by another": (
        t.pickled(
            t.call("torch._tensor", "_rebuild_from_type_v2", t.name("torch", "Size"), b"N", b")N")
        ),
        "rebuilt in an unknown way",
    ),
    "negative size": (t.pickled(t.call("torch", "Size", t.integers(-1))), "a shape: not"),
    "numpy objects": (t.pickled(t.call("numpy", "dtype", t.text("O8"))), "not a number's type"),
    "numpy records": (t.pickled(t.call("numpy", "dtype", t.text("f4,f4"))), "not a number's type"),
    "numpy scalar of 1 byte": (
        t.pickled(
            t.call(
                "numpy.core.multiarray",
                "scalar",
                t.call("numpy", "dtype", t.text("f8"), b"\x89", b"\x88"),
                b"C\x01a",
            )
        ),  # fmt: skip
        "bytes that do not fit the type",
    ),
    "bytes in another encoding": (
        t.pickled(t.call("_codecs", "encode", t.text("a"), t.text("rot13"))),
        "not text in latin1",
    ),
    "device with a dict": (t.pickled(t.call("torch", "device", b"}")), "not a kind and an index"),
}
BOMBS = {
    "a million lists": b"]" * 10**6,
    "a million marks": b"(" * 10**6,
    "a million dicts in a tuple": b"(" + b"}" * 10**6 + b"t",
    "memo of a million entries": b"]" + t.MEMOIZE * 10**6,
    "one list, dropped again and again": b"]0" * 10**6,
    "tuples nested 200,000 deep": b")" + t.TUPLE_1 * 200_000,
    "lists nested 200,000 deep": b"]" * 200_000 + t.APPEND * 199_999,
    "a tuple doubled 10^5 times": b")" + (b"2" + t.TUPLE_2) * 10**5,
    "a list that holds itself": b"]" + b"2a" * 10**6,
    "sets made of one long list": (
        b"](" + b"N" * 10_000 + b"e\x94" + t.POP
        + (b"cbuiltins\nset\n\x94" + b"h\x00\x85R0") + b"h\x01h\x00\x85R0" * 10**4
    ),
    "bytes made of one long text": LONG_TEXT + (
        b"c_codecs\nencode\nq\x01" + t.text("latin1") + b"q\x02"
        + b"00" + b"h\x01h\x00h\x02\x86R0" * 10**4
    ),
    "instructions that do nothing": b"N0" * 10**6,
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_pickle_is_refused_at_once(case):
    raw, message = REFUSED[case]
    line = refusal(raw)
    assert message in line, line


@pytest.mark.parametrize("case", BOMBS)
def test_bomb_is_refused_before_it_grows(case):
    refusal(t.pickled(BOMBS[case]))


def refusal(raw: bytes) -> str:
    start = time.process_time()
    with pytest.raises(WeightError) as caught:
        loaded(raw)
    took = time.process_time() - start
    line = str(caught.value)
    assert "model.pt" in line and line.isprintable()
    assert took < QUICK
    tracemalloc.start()
    with pytest.raises(WeightError):
        loaded(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < ROOM[0] * len(raw) + ROOM[1]
    return line


def test_billion_laughs_is_no_larger_than_it_is_written():
    assert len(loaded(t.pickled(laughs(9)))) == 9


def test_cyclic_value_is_built_and_freed():
    value = loaded(t.pickled(b"]2a"))
    assert value[0] is value
