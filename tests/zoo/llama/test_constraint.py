"""Constrained output: whatever the logits, the reply is valid; whatever is valid can come."""

from __future__ import annotations

import json
import re
import sys

import jsonschema
import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zoo.llama import vocab
from tests.zoo.llama.fake import one, scripted
from zoo.errors import UsageError, UserError
from zoo.llama.constraint import Constraints
from zoo.llama.gguf_tokenizer import from_gguf
from zoo.llama.reply import Reply
from zoo.llama.sampling import SamplingOptions

TOKENIZER = from_gguf(vocab.tiny())  # every byte is a token, so parts of characters are
CONSTRAINTS = Constraints(TOKENIZER)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["é", 'a"b', 1.5, None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["integer", "null"], "minimum": -5, "exclusiveMaximum": 5},
                "children": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/node"},
                    "maxItems": 2,
                },
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {
    "person": PERSON,
    "tree": TREE,
    "tuple": {
        "type": "array",
        "prefixItems": [{"const": "x"}, {"type": "boolean"}],
        "items": {"type": "string", "pattern": "^[a-c]+é?$", "maxLength": 9},
        "minItems": 2,
        "maxItems": 4,
    },
    "either": {
        "anyOf": [
            {"type": "string", "format": "uuid"},
            {"type": "string", "format": "date-time"},
            {"oneOf": [{"type": "integer", "multipleOf": 7}, {"type": "null"}]},
        ]
    },
    "all": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "number", "minimum": 0.5}}},
            {"properties": {"b": {"type": "string", "maxLength": 4}}, "required": ["b", "a"]},
        ],
        "required": ["c"],
        "properties": {"c": {"type": "boolean"}},
        "maxProperties": 3,
    },
    "patterns": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "string", "pattern": "end$", "maxLength": 9}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
}


def drawn(constraint, seed: int, tokenizer=TOKENIZER, most: int = 5000) -> str:
    """A reply drawn from random logits, in which what closes is rather likely."""
    random = np.random.default_rng(seed)
    closing = [one(tokenizer, text)[0] for text in '"}],']
    options = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    reply = Reply(tokenizer, [5], options, seed, max_tokens=most, constraint=constraint)
    pieces = []
    while reply.finish is None:
        logits = random.normal(size=tokenizer.vocab_size).astype(np.float32) * 2
        logits[closing] += 5
        reply.feed(logits)
        pieces.append(reply.piece)
    assert reply.finish == "stop", "".join(pieces)
    return "".join(pieces)


def check(text: str, schema: dict) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_replies_are_valid(name):
    texts = [drawn(CONSTRAINTS.json(SCHEMAS[name]), seed) for seed in range(25)]
    for text in texts:
        check(text, SCHEMAS[name])
    assert len(set(texts)) > 10


names = st.sampled_from(["a", "b", "é", 'q"\\'])
sizes = st.integers(0, 3)


def bounded(low: str, high: str, values=sizes):
    """The two keywords of a range, each of which may be absent."""

    def keywords(pair):
        a, b, kept = pair
        both = {low: min(a, b), high: max(a, b)}
        return {name: both[name] for name in kept}

    return st.tuples(values, values, st.sets(st.sampled_from([low, high]))).map(keywords)


def objects(inner):
    def joined(parts):
        properties, required, additional = parts
        out = {"type": "object", "properties": properties}
        out["required"] = [name for name in required if name in properties]
        # Otherwise "more" is any JSON, ever deeper; the drawing would go on for long.
        return out | {"additionalProperties": additional}

    return st.tuples(
        st.dictionaries(names, inner, max_size=3),
        st.lists(names, unique=True),
        st.sampled_from([False, {"type": "null"}]),
    ).map(joined)


def arrays(inner):
    def joined(parts):
        items, prefix, sizes = parts
        out = {"type": "array", "items": items, "maxItems": 4, **sizes}
        return out | ({"prefixItems": prefix} if prefix else {})

    parts = st.tuples(inner, st.lists(inner, max_size=2), bounded("minItems", "maxItems"))
    return parts.map(joined)


