"""Chats and completions over HTTP: what is asked, what is answered, what is refused."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.zoo.serve.fake import TOKENIZER, Server, heard, scheduler

CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(scope="module")
def client(server: Server) -> TestClient:
    with TestClient(server.app) as client:
        yield client


def events(text: str) -> list:
    """The data of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def error(answer, status: int, param: str | None = None) -> str:
    """The message of an error, after a look at its shape, which is OpenAI's."""
    assert answer.status_code == status, answer.text
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"} and "\n" not in told["message"]
    assert param is None or told["param"] == param
    return told["message"]


# --- chat ------------------------------------------------------------------------------------


def test_a_chat(client):
    answer = client.post(CHAT, json=HELLO).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "You said: hello",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    used = answer["usage"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"


def test_a_stream_says_the_same_bit_by_bit(client):
    body = HELLO | {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    got = client.post(CHAT, json=body)
    assert got.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(got.text)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 2
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == "You said: hello" and len(own) > 5
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]


def test_without_being_asked_a_stream_tells_no_usage(client):
    chunks = events(client.post(CHAT, json=HELLO | {"stream": True}).text)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, stream):
    got = client.post(CHAT, json=HELLO | {"stop": [": h", "never"], "stream": stream})
    if stream:
        parts = [c["choices"][0] for c in events(got.text)]
        text = "".join(part["delta"].get("content", "") for part in parts)
        finish = parts[-1]["finish_reason"]
    else:
        (choice,) = got.json()["choices"]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    assert (text, finish) == ("You said", "stop")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_number_of_tokens_is_limited(client, name):
    (choice,) = client.post(CHAT, json=HELLO | {name: 2}).json()["choices"]
    assert choice["message"]["content"] == "You" and choice["finish_reason"] == "length"


def test_logprobs_are_of_the_texts_tokens(client):
    body = HELLO | {"logprobs": True, "top_logprobs": 2}
    (choice,) = client.post(CHAT, json=body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == choice["message"]["content"]
    assert bytes(b for each in content for b in each["bytes"]).decode() == "You said: hello"
    for each in content:
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] < 0
        assert len(each["top_logprobs"]) == 2
    chunks = events(client.post(CHAT, json=body | {"stream": True}).text)
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == content


def test_a_seed_repeats_a_draw_and_choices_differ():
    server = Server(scheduler(says=lambda prompt: ""))  # all tokens but the end are as likely
    server.batch._logits = lambda slot: (
        server.batch.waits.add(slot),
        np.where(np.arange(TOKENIZER.vocab_size) < 2, -99, 0).astype(np.float32),
    )[1]
    server.batch.feed = lambda slot, token: server.batch.waits.remove(slot)
    body = {"messages": HELLO["messages"], "max_tokens": 8, "seed": -5, "n": 3, "top_k": 0}
    with TestClient(server.app) as client:
        texts = [
            [c["message"]["content"] for c in client.post(CHAT, json=body).json()["choices"]]
            for _ in range(2)
        ]
        other = client.post(CHAT, json=body | {"seed": 6}).json()["choices"]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    assert other[0]["message"]["content"] not in texts[0]


def test_messages_in_parts_older_roles_and_tools_reach_the_template():
    prompts: list[str] = []
    server = Server(scheduler(says=lambda prompt: prompts.append(prompt) or heard(prompt)))
    template = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}"
        "{% endfor %}"
    )
    with TestClient(server.app) as client:
        client.post(CHAT, json=HELLO)  # loads the model
        server.chats.llama.template.source = template
        server.chats.llama.template._template = None
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "w", "arguments": '{"city": "Rome"}'},
        }
        tool = {"type": "function", "function": {"name": "w", "parameters": {"<|im_end|>": 1}}}
        messages = [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "rain<|im_end|>"},
        ]
        body = {"messages": messages, "tools": [tool], "temperature": 0}
        assert client.post(CHAT, json=body).status_code == 200
        assert client.post(CHAT, json=body | {"tool_choice": "none"}).status_code == 200
    with_tools, without = prompts[-2:]
    assert with_tools.startswith('[{"type": "function", "function": {"name": "w"')
    assert without.startswith("null[system]Be brief.[user]ab[assistant](Rome)[tool]rain<|im_end|>")
    ids = TOKENIZER.encode(with_tools, special=False)
    assert TOKENIZER.special.control["<|im_end|>"] not in ids


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "pilot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 99}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"temprature": 1}, "temprature"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(client, change, param):
    assert error(client.post(CHAT, json=HELLO | change), 400, param)


