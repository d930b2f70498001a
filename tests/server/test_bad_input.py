"""What a server meets: wrong requests, strangers, clients that leave or dawdle. It goes on."""

from __future__ import annotations

import socket
import time

import httpx
import pydantic
import pytest
from live_server import CHAT, serving

from fasteagle.errors import FasteagleError
from fasteagle.options import ServeOptions
from fasteagle.server import bodies, guard, run
from fasteagle.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

HELLO = [{"role": "user", "content": "hello"}]
JSON = "application/json"
DEEP = "[" * 100_000

# Ends a process that compiles it: every rule is one level of recursion.
DEEP_RULES = (
    "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'
)


def call_with(arguments):
    """A message with a tool call."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def post(live, path="/v1/chat/completions", **body):
    body = {"messages": HELLO, "max_tokens": 4, **body} if "chat" in path else body
    return httpx.post(live.url + path, json=body)


def assert_refused(reply, status, *parts, param=None) -> None:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    for part in parts:
        assert part in error["message"], error
    assert "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.fixture(scope="module", autouse=True)
def goes_on(live):
    """Check that the server still answers after these tests."""
    yield
    assert post(live).status_code == 200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-40}, "temperature"),
        ({"temperature": -1, "top_p": 0}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"min_p": 1}, "min_p"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"temprature": 1}, "temprature"),
        ({"ünknown\n\x00": 1}, "ünknown"),
        ({"user": 3}, "user"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", "b" * 1001]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "((a{0,200}){0,200}){0,200}" * 99}, None),
        ({"guided_regex": "a" * 2**18 + "a"}, "guided_regex"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"guided_json": {"$ref": "#/$defs/none"}}, "guided_json"),
        ({"guided_json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "guided_json"),
        ({"guided_grammar": "start: start"}, "guided_grammar"),
        ({"guided_grammar": "start: a\na: b"}, "guided_grammar"),
        ({"guided_grammar": DEEP_RULES}, "guided_grammar"),
        ({"guided_grammar": "start: " + "(" * 10_000}, "guided_grammar"),
        ({"guided_grammar": 'start: "x"~1000000'}, "guided_grammar"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": DEEP}, "guided_json"),
        ({"messages": [{**HELLO[0], "tool_call_id": "a"}]}, "messages.0.tool_call_id"),
        ({"messages": [call_with("{}")]}, "messages.0.tool_calls"),
        ({"messages": [call_with(r'{"city": "\ud83d"}')]}, "messages.0.tool_calls"),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]},
            "messages.0.reasoning_content",
        ),
        ({"show_accepted": True}, "show_accepted"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
        ({"functions": []}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_honoured_is_named(live, changes, param):
    reply = post(live, **changes)
    assert_refused(reply, 400)
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert param is None or error["param"].startswith(param), error
    assert error["code"] is None


PICTURE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
CACHED = [{"type": "text", "text": "a", "cached": {"type": "ephemeral"}}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PICTURE, "messages.0.content.1.type: 'image_url' is not supported: use 'text'"),
        (CACHED, "unknown parameter 'messages.0.content.0.cached'"),
        (3, "messages.0.content: Input should be a valid string"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_of_several_kinds_the_nearest_is_told(live, content, message):
    """Where a value may be a text or a list, what is wrong with the list is not that it is one."""
    assert_refused(post(live, messages=[{"role": "user", "content": content}]), 400, message)


@pytest.mark.parametrize(
    ("changes", "status", "part"),
    [
        ({"prompt": []}, 400, "prompt is empty"),
        ({"prompt": ["a"] * 65}, 400, "prompt: 65 prompts: use at most 64 in a request"),
        ({"prompt": ["a", "x" * 3000]}, 400, "prompt.1: the prompt is too long"),
        ({"prompt": [[1], []]}, 400, "prompt.1: the prompt is empty"),
        ({"prompt": [1, -5]}, 400, "token id -5"),
        ({"prompt": [1, 2.5]}, 400, "prompt.1: Input should be a valid integer"),
        ({"prompt": "x" * 3000}, 400, "3,000 tokens, max-seq-len 2,048 leaves room for 2,047"),
        ({"prompt": "a", "echo": True}, 400, "echo: True is not supported: use False"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ({"prompt": "a", "model": "gpt-5"}, 404, "'gpt-5' is not served here"),
        ({}, 400, "prompt"),
    ],
    ids=str,
)
def test_completions_that_are_refused(live, changes, status, part):
    assert_refused(post(live, "/v1/completions", **changes), status, part)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [1] * 500}),
        (ChatRequest, {"messages": HELLO, **{f"unknown{i}": 1 for i in range(500)}}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 500}]}),
        (ChatRequest, {"messages": HELLO, "logit_bias": {str(i): "x" for i in range(500)}}),
        (ChatRequest, {"messages": HELLO, "tools": [{}] * 500}),
        (ChatRequest, {"messages": HELLO, "stop": [1] * 500}),
        (CompletionRequest, {"prompt": [None] * 500}),
        (CompletionRequest, {"prompt": [[None] * 500] * 500}),
        (TokenizeRequest, {"messages": [{str(i): 1 for i in range(500)}] * 500}),
        (DetokenizeRequest, {"tokens": ["x"] * 500}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_of_many_mistakes_few_are_looked_for(kind, body):
    """A body can hold millions: to list them would stop the event loop for seconds."""
    with pytest.raises(pydantic.ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 5


def nested(depth, begin):
    return begin + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


GUIDED = b'{"messages": [{"role": "user", "content": "hello"}], "guided_json": '
BODIES = [
    *((raw, JSON) for raw in (b"", b"{", b'{"messages": [}', b"\xff\xfe{}", b"[]", b"null", b"3")),
    # Deeper than Python recurses: in its JSON reader, or only where the body is looked at.
    *((nested(n, begin), JSON) for n in (150, 960, 10**5) for begin in (b'{"messages": ', GUIDED)),
    *((b'{"messages": []}', kind) for kind in ("text/plain", "application/octet-stream")),
    (b"messages=x", "application/x-www-form-urlencoded"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 2}', JSON),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', JSON),
    (b'{"messages": [{"role": "user", "content": "x"}], "seed": 1%s}' % (b"0" * 5000), JSON),
]


@pytest.mark.parametrize(("raw", "kind"), BODIES, ids=lambda value: repr(value[:20]))
def test_bodies_that_are_refused(live, raw, kind):
    """No JSON, nested too deeply, of another kind, half a character, a number JSON has not."""
    reply = httpx.post(live.url + CHAT, content=raw, headers={"content-type": kind})
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_a_template_without_system_role(live, monkeypatch):
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    )
    monkeypatch.setattr(live.llm.tokenizer, "_template", refusing)
    reply = post(live, messages=[{"role": "system", "content": "a"}, *HELLO])
    assert_refused(reply, 400, "chat template refused: no system")


def test_paths_and_methods_that_are_not_there(live):
    reply = httpx.post(f"{live.url}/v1/responses", json={"input": "hello"})
    assert_refused(reply, 404, "/v1/responses is not served here, ", "/v1/chat/completions is: see")
    long = httpx.get(f"{live.url}/{'a' * 60_000}")
    assert_refused(long, 404, f"/{'a' * 99} ... is not served here")
    assert_refused(httpx.get(f"{live.url}/v1/chat/completions"), 405, "GET is not: use POST")
    assert_refused(httpx.post(f"{live.url}/detokenize", json={"tokens": [10**20]}), 400, "0 .. 259")
    assert_refused(httpx.post(f"{live.url}/tokenize", json={}), 400, "prompt")


HOSTS = ("evil.example", "evil.example:8000", "192.168.0.7", "localhost.evil.example", "")
ORIGINS = ("https://evil.example", "null", "http://127.0.0.1:1", "http://[", "http://[x]")
LOCAL = ("http://xlocalhost", "http://localhost.evil.example")
STRANGERS = [{"host": host} for host in HOSTS] + [{"origin": origin} for origin in ORIGINS]
STRANGERS += [{"host": "localhost", "origin": origin} for origin in LOCAL]


@pytest.mark.parametrize("headers", STRANGERS, ids=str)
def test_strangers_are_refused(live, headers):
    for path in ("/v1/models", "/"):
        reply = httpx.get(live.url + path, headers=headers)
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers


def test_our_own_page_and_names_are_let_in(live):
    for host in (f"localhost:{live.port}", f"127.0.0.1:{live.port}", f"[::1]:{live.port}"):
        headers = {"host": host, "origin": f"http://{host}"}
        assert httpx.get(f"{live.url}/v1/models", headers=headers).status_code == 200


def test_a_body_that_is_too_large(live):
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", live.port)) as plain:
        plain.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 104857600\r\n\r\n{"
        )
        assert b"413" in plain.recv(4096)  # told before it is sent
    assert time.perf_counter() - started < 5


def test_slow_clients_are_closed(live, monkeypatch):
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as head:
        head.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHo")
        for _ in range(2):
            time.sleep(0.1)
            head.sendall(b"s")
        assert head.recv(100) == b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as idle:
        assert idle.recv(100) == b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as body:
        body.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
        )
        assert b"408" in body.recv(4096)


def test_what_is_no_http(live):
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as plain:
        plain.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert b"400" in plain.recv(4096)


def test_the_api_key(loaded):
    with serving(loaded, api_key="s3cret") as keyed:
        url = f"{keyed.url}/v1/models"
        for header in (
            None,
            "Bearer wrong",
            "Bearer s3cre",
            "s3cret",
            "Bearer s3cretx",
            "Basic s3cret",
        ):
            reply = httpx.get(url, headers={"authorization": header} if header else {})
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer"):  # RFC 9110: its case says nothing
            headers = {"authorization": f"{scheme} s3cret"}
            assert httpx.get(url, headers=headers).status_code == 200
        assert httpx.get(f"{keyed.url}/metrics").status_code == 401
        assert httpx.get(f"{keyed.url}/health").status_code == 200
        assert httpx.get(keyed.url).status_code == 200


def test_names_are_compared_without_regard_to_case(loaded):
    """Browsers write them in small letters, and leave out the usual port."""
    origins = ("https://App.Example:443", "http://b.example:80")
    options = ServeOptions(port=0, allow_origin=origins, allow_host=("Box.LAN", "lan.example."))
    with serving(loaded, options) as named:
        for host in ("box.lan", "BOX.lan:1", "lan.example", "Localhost."):
            assert httpx.get(f"{named.url}/v1/models", headers={"host": host}).is_success
        for origin in ("https://app.example", "http://b.example"):
            reply = httpx.get(f"{named.url}/v1/models", headers={"origin": origin})
            assert reply.is_success and reply.headers["access-control-allow-origin"] == origin
    assert guard.is_loopback("LocalHost")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 300])
def test_hosts_that_do_not_exist(host):
    with pytest.raises(FasteagleError, match=f"--host {host[:100]}"):
        run.listen(ServeOptions(host=host))


def test_other_machines_need_a_key():
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
        with pytest.raises(FasteagleError, match="open to other machines: add --api-key"):
            run.check_exposed(ServeOptions(host=host), None)
        run.check_exposed(ServeOptions(host=host), "key")
        run.check_exposed(ServeOptions(host=host, allow_anyone=True), None)
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        run.check_exposed(ServeOptions(host=host), None)
    with pytest.raises(FasteagleError, match="API key is empty"):
        run.check_exposed(ServeOptions(), "")
    for key in ("key\n", " key", "k\udcffy"):  # of a file, of bytes that are no UTF-8
        with pytest.raises(FasteagleError, match="no client can send it"):
            run.check_exposed(ServeOptions(), key)


def test_null_is_the_default(live):
    """Clients that write every field send null in those that they do not use."""
    names = ("stream", "speculate", "show_accepted", "n", "max_tokens", "tools", "stream_options")
    body = {"messages": HELLO, **dict.fromkeys(names), "max_completion_tokens": 2}
    assert post(live, **body).status_code == 200
    assert_refused(post(live, **body | {"messages": None}), 400, "messages", param="messages")
