"""Vocabularies of Hugging Face folders: tokenizer.json, or a SentencePiece tokenizer.model.

Read into the terms of GGUF, whose numbers for the types of tokens are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weights.checkpoint import WeightError
from weights.pretokenizers import GPT2, SINGLE_DIGITS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# What a folder may hold of its tokenizer.
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
# NFC leaves text alone that is composed already, as nearly all is
_NORMALISERS = ("Prepend", "Replace", "NFC")


@dataclass
class Vocabulary:
    """What a tokenizer is made of.

    `tokens` and `types` by id; a byte-level vocabulary has `merges` ("left right") and a `pattern`
    that cuts text into words, taken whole where they are tokens if `whole_words`; SentencePiece's
    has `scores` and may put a space in front of text (`prefix`), only where all text begins and
    not after a special token (`prefix_once`), or not before another space (`unless_spaced`).
    `control` are tokens with a meaning, `added` those that stand for their text, `stop` the ids
    that end a text.
    """

    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    pattern: str | None = None
    whole_words: bool = False
    scores: list[float] | None = None
    prefix: bool = False
    prefix_once: bool = False
    unless_spaced: bool = False
    control: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    stop: set[int] = field(default_factory=set)
    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    add_bos: bool = False
    template: str | None = None


def files_of(folder: Path) -> dict[str, bytes]:
    """Those of FILES that a folder has; WeightError for one that can't be read."""
    files = {}
    for name in FILES:
        path = folder / name
        try:
            if path.is_file():
                files[name] = path.read_bytes()
        except OSError as error:
            raise WeightError(f"can't be read: {error.strerror or error}", file=path) from None
    return files


def read(files: Mapping[str, bytes], where: Path) -> Vocabulary:
    """The vocabulary in some of FILES, that come from `where`; WeightError without a usable one."""
    reader = _Files(files, where)
    if "tokenizer.json" in files:
        return _from_json(reader)
    if "tokenizer.model" in files:
        return _from_model(reader)
    expected = "tokenizer.json or tokenizer.model"
    raise WeightError("the folder has no tokenizer", file=where, expected=expected)


