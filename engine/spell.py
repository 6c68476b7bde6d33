"""How a value of the loop IR is written in the target's language: its expression, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine import dtype as dt
from engine.dialects import Dialect
from engine.dtype import DType
from engine.graph import Op
from engine.ir import Accumulator, Address, Kind, Scratch, Value
from engine.symbolic import Expr, Int, bounds, linear_in, substitute

LANE_NAMES = "0123456789abcdef"
HALVES = (dt.float16, dt.bfloat16)


C_TYPES = {
    dt.bool_: "int",
    dt.uint8: "uchar",
    dt.int8: "char",
    dt.uint16: "ushort",
    dt.int16: "short",
    dt.uint32: "uint",
    dt.int32: "int",
    dt.uint64: "ulong",
    dt.int64: "long",
    dt.float16: "float",
    dt.bfloat16: "float",
    dt.float32: "float",
}
MEMORY_TYPES = {dt.bool_: "uchar", dt.float16: "ushort", dt.bfloat16: "ushort"}

INFIX = {
    Op.ADD: "+",
    Op.MUL: "*",
    Op.AND: "&",
    Op.OR: "|",
    Op.XOR: "^",
    Op.SHL: "<<",
    Op.SHR: ">>",
    Op.CMPLT: "<",
    Op.CMPNE: "!=",
}


class Speller:
    """Writes values; remembers their names and which helpers they call."""

    def __init__(self, dialect: Dialect, inlined: set[Value]) -> None:
        self.dialect = dialect
        self.inlined = inlined  # values written where they are used
        self.names: dict[Value, str] = {}
        self.accumulators: dict[Accumulator, str] = {}
        self.helpers: set[str] = set()

    def expression(self, value: Value) -> str:
        match value.kind:
            case Kind.CONST:
                return self.number(value.arg, value.dtype)
            case Kind.INDEX:
                return self._index(*value.arg, value.lanes)
            case Kind.LOAD:
                return self._load(value)
            case Kind.READ:
                return self.accumulators[value.arg]
            case Kind.FOLD:
                name = f"fold_{value.arg}_{self.type(value.dtype, value.args[0].lanes)}"
                self.need(name)
                return f"{name}({self.name(value.args[0])})"
            case Kind.TEAM:
                name = f"zoo_team_{value.arg}_{self.type(value.dtype, 1)}"
                self.need(name)
                if value.arg == "max":
                    self.need(f"zoo_max_{self.type(value.dtype, 1)}")
                return f"{name}({self.name(value.args[0])}, room, item)"
            case Kind.CAST:
                return self._cast(value.args[0], value.dtype)
            case Kind.BITCAST:
                return self._bitcast(value.args[0], value.dtype)
        return self._alu(value)

    def _alu(self, value: Value) -> str:
        op, lanes = value.arg, value.lanes
        args = [self.operand(a, lanes) for a in value.args]
        dtype = value.args[-1].dtype
        if op in (Op.CMPLT, Op.CMPNE):
            text = f"{args[0]} {INFIX[op]} {args[1]}"
            return text if lanes == 1 else self._mask(f"({text})", dtype, lanes)
        if op in INFIX:
            return f"{args[0]} {INFIX[op]} {args[1]}"
        match op:
            case Op.MAX:
                return self.max(args[0], args[1], dtype, lanes)
            case Op.WHERE:
                return self._where(value, args)
            case Op.IDIV | Op.MOD:
                return self._divide(value)
            case Op.RECIP:
                return f"1.0f / {args[0]}"
        name = f"zoo_{op.name.lower()}_{self.type(dtype, lanes)}"
        self.need(name)
        return f"{name}({args[0]})"

    def _where(self, value: Value, args: list[str]) -> str:
        if value.lanes == 1:
            return f"{args[0]} ? {args[1]} : {args[2]}"
        size = 4 if value.dtype.is_float or value.dtype is dt.bool_ else value.dtype.itemsize
        mask = {1: "char", 2: "short", 4: "int", 8: "long"}[size]
        text = args[0] if mask == "int" else f"convert_{mask}{value.lanes}({args[0]})"
        return f"{text} ? {args[1]} : {args[2]}"

    def max(self, a: str, b: str, dtype: DType, lanes: int) -> str:
        """The larger one; NaN if either is."""
        name = f"zoo_max_{self.type(dtype, lanes)}"
        self.need(name)
        return f"{name}({a}, {b})"

    def _divide(self, value: Value) -> str:
        """Floor division and modulo: a lane at a time, since no processor divides int vectors."""
        kind = self.type(value.dtype, 1)
        name = f"zoo_{value.arg.name.lower()}_{kind}"
        self.need(name)
        a, b = (self.operand(x, value.lanes) for x in value.args)
        if value.lanes == 1:
            return f"{name}({a}, {b})"
        each = [f"{name}(({a}).s{c}, ({b}).s{c})" for c in LANE_NAMES[: value.lanes]]
        return f"({self.type(value.dtype, value.lanes)})({', '.join(each)})"

    def _mask(self, comparison: str, dtype: DType, lanes: int) -> str:
        """A vector comparison has the width of what it compares; masks are ints."""
        wide = dtype.is_float or dtype is dt.bool_ or dtype.itemsize == 4
        return comparison if wide else f"convert_int{lanes}{comparison}"

    def _cast(self, source: Value, to: DType) -> str:
        text, lanes, old = self.name(source), source.lanes, source.dtype
        if to is dt.bool_:
            zero = self.number(0, old)
            if lanes == 1:
                return f"{text} != {zero}"
            return self._mask(f"({text} != ({self.type(old, lanes)})({zero}))", old, lanes)
        if old is dt.bool_ and lanes > 1:
            text = f"(-{text})"
        if to in HALVES and old is not to:
            exact = old.is_int and old.itemsize == 1 or old is dt.bool_
            number = self._convert(text, old, dt.float32, lanes)
            return number if exact else self._round(number, to, lanes)
        return self._convert(text, old, to, lanes)

    def _convert(self, text: str, old: DType, to: DType, lanes: int) -> str:
        """A conversion between register types; floats truncate, then wrap into small ints."""
        wanted, present = self.type(to, lanes), self.type(old, lanes)
        if wanted == present:
            return text
        if old.is_float and to.is_int and (to.itemsize < 4 or to.kind == "u"):
            step = "int" if to.itemsize < 4 else "long"
            text = self._converted(text, step if lanes == 1 else f"{step}{lanes}", lanes)
        return self._converted(text, wanted, lanes)

    @staticmethod
    def _converted(text: str, wanted: str, lanes: int) -> str:
        return f"({wanted})({text})" if lanes == 1 else f"convert_{wanted}({text})"

    def _round(self, text: str, to: DType, lanes: int) -> str:
        """float32 -> the nearest half, still held as float32."""
        return self._unpack(self.pack(text, to, lanes), to, lanes)

    def pack(self, text: str, to: DType, lanes: int) -> str:
        name = f"pack_{to}_{self.type(dt.float32, lanes)}"
        self.need(name)
        return f"{name}({text})"

    def _unpack(self, text: str, source: DType, lanes: int) -> str:
        name = f"unpack_{source}_{self.type(dt.float32, lanes)}"
        self.need(name)
        return f"{name}({text})"

    def _bitcast(self, source: Value, to: DType) -> str:
        text, lanes = self.name(source), source.lanes
        if source.dtype in HALVES:
            text = self.pack(text, source.dtype, lanes)
        if to in HALVES:
            bits = "ushort" if lanes == 1 else f"ushort{lanes}"
            return self._unpack(f"as_{bits}({text})", to, lanes)
        return f"as_{self.type(to, lanes)}({text})"

    def _index(self, e: Int, lane: Expr | None, lanes: int) -> str:
        if lane is None or lanes == 1:
            return c_index(e)
        e = _of_all_lanes(e, lane, lanes)
        found = linear_in(e, lane)
        if found is None:
            each = [c_index(substitute(e, {lane: i})) for i in range(lanes)]
            return f"(int{lanes})({', '.join(each)})"
        step, rest = found
        steps = ", ".join(str(step * i) for i in range(lanes))
        return f"(int{lanes})({c_index(rest)}) + (int{lanes})({steps})"

    # --- memory ------------------------------------------------------------------------------

    def _load(self, value: Value) -> str:
        address: Address = value.arg
        lanes, dtype = value.lanes, value.dtype
        guards = [_of_all_lanes(g, address.lane, lanes) for g in address.guard]
        scalar_guard = [g for g in guards if address.lane not in _vars(g)]
        lane_guard = [g for g in guards if address.lane in _vars(g)]
        start = self.vector_start(address, dtype) if lanes > 1 and not lane_guard else None
        kind = self.memory(dtype)
        if lanes == 1:
            text = self._registers(self._cell(address, dtype, address.index), dtype, 1)
        elif start is not None:
            base = (
                self._bytes(address, start)
                if address.itemsize
                else f"{self._place(address)} + {c_index(start)}"
            )
            self.need(f"loose_{kind}{lanes}")
            text = f"*({self._space(address)}const loose_{kind}{lanes}*)({base})"
            text = self._registers(text, dtype, lanes)
        elif not lane_guard and (window := self._window(address, lanes)):
            text = self._registers(self._from_window(address, kind, *window), dtype, lanes)
        else:
            each = []
            for i in range(lanes):
                cell = self._cell(address, dtype, substitute(address.index, {address.lane: i}))
                tests = [substitute(g, {address.lane: i}) for g in lane_guard]
                each.append(_guarded(cell, tests, "0"))
            text = self._registers(f"({kind}{lanes})({', '.join(each)})", dtype, lanes)
        kind = self.type(dtype, lanes)
        return _guarded(text, scalar_guard, f"({kind})({self.number(0, dtype)})")

    def _window(self, address: Address, lanes: int) -> tuple[Int, list[int]] | None:
        """(start, each lane's place behind it) if all lanes lie in one short stretch of memory.

        Nothing outside of what the lanes read is read, but for scratch memory, which has room.
        """
        at = [substitute(address.index, {address.lane: i}) for i in range(lanes)]
        offsets = [a - at[0] for a in at]
        if address.itemsize or not all(isinstance(o, int) for o in offsets):
            return None
        low, span = min(offsets), max(offsets) - min(offsets) + 1
        if span > len(LANE_NAMES) or (span & (span - 1) and not isinstance(address.slot, Scratch)):
            return None
        return at[0] + low, [o - low for o in offsets]

    def _from_window(self, address: Address, kind: str, start: Int, places: list[int]) -> str:
        width = 1 << max(places).bit_length()
        if width == 1:
            return f"({kind}{len(places)})({self._cell(address, dt.uint8, start)})"
        self.need(f"loose_{kind}{width}")
        vector = (
            f"*({self._space(address)}const loose_{kind}{width}*)"
            f"({self._place(address)} + {c_index(start)})"
        )
        return f"({vector}).s{''.join(LANE_NAMES[p] for p in places)}"

    def _registers(self, text: str, dtype: DType, lanes: int) -> str:
        """Memory type -> register type."""
        if dtype in HALVES:
            return self._unpack(text, dtype, lanes)
        if dtype is dt.bool_:
            return text if lanes == 1 else f"(convert_int{lanes}({text}) != (int{lanes})(0))"
        return text

    def _cell(self, address: Address, dtype: DType, index: Int) -> str:
        if not address.itemsize:
            return f"{self._place(address)}[{c_index(index)}]"
        kind = self.memory(dtype)
        base = self._bytes(address, index)
        if self.dialect.vectors:
            self.need(f"loose_{kind}")
            return f"*({self.dialect.pointer} const loose_{kind}*)({base})"
        if index * address.itemsize % dtype.itemsize == 0:
            return f"*({self.dialect.pointer} const {kind}*)({base})"
        self.need(f"zoo_bytes_{kind}")
        return f"zoo_bytes_{kind}({base})"

    def cell(self, address: Address) -> str:
        """The element at an address, as it is written to."""
        return f"{self._place(address)}[{c_index(address.index)}]"

    @staticmethod
    def _place(address: Address) -> str:
        slot = address.slot
        return slot.name if isinstance(slot, Scratch) else f"p{slot}"

    def _space(self, address: Address) -> str:
        return "" if isinstance(address.slot, Scratch) else f"{self.dialect.pointer} "

    def _bytes(self, address: Address, index: Int) -> str:
        start = c_index(index * address.itemsize)
        return f"({self.dialect.pointer} const uchar*)p{address.slot} + {start}"

    def vector_start(self, address: Address, dtype: DType) -> Int | None:
        """Where the lanes begin, if they lie side by side."""
        found = linear_in(address.index, address.lane)
        step = dtype.itemsize // address.itemsize if address.itemsize else 1
        return found[1] if found and found[0] == step else None

    # --- small pieces ------------------------------------------------------------------------

    def name(self, value: Value) -> str:
        if value in self.inlined:
            return f"({self.expression(value)})"
        if value.kind is Kind.CONST and value not in self.names:
            return self.number(value.arg, value.dtype)
        return self.names[value]

    def operand(self, value: Value, lanes: int) -> str:
        """A value in as many lanes as its neighbours have."""
        text = self.name(value)
        if value.lanes == lanes:
            return text
        sign = "-" if value.dtype is dt.bool_ else ""  # a scalar 1 is all ones in a lane
        return f"({self.type(value.dtype, lanes)})({sign}({text}))"

    def type(self, dtype: DType, lanes: int) -> str:
        return C_TYPES[dtype] + (str(lanes) if lanes > 1 else "")

    def memory(self, dtype: DType) -> str:
        return MEMORY_TYPES.get(dtype, C_TYPES[dtype])

    def need(self, helper: str) -> None:
        self.helpers.add(helper)

    @staticmethod
    def number(value: int | float | bool, dtype: DType) -> str:
        if dtype.is_float:
            if math.isnan(value):
                return "NAN"
            with np.errstate(over="ignore"):
                value = float(np.float32(value))  # rounded once, here
            if math.isinf(value):
                return "INFINITY" if value > 0 else "(-INFINITY)"
            text = f"{value!r}f"
            return text if not text.startswith("-") else f"({text})"
        if dtype is dt.bool_:
            return str(int(value))
        value = int(value)
        if dtype.itemsize == 8:
            if value == -(1 << 63):
                return "(-9223372036854775807L - 1)"
            return f"({value}{'UL' if dtype.kind == 'u' else 'L'})"
        if value == -(1 << 31):
            return "(-2147483647 - 1)"
        return f"(({C_TYPES[dtype]})({value}{'u' if dtype is dt.uint32 else ''}))"


def _guarded(text: str, guard: Sequence[Int], otherwise: str) -> str:
    if not guard:
        return text
    return f"(({' && '.join(c_index(g) for g in guard)}) ? {text} : {otherwise})"


def _of_all_lanes(guard: Int, lane: Expr | None, lanes: int) -> Int:
    """A comparison without its lane if it is the same for all, as at the border of a whole vector.

    A difference r + k or r - k of two numbers passes 0 between vectors if r is known modulo lanes.
    """
    if lanes == 1 or lane not in _vars(guard) or guard.op != "lt":
        return guard
    found = linear_in(guard.args[0] - guard.args[1], lane)
    if found is None or found[0] not in (1, -1):
        return guard
    first = 0 if found[0] == 1 else lanes - 1
    return substitute(guard, {lane: 0}) if found[1] % lanes == first else guard


def _vars(e: Int) -> frozenset[Expr]:
    return frozenset() if isinstance(e, int) else e.vars


def c_index(e: Int) -> str:
    """An index expression in C; 64-bit where 32 could overflow."""
    if isinstance(e, int):
        return str(e) if abs(e) < 1 << 31 else f"{e}L"
    low, high = _extremes(e)
    return _print(e, long=max(abs(low), abs(high)) >= 1 << 31)


def _extremes(e: Expr) -> tuple[int, int]:
    """The bounds of an expression and of everything in it."""
    low, high = e.min, e.max
    for part in e.args if e.op != "sum" else [t for t, _ in e.args[1]]:
        if isinstance(part, Expr):
            a, b = _extremes(part)
            low, high = min(low, a), max(high, b)
    return low, high


def _print(e: Int, long: bool) -> str:
    if isinstance(e, int):
        return f"{e}L" if long else str(e)
    if e.op == "var":
        return f"(long){e.text}" if long else e.text
    if e.op == "sum":
        const, terms = e.args
        pieces = [_print(t, long) + (f"*{k}" if k != 1 else "") for t, k in terms]
        pieces += [str(const)] if const else []
        return "(" + " + ".join(pieces).replace("+ -", "- ") + ")"
    if e.op == "mul":
        return "(" + "*".join(_print(f, long) for f in e.args) + ")"
    a, b = (_print(x, long) for x in e.args)
    if e.op in ("div", "mod") and bounds(e.args[0])[0] < 0:  # C rounds towards zero
        rest = f"(({a} % {b} + {b}) % {b})"
        return rest if e.op == "mod" else f"(({a} - {rest}) / {b})"
    sign = {"div": "/", "mod": "%", "lt": "<"}.get(e.op)
    if sign:
        return f"({a} {sign} {b})"
    sign = {"min": "<", "max": ">"}[e.op]  # min() would be called in every turn of a loop
    return f"({a} {sign} {b} ? {a} : {b})"
