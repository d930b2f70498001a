"""A server of a tiny model in a thread of this process, for clients over loopback."""

from __future__ import annotations

import shutil
import time

import openai
import pytest

pytest.importorskip("fastapi", reason="needs the extra [serve]")

from live_server import SHORT, load, serving, slow_down

from fasteagle.answering import several
from fasteagle.answering.answer import Chunk
from fasteagle.options import AnswerOptions, Defaults, SamplingParams
from fasteagle.server.protocol import ChatRequest
from helpers import allowed, save_tiny


@pytest.fixture(scope="session")
def serve_dir(tmp_path_factory):
    """A tiny model whose tokenizer goes through every character."""
    return save_tiny(tmp_path_factory.mktemp("serve") / "tiny-model", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def loaded(request, serve_dir):
    """A model with four slots, or as many as a test says."""
    return load(serve_dir, parallel=getattr(request, "param", 4))


@pytest.fixture(scope="session")
def live(loaded):
    with serving(loaded) as served:
        yield served


@pytest.fixture(scope="session")
def client(live):
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def plant(live, monkeypatch):
    """Make the model want to write a text; where a grammar does not allow it, something else."""

    def set_text(text):
        tokenizer, vocab_size = live.llm.tokenizer, live.llm.engine.model.config.vocab_size
        end = min(tokenizer.eos_ids)

        def answer(engine, decoder, request, stats):
            wanted = [*tokenizer.encode(text), *[end] * request.answer.max_new_tokens]
            stats.prompt_tokens = len(request.prompt)
            while not stats.finish:
                token = wanted[stats.new_tokens]
                if request.mask is not None:
                    (may,) = allowed(request.mask, vocab_size)
                    token = token if may[token] else int(may.nonzero()[0])
                    request.mask.advance([token])
                stats.new_tokens += 1
                if token in tokenizer.eos_ids:
                    stats.finish = "eos"
                elif stats.new_tokens == request.answer.max_new_tokens:
                    stats.finish = "length"
                yield Chunk(tokenizer.decode([token]), (token,))
                yield Chunk("")  # it waits for a pass

        monkeypatch.setattr(several, "answer", answer)

    return set_text


@pytest.fixture
def plan(live, monkeypatch):
    """Plan a chat, under the server's defaults and with the model's template or others."""

    def make(defaults=None, template=None, **body):
        if defaults is not None:
            monkeypatch.setattr(live.server.planner, "_defaults", defaults)
        if template is not None:
            monkeypatch.setattr(live.llm.tokenizer, "_template", template)
        return live.server.planner.chat(ChatRequest(**{"messages": SHORT["messages"], **body}))

    return make


@pytest.fixture
def slow(live, monkeypatch):
    slow_down(live, monkeypatch)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def site(serve_dir):
    defaults = Defaults(SamplingParams(), AnswerOptions(40))
    with serving(load(serve_dir, parallel=1), defaults=defaults) as served:
        yield served


@pytest.fixture
def page(browser, site):
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    made = context.new_page()
    made.problems = []
    made.on("console", lambda m: m.type == "error" and made.problems.append(m.text))
    made.on("pageerror", lambda e: made.problems.append(str(e)))
    made.on(
        "request", lambda r: r.url.startswith((site.url, "data:")) or made.problems.append(r.url)
    )
    made.goto(site.url)
    yield made
    assert not made.problems
    context.close()


@pytest.fixture
def says(site, monkeypatch):
    """Lets the model say what a test wants, piece by piece, all but the first guessed."""

    def set_answer(text, size=7, wait=0.0):
        def answer(engine, decoder, request, stats):
            stats.__init__(prompt_tokens=3, finish="eos", ttft=0.01, decode_seconds=0.5)
            for i in range(0, len(text), size):
                time.sleep(wait)
                part, first = text[i : i + size], i == 0
                stats.new_tokens += 1 if first else 2
                if not first:
                    stats.passes += 1
                    stats.drafted += 3
                    stats.path_lengths.append(1)
                n = 0 if first else len(part) // 2
                yield Chunk(part, (1,) if first else (1, 2), int(not first), n)
                yield Chunk("")  # it waits for a pass

        monkeypatch.setattr(several, "answer", answer)

    return set_answer
