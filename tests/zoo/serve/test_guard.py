"""Who is let in, how much is read, and how errors look; whatever comes, the server goes on."""

from __future__ import annotations

import json
import random
import threading

import pytest
from starlette.testclient import TestClient

from tests.zoo.serve.fake import Server, until
from tests.zoo.serve.test_chat import CHAT, HELLO, error

LOCAL = {"hosts": ("localhost", "127.0.0.1", "::1"), "keys": ("right", "other key")}


def client(server: Server, **options) -> TestClient:
    return TestClient(server.app, base_url="http://127.0.0.1:8080", **options)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer righ", "Bearer rightx", "Basic right",
     "right", "Bearer \xff\xfe"],
)  # fmt: skip
def test_without_a_right_key_nothing_is_answered(header):
    server = Server(**LOCAL)
    given = {} if header is None else {"Authorization": header.encode("latin-1")}
    with client(server) as http:
        for path in ("/v1/models", "/metrics", "/v1/models/tiny"):
            got = http.get(path, headers=given)
            assert error(got, 401) and got.headers["www-authenticate"] == "Bearer"
            assert got.json()["error"]["code"] == "invalid_api_key"
        assert error(http.post(CHAT, json=HELLO, headers=given), 401)
        assert server.models.served["tiny"].worker.state == "not loaded"


def test_each_key_lets_in_and_the_page_and_health_need_none():
    with client(Server(**LOCAL)) as http:
        for key in LOCAL["keys"]:
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).is_success
            assert http.get("/v1/models", headers={"Authorization": f"bearer  {key} "}).is_success
        for path in ("/health", "/", "/page.js", "/page.css"):
            assert http.get(path).is_success


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost:9", 200),
        ("LOCALHOST", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_a_server_of_this_machine_answers_to_its_names_only(host, status):
    """Otherwise a page elsewhere could have its name mean this machine (DNS rebinding)."""
    with client(Server(hosts=LOCAL["hosts"])) as http:
        assert http.get("/v1/models", headers={"Host": host}).status_code == status


def test_pages_of_other_sites_are_refused_unless_told():
    elsewhere = {"Origin": "https://evil.example"}
    with client(Server()) as http:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:9999", "http://[::1"):
            assert error(http.post(CHAT, json=HELLO, headers={"Origin": origin}), 403)
        own = http.post(CHAT, json=HELLO, headers={"Origin": "http://127.0.0.1:8080"})
        assert own.is_success and "access-control-allow-origin" not in own.headers
        asked = {**elsewhere, "Access-Control-Request-Method": "POST"}
        assert not http.options(CHAT, headers=asked).is_success
    with client(Server(origins=("https://evil.example",))) as http:
        allowed = http.options(CHAT, headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://evil.example"
        got = http.post(CHAT, json=HELLO, headers=elsewhere)
        assert (
            got.is_success and got.headers["access-control-allow-origin"] == "https://evil.example"
        )
        assert error(http.get("/v1/models", headers={"Origin": "https://b.example"}), 403)
    with client(Server(origins=("*",), keys=("k",))) as http:
        assert http.options(CHAT, headers=asked).is_success  # a preflight carries no key
        got = http.get("/v1/models", headers=elsewhere)
        assert error(got, 401) and got.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("told", [True, False], ids=["with a length", "in chunks"])
def test_a_body_that_is_too_large_is_refused_before_it_is_kept(told):
    server = Server(most=1000)
    parts = [b'{"messages": "', *[b"x" * 500] * 5, b'"}']
    body = b"".join(parts) if told else iter(parts)
    with client(server) as http:
        sent = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert "1000 bytes" in error(sent, 413)
        assert http.post(CHAT, json=HELLO).is_success


def test_a_body_must_say_that_it_is_json():
    """A form or plain text is what any page may send without being asked for leave."""
    with client(Server()) as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            got = http.post(CHAT, content=json.dumps(HELLO), headers={"Content-Type": kind})
            assert error(got, 415)
        kind = "application/json; charset=utf-8"
        got = http.post(CHAT, content=json.dumps(HELLO), headers={"Content-Type": kind})
        assert got.is_success


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"messages": Infinity}',
     b"[" * 100_000, b'{"a":' * 100_000, b"null", b"\x00"],
)  # fmt: skip
def test_a_body_that_is_no_json_object(body):
    with client(Server()) as http:
        got = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert error(got, 400)


def test_tools_nested_deeper_than_anyone_means():
    deep: dict = {}
    for _ in range(900):
        deep = {"a": deep}
    tools = [{"type": "function", "function": deep}]
    with client(Server()) as http:
        got = http.post(CHAT, json=HELLO | {"tools": tools})
        assert got.status_code in (200, 400)
        assert http.post(CHAT, json=HELLO).is_success


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/page/page.js", 404),
        ("GET", "/../pyproject.toml", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "/page.js/../../command.py", 404),
        ("GET", "/v1/models/../../../etc/passwd", 404),
        ("GET", "/v1/models/%2Fetc%2Fpasswd", 404),
    ],
)
def test_paths_that_are_not_served(method, path, status):
    with client(Server()) as http:
        assert error(http.request(method, path), status)


