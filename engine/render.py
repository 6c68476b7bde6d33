"""Loop IR -> source. One renderer; `dialects` holds what differs between the languages.

Sources are deterministic, so their hash names the compiled binary on disk. A product that only a
sum takes is written inside that sum, where the compiler may fuse the two; every other operation is
a statement of its own and rounds as NumPy does.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine import dtype as dt
from engine.clib import SIZES, helpers
from engine.dialects import DIALECTS, Dialect
from engine.graph import Op
from engine.ir import (
    Accumulator,
    Barrier,
    Call,
    Define,
    Fetch,
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
from engine.spell import HALVES, LANE_NAMES, Speller, c_index
from engine.symbolic import Expr, Int, bounds, substitute


@dataclass(frozen=True)
class Rendered:
    """One function in the target's language; equal names mean equal code.

    text defines `static void name(buffers…, [ints, first,] group[, item, shared…])`; types are its
    buffers' C types, has_ints says whether it takes symbolic ints; helpers are the names of what it
    calls; team is how many work-items make a group together, each called with its number and with
    the memory that they share: (name, C type, elements) of each part.
    """

    name: str
    text: str = field(compare=False)
    types: tuple[str, ...] = field(compare=False)
    has_ints: bool = field(compare=False)
    helpers: frozenset[str] = field(compare=False)
    support: tuple[str, ...] = field(compare=False, default=())  # definitions it needs besides
    team: int = field(compare=False, default=1)
    shared: tuple[tuple[str, str, int], ...] = field(compare=False, default=())

    @property
    def local_bytes(self) -> int:
        """Bytes of memory that a team shares."""
        return sum(SIZES[kind.removeprefix("u")] * size for _, kind, size in self.shared)


def render(function: Function, target: Target) -> Rendered:
    """The source of one function; its name is the hash of what it does."""
    renderer = _Renderer(function, DIALECTS[target.dialect])
    body = renderer.text()
    name = "k" + hashlib.sha256(body.encode()).hexdigest()[:16]
    kinds = tuple(renderer.spell.memory(p.dtype) for p in function.parameters)
    # without it, clang splits vectors of 512 bits where it takes the processor for one that slows
    wide = "__attribute__((min_vector_width(512))) " if target.is_cpu and target.lanes == 16 else ""
    text = f"// {function.label}\nstatic {wide}void {name}{body}"
    helpers = frozenset(renderer.spell.helpers)
    has_ints = bool(function.variables)
    shared = tuple(
        (s.name, renderer.spell.memory(s.dtype), s.size) for s in function.scratch if s.shared
    )
    return Rendered(name, text, kinds, has_ints, helpers, function.support, function.team, shared)


def assemble(functions: Sequence[Rendered], target: Target) -> str:
    """The functions and the helpers that they call, each once."""
    needed = frozenset().union(*(f.helpers for f in functions), ())
    called = [text for name, text in helpers(target).items() if name in needed]
    support = dict.fromkeys(part for f in functions for part in f.support)
    prelude = [text] if (text := DIALECTS[target.dialect].prelude) else []
    return "\n".join([*prelude, *called, *support, *(f.text for f in functions)])


def entry_points(functions: Sequence[Rendered], target: Target) -> str:
    """A kernel for each function, called like it with "_" behind: one group a launch index.

    On a GPU it also takes how many groups there are, and a function without a team takes one
    work-item for each.
    """
    return "\n".join(_entry_point(f, target, DIALECTS[target.dialect]) for f in functions)


def _entry_point(f: Rendered, target: Target, d: Dialect) -> str:
    taken = _buffers(f.types, d)
    passed = [f"p{i}" for i in range(len(f.types))]
    if f.has_ints:
        taken += [f"{d.pointer} const int* restrict ints", d.number.format("first")]
        passed += ["ints", "first"]
    if not target.is_cpu:
        taken.append(d.number.format("groups"))
    taken = [text + d.binding.format(i) for i, text in enumerate(taken)] + list(d.builtins)
    head = f"{d.kernel} {f.name}_({', '.join(taken)})"
    if f.team > 1:
        passed += [d.group, d.item, *(name for name, _, _ in f.shared)]
        parts = " ".join(f"{d.room} {kind} {name}[{size}];" for name, kind, size in f.shared)
        return f"{head} {{ {parts} {f.name}({', '.join(passed)}); }}"
    check = "" if target.is_cpu else f"if ({d.alone} < groups) "
    return f"{head} {{ {check}{f.name}({', '.join([*passed, d.alone])}); }}"


def _buffers(types: Sequence[str], d: Dialect) -> list[str]:
    """Parameters p0, p1, …; only the first is written."""
    return [
        f"{d.pointer} {'const ' if i else ''}{kind}* restrict p{i}" for i, kind in enumerate(types)
    ]


class _Renderer:
    def __init__(self, function: Function, dialect: Dialect) -> None:
        self.function = function
        self.dialect = dialect
        self.lines: list[str] = []
        inlined = _products_of_sums(function.body, _count_uses(function.body))
        self.spell = Speller(dialect, inlined)
        self.is_around = False  # whether any store goes past the caches

    def text(self) -> str:
        """Parameters and body, without the name."""
        f, d = self.function, self.dialect
        arguments = _buffers([self.spell.memory(p.dtype) for p in f.parameters], d)
        if f.variables:
            arguments += [f"{d.pointer} const int* restrict ints", "int first"]
        arguments.append("const int group")
        if f.team > 1:
            arguments.append("const int item")
        for part in f.scratch:
            if part.shared:
                arguments.append(f"{d.shared} {self.spell.memory(part.dtype)}* {part.name}")
        self.lines.append(f"({', '.join(arguments)}) {{")
        for i, v in enumerate(f.variables):
            self.lines.append(f"  const int {v} = ints[first + {i}];")
        for part in f.scratch:
            if part.shared:
                continue
            kind = part.kind or self.spell.memory(part.dtype)
            aligned = " __attribute__((aligned(64)))" if d.vectors else ""
            room = f"{kind} {part.name}[{part.size}]{aligned}"
            self.lines.append(f"  {room};")
        self._block(f.body, "  ")
        if self.is_around:  # such stores keep no order by themselves
            self.lines.append('  __asm__ volatile("sfence" ::: "memory");')
        self.lines.append("}")
        return "\n".join(self.lines) + "\n"

    def _block(self, body: list[Statement], indent: str) -> None:
        for s in body:
            match s:
                case Loop(var, extent, inner, dealt):
                    first, step = (0, "++")
                    if dealt:
                        first, step = "item", f" += {self.function.team}"
                    turns = f"int {var} = {first}; {var} < {c_index(extent)}; {var}{step}"
                    self.lines.append(f"{indent}for ({turns}) {{")
                    self._block(inner, indent + "  ")
                    self.lines.append(indent + "}")
                case Let(value):
                    if value not in self.spell.inlined:
                        self._let(value, indent)
                case Define(var, value):
                    self._define(var, value, indent)
                case Start(acc):
                    name = self.spell.accumulators[acc] = f"s{len(self.spell.accumulators)}"
                    zero = self.spell.number(
                        0 if acc.combine == "add" else acc.dtype.min, acc.dtype
                    )
                    kind = self.spell.type(acc.dtype, acc.lanes)
                    self.lines.append(f"{indent}{kind} {name} = ({kind})({zero});")
                case Update(acc, value):
                    self._update(acc, value, indent)
                case Store():
                    self._store(s, indent)
                case Barrier():
                    self.lines.append(f"{indent}{self.dialect.barrier};")
                case Fetch(slot, index):
                    self.spell.need(name := "zoo_fetch_out" if slot == 0 else "zoo_fetch")
                    self.lines.append(f"{indent}{name}(p{slot} + {c_index(index)});")
                case Call(name, scratch, slots, ints):
                    given = [part.name for part in scratch] + [f"p{i}" for i in slots]
                    given += [c_index(i) for i in ints]
                    given += ["item"] if self.function.team > 1 else []
                    self.lines.append(f"{indent}{name}({', '.join(given)});")

    def _let(self, value: Value, indent: str) -> None:
        names = self.spell.names
        if value.kind is Kind.CONST:
            names[value] = self.spell.number(value.arg, value.dtype)
            return
        text = self.spell.expression(value)
        names[value] = f"v{len(names)}"
        kind = self.spell.type(value.dtype, value.lanes)
        self.lines.append(f"{indent}const {kind} {names[value]} = {text};")

    def _define(self, var: Expr, value: Int | Value, indent: str) -> None:
        if isinstance(value, Value):  # a gathered index: clamped, so it can't leave the buffer
            low, high = bounds(var)
            text = f"({self.spell.name(value)})"
            kind = "long" if value.dtype.itemsize == 8 else "int"
            cast = "ulong" if value.dtype is dt.uint64 else kind
            below = f"({kind})min(({cast}){text}, ({cast}){high})"
            self.lines.append(f"{indent}const int {var} = (int)max({below}, ({kind}){low});")
        else:
            self.lines.append(f"{indent}const int {var} = {c_index(value)};")

    def _update(self, acc: Accumulator, value: Value, indent: str) -> None:
        name = self.spell.accumulators[acc]
        text = self.spell.operand(value, acc.lanes)
        if acc.combine == "add":
            self.lines.append(f"{indent}{name} += {text};")
        else:
            self.lines.append(
                f"{indent}{name} = {self.spell.max(name, text, acc.dtype, acc.lanes)};"
            )

    def _store(self, store: Store, indent: str) -> None:
        address, dtype, value = store.address, store.dtype, store.value
        lanes = value.lanes if address.lane is None else address.lane.max + 1
        text = self.spell.operand(value, lanes)
        if dtype in HALVES:
            if (
                value.kind is Kind.CAST
                and value.lanes == lanes
                and value.args[0].dtype is dt.float32
            ):
                text = self.spell.operand(value.args[0], lanes)  # rounded once, by the store
            text = self.spell.pack(text, dtype, lanes)
        elif dtype is dt.bool_:
            text = f"({text} != 0)" if lanes == 1 else f"convert_uchar{lanes}(-{text})"
        kind = self.spell.memory(dtype)
        start = self.spell.vector_start(address, dtype) if lanes > 1 else None
        if lanes == 1:
            self.lines.append(f"{indent}{self.spell.cell(address)} = {text};")
        elif start is not None and store.around:
            place = f"({self.dialect.pointer} {kind}{lanes}*)(p0 + {c_index(start)})"
            self.lines.append(f"{indent}__builtin_nontemporal_store({text}, {place});")
            self.is_around = True
        elif start is not None:
            self.spell.need(f"loose_{kind}{lanes}")
            place = f"*({self.dialect.pointer} loose_{kind}{lanes}*)(p0 + {c_index(start)})"
            self.lines.append(f"{indent}{place} = {text};")
        else:
            name = f"w{len(self.lines)}"
            self.lines.append(f"{indent}{{ const {kind}{lanes} {name} = {text};")
            for i in range(lanes):
                at = c_index(substitute(address.index, {address.lane: i}))
                self.lines.append(f"{indent}  p0[{at}] = {name}.s{LANE_NAMES[i]};")
            self.lines.append(indent + "}")


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
            case Store(value=value):
                uses[value] += 1
            case Loop(body=inner):
                uses += _count_uses(inner)
    return uses


def _products_of_sums(body: list[Statement], uses: Counter[Value]) -> set[Value]:
    """Float products whose only use is a sum in the same block: one of each sum's operands."""
    found: set[Value] = set()
    here = {s.value for s in body if isinstance(s, Let)}
    for s in body:
        match s:
            case Loop(body=inner):
                found |= _products_of_sums(inner, uses)
            case Update(Accumulator(combine="add"), value):
                found |= _products([value], uses, here)
            case Let(Value(kind=Kind.ALU, arg=Op.ADD) as value):
                found |= _products(value.args, uses, here)
    return found


def _products(values: Sequence[Value], uses: Counter[Value], here: set[Value]) -> set[Value]:
    for v in values:
        is_product = v.kind is Kind.ALU and v.arg is Op.MUL and v.dtype is dt.float32
        if is_product and uses[v] == 1 and v in here:
            return {v}
    return set()
