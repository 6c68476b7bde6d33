"""Tokenizers of Hugging Face folders against the same vocabulary in GGUF."""

from __future__ import annotations

import json

import pytest

from tests.zoo.llama import vocab
from tests.zoo.llama.test_tokenizer import strange_texts
from weights import WeightError
from zoo.llama import spm
from zoo.llama.gguf_tokenizer import from_gguf
from zoo.llama.hf_tokenizer import from_folder

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
STEPS = {
    "gpt-2": [{"type": "ByteLevel", "use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": LLAMA3_REGEX}, "behavior": "Isolated"},
        {"type": "ByteLevel", "use_regex": False},
    ],
}


def byte_level(metadata: dict, steps: list[dict], **options) -> dict:
    """A tokenizer.json with the vocabulary of GGUF metadata."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    return {
        "added_tokens": [
            {"id": i, "content": tokens[i], "special": kind == vocab.CONTROL}
            for i, kind in enumerate(kinds)
            if kind != vocab.NORMAL
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, (t, k) in enumerate(zip(tokens, kinds)) if k == vocab.NORMAL},
            "merges": metadata["tokenizer.ggml.merges"],
        },
        **options,
    }


def write(folder, **files) -> None:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), "utf-8")


@pytest.mark.parametrize("pre", sorted(STEPS))
def test_byte_level_tokenizer_json_equals_gguf(tmp_path, pre):
    metadata = vocab.tiny(pre, added=("<think>",))
    write(
        tmp_path,
        tokenizer=byte_level(metadata, STEPS[pre]),
        tokenizer_config={"eos_token": "<|im_end|>", "chat_template": "T"},
        generation_config={"eos_token_id": [1, 40]},
    )
    ours, theirs = from_gguf(metadata), from_folder(tmp_path)
    for text in [*strange_texts(300, seed=3), "a<think>b<|im_end|>c"]:
        for special in (False, True):
            assert theirs.encode(text, special) == ours.encode(text, special)
    assert theirs.stop_ids == {1, 40}
    assert theirs.chat_template == "T"


def test_merges_may_be_pairs(tmp_path):
    metadata = vocab.tiny()
    data = byte_level(metadata, STEPS["smollm"])
    data["model"]["merges"] = [m.split(" ") for m in data["model"]["merges"]]
    write(tmp_path, tokenizer=data)
    assert from_folder(tmp_path).encode(vocab.CORPUS) == from_gguf(metadata).encode(vocab.CORPUS)


def test_bos_comes_from_the_post_processor(tmp_path):
    step = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>"}}, {"Sequence": {"id": "A"}}],
    }
    data = byte_level(vocab.tiny(), STEPS["smollm"], post_processor=step)
    write(tmp_path, tokenizer=data, tokenizer_config={"bos_token": "<|im_start|>"})
    assert from_folder(tmp_path).add_bos


def test_sentencepiece_model_equals_gguf(tmp_path):
    metadata = vocab.llama2()
    rows = [metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    proto = spm.model_proto(*rows, unknown_id=0, space_prefix=True)
    (tmp_path / "tokenizer.model").write_bytes(proto)
    ours, theirs = from_gguf(metadata), from_folder(tmp_path)
    assert theirs.encode("Hello world", add_bos=True) == [1, 15043, 3186]
    assert (theirs.add_bos, theirs.stop_ids) == (True, {2})
    for text in strange_texts(300, seed=4):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text))


def test_sentencepiece_as_tokenizer_json_takes_the_order_of_merges(tmp_path):
    metadata = vocab.llama2()
    pieces = sorted(vocab.LLAMA2, key=lambda row: -row[2])
    known = {text for text, _, _ in pieces}
    merges = [
        f"{text[:cut]} {text[cut:]}"
        for text, _, _ in pieces
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    tokens = metadata["tokenizer.ggml.tokens"]
    data = {
        "added_tokens": [{"id": i, "content": tokens[i], "special": True} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
            "byte_fallback": True,
            "unk_token": "<unk>",
        },
    }
    write(tmp_path, tokenizer=data)
    tokenizer = from_folder(tmp_path)
    for text, ids in (
        ("Hello world", [15043, 3186]),
        (" Hello", [29871, 15043]),
        ("Hello\nHello", [15043, 13, 10994]),
        ("é", [29871, 3 + 0xC3, 3 + 0xA9]),
    ):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": None}, "model.vocab"),
        ({"model": {"type": "Unigram", "vocab": {}}}, "Unigram"),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": 1, "x": 1}}, None),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer"),
        ({"added_tokens": [{"content": "x"}]}, "added_tokens"),
        ({"added_tokens": [{"content": "x", "id": 10**9}]}, "token ids"),
        ({"added_tokens": [{"content": "x", "id": -5}]}, "token ids"),
        ({"added_tokens": [3]}, "added_tokens"),
        ({"added_tokens": 3}, "added_tokens"),
        ({"model": {"vocab": {"a": "0"}}}, "model.vocab"),
        ({"model": {"vocab": {"a": 0.5}}}, "model.vocab"),
        ({"model": {"vocab": {"a": 0}, "merges": None}}, "model.merges"),
        ({"model": {"vocab": {"a": 0}, "merges": ["a b c"]}}, "model.merges"),
        ({"model": {"vocab": {"a": 0}, "merges": [["a", 3]]}}, "model.merges"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"normalizer": {"type": "Sequence", "normalizers": [None, 3]}}, None),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": None}}, "pre-tokenizer"),
    ],
)
def test_broken_tokenizer_json_is_one_line_naming_the_file(tmp_path, change, named):
    write(tmp_path, tokenizer=byte_level(vocab.tiny(), STEPS["smollm"]) | change)
    if named is None:
        from_folder(tmp_path)
        return
    with pytest.raises(WeightError) as caught:
        from_folder(tmp_path)
    message = str(caught.value)
    assert "tokenizer.json" in message and named in message and "\n" not in message


def test_a_list_of_templates_may_hold_nonsense(tmp_path):
    rows = [3, None, {"name": ["x"]}, {"name": "default", "template": "T"}]
    config = {"chat_template": rows}
    write(tmp_path, tokenizer=byte_level(vocab.tiny(), STEPS["smollm"]), tokenizer_config=config)
    assert from_folder(tmp_path).chat_template == "T"


def test_broken_sentencepiece_model_is_named(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xfe nonsense")
    with pytest.raises(WeightError, match="tokenizer.model"):
        from_folder(tmp_path)


def pieces(tokens: list[str], **options) -> dict:
    """A tokenizer.json of whole pieces, each merged character by character in their order."""
    singles = [*dict.fromkeys("".join(tokens)), *(f"<0x{i:02X}>" for i in range(256))]
    merges = [f"{t[:i]} {t[i]}" for t in tokens for i in range(1, len(t))]
    names = dict.fromkeys(["<unk>", "<s>", "[I]", *singles, *(m.replace(" ", "") for m in merges)])
    vocabulary = {token: i for i, token in enumerate(names)}
    added = [{"id": i, "content": t, "special": True} for t, i in list(vocabulary.items())[:3]]
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": True,
             "unk_token": "<unk>"}  # fmt: skip
    return {"model": model, "added_tokens": added, **options}


@pytest.mark.parametrize(
    ("scheme", "text", "wanted"),
    [
        ("first", "a [I]a[I] a", ["▁a", "▁", "[I]", "a", "[I]", "▁a"]),
        ("first", " a", ["▁a"]),
        ("first", "<s>a", ["<s>", "a"]),
        ("always", "<s>a[I] a", ["<s>", "▁a", "[I]", "▁a"]),
        ("never", "<s>a a", ["<s>", "a", "▁a"]),
    ],
)
def test_metaspace_puts_a_space_where_its_scheme_says(tmp_path, scheme, text, wanted):
    """Mistral's later files say "first": what follows [INST] has no space put before it."""
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    write(tmp_path, tokenizer=pieces(["▁a"], normalizer=None, pre_tokenizer=step))
    tokenizer = from_folder(tmp_path)
    got = [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, special=True)]
    assert [piece.replace(" ", "▁") for piece in got] == wanted


def test_runs_of_spaces_are_tokens_of_their_own_in_gemma(tmp_path):
    data = pieces(["▁▁", "▁a"], normalizer={"type": "Replace", "content": "▁"}, pre_tokenizer=None)
    token = data["model"]["vocab"]["▁▁"]
    data["added_tokens"].append({"id": token, "content": "▁▁", "special": False})
    write(tmp_path, tokenizer=data)
    tokenizer = from_folder(tmp_path)
    ids = data["model"]["vocab"]
    assert tokenizer.encode("a  a a") == [ids["a"], token, ids["a"], ids["▁a"]]
    assert tokenizer.decode(tokenizer.encode("a  a a")) == "a  a a"
