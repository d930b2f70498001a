"""Headers that SDKs, browsers, proxies and Prometheus go by."""

from __future__ import annotations

import httpx
import pytest
from live_server import CHAT, SHORT, serving

from fasteagle.options import ServeOptions
from fasteagle.server.prepare import Planner
from helpers import raising

APP = {"origin": "https://app.example"}


@pytest.fixture(scope="module")
def shared(loaded):
    """A server that pages of one origin may use, under a name of its own."""
    options = ServeOptions(port=0, allow_origin=(APP["origin"],), allow_host=("box.lan",))
    with serving(loaded, options) as served:
        yield served


def test_prometheus_knows_the_format_of_the_numbers(live):
    """It refuses another kind of content."""
    kind = httpx.get(f"{live.url}/metrics").headers["content-type"]
    assert kind.startswith("text/plain; version=0.0.4")


def test_a_stream_is_one_of_events(live):
    """Its last event ends with an empty line too: browsers drop one that does not."""
    reply = httpx.post(live.url + CHAT, json={**SHORT, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("}\n\ndata: [DONE]\n\n")


def test_the_page_is_what_it_says_and_in_no_frame(live):
    headers = httpx.get(live.url).headers
    assert headers["content-type"].startswith("text/html")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-cache"
    policy = headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy and "default-src 'none'" in policy


def test_refusals_tell_what_would_be_let_in(live, loaded):
    assert httpx.get(live.url + CHAT).headers["allow"] == "POST"
    with serving(loaded, api_key="s3cret") as keyed:
        reply = httpx.get(f"{keyed.url}/v1/models")
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")


def test_pages_may_ask_with_a_key_and_read_what_they_need(shared):
    """Those of other origins, or under other names of the server, may not."""
    wanted = {"access-control-request-headers": "authorization,x-stainless-os,x-stainless-lang"}
    for method, path in (("GET", "/v1/models"), ("POST", CHAT)):
        headers = {**APP, **wanted, "access-control-request-method": method}
        assert httpx.options(shared.url + path, headers=headers).status_code == 200
    url = f"{shared.url}/v1/models"
    reply = httpx.get(url, headers={**APP, "host": "box.lan:1"})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == APP["origin"]
    exposed = reply.headers["access-control-expose-headers"].split(", ")
    assert {"retry-after", "x-request-id"} <= set(exposed)
    reply = httpx.get(url, headers={**APP, "host": "evil.example"})
    assert reply.status_code == 403
    assert reply.headers["access-control-allow-origin"] == APP["origin"]
    assert httpx.get(url, headers={"origin": "https://b.example"}).status_code == 403


@pytest.mark.parametrize(
    ("name", "is_same"), [("a" * 64, True), ("a" * 65, False), ("a b", False), ("", False)]
)
def test_a_request_has_the_name_that_its_client_gives_if_a_log_can_hold_it(live, name, is_same):
    reply = httpx.get(f"{live.url}/health", headers={"x-request-id": name})
    assert (reply.headers["x-request-id"] == name) is is_same


def test_a_mistake_has_the_name_under_which_the_log_tells_of_it(shared, monkeypatch, capfd):
    """And a page that may use the server may read it."""

    monkeypatch.setattr(Planner, "chat", raising(RuntimeError("planted")))
    reply = httpx.post(shared.url + CHAT, json=SHORT, headers={**APP, "x-request-id": "mine-2"})
    assert reply.status_code == 500 and "its log says more" in reply.json()["error"]["message"]
    assert reply.headers["x-request-id"] == "mine-2"
    assert reply.headers["access-control-allow-origin"] == APP["origin"]
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "mine-2" in errors[0] and errors[0].endswith("planted")
