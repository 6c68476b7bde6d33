"""A pickle interpreter that can only build plain values and our own stand-ins.

Python's unpickler imports and calls whatever a file names. This one knows a table of exact names
(`Known`), and REDUCE, NEWOBJ and BUILD reach nothing else. The opcodes are those of protocols 2
to 5 that data uses; text opcodes of protocol 0, extensions and out-of-band buffers are refused.
Nothing recurses, each opcode reads only bytes that are there, and what it allocates is charged to
a Budget first. Source: the opcode descriptions in Python's `pickletools`.
"""

from __future__ import annotations

import mmap
import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any

from weights.budget import Budget
from weights.checkpoint import WeightError, printable
from weights.pickle_machine import SLOT, Known, Machine, Malformed, checked_key, utf8

_MAX_OPS = 700_000  # half a second's worth; SDXL's 2,500 tensors take 90,000
_MAX_INT = 255  # bytes of an integer; printing one takes time quadratic in them
# Bytes of memory, rounded up; a container's include the room for its first items.
_MARK, _OBJECT, _CONTAINER, _PAIR, _MEMBER = 48, 256, 256, 100, 120


def load(
    data: bytes | mmap.mmap,
    start: int,
    end: int,
    known: Mapping[tuple[str, str], Known],
    persistent: Callable[[Any], Any],
    budget: Budget,
) -> tuple[Any, int]:
    """Read the pickle at data[start:end]; returns its value and where it ends.

    `persistent(id)` resolves a persistent id; it raises Malformed for one that makes no sense.
    WeightError, naming the budget's file, for whatever is damaged, hostile or not in `known`.
    """
    machine = Machine(data, start, end, known, persistent, budget)
    try:
        return _run(machine), machine.pos
    except Malformed as error:
        raise WeightError(f"its pickle is malformed: {error}", file=budget.path) from None


def _run(m: Machine) -> Any:
    for _ in range(_MAX_OPS):
        if m.pos >= m.end:
            raise Malformed("it ends before its STOP")
        code = m.data[m.pos]
        m.pos += 1
        if code == _STOP:
            if len(m.stack) != 1 or m.marks:
                raise Malformed("it stops in the middle of an object")
            return m.stack[0]
        if code not in OPCODES:
            row = pickletools.code2op.get(chr(code))
            name = row.name if row else hex(code)
            raise Malformed(f"instruction {name} has no place in a checkpoint")
        OPCODES[code](m)
    raise Malformed(f"it has more than {_MAX_OPS} instructions")


_U8, _U16, _U32, _U64 = (struct.Struct(f"<{c}") for c in "BHIQ")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


def _number(form: struct.Struct) -> Callable[[Machine], None]:
    return lambda m: m.push_new(m.number(form))


def _constant(value: Any) -> Callable[[Machine], None]:
    return lambda m: m.push(value)


def _fresh(make: type) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        m.budget.spend(_CONTAINER)
        m.push(make())

    return handler


def _sized(form: struct.Struct, make: Callable[[bytes], Any]) -> Callable[[Machine], None]:
    """The handler of a value with its length before it."""
    return lambda m: m.push_new(make(m.take(m.number(form))))


def _integer(raw: bytes) -> int:
    if len(raw) > _MAX_INT:
        raise Malformed("an integer is too long")
    return int.from_bytes(raw, "little", signed=True)


