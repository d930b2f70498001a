"""Errors that agents' libraries and health checks must be able to tell apart."""

from __future__ import annotations

import gzip

import httpx
import pytest

HELLO = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "x" * 3000}]
HUGE = [{"role": "user", "content": "x" * 10**6}]
MANY = HELLO * 2049
CUT = "x" * 100 + " ..."


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/chat/completions", {"messages": LONG}, "messages", "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x" * 3000}, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x" * 10**6}, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": [1] * 2048}, "prompt", "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": HUGE}, "messages", "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": MANY}, "messages", "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": [{"role": "system"}]}, "messages.0.content", None),
        ("/v1/completions", {"prompt": ""}, "prompt", None),
        ("/v1/chat/completions", {"x" * 10**6: 1}, CUT, None),
        ("/v1/chat/completions", {"": 1}, "", None),
        ("/v1/completions", {"prompt": "a", "n": 10**2000}, "n", None),
        ("/v1/completions", {"prompt": "a", "model": "gpt-5"}, None, "model_not_found"),
        ("/v1/completions", {"prompt": "a", "model": "x" * 10**6}, None, "model_not_found"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_agents_can_tell_what_is_wrong(live, path, body, param, code):
    reply = httpx.post(live.url + path, json={"messages": HELLO} | body if "chat" in path else body)
    assert reply.status_code in (400, 404), reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert len(error["message"]) < 500  # what a client sent is not sent back


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"top_p": 1.5}, "top_p 1.5 is out of range"),
        ({"max_tokens": 0}, "max_tokens 0 is out of range"),
        ({"max_completion_tokens": 0}, "max_completion_tokens: Input should be greater than"),
        ({"messages": [1]}, "messages.0: Input should be an object"),
        ([1], "Input should be an object"),
    ],
    ids=str,
)
def test_messages_name_what_the_request_names(live, body, message):
    """The command line spells parameters otherwise, and classes are no one's business."""
    body = {"messages": HELLO} | body if isinstance(body, dict) else body
    reply = httpx.post(f"{live.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(message), reply.text


def test_a_body_that_is_not_said_to_be_json(live):
    url = live.url + "/v1/chat/completions"
    plain = httpx.post(url, content=b'{"messages": []}', headers={"content-type": "text/plain"})
    for reply, part in ((plain, "Content-Type: application/json"), (httpx.post(url), "is empty")):
        assert reply.status_code == 400 and part in reply.json()["error"]["message"]


def test_the_type_of_a_body_is_read_without_regard_to_case(live):
    headers = {"content-type": "Application/JSON"}
    reply = httpx.post(f"{live.url}/tokenize", content=b'{"prompt": "a"}', headers=headers)
    assert reply.status_code == 200, reply.text


def test_a_body_that_is_compressed(live):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(b'{"prompt": "a"}')
    reply = httpx.post(f"{live.url}/tokenize", content=body, headers=headers)
    assert reply.status_code == 415 and "'gzip'" in reply.json()["error"]["message"]
    for coding in ("identity", "Identity", ""):
        headers["content-encoding"] = coding
        reply = httpx.post(f"{live.url}/tokenize", content=b'{"prompt": "a"}', headers=headers)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/models/{}"])
def test_health_checks_may_ask_for_headers_alone(live, path):
    reply = httpx.head(live.url + path.format(live.server.name))
    assert reply.status_code == 200 and not reply.content