def test_more_requests_than_may_wait_are_told_to_come_back():
    server = Server(slots=1, queue=1)
    server.batch.may_step.clear()
    got = []
    with client(server) as http:
        gate = server.models.served["tiny"].gate
        threads = [
            threading.Thread(target=lambda: got.append(http.post(CHAT, json=HELLO)))
            for _ in range(2)
        ]
        for n, thread in enumerate(threads):
            thread.start()
            until(lambda n=n: gate.inside == n + 1)
        late = http.post(CHAT, json=HELLO)
        assert "busy" in error(late, 429) and int(late.headers["retry-after"]) > 0
        assert late.json()["error"]["type"] == "rate_limit_error"
        assert error(http.post(CHAT, json=HELLO | {"stream": True}), 429)
        server.batch.may_step.set()
        for thread in threads:
            thread.join()
        assert [each.status_code for each in got] == [200, 200] and gate.inside == 0
        assert "at most 2 at once" in error(http.post(CHAT, json=HELLO | {"n": 3}), 400)
        assert http.post(CHAT, json=HELLO).is_success


def test_a_model_that_cannot_be_loaded_is_a_503_and_tried_again(capfd):
    tries = []

    def broken(name: str):
        tries.append(name)
        raise OSError(2, "No such file or directory", "/secret/place")

    with client(Server(loaders={"chat": broken})) as http:
        for body in (HELLO, HELLO | {"stream": True}):
            got = http.post(CHAT, json=body)
            assert "log" in error(got, 503) and "/secret" not in got.text
        assert http.get("/health").json()["models"] == {"tiny": "failed"}
    assert len(tries) == 2 and "/secret/place" in capfd.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_ours_is_a_500_that_tells_nothing(capfd, stream):
    server = Server()
    with client(server) as http:
        server.batch.fails = RuntimeError("the secret of the device")
        got = http.post(CHAT, json=HELLO | {"stream": stream})
        assert error(got, 500) and "secret" not in got.text
        server.batch.fails = None
        assert http.post(CHAT, json=HELLO).is_success
    assert "the secret of the device" in capfd.readouterr().err


def test_an_error_in_the_midst_of_a_stream_is_its_last_event(capfd):
    server = Server()
    feed, count = server.batch.feed, 0

    def fails_later(slot: int, token: int) -> None:
        nonlocal count
        count += 1
        if count == 3:
            server.batch.fails = RuntimeError("lost")
        feed(slot, token)

    server.batch.feed = fails_later
    with client(server) as http:
        lines = http.post(CHAT, json=HELLO | {"stream": True}).text.strip().split("\n\n")
    assert len(lines) > 2 and "error" not in lines[-2]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "internal_error"


def test_the_page_may_load_nothing_but_its_own_files():
    with client(Server()) as http:
        for path in ("/", "/page.js", "/page.css"):
            got = http.get(path)
            policy = got.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert got.headers["x-content-type-options"] == "nosniff"
            for word in (
                "http://",
                "https://",
                "innerHTML",
                "insertAdjacentHTML",
                "style=",
                "onclick",
            ):
                assert word not in got.text, word


def test_metrics_count_what_was_answered():
    server = Server()
    with client(server) as http:
        http.post(CHAT, json=HELLO)
        http.post(CHAT, json=HELLO | {"n": 0})
        for n in range(5):
            http.get(f"/{n}")
        text = http.get("/metrics").text
    assert f'zoo_requests_total{{endpoint="{CHAT}",status="200"}} 1\n' in text
    assert f'zoo_requests_total{{endpoint="{CHAT}",status="400"}} 1\n' in text
    assert 'zoo_requests_total{endpoint="other",status="404"} 5\n' in text
    assert 'zoo_tokens_total{model="tiny",kind="reply"}' in text
    assert 'zoo_requests_inside{model="tiny"} 0\n' in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    for line in text.splitlines():
        assert line.startswith("#") or float(line.rpartition(" ")[2]) >= 0


@pytest.mark.parametrize("seed", range(3))
def test_scrambled_requests_are_answered_in_openais_shape(seed):
    draw = random.Random(seed)
    values = [None, True, -1, 0, 1e308, 2**70, "", "x", [], [[]], {}, {"type": "text"}, [1, "a"]]
    names = [*HELLO, "n", "stop", "seed", "stream", "tools", "logprobs", "response_format",
             "logit_bias", "stream_options", "model", "prompt", "input", "size"]  # fmt: skip
    with client(Server()) as http:
        for _ in range(150):
            body = dict(HELLO, prompt="a", input="a")
            for _ in range(draw.randint(1, 3)):
                body[draw.choice(names)] = draw.choice(values)
            path = draw.choice([CHAT, "/v1/completions"])
            body.pop("input")
            body.pop("prompt" if path == CHAT else "messages", None)
            got = http.post(path, json=body)
            assert got.status_code in (200, 400, 404, 429), got.text
            if got.status_code != 200:
                error(got, got.status_code)
