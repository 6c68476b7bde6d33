"""OpenAI's own client at every endpoint of a server in its own process, on small random models."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from PIL import Image

from tests.zoo.llama import tiny
from tests.zoo.serve.process import Process
from tests.zoo.stable_diffusion import tiny as tiny_diffusion
from weights import FetchError, resolve
from zoo.llama.loading import load

openai = pytest.importorskip("openai")
JFK = Path(__file__).parents[1] / "whisper" / "data" / "jfk.flac"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("llama") / "tiny.gguf")


@pytest.fixture(scope="module")
def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("server")
    picture = folder / "picture.safetensors"
    diffusion = tiny_diffusion.single_file(picture, small_vocabulary())
    flags = ("--model", str(model), "--whisper-model", "tiny.en", "--sd-model", str(diffusion))
    with Process(folder, *flags, "--slots", "2", "--api-key", "secret") as server:
        yield openai.OpenAI(base_url=f"{server.address}/v1", api_key="secret", max_retries=0)


def small_vocabulary() -> dict:
    """Random weights with as many rows as CLIP has tokens."""
    made = tiny_diffusion.weights_of("1")
    name = "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"
    rows = np.random.default_rng(1).normal(size=(49408, tiny_diffusion.TEXT)) * 0.1
    made[name] = rows.astype(np.float32)
    return made


def solo(model: Path, **options) -> str:
    """What the model says without a server."""
    return "".join(load(model).chat(MESSAGES, **options))


def test_a_chat_says_what_the_model_says_alone(client, model):
    options = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == solo(model, max_tokens=12)
    assert whole.usage.completion_tokens == 12 and whole.choices[0].finish_reason == "length"
    again = client.chat.completions.create(**options)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == again.usage


def test_logprobs_choices_and_stop(client):
    options = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    one = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    text, content = one.choices[0].message.content, one.choices[0].logprobs.content
    assert len(content) == 12 and all(len(each.top_logprobs) == 3 for each in content)
    stopped = client.chat.completions.create(**options, stop=[text[4:6]])
    assert stopped.choices[0].message.content == text[: text.index(text[4:6])]
    assert stopped.choices[0].finish_reason == "stop"
    drawn = client.chat.completions.create(**options | {"temperature": 1.5}, n=3, seed=1)
    assert len({choice.message.content for choice in drawn.choices}) == 3


def test_a_hundred_of_a_hundred_replies_meet_their_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    for first in range(0, 100, 10):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=form, temperature=1.0, n=10, seed=first
        )
        for choice in answer.choices:
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            assert choice.finish_reason == "stop"


def test_completions_and_models(client):
    answer = client.completions.create(model="tiny", prompt="the fox", temperature=0, logprobs=2)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert [model.id for model in client.models.list()] == ["tiny", "tiny.en", "picture"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_embeddings_are_of_length_one_and_differ(client):
    answer = client.embeddings.create(model="tiny", input=["the fox", "the dog", "the fox"])
    vectors = np.array([each.embedding for each in answer.data])
    assert vectors.shape == (3, 24)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)  # float32
    np.testing.assert_array_equal(vectors[0], vectors[2])
    assert vectors[0] @ vectors[1] < 0.999


def test_a_recording_as_text(client):
    try:
        resolve("tiny.en")
    except FetchError as error:
        pytest.skip(f"needs the tiny.en model: {error}")
    with open(JFK, "rb") as file:
        words = client.audio.transcriptions.create(
            model="tiny.en",
            file=file,
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
    assert "ask what you can do for your country" in words.text
    assert words.language == "english" and words.duration == pytest.approx(11, abs=0.01)
    assert words.words[0].word == "And" and words.segments[-1].end <= 11
    with open(JFK, "rb") as file:
        lines = client.audio.transcriptions.create(
            model="tiny.en", file=file, response_format="srt"
        )
    assert lines.startswith("1\n00:00:00,000 --> ")
    with pytest.raises(openai.BadRequestError, match="no audio that can be read"):
        client.audio.transcriptions.create(model="tiny.en", file=("a.wav", b"no sound at all"))


def test_a_picture(client):
    options = {"model": "picture", "prompt": "a cat", "size": "64x64", "n": 2}
    more = {"steps": 2, "seed": 5}
    answers = [client.images.generate(**options, extra_body=more) for _ in range(2)]
    first, second = (answers[0].data[n].b64_json for n in (0, 1))
    assert Image.open(io.BytesIO(base64.b64decode(first))).size == (64, 64)
    assert first != second and answers[1].data[0].b64_json == first


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 999}]
        )
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
