"""Recordings and pictures over HTTP, on stand-ins for the models."""

from __future__ import annotations

import base64
import io
import json
import os
import tempfile

import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.zoo.serve.fake import FakeDiffusion, FakeWhisper, Server
from tests.zoo.serve.test_chat import error

LISTEN, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
DRAW = "/v1/images/generations"


class Media(Server):
    """A server of all three kinds."""

    def __init__(self, **options) -> None:
        self.whisper, self.diffusion = FakeWhisper(), FakeDiffusion()
        made = {"speech": lambda name: self.whisper, "pictures": lambda name: self.diffusion}
        super().__init__(loaders=made, **options)


@pytest.fixture(scope="module")
def media() -> Media:
    return Media()


@pytest.fixture(scope="module")
def client(media: Media) -> TestClient:
    with TestClient(media.app) as client:
        yield client


def sound(content: bytes = b"sound", name: str = "a.wav") -> dict:
    return {"file": (name, content)}


def stream_of(text: str) -> list[dict]:
    """The events, each named as its type says."""
    out = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        out.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {out[-1]['type']}"
    return out


# --- speech ----------------------------------------------------------------------------------


def test_a_transcript_in_each_format(client):
    def form(kind: str) -> str:
        return client.post(LISTEN, files=sound(), data={"response_format": kind}).text

    assert json.loads(client.post(LISTEN, files=sound()).text) == {
        "text": "one two three four five",
        "usage": {"type": "duration", "seconds": 3.0},
    }
    assert form("text") == "one two three four five\n"
    assert form("srt").startswith("1\n00:00:00,000 --> 00:00:01,000\none two\n\n2\n")
    assert form("vtt").startswith("WEBVTT\n\n00:00.000 --> 00:01.000\none two\n")
    verbose = json.loads(form("verbose_json"))
    assert verbose["language"] == "english" and verbose["duration"] == 3.0
    assert [s["text"] for s in verbose["segments"]] == [" one two", " three four", " five"]
    assert set(verbose["segments"][0]) == {
        "id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob",
        "compression_ratio", "no_speech_prob",
    }  # fmt: skip
    assert "words" not in verbose


@pytest.mark.parametrize("name", ["timestamp_granularities[]", "timestamp_granularities"])
def test_words_and_segments_are_given_as_asked(client, name):
    def parts(*granularities: str) -> set[str]:
        data = {"response_format": "verbose_json", name: list(granularities)}
        got = client.post(LISTEN, files=sound(), data=data).json()
        if "word" in granularities:
            assert got["words"][:2] == [
                {"word": "one", "start": 0, "end": 1},
                {"word": "two", "start": 0, "end": 1},
            ]
        return {"words", "segments"} & got.keys()

    assert parts("word") == {"words"}
    assert parts("segment") == {"segments"}
    assert parts("word", "segment") == {"words", "segments"}


def test_options_reach_the_model(media, client):
    data = {"language": "de", "prompt": "Menagerie", "temperature": "0.5"}
    client.post(LISTEN, files=sound(b"\x00" * 9), data=data)
    asked = media.whisper.asked[-1]
    assert asked["bytes"] == b"\x00" * 9 and asked["task"] == "transcribe"
    assert (asked["language"], asked["initial_prompt"], asked["temperature"]) == (
        "de",
        "Menagerie",
        0.5,
    )
    client.post(TRANSLATE, files=sound(), data={"temperature": "0"})
    asked = media.whisper.asked[-1]
    assert asked["task"] == "translate" and "temperature" not in asked  # 0: as high as it must be


def test_a_transcript_as_it_is_found(client):
    events = stream_of(client.post(LISTEN, files=sound(), data={"stream": "true"}).text)
    assert [e["type"] for e in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
    assert "".join(e["delta"] for e in events[:-1]).strip() == events[-1]["text"]
    data = {"stream": "true", "response_format": "verbose_json"}
    events = stream_of(client.post(LISTEN, files=sound(), data=data).text)
    assert events[1] == {
        "type": "transcript.text.segment", "id": 1, "start": 1, "end": 2.0, "text": " three four",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "2"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"prompt": "x" * 10_001}, "prompt"),
        ({"langauge": "de"}, "langauge"),
    ],
)
def test_what_cannot_be_asked_of_a_recording(client, data, param):
    assert error(client.post(LISTEN, files=sound(), data=data), 400, param)