def test_fields_that_change_nothing_here_are_let_through(client):
    body = HELLO | {"user": "me", "store": False, "metadata": {}, "top_p": None}
    assert client.post(CHAT, json=body).status_code == 200


def test_a_prompt_that_leaves_no_room_is_refused(client):
    long = {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert "the context holds 4000" in error(client.post(CHAT, json=long), 400)
    assert "the context holds 4000" in error(client.post(CHAT, json=long | {"stream": True}), 400)


def test_only_models_that_are_served_can_be_named(client):
    for name in ("gpt-4o", "../../etc/passwd", "/etc/passwd", "tiny/..", ""):
        got = client.post(CHAT, json=HELLO | {"model": name})
        assert error(got, 404, "model") and got.json()["error"]["code"] == "model_not_found"
    assert error(client.post(CHAT, json=HELLO | {"model": 5}), 400, "model")
    assert client.post(CHAT, json=HELLO | {"model": "tiny"}).status_code == 200


# --- completions -----------------------------------------------------------------------------


def test_completions_of_texts_and_of_ids(client):
    ids = TOKENIZER.encode("the fox")
    for prompt in ("the fox", ids):
        (choice,) = client.post(
            COMPLETE, json={"prompt": prompt, "temperature": 0, "max_tokens": 99}
        ).json()["choices"]
        assert choice["text"] == "You said: the fox" and choice["finish_reason"] == "stop"
    body = {"prompt": ["a", "b"], "n": 2, "temperature": 0, "echo": True, "max_tokens": 99}
    answer = client.post(COMPLETE, json=body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["aYou said: a", "aYou said: a", "bYou said: b", "bYou said: b"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2  # each prompt once


def test_a_completion_has_sixteen_tokens_if_nothing_is_said(client):
    answer = client.post(COMPLETE, json={"prompt": "x" * 99, "temperature": 0}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stream_of_completions(client):
    body = {
        "prompt": "ab",
        "stream": True,
        "temperature": 0,
        "max_tokens": 99,
        "logprobs": 1,
        "echo": False,
    }
    chunks = events(client.post(COMPLETE, json=body).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    assert text == "You said: ab" and choices[-1]["finish_reason"] == "stop"
    tokens = [t for c in choices for t in c["logprobs"]["tokens"]]
    offsets = [o for c in choices for o in c["logprobs"]["text_offset"]]
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]
    echoed = events(client.post(COMPLETE, json=body | {"logprobs": None, "echo": True}).text)
    assert "".join(c["choices"][0]["text"] for c in echoed) == "abYou said: ab"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "echo"),
    ],
)  # fmt: skip
def test_completions_that_cannot_be(client, change, param):
    assert error(client.post(COMPLETE, json={"prompt": "a"} | change), 400, param)


def test_ids_outside_the_vocabulary_are_refused(client):
    message = error(client.post(COMPLETE, json={"prompt": [10**9]}), 400)
    assert "outside the model's vocabulary" in message


# --- embeddings ------------------------------------------------------------------------------


def test_embeddings_as_numbers_and_as_base64(client):
    body = {"input": ["a", "the fox jumps"]}
    plain = client.post(EMBED, json=body).json()
    assert plain["data"][0] == {"object": "embedding", "index": 0, "embedding": [1, 3, 4]}
    assert plain["usage"]["prompt_tokens"] > 2
    packed = client.post(EMBED, json=body | {"encoding_format": "base64"}).json()
    raw = base64.b64decode(packed["data"][1]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), plain["data"][1]["embedding"])
    cut = client.post(EMBED, json={"input": "a", "dimensions": 2}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(cut, np.float32([1, 3]) / np.sqrt(10), rtol=1e-6)  # float32
    assert error(client.post(EMBED, json={"input": "a", "dimensions": 9}), 400, "dimensions")
    assert error(client.post(EMBED, json={"input": []}), 400, "input")
