"""Loop IR -> source. One renderer; a Dialect holds what differs between the languages.

Sources are deterministic, so their hash names the compiled binary on disk. A product that only a
sum takes is written inside that sum, where the compiler may fuse the two; every other operation is
a statement of its own and rounds as NumPy does.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine import dtype as dt
from engine.clib import helpers
from engine.dtype import DType
from engine.graph import Op
from engine.ir import (
    Accumulator,
    Address,
    Define,
    Function,
    Kind,
    Let,
    Loop,
    Start,
    Statement,
    Store,
    Target,
    Update,
    Value,
)
from engine.symbolic import Expr, Int, bounds, linear_in, substitute

LANE_NAMES = "0123456789abcdef"
HALVES = (dt.float16, dt.bfloat16)


@dataclass(frozen=True)
class Dialect:
    """How a language spells what they don't share."""

    types: dict[DType, str]  # in registers
    memory: dict[DType, str]  # in buffers, where that is another
    kernel: str
    pointer: str
    group: str


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

DIALECTS = {
    "opencl-cpu": Dialect(
        C_TYPES,
        MEMORY_TYPES,
        "__kernel __attribute__((reqd_work_group_size(1,1,1))) void",
        "__global",
        "get_group_id(0)",
    ),
    "opencl-gpu": Dialect(
        C_TYPES,
        MEMORY_TYPES,
        "__kernel void",
        "__global",
        "get_global_id(0)",
    ),
}

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


@dataclass(frozen=True)
class Rendered:
    """One function in the target's language.

    text defines `static void name(buffers…, [ints, first,] group)`; types are its buffers' C types,
    has_ints says whether it takes symbolic ints; helpers are the names of what it calls.
    """

    name: str
    text: str
    types: tuple[str, ...]
    has_ints: bool
    helpers: frozenset[str]


def render(function: Function, target: Target) -> Rendered:
    """The source of one function; its name is the hash of what it does."""
    renderer = _Renderer(function, DIALECTS[target.dialect], target)
    body = renderer.text()
    name = "k" + hashlib.sha256(body.encode()).hexdigest()[:16]
    kinds = tuple(renderer.memory(p.dtype) for p in function.parameters)
    text = f"// {function.label}\nstatic void {name}{body}"
    return Rendered(name, text, kinds, bool(function.variables), frozenset(renderer.helpers))


def assemble(functions: Sequence[Rendered], target: Target) -> str:
    """The functions and the helpers that they call, each once."""
    needed = frozenset().union(*(f.helpers for f in functions), ())
    called = [text for name, text in helpers(target).items() if name in needed]
    return "\n".join([*called, *(f.text for f in functions)])


def entry_points(functions: Sequence[Rendered], target: Target) -> str:
    """A kernel for each function, called like it with "_" behind: one group a launch index."""
    d = DIALECTS[target.dialect]
    out = []
    for f in functions:
        taken = _buffers(f.types, d)
        passed = [f"p{i}" for i in range(len(f.types))]
        if f.has_ints:
            taken += [f"{d.pointer} const int* restrict ints", "int first"]
            passed += ["ints", "first"]
        limit = "" if target.is_cpu else ", int groups"
        check = "" if target.is_cpu else f"if ({d.group} < groups) "
        out.append(
            f"{d.kernel} {f.name}_({', '.join(taken)}{limit}) {{ "
            f"{check}{f.name}({', '.join(passed)}, {d.group}); }}"
        )
    return "\n".join(out)


def _buffers(types: Sequence[str], d: Dialect) -> list[str]:
    """Parameters p0, p1, …; only the first is written."""
    return [
        f"{d.pointer} {'const ' if i else ''}{kind}* restrict p{i}" for i, kind in enumerate(types)
    ]


