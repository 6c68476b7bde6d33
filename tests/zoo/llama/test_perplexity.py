"""Perplexity by its definition, and vectors of texts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zoo.llama
from tests.zoo.llama import reference, tiny
from tests.zoo.llama.fake import scripted
from zoo.errors import UserError
from zoo.llama.perplexity import measure, windows

ROOT = Path(__file__).resolve().parents[3]
ALICE = Path(__file__).with_name("data") / "alice.txt"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(file):
    return zoo.llama.load(file, device="reference", ctx=64)


def command(*args: str, **options) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "zoo.llama", *args]
    return subprocess.run(line, cwd=ROOT, capture_output=True, timeout=120, **options)


def their_logits(model, ids) -> np.ndarray:
    size = model.config.vocab_size
    return reference.logits(tiny.tensors(size), model.config, ids)


def test_windows_without_a_stride_score_their_second_halves():
    assert windows(1050, 512) == [(0, 512, 257), (512, 1024, 769)]
    assert windows(511, 512) == []
    assert sum(end - first for _, end, first in windows(20_000, 512)) == 39 * 255  # llama.cpp's


@pytest.mark.parametrize(
    ("tokens", "ctx", "stride"), [(100, 10, 3), (7, 10, 3), (2, 10, 9), (101, 10, 9)]
)
def test_windows_with_a_stride_score_every_token_but_the_first_once(tokens, ctx, stride):
    cuts = windows(tokens, ctx, stride)
    assert [n for _, end, first in cuts for n in range(first, end)] == list(range(1, tokens))
    assert all(begin < first < end <= begin + ctx for begin, end, first in cuts)
    begins = [begin for begin, _, _ in cuts]
    assert begins == [stride * n for n in range(len(cuts))]


@pytest.mark.parametrize("stride", [None, 5])
def test_perplexity_is_that_of_the_plain_numpy_model(model, stride):
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 40).tolist()
    found = measure(model, ids, 16, stride)
    losses = []
    for begin, end, first in windows(40, 16, stride):
        logits = their_logits(model, ids[begin:end])
        chance = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        losses += [-math.log(chance[n - 1 - begin, ids[n]]) for n in range(first, end)]
    # Sums in float32 of at most 40 terms, on one side.
    assert found.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    error = found.perplexity * np.std(losses) / math.sqrt(len(losses) - 1)
    assert found.error == pytest.approx(error, rel=1e-3)
    assert (found.scored, found.tokens) == (len(losses), 40)


def test_each_window_begins_with_the_token_that_the_model_wants(monkeypatch):
    model = scripted(["a"])
    seen = []
    monkeypatch.setattr(model, "each_logits", lambda ids: seen.append(ids) or iter([FLAT]))
    found = measure(model, list(range(2, 12)), 4, 2)
    assert found.perplexity == pytest.approx(len(FLAT[0]))  # all tokens are equally likely
    assert [ids[0] for ids in seen] == [2, 4, 6, 8]
    monkeypatch.setattr(type(model.tokenizer), "add_bos", True)
    seen.clear()
    measure(model, list(range(2, 12)), 4, 2)
    assert [ids[0] for ids in seen] == [model.tokenizer.bos_id] * 4


FLAT = np.zeros((4, 300), np.float32)


@pytest.mark.parametrize(
    ("count", "options", "told"),
    [
        (5, {"ctx": 16}, "has 5 tokens, perplexity needs at least 16; --ctx 5 would do$"),
        (1, {"ctx": 16, "stride": 2}, "has 1 tokens, perplexity needs at least 2$"),
        (50, {"ctx": 16, "stride": 16}, "stride must be from 1 to 15"),
        (50, {"ctx": 65}, "ctx must be from 3 to 64"),
        (50, {"ctx": 2}, "ctx must be from 3 to 64"),  # half of that scores nothing
        (50, {"ctx": 1, "stride": 1}, "ctx must be from 2 to 64"),
        (50, {}, "needs at least 64"),  # less than 512, as this context is smaller
    ],
)
def test_perplexity_of_too_little_is_told_in_a_line(model, count, options, told):
    with pytest.raises(UserError, match=told):
        measure(model, [3] * count, **options)


def test_perplexity_command(file, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox, " * 30)
    args = ("--model", str(file), "--device", "reference", "--ctx", "20")
    result = command("perplexity", str(text), *args, "--json")
    assert (result.returncode, result.stderr) == (0, b"")
    found = json.loads(result.stdout)
    assert found["ctx"] == 20 and found["perplexity"] > 1
    piped = command("perplexity", "-", *args, "--stride", "15", input=text.read_bytes())
    assert piped.returncode == 0
    assert piped.stdout.startswith(b"perplexity ") and b"stride 15" in piped.stdout
    missing = command("perplexity", str(tmp_path / "none"), *args)
    assert missing.returncode == 1 and missing.stderr.count(b"\n") == 1


def test_vector_of_a_text_is_the_mean_of_its_normalised_states(model):
    ids = list(range(3, 40))  # more than the rows of one call
    logits = their_logits(model, ids)
    weights = tiny.tensors(model.config.vocab_size)
    output = weights.get("output.weight", weights["tok_embeddings.weight"]).astype(np.float64)
    states = np.linalg.lstsq(output, logits.T, rcond=None)[0].T  # what the logits were made of
    mean = states.mean(0)
    # float32 against float64
    np.testing.assert_allclose(model.embed(ids), mean / np.linalg.norm(mean), atol=1e-5)
    assert np.array_equal(model.embed("the fox"), model.embed(model.prompt_ids("the fox")))
    with pytest.raises(UserError, match="context holds 64"):
        model.embed([3] * 65)
    with pytest.raises(UserError, match="empty"):
        model.embed([])


def test_embed_command_writes_json_or_an_array(file, model, tmp_path):
    args = ("--model", str(file), "--device", "reference", "--ctx", "64")
    result = command("embed", "the fox", "a dog", *args)
    assert (result.returncode, result.stderr) == (0, b"")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["text"] for row in rows] == ["the fox", "a dog"]
    expected = np.stack([model.embed("the fox"), model.embed("a dog")])
    np.testing.assert_allclose([row["embedding"] for row in rows], expected, atol=1e-7)
    array = tmp_path / "vectors"
    assert command("embed", *args, "-o", str(array), input=b"the fox\n").stdout == b""
    np.testing.assert_array_equal(np.load(array), expected[:1])


def test_smollm2_foretells_the_beginning_of_a_public_text(smollm2):
    model = zoo.llama.load(smollm2, ctx=512)
    ids = model.tokenizer.encode(ALICE.read_text("utf-8"))[:1100]
    # transformers with the dequantised file in float32: 20.77858. "auto" multiplies in int8 terms.
    assert measure(model, ids).perplexity == pytest.approx(20.77858, rel=1e-3)


@pytest.mark.slow
def test_smollm2_foretells_a_public_text(smollm2):
    found = measure(zoo.llama.load(smollm2, ctx=512), ALICE.read_text("utf-8"))
    assert (found.tokens, found.scored) == (23028, 11220)
    assert found.perplexity == pytest.approx(17.63558, rel=1e-3)  # as above
