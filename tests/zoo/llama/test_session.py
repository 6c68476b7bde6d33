"""Saved sessions: they go on as if nothing had come between, and no other file is taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import weights
import zoo.llama
from tests.zoo.llama import tiny
from tests.zoo.llama.test_smollm2 import PROMPT_IDS, QUESTION, command
from weights import WeightError
from zoo.errors import UserError
from zoo.llama import session

TALK = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "dogs"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(device, file):
    return zoo.llama.load(file, device=device)


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 400, count).tolist()


def test_a_session_goes_on_to_the_bit_and_computes_only_what_is_new(model, device, file, tmp_path):
    model.context.reset()
    model.context.next_logits(ids(50))
    model.save_session(tmp_path / "a.session", TALK)
    right = model.context.next_logits(ids(53))
    for other in (model, zoo.llama.load(file, device=device)):  # with programs, and without any
        other.context.reset()
        other.context.next_logits(ids(60, seed=1))
        assert other.load_session(tmp_path / "a.session") == TALK
        assert other.context.ids == ids(50)
        reply = other.generate(ids(53), max_tokens=1)
        list(reply)
        assert reply.stats.reused_tokens == 50
        other.load_session(tmp_path / "a.session")
        np.testing.assert_array_equal(other.context.next_logits(ids(53)), right)


def test_an_empty_context_and_an_older_file_are_no_trouble(model, tmp_path):
    path = tmp_path / "a.session"
    model.context.reset()
    model.save_session(path)
    assert model.load_session(path) == [] and model.context.ids == []
    model.context.next_logits(ids(5))
    model.save_session(path)
    model.load_session(path)
    assert model.context.ids == ids(5)
    assert [p.name for p in tmp_path.iterdir()] == ["a.session"]


def test_what_can_not_be_written_is_told_and_nothing_stays_behind(model, tmp_path):
    with pytest.raises(WeightError, match="its folder does not exist"):
        model.save_session(tmp_path / "none" / "a.session")
    with pytest.raises(WeightError, match="it is a folder"):
        session.check(tmp_path)
    assert not list(tmp_path.iterdir())
    session.check(tmp_path / "a.session")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no files")
def test_a_folder_that_takes_no_files_is_told_before_anything_is_computed():
    with pytest.raises(WeightError, match="a.session: can't be written"):
        session.check(Path("/proc/self/a.session"))


@pytest.fixture
def saved(model, tmp_path):
    model.context.reset()
    model.context.next_logits(ids(20))
    model.save_session(tmp_path / "a.session", TALK)
    return tmp_path / "a.session"


def refused(model, path, told: str) -> None:
    before = list(model.context.ids)
    with pytest.raises((WeightError, UserError), match=told) as error:
        model.load_session(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert model.context.ids == before


def test_foreign_files_are_told_in_a_line(model, file, tmp_path):
    path = tmp_path / "x"
    for content in (b"", b"hello, this is no session", file.read_bytes(), b"\xff" * 100):
        path.write_bytes(content)
        refused(model, path, "not a saved session, or cut short")
    weights.convert(file, tmp_path / "x.safetensors")
    refused(model, tmp_path / "x.safetensors", "not a saved session")
    with pytest.raises(WeightError, match="can't be read"):
        model.load_session(tmp_path / "none")


def test_a_damaged_file_is_told_whatever_byte_it_is(model, saved):
    raw = saved.read_bytes()
    for at in np.random.default_rng(3).integers(0, len(raw), 60):
        saved.write_bytes(raw[:at] + bytes([raw[at] ^ 64]) + raw[at + 1 :])
        with pytest.raises((WeightError, UserError)):
            model.load_session(saved)
        saved.write_bytes(raw[:at])
        with pytest.raises(WeightError):
            model.load_session(saved)
    assert model.context.ids == ids(20)
    saved.write_bytes(raw)
    assert model.load_session(saved) == TALK


def rewritten(model, path, tokens: list[int], messages: str) -> None:
    """A session that is whole, of this model, and wrong."""
    kept, model.context.ids = model.context.ids, tokens
    session.save(path, model.context, model.fingerprint, messages)
    model.context.ids = kept


def test_a_file_is_not_believed_what_it_says(model, saved):
    rewritten(model, saved, [1, 10**6], "[]")
    refused(model, saved, "token ids outside the vocabulary")
    rewritten(model, saved, [1, -1], "[]")
    refused(model, saved, "token ids outside the vocabulary")
    for messages in ("{}", "[1]", '[{"role": "user"}]', "[" * 10**5, "nonsense"):
        rewritten(model, saved, [1, 2], messages)
        with pytest.raises(UserError, match="no saved conversation"):
            model.load_session(saved)


def test_another_model_cache_or_size_is_told(model, device, saved, tmp_path):
    other = tiny.write_gguf(tmp_path / "other.gguf", sizes={"context_length": 200})
    refused(zoo.llama.load(other, device=device), saved, "a session of another model")
    path = model.fingerprint
    small = zoo.llama.load(tiny.write_gguf(tmp_path / "same.gguf"), device=device, ctx=10)
    assert small.fingerprint == path
    refused(small, saved, "longer than the context.*--ctx 20 or more, got --ctx 10")
    floats = zoo.llama.load(tmp_path / "same.gguf", device=device, cache_type="f32")
    refused(floats, saved, "another type of cache .expected f32, got f16.; --cache-type sets it")


def test_chat_and_complete_go_on_where_they_ended(smollm2, tmp_path):
    path = str(tmp_path / "talk.session")
    flags = ("--model", str(smollm2), "--session", path, "--json", "--cache-type", "q8_0")
    first = command("chat", QUESTION, *flags)
    assert first.returncode == 0 and "Paris" in first.stdout
    second = command("chat", "And of Italy?", *flags)
    end = json.loads(second.stdout.splitlines()[-1])
    # all of the first turn but its last token, which was never fed
    assert end["reused_tokens"] > len(PROMPT_IDS)
    assert "Rome" in "".join(
        event.get("text", "") for event in map(json.loads, second.stdout.splitlines())
    )
    again = command("complete", "hello", "--model", str(smollm2), "--session", path)
    assert again.returncode == 1 and again.stderr.count("\n") == 1
    assert "--cache-type" in again.stderr
    wrong = command("chat", QUESTION, "--model", str(smollm2), "--session", str(smollm2))
    assert wrong.returncode == 1 and "not a saved session" in wrong.stderr
    assert smollm2.read_bytes()[:4] == b"GGUF"