class _Renderer:
    def __init__(self, function: Function, dialect: Dialect, target: Target) -> None:
        self.function = function
        self.dialect = dialect
        self.target = target
        self.names: dict[Value, str] = {}
        self.accumulators: dict[Accumulator, str] = {}
        self.lines: list[str] = []
        self.helpers: set[str] = set()
        self.uses = _count_uses(function.body)
        self.inlined = _products_of_sums(function.body, self.uses)

    def text(self) -> str:
        """Parameters and body, without the name."""
        f, d = self.function, self.dialect
        arguments = _buffers([self.memory(p.dtype) for p in f.parameters], d)
        if f.variables:
            arguments += [f"{d.pointer} const int* restrict ints", "int first"]
        self.lines.append(f"({', '.join(arguments)}, const int group) {{")
        for i, v in enumerate(f.variables):
            self.lines.append(f"  const int {v} = ints[first + {i}];")
        self._block(f.body, "  ")
        self.lines.append("}")
        return "\n".join(self.lines) + "\n"

    def _block(self, body: list[Statement], indent: str) -> None:
        for s in body:
            match s:
                case Loop(var, extent, inner):
                    end = _c(extent)
                    self.lines.append(f"{indent}for (int {var} = 0; {var} < {end}; {var}++) {{")
                    self._block(inner, indent + "  ")
                    self.lines.append(indent + "}")
                case Let(value):
                    if value not in self.inlined:
                        self._let(value, indent)
                case Define(var, value):
                    self._define(var, value, indent)
                case Start(acc):
                    name = self.accumulators[acc] = f"s{len(self.accumulators)}"
                    zero = self._number(0 if acc.combine == "add" else acc.dtype.min, acc.dtype)
                    kind = self._type(acc.dtype, acc.lanes)
                    self.lines.append(f"{indent}{kind} {name} = ({kind})({zero});")
                case Update(acc, value):
                    self._update(acc, value, indent)
                case Store():
                    self._store(s, indent)

    def _define(self, var: Expr, value: Int | Value, indent: str) -> None:
        if isinstance(value, Value):  # a gathered index: clamped, so it can't leave the buffer
            low, high = bounds(var)
            text = self._scalar(value)
            kind = "long" if value.dtype.itemsize == 8 else "int"
            cast = "ulong" if value.dtype is dt.uint64 else kind
            clamped = f"(int)clamp(({kind})min(({cast}){text}, ({cast}){high}), ({kind}){low}, ({kind}){high})"
            self.lines.append(f"{indent}const int {var} = {clamped};")
        else:
            self.lines.append(f"{indent}const int {var} = {_c(value)};")

    def _update(self, acc: Accumulator, value: Value, indent: str) -> None:
        name = self.accumulators[acc]
        text = self._operand(value, acc.lanes)
        if acc.combine == "add":
            self.lines.append(f"{indent}{name} += {text};")
        else:
            self.lines.append(f"{indent}{name} = {self._max(name, text, acc.dtype, acc.lanes)};")

    # --- values ------------------------------------------------------------------------------

    def _let(self, value: Value, indent: str) -> None:
        if value.kind is Kind.CONST:
            self.names[value] = self._number(value.arg, value.dtype)
            return
        text = self._expression(value)
        name = self.names[value] = f"v{len(self.names)}"
        kind = self._type(value.dtype, value.lanes)
        self.lines.append(f"{indent}const {kind} {name} = {text};")

    def _expression(self, value: Value) -> str:
        match value.kind:
            case Kind.CONST:
                return self._number(value.arg, value.dtype)
            case Kind.INDEX:
                return self._index(*value.arg, value.lanes)
            case Kind.LOAD:
                return self._load(value)
            case Kind.READ:
                return self.accumulators[value.arg]
            case Kind.FOLD:
                name = f"fold_{value.arg}_{self._type(value.dtype, value.args[0].lanes)}"
                self._need(name)
                return f"{name}({self._name(value.args[0])})"
            case Kind.CAST:
                return self._cast(value.args[0], value.dtype)
            case Kind.BITCAST:
                return self._bitcast(value.args[0], value.dtype)
        return self._alu(value)

    def _alu(self, value: Value) -> str:
        op, lanes = value.arg, value.lanes
        args = [self._operand(a, lanes) for a in value.args]
        dtype = value.args[-1].dtype
        if op in (Op.CMPLT, Op.CMPNE):
            text = f"{args[0]} {INFIX[op]} {args[1]}"
            return text if lanes == 1 else self._mask(f"({text})", dtype, lanes)
        if op in INFIX:
            return f"{args[0]} {INFIX[op]} {args[1]}"
        match op:
            case Op.MAX:
                return self._max(args[0], args[1], dtype, lanes)
            case Op.WHERE:
                return self._where(value, args)
            case Op.IDIV | Op.MOD:
                return self._divide(value)
            case Op.RECIP:
                return f"1.0f / {args[0]}"
            case Op.EXP2 | Op.LOG2 | Op.SIN:
                name = f"zoo_{op.name.lower()}_{self._type(dtype, lanes)}"
                self._need(name)
                return f"{name}({args[0]})"
        return f"{op.name.lower()}({args[0]})"

    def _where(self, value: Value, args: list[str]) -> str:
        if value.lanes == 1:
            return f"{args[0]} ? {args[1]} : {args[2]}"
        size = 4 if value.dtype.is_float or value.dtype is dt.bool_ else value.dtype.itemsize
        mask = {1: "char", 2: "short", 4: "int", 8: "long"}[size]
        text = args[0] if mask == "int" else f"convert_{mask}{value.lanes}({args[0]})"
        return f"select({args[2]}, {args[1]}, {text})"

    def _max(self, a: str, b: str, dtype: DType, lanes: int) -> str:
        """The larger one; NaN if either is."""
        if not dtype.is_float:
            return f"max({a}, {b})"
        name = f"zoo_max_{self._type(dtype, lanes)}"
        self._need(name)
        return f"{name}({a}, {b})"

    def _divide(self, value: Value) -> str:
        """Floor division and modulo: a lane at a time, since no processor divides int vectors."""
        kind = self._type(value.dtype, 1)
        name = f"zoo_{value.arg.name.lower()}_{kind}"
        self._need(name)
        a, b = (self._operand(x, value.lanes) for x in value.args)
        if value.lanes == 1:
            return f"{name}({a}, {b})"
        each = [f"{name}(({a}).s{c}, ({b}).s{c})" for c in LANE_NAMES[: value.lanes]]
        return f"({self._type(value.dtype, value.lanes)})({', '.join(each)})"

    def _mask(self, comparison: str, dtype: DType, lanes: int) -> str:
        """A vector comparison has the width of what it compares; masks are ints."""
        wide = dtype.is_float or dtype is dt.bool_ or dtype.itemsize == 4
        return comparison if wide else f"convert_int{lanes}{comparison}"

    def _cast(self, source: Value, to: DType) -> str:
        text, lanes, old = self._name(source), source.lanes, source.dtype
        if to is dt.bool_:
            zero = self._number(0, old)
            if lanes == 1:
                return f"{text} != {zero}"
            return self._mask(f"({text} != ({self._type(old, lanes)})({zero}))", old, lanes)
        if old is dt.bool_ and lanes > 1:
            text = f"(-{text})"
        if to in HALVES and old is not to:
            exact = old.is_int and old.itemsize == 1 or old is dt.bool_
            number = self._convert(text, old, dt.float32, lanes)
            return number if exact else self._round(number, to, lanes)
        return self._convert(text, old, to, lanes)

    def _convert(self, text: str, old: DType, to: DType, lanes: int) -> str:
        """A conversion between register types; floats truncate, then wrap into small ints."""
        wanted, present = self._type(to, lanes), self._type(old, lanes)
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
        return self._unpack(self._pack(text, to, lanes), to, lanes)

    def _pack(self, text: str, to: DType, lanes: int) -> str:
        name = f"pack_{to}_{self._type(dt.float32, lanes)}"
        self._need(name)
        return f"{name}({text})"

    def _unpack(self, text: str, source: DType, lanes: int) -> str:
        name = f"unpack_{source}_{self._type(dt.float32, lanes)}"
        self._need(name)
        return f"{name}({text})"

    def _bitcast(self, source: Value, to: DType) -> str:
        text, lanes = self._name(source), source.lanes
        if source.dtype in HALVES:
            text = self._pack(text, source.dtype, lanes)
        if to in HALVES:
            bits = "ushort" if lanes == 1 else f"ushort{lanes}"
            return self._unpack(f"as_{bits}({text})", to, lanes)
        return f"as_{self._type(to, lanes)}({text})"

    def _index(self, e: Int, lane: Expr | None, lanes: int) -> str:
        if lane is None or lanes == 1:
            return _c(e)
        found = linear_in(e, lane)
        if found is None:
            each = [_c(substitute(e, {lane: i})) for i in range(lanes)]
            return f"(int{lanes})({', '.join(each)})"
        step, rest = found
        steps = ", ".join(str(step * i) for i in range(lanes))
        return f"(int{lanes})({_c(rest)}) + (int{lanes})({steps})"

    # --- memory ------------------------------------------------------------------------------

    def _load(self, value: Value) -> str:
        address: Address = value.arg
        lanes, dtype = value.lanes, value.dtype
        scalar_guard = [g for g in address.guard if address.lane not in _vars(g)]
        lane_guard = [g for g in address.guard if address.lane in _vars(g)]
        start = self._vector_start(address, dtype) if lanes > 1 and not lane_guard else None
        kind = self.memory(dtype)
        if lanes == 1:
            text = self._registers(self._cell(address, dtype, address.index), dtype, 1)
        elif start is not None:
            base = (
                self._bytes(address, start)
                if address.itemsize
                else f"p{address.slot} + {_c(start)}"
            )
            self._need(f"loose_{kind}{lanes}")
            text = f"*({self.dialect.pointer} const loose_{kind}{lanes}*)({base})"
            text = self._registers(text, dtype, lanes)
        else:
            each = []
            for i in range(lanes):
                cell = self._cell(address, dtype, substitute(address.index, {address.lane: i}))
                tests = [substitute(g, {address.lane: i}) for g in lane_guard]
                each.append(_guarded(cell, tests, "0"))
            text = self._registers(f"({kind}{lanes})({', '.join(each)})", dtype, lanes)
        kind = self._type(dtype, lanes)
        return _guarded(text, scalar_guard, f"({kind})({self._number(0, dtype)})")

    def _registers(self, text: str, dtype: DType, lanes: int) -> str:
        """Memory type -> register type."""
        if dtype in HALVES:
            return self._unpack(text, dtype, lanes)
        if dtype is dt.bool_:
            return text if lanes == 1 else f"(convert_int{lanes}({text}) != (int{lanes})(0))"
        return text

    def _cell(self, address: Address, dtype: DType, index: Int) -> str:
        if not address.itemsize:
            return f"p{address.slot}[{_c(index)}]"
        kind = self.memory(dtype)
        self._need(f"loose_{kind}")
        base = self._bytes(address, index)
        return f"*({self.dialect.pointer} const loose_{kind}*)({base})"

    def _bytes(self, address: Address, index: Int) -> str:
        return (
            f"({self.dialect.pointer} const uchar*)p{address.slot} + {_c(index * address.itemsize)}"
        )

    def _vector_start(self, address: Address, dtype: DType) -> Int | None:
        """Where the lanes begin, if they lie side by side."""
        found = linear_in(address.index, address.lane)
        step = dtype.itemsize // address.itemsize if address.itemsize else 1
        return found[1] if found and found[0] == step else None

    def _store(self, store: Store, indent: str) -> None:
        address, dtype, value = store.address, store.dtype, store.value
        lanes = value.lanes if address.lane is None else self._lanes_of(address)
        text = self._operand(value, lanes)
        if dtype in HALVES:
            text = self._pack(text, dtype, lanes)
        elif dtype is dt.bool_:
            text = f"({text} != 0)" if lanes == 1 else f"convert_uchar{lanes}(-{text})"
        kind = self.memory(dtype)
        start = self._vector_start(address, dtype) if lanes > 1 else None
        if lanes == 1:
            self.lines.append(f"{indent}p0[{_c(address.index)}] = {text};")
        elif start is not None:
            self._need(f"loose_{kind}{lanes}")
            place = f"*({self.dialect.pointer} loose_{kind}{lanes}*)(p0 + {_c(start)})"
            self.lines.append(f"{indent}{place} = {text};")
        else:
            name = f"w{len(self.lines)}"
            self.lines.append(f"{indent}{{ const {kind}{lanes} {name} = {text};")
            for i in range(lanes):
                at = _c(substitute(address.index, {address.lane: i}))
                self.lines.append(f"{indent}  p0[{at}] = {name}.s{LANE_NAMES[i]};")
            self.lines.append(indent + "}")

    @staticmethod
    def _lanes_of(address: Address) -> int:
        return address.lane.max + 1

    # --- small pieces ------------------------------------------------------------------------

    def _name(self, value: Value) -> str:
        if value in self.inlined:
            return f"({self._expression(value)})"
        if value.kind is Kind.CONST and value not in self.names:
            return self._number(value.arg, value.dtype)
        return self.names[value]

    def _scalar(self, value: Value) -> str:
        return f"({self._name(value)})"

    def _operand(self, value: Value, lanes: int) -> str:
        """A value in as many lanes as its neighbours have."""
        text = self._name(value)
        if value.lanes == lanes:
            return text
        sign = "-" if value.dtype is dt.bool_ else ""  # a scalar 1 is all ones in a lane
        return f"({self._type(value.dtype, lanes)})({sign}({text}))"

    def _type(self, dtype: DType, lanes: int) -> str:
        return self.dialect.types[dtype] + (str(lanes) if lanes > 1 else "")

    def memory(self, dtype: DType) -> str:
        return self.dialect.memory.get(dtype, self.dialect.types[dtype])

    def _need(self, helper: str) -> None:
        self.helpers.add(helper)

    @staticmethod
    def _number(value: int | float | bool, dtype: DType) -> str:
        if dtype.is_float:
            if math.isnan(value):
                return "NAN"
            if math.isinf(value):
                return "INFINITY" if value > 0 else "(-INFINITY)"
            text = f"{float(value)!r}f"
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
    return f"(({' && '.join(_c(g) for g in guard)}) ? {text} : {otherwise})"


