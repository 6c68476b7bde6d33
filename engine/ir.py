"""The loop IR: what a kernel does, in loops over values that are each assigned once.

Its own small set of kinds, apart from the graph's ops: here there are loops, lanes and addresses.
`lower` makes it, `render` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from engine.dtype import DType
from engine.symbolic import Expr, Int


@dataclass(frozen=True)
class Target:
    """What code generation may know of a device."""

    dialect: str  # a key of dialects.DIALECTS
    is_cpu: bool
    lanes: int  # floats in the widest register that is worth using
    cores: int  # work-groups that run at once
    features: frozenset[str] = field(default_factory=frozenset)  # what else a recipe may use
    team: int = 1  # work-items that make a group's outputs together, on a GPU; a power of two


class Kind(Enum):
    """What a Value is."""

    CONST = auto()  # arg: a Python number
    INDEX = auto()  # arg: an Expr, as an int32 value
    LOAD = auto()  # arg: Address
    ALU = auto()  # arg: a graph Op
    CAST = auto()
    BITCAST = auto()  # same item size
    READ = auto()  # arg: Accumulator
    FOLD = auto()  # arg: "add" | "max": all lanes into one
    TEAM = auto()  # arg: the same: one value of each work-item into one that all of them get


@dataclass(frozen=True, eq=False)
class Value:
    """One value: `lanes` numbers of a type. Bools are 0 or 1; in lanes, 0 or all ones."""

    kind: Kind
    dtype: DType
    lanes: int
    args: tuple[Value, ...]
    arg: Any
    depth: int  # how many loops it lies inside of


@dataclass(frozen=True)
class Scratch:
    """Memory of one work-group's own, gone at its end; `size` in elements.

    shared: the work-items of a team see the same; else each of them has its own.
    kind: the language's name of what it consists of, where that is no plain number.
    """

    name: str
    dtype: DType
    size: int
    shared: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Address:
    """Elements of a buffer: at `index`, which moves with the Var `lane` when there are lanes.

    Where a guard (0 or 1) fails, nothing is read and the value is 0. stride is the item size of
    the buffer when it is read as another type.
    """

    slot: int | Scratch
    index: Int
    lane: Expr | None
    guard: tuple[Int, ...] = ()
    itemsize: int = 0  # of the buffer's own type, when that differs from the value's


@dataclass(eq=False)
class Accumulator:
    """A variable that a loop adds to, or keeps the maximum in."""

    combine: str  # "add" | "max"
    dtype: DType
    lanes: int


@dataclass(frozen=True)
class Let:
    value: Value


@dataclass(frozen=True)
class Define:
    """A Var takes the value of an expression (a work-group's coordinate), or of a Value."""

    var: Expr
    value: Int | Value


@dataclass(frozen=True)
class Start:
    accumulator: Accumulator


@dataclass(frozen=True)
class Update:
    accumulator: Accumulator
    value: Value


@dataclass(frozen=True)
class Store:
    """around: straight to memory, past the caches; a whole vector at a multiple of its size."""

    address: Address
    dtype: DType
    value: Value
    around: bool = False


@dataclass(frozen=True)
class Fetch:
    """Memory that will be read soon, or written (slot 0), may come nearer."""

    slot: int
    index: Int


@dataclass(frozen=True)
class Barrier:
    """Every work-item of a team gets here, and then sees what the others wrote to scratch."""


@dataclass(frozen=True)
class Loop:
    """for var in 0 … extent-1

    dealt: the work-items of a team take turns in turn; outside of such loops all do the same.
    """

    var: Expr
    extent: Int
    body: list[Statement]
    dealt: bool = False


@dataclass(frozen=True)
class Call:
    """A function of the target's language runs on scratch memory, buffers (by slot) and ints.

    That of a team is also given the number of the work-item, behind them.
    """

    function: str
    scratch: tuple[Scratch, ...]
    slots: tuple[int, ...]
    ints: tuple[Int, ...]


Statement = Let | Define | Start | Update | Store | Fetch | Barrier | Loop | Call


@dataclass(frozen=True)
class Parameter:
    """A buffer argument; slot 0 is the one written."""

    slot: int
    dtype: DType


@dataclass(frozen=True)
class Function:
    """One kernel: `groups` work-groups, each told its number in the Var `group`."""

    label: str  # for people: what it computes and by which recipe
    parameters: tuple[Parameter, ...]
    variables: tuple[Expr, ...]  # symbolic ints it reads
    groups: Int
    body: list[Statement] = field(default_factory=list)
    scratch: tuple[Scratch, ...] = ()
    support: tuple[str, ...] = ()  # definitions of the functions that Calls name
    team: int = 1  # work-items that make a group together


def show(function: Function) -> str:
    """The loops as text, one statement a line: `value type x lanes = what it is`."""
    lines = [f"{function.label}: {function.groups} groups"]
    names: dict[Value, str] = {}
    sums: dict[Accumulator, str] = {}

    def text(value: Value) -> str:
        args = [names[a] for a in value.args]
        match value.arg:
            case Address(slot, index):
                place = slot.name if isinstance(slot, Scratch) else f"p{slot}"
                return f"load {place}[{index}]"
            case Accumulator():
                return sums[value.arg]
            case Enum():
                return " ".join([value.arg.name.lower(), *args])
        what = "" if value.arg is None else f" {value.arg}"
        return " ".join([value.kind.name.lower() + what, *args])

    def walk(body: list[Statement], indent: str) -> None:
        for s in body:
            match s:
                case Loop(var, extent, inner, dealt):
                    whose = "each item's of " if dealt else ""
                    lines.append(f"{indent}for {var} in {whose}0 … {extent} - 1:")
                    walk(inner, indent + "  ")
                case Let(value):
                    line = text(value)
                    names[value] = f"v{len(names)}"
                    kind = f"{value.dtype} x {value.lanes}"
                    lines.append(f"{indent}{names[value]} {kind} = {line}")
                case Call(name, scratch, slots, ints):
                    places = [s.name for s in scratch] + [f"p{i}" for i in slots]
                    given = ", ".join([*places, *map(str, ints)])
                    lines.append(f"{indent}call {name}({given})")
                case Define(var, value):
                    lines.append(f"{indent}{var} = {names.get(value, value)}")
                case Store(address, _, value, _):
                    lines.append(f"{indent}store p{address.slot}[{address.index}] = {names[value]}")
                case Barrier():
                    lines.append(f"{indent}barrier")
                case Fetch(slot, index):
                    lines.append(f"{indent}fetch p{slot}[{index}]")
                case Start(acc):
                    sums[acc] = f"s{len(sums)}"
                    lines.append(
                        f"{indent}{sums[acc]} {acc.dtype} x {acc.lanes} = start {acc.combine}"
                    )
                case Update(acc, value):
                    lines.append(f"{indent}{sums[acc]} {acc.combine}= {names[value]}")

    walk(function.body, "  ")
    return "\n".join(lines)