class _Files:
    """The files by name, their JSON read on demand."""

    def __init__(self, files: Mapping[str, bytes], where: Path) -> None:
        self.files, self.where = files, where

    def json(self, name: str) -> Any:
        try:
            return json.loads(self.files[name].decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise WeightError(f"not valid JSON: {error}", file=self.where / name) from None

    def optional(self, name: str) -> dict:
        data = self.json(name) if name in self.files else {}
        if not isinstance(data, dict):
            raise WeightError("not a JSON object", file=self.where / name, got=type(data).__name__)
        return data


def _from_json(reader: _Files) -> Vocabulary:
    path, data = reader.where / "tokenizer.json", reader.json("tokenizer.json")
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise WeightError("not a tokenizer: no model.vocab", file=path)
    if model.get("type", "BPE") != "BPE":
        problem = "unsupported tokenizer model"
        raise WeightError(problem, file=path, expected="BPE", got=model["type"])
    if not all(type(i) is int for i in model["vocab"].values()):
        raise WeightError("an id in model.vocab is not a whole number", file=path)
    config = reader.optional("tokenizer_config.json")
    control, added = _added_tokens(path, data)
    tokens = _by_id(path, model["vocab"], control, added)
    merges = _merges(path, model.get("merges", []))
    _check_normaliser(path, data)
    out = Vocabulary(tokens, [], merges, control=control, added=added)
    out.add_bos = _adds_bos(data, config)
    _name_special(out, reader, config)
    out.template = _template(reader, config)
    steps = _steps(data.get("pre_tokenizer"))
    if any(step.get("type") == "ByteLevel" for step in steps):
        out.pattern = _pattern(path, steps)
        out.whole_words = bool(model.get("ignore_merges"))
        known = model["vocab"].keys() | control.keys() | added.keys()
        out.types = [NORMAL if token in known else UNUSED for token in tokens]
    elif model.get("byte_fallback"):
        name = model.get("unk_token")
        out.unknown = model["vocab"].get(name) if isinstance(name, str) else None
        out.prefix = _has_prefix(data, steps)
        schemes = [s.get("prepend_scheme") for s in steps if s.get("type") == "Metaspace"]
        out.unless_spaced, out.prefix_once = bool(schemes), "first" in schemes
        # Gemma's runs of spaces are cut out of the text before spaces are written otherwise.
        out.added = {text.replace("\u2581", " "): i for text, i in added.items()}
        out.scores = _scores(tokens, merges)
        out.types = [BYTE if _is_byte(token) else NORMAL for token in tokens]
    else:
        expected = "byte-level or SentencePiece BPE"
        raise WeightError("unsupported pre-tokenizer", file=path, expected=expected)
    _mark_special(out)
    return out


def _from_model(reader: _Files) -> Vocabulary:
    import sentencepiece as library

    path, processor = reader.where / "tokenizer.model", library.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(reader.files["tokenizer.model"])
    except RuntimeError as error:
        raise WeightError(f"can't be read as SentencePiece: {error}", file=path) from None
    count = processor.GetPieceSize()
    tokens = [processor.IdToPiece(i) for i in range(count)]
    out = Vocabulary(tokens, [_library_type(processor, i) for i in range(count)])
    out.scores = [processor.GetScore(i) for i in range(count)]
    out.control = {tokens[i]: i for i, t in enumerate(out.types) if t in (CONTROL, UNKNOWN)}
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    config |= reader.optional("tokenizer_config.json")
    out.add_bos = bool(config["add_bos_token"])
    _name_special(out, reader, config)
    out.unknown = processor.unk_id()
    out.prefix = not processor.EncodeAsPieces("a")[:1] == ["a"]
    out.template = _template(reader, config)
    _mark_special(out)
    return out


def _mark_special(out: Vocabulary) -> None:
    """The types of the special tokens, and of the unknown one."""
    for ids, kind in ((out.added, USER_DEFINED), (out.control, CONTROL)):
        for i in ids.values():
            out.types[i] = kind
    if out.scores is not None and out.unknown is not None:
        out.types[out.unknown] = UNKNOWN


def _merges(path: Path, rows: Any) -> list[str]:
    """Each merge as "left right"; newer files write pairs."""
    if not isinstance(rows, list):
        raise WeightError("model.merges is not a list", file=path, got=type(rows).__name__)
    out = []
    for row in rows:
        pair = row.split(" ") if isinstance(row, str) else row
        texts = isinstance(pair, list) and all(isinstance(p, str) for p in pair)
        if not texts or len(pair) != 2:
            raise WeightError("an entry of model.merges is not a pair of texts", file=path)
        out.append(" ".join(pair))
    return out


def _check_normaliser(path: Path, data: dict) -> None:
    """Refuse what would change the text in a way that we don't: better no ids than wrong ones."""
    for step in _steps(data.get("normalizer"), "normalizers"):
        if step.get("type") not in _NORMALISERS:
            expected = ", ".join(_NORMALISERS)
            raise WeightError(
                "unsupported normalizer", file=path, expected=expected, got=step.get("type")
            )


def _added_tokens(path: Path, data: dict) -> tuple[dict[str, int], dict[str, int]]:
    control, added = {}, {}
    rows = data.get("added_tokens", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WeightError("added_tokens is not a list of objects", file=path)
    for row in rows:
        if not isinstance(row.get("content"), str) or type(row.get("id")) is not int:
            raise WeightError("an entry of added_tokens lacks content or id", file=path)
        (control if row.get("special") else added)[row["content"]] = row["id"]
    return control, added


def _by_id(path: Path, *tables: dict[str, int]) -> list[str]:
    """Token texts in order of id; a gap gets a name that no text can contain."""
    ids = {text: i for table in tables for text, i in table.items()}
    limit = 2 * len(ids) + 1024
    every = [i for table in tables for i in table.values()]  # those too that a later one replaces
    top = max(every, default=-1)
    if not 0 <= top < limit or min(every) < 0:
        raise WeightError("token ids out of range", file=path, expected=f"0 to {limit}", got=top)
    tokens = [f"\0unused {i}" for i in range(top + 1)]
    for text, i in ids.items():
        tokens[i] = text
    return tokens


def _name_special(out: Vocabulary, reader: _Files, config: dict) -> None:
    """Find out which tokens begin and end a text; those are control tokens, whatever is said."""
    tokens, model = out.tokens, reader.optional("config.json")
    out.bos = _named(tokens, config.get("bos_token"), model.get("bos_token_id"))
    out.eos = _named(tokens, config.get("eos_token"), None)
    stop = {out.eos} - {None}
    for source in (reader.optional("generation_config.json"), model):
        ids = source.get("eos_token_id")
        stop |= {i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int}
    out.stop = {i for i in stop if 0 <= i < len(tokens)}
    for i in {*out.stop, out.bos} - {None}:
        out.added.pop(tokens[i], None)
        out.control[tokens[i]] = i
    if out.eos is None:
        out.eos = min(out.stop, default=None)


def _named(tokens: list[str], name: Any, fallback: Any) -> int | None:
    """The id of a token that a config names, as text or as {"content": text}."""
    text = name.get("content") if isinstance(name, dict) else name
    if isinstance(text, str) and text in tokens:
        return tokens.index(text)
    return fallback if type(fallback) is int and 0 <= fallback < len(tokens) else None


def _adds_bos(data: dict, config: dict) -> bool:
    """Whether the post-processor, or failing it the config, puts a token before the text."""
    for step in _steps(data.get("post_processor"), "processors"):
        single = step.get("single")
        if step.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            return isinstance(single[0], dict) and "SpecialToken" in single[0]
    return bool(config.get("add_bos_token", False))


def _steps(node: Any, children: str = "pretokenizers") -> list[dict]:
    """The steps of a pre-tokenizer, normaliser or post-processor, a Sequence spread out."""
    if not isinstance(node, dict):
        return []
    if node.get("type") != "Sequence":
        return [node]
    steps = node.get(children)
    return [s for s in steps if isinstance(s, dict)] if isinstance(steps, list) else []


def _pattern(path: Path, steps: list[dict]) -> str:
    """The one regular expression that does what the pre-tokenizer's steps do."""
    match [step.get("type") for step in steps]:
        case ["ByteLevel"]:
            return GPT2
        case ["Digits", "ByteLevel"] if steps[0].get("individual_digits"):
            return SINGLE_DIGITS
        case ["Split", "ByteLevel"] if not steps[1].get("use_regex", True):
            pattern = steps[0].get("pattern")
            pattern = pattern.get("Regex") if isinstance(pattern, dict) else None
            if isinstance(pattern, str) and not steps[0].get("invert"):
                return pattern
    got = [step.get("type") for step in steps]
    expected = "ByteLevel, Digits + ByteLevel or Split + ByteLevel"
    raise WeightError("unsupported pre-tokenizer", file=path, expected=expected, got=got)


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _library_type(processor: Any, i: int) -> int:
    if processor.IsUnknown(i):
        return UNKNOWN
    if processor.IsControl(i):
        return CONTROL
    return BYTE if processor.IsByte(i) else NORMAL


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """A score for each piece: the earlier its first merge, the higher."""
    place: dict[str, int] = {}
    for i, merge in enumerate(merges):
        place.setdefault(merge.replace(" ", "", 1), i)
    return [-float(place.get(token, len(merges))) for token in tokens]


def _has_prefix(data: dict, steps: list[dict]) -> bool:
    normalisers = _steps(data.get("normalizer"), "normalizers")
    if any(step.get("type") == "Prepend" for step in normalisers):
        return True
    return any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in steps
    )


def _template(reader: _Files, config: dict) -> str | None:
    name = "chat_template.jinja"
    if name in reader.files:
        try:
            return reader.files[name].decode("utf-8")
        except ValueError as error:
            raise WeightError(f"can't be read: {error}", file=reader.where / name) from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        rows = [row for row in template if isinstance(row, dict)]
        named = {str(row.get("name")): row.get("template") for row in rows}
        template = named.get("default")
    return template if isinstance(template, str) else None
