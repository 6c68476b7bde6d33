"""Name tables: rows of two templates, read in either direction by one function.

A row pairs a canonical name with that of another layout. In a template `{n}` and `{m}` stand for
a number, `{p}` for `weight` or `bias`, `{w}` for `weight` or `weight_scale`, `{s}` for any of the
three; all else is literal, and a template matches whole keys only. Where one side of a row is a
tuple, several tensors there are one here, joined along their rows; None in it is a tensor that
the layout does without: it is left out in one direction and zeros in the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from weights import entries
from weights.checkpoint import Checkpoint, Entry, WeightError

Counts = Mapping[str, int]
Names = tuple["str | None", ...]

_FIELD = re.compile(r"\{(\w)\}")
_NUMBER = re.compile("[0-9]+")
_LAST_WORD = re.compile(r"(weight_scale|weight|bias)\Z")
_FIELDS = {
    "n": re.compile("0|[1-9][0-9]{0,5}"),
    "m": re.compile("0|[1-9][0-9]{0,5}"),
    "p": re.compile("weight|bias"),
    "w": re.compile("weight|weight_scale"),
    "s": re.compile("weight|bias|weight_scale"),
}


@dataclass(frozen=True)
class Change:
    """What happens to a tensor on its way to our layout and back; both may look at `counts`."""

    to_ours: Callable[[Entry, Counts], Entry]
    to_theirs: Callable[[Entry, Counts], Entry]


@dataclass(frozen=True)
class Row:
    """One row of a table: our name or names, theirs, and what else differs."""

    ours: str | Names
    theirs: str | Names
    change: Change | None = None

    def side(self, ours: bool) -> Names:
        side = self.ours if ours else self.theirs
        return (side,) if isinstance(side, str) else side


@dataclass(frozen=True)
class Layout:
    """One layout of a model: `rows` (fixed, or chosen by the checkpoint's keys and direction).

    `ignore` lists, as regular expressions of whole keys, what is no part of the model.
    """

    name: str
    rows: tuple[Row, ...] | Callable[[Checkpoint, bool], tuple[Row, ...]]
    ignore: tuple[str, ...] = ()

    def rows_for(self, checkpoint: Checkpoint, to_ours: bool) -> tuple[Row, ...]:
        return self.rows(checkpoint, to_ours) if callable(self.rows) else self.rows


def under(ours: str, theirs: str, rows: Iterable[Row]) -> tuple[Row, ...]:
    """The same rows with a prefix before every name of either side."""

    def put(prefix: str, names: Names) -> Names:
        return tuple(None if name is None else prefix + name for name in names)

    return tuple(
        Row(put(ours, row.side(True)), put(theirs, row.side(False)), row.change) for row in rows
    )


def identity(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The table of the canonical layout itself: our names on both sides."""
    ours = dict.fromkeys(name for row in rows for name in row.side(True) if name)
    return tuple(Row(name, name) for name in ours)


def translate(
    checkpoint: Checkpoint, layout: Layout, to_ours: bool, counts: Counts | None = None
) -> Checkpoint:
    """`checkpoint` with every key translated by `layout`'s rows, still lazy, in one direction.

    The first row that matches a key counts. WeightError for a key that none matches, for two
    keys with one name, for a part that is missing and for a shape that doesn't fit.
    """
    rows = layout.rows_for(checkpoint, to_ours)
    find = _index(rows, not to_ours)
    ignore = re.compile("|".join(f"(?:{pattern})" for pattern in layout.ignore) or "(?!)")
    parts: dict[tuple, dict[int, str]] = {}  # (row, fields) -> place in the row -> key
    for key in checkpoint.entries:
        if ignore.fullmatch(key):
            continue
        found = find(key)
        if found is None:
            problem = "no row of the name table matches it"
            raise WeightError(problem, file=checkpoint.path, tensor=key)
        number, place, fields = found
        parts.setdefault((number, tuple(fields.items())), {})[place] = key
    out: dict[str, Entry] = {}
    origin: dict[str, str] = {}
    for (number, fields), keys in parts.items():
        row, values = rows[number], dict(fields)
        try:
            made = _row(checkpoint, row, keys, to_ours, values, counts or {})
        except WeightError as error:
            error.file, error.tensor = checkpoint.path, error.tensor or keys[min(keys)]
            raise
        for name, entry in made.items():
            if name in out:
                problem = f"it and '{origin[name]}' are both {name}"
                raise WeightError(problem, file=checkpoint.path, tensor=keys[min(keys)])
            out[name], origin[name] = entry, keys[min(keys)]
    path, form = checkpoint.path, checkpoint.format
    return Checkpoint(path, form, checkpoint.metadata, out, checkpoint.device)


def matching(rows: tuple[Row, ...], ours: str) -> tuple[str, ...]:
    """Their names of one of our keys, by the first row that has it; none when no row does."""
    found = _index(rows, True)(ours)
    if found is None:
        return ()
    number, _, fields = found
    return tuple(t.format(**fields) for t in rows[number].side(False) if t)


def _row(
    checkpoint: Checkpoint,
    row: Row,
    keys: dict[int, str],
    to_ours: bool,
    fields: dict[str, str],
    counts: Counts,
) -> dict[str, Entry]:
    """The tensors that one row makes of the keys found for it."""
    sources, targets = row.side(not to_ours), row.side(to_ours)
    for place, template in enumerate(sources):
        if template is not None and place not in keys:
            raise WeightError("the tensor is missing", tensor=template.format(**fields))
    found = [checkpoint.entries[keys[place]] if place in keys else None for place in
             range(len(sources))]  # fmt: skip
    if len(sources) > 1 and len(targets) == 1:
        have = next(entry for entry in found if entry is not None)
        made = [entries.joined([e or entries.zeros_like(have) for e in found])]
    elif len(sources) == 1 and len(targets) > 1:
        made = entries.split(found[0], len(targets))
    else:
        made = found
    if row.change is not None:
        change = row.change.to_ours if to_ours else row.change.to_theirs
        made = [change(entry, counts) for entry in made]
    return {template.format(**fields): entry for template, entry in zip(targets, made) if template}


def _cut(text: str) -> tuple[str, tuple[str, ...]]:
    """A key's words with its numbers and last word taken out, and these."""
    last = _LAST_WORD.search(text)
    text = text[: last.start()] + "*" if last else text
    return _NUMBER.sub("#", text), (*_NUMBER.findall(text), last.group() if last else "")


@lru_cache(maxsize=16)
def _index(
    rows: tuple[Row, ...], ours: bool
) -> Callable[[str], tuple[int, int, dict[str, str]] | None]:
    """A function that finds a key's row, its place there and the values of its fields.

    Tables of Stable Diffusion have a thousand rows, so they are found by the words of the key.
    """
    table: dict[str, list[tuple[int, int, tuple[str, ...]]]] = {}
    for number, row in enumerate(rows):
        for place, template in enumerate(row.side(ours)):
            if template is not None:
                words, holes = _cut_template(template)
                table.setdefault(words, []).append((number, place, holes))

    def find(key: str) -> tuple[int, int, dict[str, str]] | None:
        words, values = _cut(key)
        for number, place, holes in table.get(words, ()):
            fields = _fields(holes, values)
            if fields is not None:
                return number, place, fields
        return None

    return find


def _cut_template(template: str) -> tuple[str, tuple[str, ...]]:
    """`_cut` of a template; a field is kept as `{n}`."""
    example = {"n": "0", "m": "0", "p": "weight", "w": "weight", "s": "weight"}
    words, _ = _cut(template.format(**example))
    holes = re.findall(r"\{\w\}|[0-9]+|(?:weight_scale|weight|bias)\Z", template)
    return words, tuple(holes if words.endswith("*") else [*holes, ""])


def _fields(holes: tuple[str, ...], values: tuple[str, ...]) -> dict[str, str] | None:
    fields: dict[str, str] = {}
    for hole, value in zip(holes, values, strict=True):
        if not hole.startswith("{"):
            if hole != value:
                return None
        elif not _FIELDS[hole[1]].fullmatch(value) or fields.setdefault(hole[1], value) != value:
            return None
    return fields