def _vars(e: Int) -> frozenset[Expr]:
    return frozenset() if isinstance(e, int) else e.vars


def _c(e: Int) -> str:
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
    sign = {"div": "/", "mod": "%", "lt": "<"}.get(e.op)
    if sign:
        return f"({a} {sign} {b})"
    kind = "long" if long else "int"
    return f"{e.op}(({kind}){a}, ({kind}){b})"


def _count_uses(body: list[Statement]) -> Counter[Value]:
    uses: Counter[Value] = Counter()
    for s in body:
        match s:
            case Let(value):
                uses.update(value.args)
            case Define(_, value) if isinstance(value, Value):
                uses[value] += 1
            case Update(_, value):
                uses[value] += 1
            case Store(_, _, value):
                uses[value] += 1
            case Loop(_, _, inner):
                uses += _count_uses(inner)
    return uses


def _products_of_sums(body: list[Statement], uses: Counter[Value]) -> set[Value]:
    """Float products whose only use is to be added to an accumulator in the same block."""
    found: set[Value] = set()
    here = {s.value for s in body if isinstance(s, Let)}
    for s in body:
        if isinstance(s, Loop):
            found |= _products_of_sums(s.body, uses)
        elif isinstance(s, Update) and s.accumulator.combine == "add":
            v = s.value
            is_product = v.kind is Kind.ALU and v.arg is Op.MUL and v.dtype.is_float
            if is_product and uses[v] == 1 and v in here:
                found.add(v)
    return found