def _string_of_python_2(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _tuple(count: int) -> Callable[[Machine], None]:
    return lambda m: m.push_new(tuple([m.pop() for _ in range(count)][::-1]))


def _append(m: Machine, values: list[Any]) -> None:
    target = m.top()
    if type(target) is not list:
        raise Malformed(f"it appends to a {type(target).__name__}")
    m.budget.spend(SLOT * len(values))
    target.extend(values)


def _set_items(m: Machine, flat: list[Any], target: Any) -> None:
    if type(target) is not dict or len(flat) % 2:
        raise Malformed(f"it sets items of a {type(target).__name__}")
    m.budget.spend(_PAIR * (len(flat) // 2))
    target.update((checked_key(k), v) for k, v in zip(flat[::2], flat[1::2]))


def _dict(m: Machine) -> None:
    flat = m.pop_mark()
    m.budget.spend(_CONTAINER)
    m.push({})
    _set_items(m, flat, m.top())


def _set_item(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    _set_items(m, [key, value], m.top())


def _many_items(m: Machine) -> None:
    flat = m.pop_mark()
    _set_items(m, flat, m.top())


def _add_items(m: Machine) -> None:
    values, target = m.pop_mark(), m.top()
    if type(target) is not set:
        raise Malformed(f"it adds members to a {type(target).__name__}")
    m.budget.spend(_MEMBER * len(values))
    target.update(map(checked_key, values))


def _frozen_set(m: Machine) -> None:
    values = m.pop_mark()
    m.budget.spend(_MEMBER * len(values))
    m.push_new(frozenset(map(checked_key, values)))


def _pop(m: Machine) -> None:
    if m.marks and len(m.stack) == m.marks[-1]:
        m.marks.pop()
    else:
        m.pop()


def _mark(m: Machine) -> None:
    m.budget.spend(_MARK)
    m.marks.append(len(m.stack))


def _put(m: Machine, index: int) -> None:
    # Pickles number from 0 or 1 on; a made-up index must not make a long list.
    ahead = index - len(m.memo)
    if ahead > 1:
        raise Malformed("it numbers its objects out of order")
    m.budget.spend(2 * SLOT)
    if ahead < 0:
        m.memo[index] = m.top()
    else:
        m.memo += [None] * ahead + [m.top()]


def _get(m: Machine, index: int) -> None:
    if index >= len(m.memo):
        raise Malformed("it refers to an object that it did not store")
    m.push(m.memo[index])


def _global(m: Machine, module: Any, name: Any) -> None:
    if type(module) is not str or type(name) is not str:
        raise Malformed("it names something not by strings")
    found = m.known.get((module, name))
    if found is None:
        wanted = f"{printable(module)}.{printable(name)}"
        raise WeightError(
            f"its pickle names {wanted}, which no checkpoint needs; nothing was run",
            file=m.budget.path,
            remedy="save only its state_dict, or use its safetensors version",
        )
    m.push(found if found.value is None else found.value)


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    _global(m, module, name)


def _weight(value: Any) -> int:
    """Bytes that a call may allocate on account of one argument."""
    if type(value) in (str, bytes):
        return 4 * len(value)
    return _MEMBER * len(value) if type(value) in (list, tuple, dict, set) else 0


def _call(m: Machine) -> None:
    args, target = m.pop(), m.pop()
    if not isinstance(target, Known) or type(args) is not tuple:
        raise Malformed(f"it calls a {type(target).__name__}")
    if target.call is None:
        raise Malformed(f"{target.name} is called")
    m.budget.spend(_OBJECT + sum(map(_weight, args)))
    try:
        m.push(target.call(*args))
    except (Malformed, TypeError) as error:
        raise Malformed(f"{target.name}: {error}") from None


def _call_with_keywords(m: Machine) -> None:
    keywords = m.pop()
    if type(keywords) is not dict or keywords:
        raise Malformed("it calls with keywords")
    _call(m)


def _build(m: Machine) -> None:
    state, target = m.pop(), m.top()
    m.budget.spend(_OBJECT)
    if hasattr(target, "build"):
        target.build(state)
    elif type(target) is not dict:  # attributes of an OrderedDict: versions of its modules
        raise Malformed(f"it gives a state to a {type(target).__name__}")


def _persistent(m: Machine) -> None:
    m.budget.spend(_OBJECT)
    m.push(m.persistent(m.pop()))


def _protocol(m: Machine) -> None:
    if (version := m.number(_U8)) > 5:
        raise Malformed(f"protocol {version}")


def _frame(m: Machine) -> None:
    if m.number(_U64) > m.end - m.pos:
        raise Malformed("a frame runs past its end")


_STOP = 0x2E
OPCODES: dict[int, Callable[[Machine], Any]] = {
    # Plain values.
    0x4E: _constant(None),  # NONE
    0x88: _constant(True),  # NEWTRUE
    0x89: _constant(False),  # NEWFALSE
    0x4A: _number(_I32),  # BININT
    0x4B: _number(_U8),  # BININT1
    0x4D: _number(_U16),  # BININT2
    0x8A: _sized(_U8, _integer),  # LONG1
    0x8B: _sized(_U32, _integer),  # LONG4
    0x47: _number(_F64),  # BINFLOAT
    0x55: _sized(_U8, _string_of_python_2),  # SHORT_BINSTRING
    0x54: _sized(_U32, _string_of_python_2),  # BINSTRING
    0x8C: _sized(_U8, utf8),  # SHORT_BINUNICODE
    0x58: _sized(_U32, utf8),  # BINUNICODE
    0x8D: _sized(_U64, utf8),  # BINUNICODE8
    0x43: _sized(_U8, bytes),  # SHORT_BINBYTES
    0x42: _sized(_U32, bytes),  # BINBYTES
    0x8E: _sized(_U64, bytes),  # BINBYTES8
    0x96: _sized(_U64, bytes),  # BYTEARRAY8
    # Containers.
    0x29: _constant(()),  # EMPTY_TUPLE
    0x85: _tuple(1),  # TUPLE1
    0x86: _tuple(2),  # TUPLE2
    0x87: _tuple(3),  # TUPLE3
    0x74: lambda m: m.push_new(tuple(m.pop_mark())),  # TUPLE
    0x5D: _fresh(list),  # EMPTY_LIST
    0x6C: lambda m: m.push_new(m.pop_mark()),  # LIST
    0x61: lambda m: _append(m, [m.pop()]),  # APPEND
    0x65: lambda m: _append(m, m.pop_mark()),  # APPENDS
    0x7D: _fresh(dict),  # EMPTY_DICT
    0x64: _dict,  # DICT
    0x73: _set_item,  # SETITEM
    0x75: _many_items,  # SETITEMS
    0x8F: _fresh(set),  # EMPTY_SET
    0x90: _add_items,  # ADDITEMS
    0x91: _frozen_set,  # FROZENSET
    # The stack and the memo.
    0x28: _mark,  # MARK
    0x30: _pop,  # POP
    0x31: lambda m: m.pop_mark(),  # POP_MARK
    0x32: lambda m: m.push(m.top()),  # DUP
    0x71: lambda m: _put(m, m.number(_U8)),  # BINPUT
    0x72: lambda m: _put(m, m.number(_U32)),  # LONG_BINPUT
    0x94: lambda m: _put(m, len(m.memo)),  # MEMOIZE
    0x68: lambda m: _get(m, m.number(_U8)),  # BINGET
    0x6A: lambda m: _get(m, m.number(_U32)),  # LONG_BINGET
    # What is not plain: names from the table only.
    0x63: lambda m: _global(m, m.line(), m.line()),  # GLOBAL
    0x93: _stack_global,  # STACK_GLOBAL
    0x52: _call,  # REDUCE
    0x81: _call,  # NEWOBJ
    0x92: _call_with_keywords,  # NEWOBJ_EX
    0x62: _build,  # BUILD
    0x51: _persistent,  # BINPERSID
    # The frame around it.
    0x80: _protocol,  # PROTO
    0x95: _frame,  # FRAME
}