def test_uploads_that_are_none(client):
    assert error(client.post(LISTEN, json={"file": "/etc/passwd"}), 415)
    assert error(client.post(LISTEN, data={"file": "/etc/passwd"}), 415)
    assert error(client.post(LISTEN, files={"other": ("a", b"x")}), 400, "file")
    boundary = {"Content-Type": "multipart/form-data; boundary=x"}
    for body in (
        b"",
        b"nothing",
        b"--x\r\n\r\n",
        b"--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n/etc/passwd\r\n--x--\r\n',
    ):
        assert error(client.post(LISTEN, content=body, headers=boundary), 400)
    assert error(
        client.post(LISTEN, content=b"x", headers={"Content-Type": "multipart/form-data"}), 400
    )
    many = [("file", ("a", b"x")), ("file", ("b", b"y"))]
    assert error(client.post(LISTEN, files=many), 400)


def test_an_upload_leaves_no_file_and_its_name_is_no_path(media, client, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    large = os.urandom(3 << 20)  # more than is kept in memory on the way
    got = client.post(LISTEN, files=sound(large, "../../etc/passwd"))
    assert got.is_success and media.whisper.asked[-1]["bytes"] == large
    assert not any(tmp_path.iterdir())


# --- pictures --------------------------------------------------------------------------------


def picture(data: dict) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data["b64_json"])))


def test_pictures_of_a_size_and_number(media, client):
    body = {"prompt": "a cat", "n": 2, "size": "64x128", "seed": 3, "steps": 2}
    got = client.post(DRAW, json=body).json()
    assert [picture(each).size for each in got["data"]] == [(64, 128)] * 2
    assert picture(got["data"][0]).format == "PNG" and got["size"] == "64x128"
    asked = media.diffusion.asked[-1]
    assert asked == {
        "batch": 2, "width": 64, "height": 128, "steps": 2, "seed": 3, "prompt": "a cat",
    }  # fmt: skip
    own = client.post(DRAW, json={"prompt": "a cat", "output_format": "webp"}).json()
    assert picture(own["data"][0]).format == "WEBP"


def test_the_making_of_a_picture_can_be_followed(client):
    body = {"prompt": "a cat", "stream": True, "partial_images": 2, "steps": 6}
    events = stream_of(client.post(DRAW, json=body).text)
    steps = [e["step"] for e in events if e["type"] == "image_generation.progress"]
    assert steps == [1, 2, 3, 4, 5, 6]
    partial = [e for e in events if e["type"] == "image_generation.partial_image"]
    assert [e["partial_image_index"] for e in partial] == [0, 1]
    assert events[-1]["type"] == "image_generation.completed"
    assert picture(events[-1]).size == (64, 64) and picture(partial[0]).size == (8, 8)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": "x" * 32_001}, "prompt"),
        ({"n": 11}, "n"),
        ({"n": 0}, "n"),
        ({"size": "big"}, "size"),
        ({"size": "4096x4096"}, "size"),
        ({"size": "²x²"}, "size"),
        ({"size": "-64x64"}, "size"),
        ({"steps": 1000}, "steps"),
        ({"seed": -1}, "seed"),
        ({"response_format": "url"}, "response_format"),
        ({"output_format": "gif"}, "output_format"),
        ({"partial_images": 9}, "partial_images"),
    ],
)
def test_pictures_that_cannot_be(client, change, param):
    assert error(client.post(DRAW, json={"prompt": "a cat"} | change), 400, param)


def test_a_kind_of_model_that_is_not_served():
    with TestClient(Server().app) as client:
        assert "no model that draws" in error(client.post(DRAW, json={"prompt": "a"}), 404)
        assert error(client.post(LISTEN, files=sound()), 404)
    with TestClient(Media().app) as client:
        got = client.post(DRAW, json={"prompt": "a", "model": "tiny"})
        assert "no model that draws" in error(got, 400, "model")


def test_the_name_that_clients_have_built_in_is_the_first_that_transcribes(client):
    for name in ("whisper-1", None):
        got = client.post(LISTEN, files=sound(), data={"model": name} if name else {})
        assert got.status_code == 200
    assert error(client.post(DRAW, json={"model": "whisper-1", "prompt": "x"}), 404, "model")
