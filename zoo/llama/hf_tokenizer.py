"""Tokenizers of Hugging Face folders: tokenizer.json, or a SentencePiece tokenizer.model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weights import WeightError
from zoo import bpe
from zoo.llama import spm
from zoo.llama.tokenizer import SpecialTokens, Tokenizer
from zoo.llama.vocabulary import byte_level, read_json, sentencepiece, special_tokens

# NFC leaves text alone that is composed already, as nearly all is
_NORMALISERS = ("Prepend", "Replace", "NFC")


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder; WeightError when it holds none that can be read."""
    config = _optional(folder / "tokenizer_config.json")
    path = folder / "tokenizer.json"
    if path.exists():
        return _from_json(path, read_json(path), config)
    path = folder / "tokenizer.model"
    if path.exists():
        return _from_model(path, config)
    expected = "tokenizer.json or tokenizer.model"
    raise WeightError("the folder has no tokenizer", file=folder, expected=expected)


def _from_json(path: Path, data: Any, config: dict) -> Tokenizer:
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise WeightError("not a tokenizer: no model.vocab", file=path)
    if model.get("type", "BPE") != "BPE":
        problem = "unsupported tokenizer model"
        raise WeightError(problem, file=path, expected="BPE", got=model["type"])
    if not all(type(i) is int for i in model["vocab"].values()):
        raise WeightError("an id in model.vocab is not a whole number", file=path)
    control, added = _added_tokens(path, data)
    tokens = _by_id(path, {**model["vocab"], **control, **added})
    merges = _merges(path, model.get("merges", []))
    _check_normaliser(path, data)
    add_bos = _adds_bos(data, config)
    special = _special(path, tokens, control, added, config, add_bos)
    template = _template(path.parent, config)
    steps = _steps(data.get("pre_tokenizer"))
    if any(step.get("type") == "ByteLevel" for step in steps):
        pattern = _pattern(path, steps)
        whole = bool(model.get("ignore_merges"))
        encoder, raw = byte_level(tokens, merges, special, pattern, whole, path)
        return Tokenizer(encoder, raw, special, False, template)
    if not model.get("byte_fallback"):
        expected = "byte-level or SentencePiece BPE"
        raise WeightError("unsupported pre-tokenizer", file=path, expected=expected)
    types = [_piece_type(i, token, special) for i, token in enumerate(tokens)]
    unknown = model["vocab"].get(model.get("unk_token"))
    prefix = _has_prefix(data, steps)
    scores = _scores(tokens, merges)
    encoder, raw = sentencepiece(tokens, scores, types, unknown, prefix, path)
    return Tokenizer(encoder, raw, special, prefix, template)


def _from_model(path: Path, config: dict) -> Tokenizer:
    import sentencepiece as library

    processor = library.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(path.read_bytes())
    except (OSError, RuntimeError) as error:
        raise WeightError(f"can't be read as SentencePiece: {error}", file=path) from None
    count = processor.GetPieceSize()
    tokens = [processor.IdToPiece(i) for i in range(count)]
    types = [_library_type(processor, i) for i in range(count)]
    scores = [processor.GetScore(i) for i in range(count)]
    control = {tokens[i]: i for i in range(count) if types[i] in (spm.CONTROL, spm.UNKNOWN)}
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True} | config
    special = _special(path, tokens, control, {}, config, bool(config["add_bos_token"]))
    prefix = not processor.EncodeAsPieces("a")[:1] == ["a"]
    encoder, raw = sentencepiece(tokens, scores, types, processor.unk_id(), prefix, path)
    return Tokenizer(encoder, raw, special, prefix, _template(path.parent, config))


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


def _by_id(path: Path, ids: dict[str, int]) -> list[str]:
    """Token texts in order of id; a gap gets a name that no text can contain."""
    limit = 2 * len(ids) + 1024
    top = max(ids.values(), default=-1)
    if not 0 <= top < limit or min(ids.values()) < 0:
        raise WeightError("token ids out of range", file=path, expected=f"0 to {limit}", got=top)
    tokens = [f"\0unused {i}" for i in range(top + 1)]
    for text, i in ids.items():
        tokens[i] = text
    return tokens


def _special(
    path: Path,
    tokens: list[str],
    control: dict[str, int],
    added: dict[str, int],
    config: dict,
    add_bos: bool,
) -> SpecialTokens:
    generation = _optional(path.parent / "generation_config.json")
    model = _optional(path.parent / "config.json")
    bos = _named(tokens, config.get("bos_token"), model.get("bos_token_id"))
    eos = _named(tokens, config.get("eos_token"), None)
    stop = {eos} - {None}
    for source in (generation, model):
        ids = source.get("eos_token_id")
        stop |= {i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int}
    stop = {i for i in stop if 0 <= i < len(tokens)}
    for i in {*stop, bos} - {None}:
        added.pop(tokens[i], None)
        control[tokens[i]] = i
    if eos is None:
        eos = min(stop, default=None)
    return special_tokens(control, added, stop, bos, eos, add_bos)


def _named(tokens: list[str], name: Any, fallback: Any) -> int | None:
    """The id of a token that a config names, as text or as {"content": text}."""
    text = name.get("content") if isinstance(name, dict) else name
    if isinstance(text, str) and text in tokens:
        return tokens.index(text)
    return fallback if type(fallback) is int and 0 <= fallback < len(tokens) else None


def _adds_bos(data: dict, config: dict) -> bool:
    """Whether the post-processor, or failing it the config, puts a token before the text."""
    for step in _steps(data.get("post_processor"), "processors"):
        single = step.get("single") or ()
        if step.get("type") == "TemplateProcessing" and single:
            return "SpecialToken" in single[0]
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
            return bpe.GPT2
        case ["Digits", "ByteLevel"] if steps[0].get("individual_digits"):
            return bpe.SINGLE_DIGITS
        case ["Split", "ByteLevel"] if not steps[1].get("use_regex", True):
            pattern = steps[0].get("pattern", {}).get("Regex")
            if isinstance(pattern, str) and not steps[0].get("invert"):
                return pattern
    got = [step.get("type") for step in steps]
    expected = "ByteLevel, Digits + ByteLevel or Split + ByteLevel"
    raise WeightError("unsupported pre-tokenizer", file=path, expected=expected, got=got)


def _piece_type(i: int, token: str, special: SpecialTokens) -> int:
    if token in special.control or token in special.added:
        return spm.CONTROL
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return spm.BYTE if is_byte else spm.NORMAL


def _library_type(processor: Any, i: int) -> int:
    if processor.IsUnknown(i):
        return spm.UNKNOWN
    if processor.IsControl(i):
        return spm.CONTROL
    return spm.BYTE if processor.IsByte(i) else spm.NORMAL


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


def _template(folder: Path, config: dict) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise WeightError(f"can't be read: {error}", file=path) from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        rows = [row for row in template if isinstance(row, dict)]
        named = {str(row.get("name")): row.get("template") for row in rows}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional(path: Path) -> dict:
    data = read_json(path) if path.exists() else {}
    if not isinstance(data, dict):
        raise WeightError("not a JSON object", file=path, got=type(data).__name__)
    return data
