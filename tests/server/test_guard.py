"""Names under which a server may be called, and sizes of bodies, with no model behind them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from fasteagle.options import ServeOptions
from fasteagle.server import app
from fasteagle.server.bodies import whole_body
from fasteagle.server.guard import Guard
from fasteagle.server.job import CancelledError


def ask(options, host, **headers):
    client = TestClient(Guard(PlainTextResponse("in"), options, None))
    return client.post("/", content=b"x" * 2**10, headers={"host": host, **headers}).status_code


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_pages_of_the_server_itself_are_let_in_behind_a_proxy_too(scheme):
    options = ServeOptions(allow_host=("box.lan",))
    assert ask(options, "box.lan", origin=f"{scheme}://box.lan") == 200
    assert ask(options, "box.lan", origin=f"{scheme}://box.lan.example") == 403


@pytest.mark.parametrize(
    ("listens_on", "statuses"),
    [("127.0.0.1", (200, 403, 403)), ("0.0.0.0", (200, 200, 403)), ("box.lan", (200, 200, 200))],
)
def test_by_which_names_a_server_may_be_called(listens_on, statuses):
    """Where other machines may call it, by any address: which of them is its own it cannot know."""
    options = ServeOptions(host=listens_on)
    assert tuple(ask(options, host) for host in ("[::1]:80", "10.0.0.7", "Box.lan")) == statuses


def test_two_names_of_a_server_are_none():
    """Which one counts, a proxy and the server may judge differently."""
    client = TestClient(Guard(PlainTextResponse("in"), ServeOptions(), None))
    for others, status in (([], 200), ([("host", "example.org")], 403)):
        assert client.get("/", headers=[("host", "localhost"), *others]).status_code == status


def test_a_key_may_have_blanks_and_every_method_needs_it():
    client = TestClient(
        Guard(PlainTextResponse("in"), ServeOptions(host="testserver"), "two words")
    )
    for method in ("GET", "OPTIONS"):
        for key, status in (("two words", 200), ("words", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert client.request(method, "/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("parts", [[b"x" * 2**10], [b"x"] * 2**10])
def test_a_body_may_be_as_large_as_the_limit(parts):
    async def read(most):
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages[-1]["more_body"] = False

        async def receive():
            return messages.pop(0)

        return await whole_body(Request({"type": "http", "headers": []}, receive), most)

    assert asyncio.run(read(2**10)) == b"x" * 2**10
    with pytest.raises(HTTPException, match=r"larger than 1,023 bytes") as error:
        asyncio.run(read(2**10 - 1))
    assert error.value.status_code == 413


def test_a_prompt_of_ids_may_fill_a_long_context(monkeypatch):
    """Its request has other values too."""
    limits = []
    monkeypatch.setattr(app, "body_route", lambda *most: limits.append(most) or APIRoute)
    for max_seq_len in (2048, 2**18):
        llm = SimpleNamespace(engine=SimpleNamespace(max_seq_len=max_seq_len))
        server = SimpleNamespace(llm=llm, options=ServeOptions(max_body=1), metrics=None)
        app.make_app(server, None)
    assert limits == [(2**20, 2**18), (2**20, 2**19)]


def test_a_client_that_leaves_within_its_body():
    async def receive():
        return {"type": "http.disconnect"}

    with pytest.raises(CancelledError):
        asyncio.run(whole_body(Request({"type": "http", "headers": []}, receive), 2**10))
