"""The command `fasteagle serve`, up to where it would serve."""

from __future__ import annotations

import contextlib
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
from starlette.testclient import TestClient

from fasteagle import llm
from fasteagle.cli import serve
from fasteagle.loading import open as opening
from fasteagle.options import GrammarSpec
from fasteagle.server.protocol import ChatRequest
from helpers import THINKING_TEMPLATE, invoke, raising
from hub_cache import REPO, forbid, put_in_cache


@pytest.fixture
def started(monkeypatch):
    """Run the command; the list has the servers that it made."""
    servers = []
    monkeypatch.setattr(serve, "leave", lambda: None)

    def run(server, listener, say, ready):
        servers.append(server)
        ready()

    monkeypatch.setattr(serve, "run", run)

    def start(model, *options):
        common = ["--precision", "fp32", "--drafter", "none", "--port", "0", "--no-compile"]
        return invoke("serve", "--model", model, *common, *options)

    return start, servers


@pytest.mark.parametrize("seed", [(), ("--seed", "0"), ("--seed", "7")])
def test_the_seed_of_the_command_line(serve_dir, started, seed):
    start, servers = started
    done = start(serve_dir, "--temperature", "1", *seed)
    assert done.exit_code == 0, done.output
    planner = servers[0].planner
    body = {"messages": [{"role": "user", "content": "hello"}]}
    plans = [planner.chat(ChatRequest(**body)) for _ in range(3)]
    seeds = {plan.answers[0].params.seed for plan in plans}
    assert seeds == {int(seed[1])} if seed else len(seeds) == 3
    assert planner.chat(ChatRequest(**body, seed=5)).answers[0].params.seed == 5


def test_how_the_command_line_says_to_answer(serve_dir, tmp_path, started):
    start, servers = started
    folder = shutil.copytree(serve_dir, tmp_path / "thinking")
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    words = ["--no-think", "--system", "Be brief.", "--regex", "a+", "--api-key", "k"]
    done = start(folder, *words)
    assert done.exit_code == 0, done.output
    (server,) = servers
    assert server.name == "thinking", "clients learn no folder"
    defaults = server.planner._defaults
    assert (defaults.think, defaults.system) == (False, "Be brief.")
    assert defaults.form == GrammarSpec("regex", "a+")
    client = TestClient(server.app, headers={"host": "localhost"})
    assert client.get("/v1/models").status_code == 401
    server.queue.stop()
    assert start(folder, "--regex", "(").exit_code == 2 and len(servers) == 1


@pytest.mark.parametrize(("limit", "n_new"), [((), 100 - 13), (("--max-new-tokens", "9"), 9)])
def test_how_long_an_answer_without_a_limit_is(serve_dir, started, limit, n_new):
    """As long as the context has room: agents send none, and write long files."""
    start, servers = started
    done = start(serve_dir, "--max-seq-len", "100", *limit)
    assert done.exit_code == 0, done.output
    client = TestClient(servers[0].app, headers={"host": "localhost"})
    body = {"prompt": list(range(5, 18)), "ignore_eos": True}
    reply = client.post("/v1/completions", json=body).json()
    servers[0].queue.stop()
    assert reply["usage"]["completion_tokens"] == n_new
    assert reply["choices"][0]["finish_reason"] == "length"


def test_it_waits_for_the_compiler_if_it_is_told_to(serve_dir, started, monkeypatch):
    preparations = []

    def prepare(*args, **settings):
        preparations.append(mock.Mock())
        return preparations[-1]

    monkeypatch.setattr(llm.LLM, "prepare", prepare)
    for option, waits in (("--no-compile", []), ("--compile", [True])):
        assert started[0](serve_dir, option).exit_code == 0
        assert [made.wait_for_compiler.called for made in preparations] == waits


@pytest.mark.parametrize(("number", "n"), [((), 4), (("8",), 8), (("0",), 0), (("9",), 0)])
def test_how_many_at_once(serve_dir, started, number, n):
    start, servers = started
    done = start(serve_dir, *(("--parallel", *number) if number else ()))
    if n:
        assert servers[0].llm.answers.size == n
    else:
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        assert f"parallel {number[0]} is out of range: use >= 1 and <= 8" in done.stderr


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("box.lan", "box.lan")]
)
def test_the_address_can_be_opened_in_a_browser(serve_dir, started, monkeypatch, host, shown):
    listener = SimpleNamespace(getsockname=lambda: (host, 8123, 0, 0))
    monkeypatch.setattr(serve, "listen", lambda options: contextlib.nullcontext(listener))
    done = started[0](serve_dir)
    assert done.exit_code == 0, done.output
    assert f" on http://{shown}:8123 (the page), /v1 (the API)\n" in done.stderr


@pytest.mark.parametrize("is_default", [True, False])
def test_it_says_that_the_default_model_is_small(serve_dir, started, monkeypatch, is_default):
    monkeypatch.setattr(llm, "DEFAULT_MODEL", str(serve_dir) if is_default else "other")
    done = started[0](serve_dir)
    assert done.exit_code == 0, done.output
    assert ("is a small model for trying out, and often wrong" in done.stderr) is is_default


def test_a_port_in_use_is_one_line_before_the_model_is_loaded(
    live, serve_dir, started, monkeypatch
):
    monkeypatch.setattr(opening, "load_model", raising(AssertionError("loaded")))
    done = started[0](serve_dir, "--port", live.port)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert f"port {live.port} of 127.0.0.1 is in use" in done.stderr


@pytest.mark.parametrize("is_cached", [True, False])
def test_without_a_network(hub_cache, serve_dir, started, monkeypatch, is_cached):
    """What was downloaded is served; else one line says what may be given instead."""
    forbid(monkeypatch, ConnectionError("no route to host"))
    if is_cached:
        put_in_cache(hub_cache, serve_dir)
    done = started[0](REPO)
    if is_cached:
        assert done.exit_code == 0 and f"serving {REPO} on" in done.stderr
    else:
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        assert f"cannot fetch {REPO} (no route to host): check the network, or give" in done.stderr
