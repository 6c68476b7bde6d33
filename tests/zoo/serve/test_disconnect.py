"""A client that goes away, over real sockets: what it asked for ends at once."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.zoo.serve.fake import listening, until
from tests.zoo.serve.test_media import Media
from zoo.serve import guard


class Connection:
    """A request written by hand, so that it can be broken off anywhere."""

    def __init__(self, address: str, path: str, body: bytes, kind: str, length: int = 0) -> None:
        host = urlsplit(address)
        self.socket = socket.create_connection((host.hostname, host.port), timeout=10)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {length or len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)

    def read_until(self, what: bytes) -> bytes:
        got = b""
        while what not in got:
            part = self.socket.recv(4096)
            assert part, got
            got += part
        return got

    def close(self) -> None:
        self.socket.close()


def chat(address: str, **options) -> Connection:
    body = {"messages": [{"role": "user", "content": "the lazy dog " * 50}], "temperature": 0}
    content = json.dumps(body | options).encode()
    return Connection(address, "/v1/chat/completions", content, "application/json")


@pytest.fixture
def media() -> Media:
    return Media(slots=2, queue=4)


@pytest.mark.parametrize("stream", [True, False])
def test_a_chat_whose_client_goes_frees_its_slot_within_a_step(media, stream):
    with listening(media.app) as address:
        batch = media.batch
        batch.pace = 0.005
        one = chat(address, stream=stream)
        if stream:
            one.read_until(b"ou")
        else:
            until(lambda: batch.steps > 3)
        batch.may_step.clear()  # the next step, if there is one, waits
        one.close()
        until(lambda: media.models.served["tiny"].gate.inside == 0)
        before = batch.steps
        batch.may_step.set()
        until(lambda: not batch.script)
        assert batch.steps <= before + 1  # the step that was under way


def test_a_chat_that_waits_is_forgotten_when_its_client_goes(media):
    with listening(media.app) as address:
        gate = media.models.served["tiny"].gate
        media.batch.may_step.clear()
        open_ = [chat(address, max_tokens=3) for _ in range(4)]  # two of them wait
        until(lambda: gate.inside == 4)
        open_[3].close()
        until(lambda: gate.inside == 3)
        media.batch.may_step.set()
        for each in open_[:3]:
            assert b'"content":"You "' in each.read_until(b"total_tokens")
        until(lambda: gate.inside == 0)
        assert media.metrics.tokens.get("tiny", "reply") == 9


def test_a_transcription_whose_client_goes_ends_at_its_next_segment(media):
    boundary = "multipart/form-data; boundary=x"
    body = (
        b'--x\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nsound\r\n'
        b"--x--\r\n"
    )
    with listening(media.app) as address:
        media.whisper.go_on.clear()
        one = Connection(address, "/v1/audio/transcriptions", body, boundary)
        until(lambda: media.whisper.asked)
        one.close()
        until(lambda: media.models.served["tiny-speech"].gate.inside == 0)
        media.whisper.go_on.set()
        until(lambda: media.whisper.stopped == 1)


def test_a_picture_whose_client_goes_ends_at_its_next_step(media):
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    with listening(media.app) as address:
        media.diffusion.go_on.clear()
        one = Connection(address, "/v1/images/generations", body, "application/json")
        until(lambda: media.diffusion.asked)
        one.close()
        until(lambda: media.models.served["tiny-pictures"].gate.inside == 0)
        media.diffusion.go_on.set()
        until(lambda: media.diffusion.stopped == 1)


def test_a_body_that_never_comes_is_given_up(media, monkeypatch):
    monkeypatch.setattr(guard, "PATIENCE_S", 0.1)
    with listening(media.app) as address:
        one = Connection(address, "/v1/chat/completions", b'{"mess', "application/json", length=500)
        assert b"408" in one.read_until(b"no more of the body")


def test_a_client_that_goes_amid_its_body_leaves_nothing(media):
    with listening(media.app) as address:
        Connection(address, "/v1/chat/completions", b'{"mess', "application/json", 500).close()
        one = chat(address, max_tokens=3)
        assert b'"content":"You "' in one.read_until(b"total_tokens")
        assert media.models.served["tiny"].gate.inside == 0


def test_a_body_that_is_too_large_is_answered_although_it_was_not_read(media):
    limited = Media(most=10_000)
    with listening(limited.app) as address:
        one = Connection(address, "/v1/chat/completions", b"x" * 60_000, "application/json")
        assert b"413" in one.read_until(b"10000 bytes")