VALUES = ("a", "é\n", '"', 0, -1.5, True, None, [1, {}], {"a": []})
leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["boolean", "null"]}]),
    bounded("minLength", "maxLength").map(lambda kept: {"type": "string", "maxLength": 5, **kept}),
    bounded("minimum", "maximum", st.integers(-300, 300)).map(lambda k: {"type": "integer", **k}),
    bounded("minimum", "exclusiveMaximum", st.sampled_from([-2.5, 0, 0.125, 3, 10])).map(
        lambda kept: {"type": "number", **kept}
    ),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.lists(st.sampled_from(VALUES), min_size=1).map(lambda values: {"enum": values}),
    st.sampled_from(["^a+$", "[xyz]", "^é.?", "b$"]).map(
        lambda text: {"type": "string", "pattern": text, "maxLength": 6}
    ),
)  # fmt: skip
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
    ),
    max_leaves=6,
)


@given(schema=schemas, seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_replies_to_any_schema_are_valid(schema, seed):
    try:
        constraint = CONSTRAINTS.json(schema)
    except UsageError as error:
        assert "Unsatisfiable" in str(error), schema
        return
    check(drawn(constraint, seed), schema)


PATTERNS = (
    "^(a|bc)d?$",
    "[0-9]{3}-[0-9]{4}",
    "(é|ü|x){1,3} end",
    "(foo|foobar)baz?",
    "a/b|\"'\\\\",
)


# The tokens that are whole characters.
WHOLE = {
    i: text
    for i in range(TOKENIZER.vocab_size)
    if "\ufffd" not in (text := TOKENIZER.decode([i], special=False)) and text
}


def partly(pattern: str, text: str) -> bool:
    return regex.fullmatch(pattern, text, partial=True) is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_a_regex_allows_is_what_a_partial_match_allows(pattern):
    for seed in range(10):
        random = np.random.default_rng(seed)
        constraint, text = CONSTRAINTS.regex(pattern), ""
        while not constraint.finished:
            mask = constraint.mask()
            assert mask[list(TOKENIZER.stop_ids)].all() == bool(re.fullmatch(pattern, text))
            right = {token for token in WHOLE if partly(pattern, text + WHOLE[token])}
            allowed = sorted(WHOLE.keys() & set(np.flatnonzero(mask).tolist()))
            # Where there is but one way on, only its usual spelling is allowed.
            assert set(allowed) == right or (len(allowed) == 1 and allowed[0] in right), text
            if not allowed:
                break  # only parts of characters are left
            token = int(random.choice(allowed))
            constraint.advance(token)
            text += WHOLE[token]


def test_parts_of_a_character_lead_to_that_character_only():
    raws = [TOKENIZER.token_bytes(token) for token in range(TOKENIZER.vocab_size)]
    for text in ("é", "😀", "出"):
        constraint, left = CONSTRAINTS.regex(f"({text}|x)y"), f"{text}y".encode()
        for i in range(len(left)):
            tokens = {raws[token] for token in np.flatnonzero(constraint.mask())}
            assert left[i : i + 1] in tokens
            assert all(left[i:].startswith(raw) for raw in tokens - ({b"x"} if not i else set()))
            constraint.advance(raws.index(left[i : i + 1]))
        assert constraint.finished


def test_reply_may_end_only_where_it_is_complete():
    constraint = CONSTRAINTS.json({"type": "integer", "minimum": 5, "maximum": 50})
    assert not constraint.mask()[list(TOKENIZER.stop_ids)].any()
    constraint.advance(one(TOKENIZER, "5")[0])
    assert not constraint.finished and constraint.mask()[list(TOKENIZER.stop_ids)].all()
    constraint.advance(one(TOKENIZER, "0")[0])
    assert constraint.finished
    allowed = np.flatnonzero(constraint.mask()).tolist()
    assert allowed == sorted(TOKENIZER.stop_ids)


def test_control_tokens_are_never_part_of_a_text():
    constraint = CONSTRAINTS.regex("(?s).*")
    allowed = set(np.flatnonzero(constraint.mask()).tolist())
    assert allowed & set(TOKENIZER.special.control.values()) == set(TOKENIZER.stop_ids)
    # Bytes that can't begin a character are the only others that may not come.
    others = set(range(TOKENIZER.vocab_size)) - allowed - set(TOKENIZER.special.control.values())
    for token in others:
        with pytest.raises(UnicodeDecodeError):
            TOKENIZER.token_bytes(token).decode()


def test_white_space_is_a_space_or_a_line():
    reply = Reply(TOKENIZER, [5], constraint=CONSTRAINTS.json("object"), max_tokens=300)
    while reply.finish is None:
        logits = np.zeros(TOKENIZER.vocab_size, np.float32)
        logits[one(TOKENIZER, " ")] = 10
        logits[one(TOKENIZER, "\n")] = 20
        logits[one(TOKENIZER, "}")] = 5
        reply.feed(logits)
    assert reply.finish == "stop" and json.loads(TOKENIZER.decode(reply.stats.ids)) == {}


def test_schema_may_be_text_and_booleans():
    check(drawn(CONSTRAINTS.json(json.dumps(PERSON)), 1), PERSON)
    assert isinstance(json.loads(drawn(CONSTRAINTS.json("object"), 2)), dict)
    json.loads(drawn(CONSTRAINTS.json(True), 3))


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"not": {}}, "JSON schema can't be used: unsupported: not"),
        ({"uniqueItems": True, "if": {}}, "unsupported: (if, uniqueI|uniqueItems, if)"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
        ({"type": "text"}, "Invalid type: text"),
        ({"format": "shape", "type": "string"}, "Unknown format: shape"),
        ({"pattern": "(a"}, "unclosed group"),
        ({"pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, "minimum"),
        ({"enum": []}, "can't be used"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
        (False, "must be an object"),
        ([], "must be an object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"enum": [{1, 2}]}, "can't be used"),
        ('{"properties": {"a": ' * 400 + "{}" + "}}" * 400, "can't be used"),
    ],
)  # fmt: skip
def test_schema_that_cannot_be_used_is_one_line(schema, told):
    with pytest.raises(UsageError, match=told) as caught:
        CONSTRAINTS.json(schema)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("pattern", "told"),
    [("(a", "unclosed group"), (r"(.)\1", "backreferences"), ("(?=a)", "look-around"), (3, "text")],
)
def test_regex_that_cannot_be_used_is_one_line(pattern, told):
    with pytest.raises(UsageError, match=told) as caught:
        CONSTRAINTS.regex(pattern)
    assert "\n" not in str(caught.value)


def test_a_schema_that_explodes_is_refused_or_fails_in_a_line():
    hostile = {"type": "string", "pattern": "(x?){1000}y{1000}(a|b|ab){1000}", "minLength": 1500}
    with pytest.raises(UserError):
        drawn(CONSTRAINTS.json(hostile), 0, most=50)
        pytest.fail("it should have been too much")


def test_reply_that_the_vocabulary_cannot_spell_is_an_error():
    tokenizer = from_gguf(vocab.tiny(missing=b"#"))
    constraint = Constraints(tokenizer).regex("#+")
    with pytest.raises(UserError, match="no token of the vocabulary"):
        constraint.mask()


def test_sentencepiece_replies_are_valid_from_their_first_character():
    tokenizer = from_gguf(vocab.llama2())
    for seed in range(3):
        check(drawn(Constraints(tokenizer).json(PERSON), seed, tokenizer), PERSON)
    model = scripted([" ", "x", "<|im_end|>"])
    model.tokenizer.strip_space = True
    assert "".join(model.chat("hi", regex=" x")) == " x"


def test_generation_takes_a_schema_or_a_regex_but_not_both():
    model = scripted(["a", "b", "1", "<|im_end|>"])
    assert re.fullmatch("[0-9]b", "".join(model.generate("x", regex="[0-9]b?")))
    assert "".join(model.chat("x", json_schema={"const": 1})) == "1"
    with pytest.raises(UsageError, match="at once"):
        model.generate("x", regex="a", json_schema="object")


def test_without_the_package_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    model = scripted(["a"])
    assert "".join(model.generate("x", max_tokens=1)) == "a"
    with pytest.raises(UserError, match=r"pip install 'menagerie\[constrain\]'"):
        model.generate("x", regex="a")
