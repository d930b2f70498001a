"""A server of a tiny model in a thread of this process, for clients over loopback."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi", reason="needs the extra [serve]")

from tokenizers.pre_tokenizers import ByteLevel

import fasteagle
from fasteagle.answering import several
from fasteagle.answering.answer import Chunk
from fasteagle.llm import LLM
from fasteagle.options import AnswerOptions, Defaults, SamplingParams, ServeOptions
from fasteagle.server import run as running
from fasteagle.server.app import Server
from helpers import save_tiny

# A letter's token id: biased by 100 it is always drawn, and n-grams guess it.
LETTER = "q"
LETTER_ID = sorted(ByteLevel.alphabet()).index(LETTER)

# Qwen3's own template, and one with the structure of Llama 3.1's: tools in the first question, one
# call in a message at most, results as JSON.
QWEN = (Path(__file__).parent.parent / "assets" / "templates" / "qwen3.jinja").read_text()
LLAMA = """\
{%- macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set system = "" %}
{%- if messages[0].role == "system" %}
    {%- set system, messages = messages[0].content | trim, messages[1:] %}
{%- endif %}
{{- bos_token }}{{ head("system") }}{{ system }}<|eot_id|>
{%- if not tools is none %}
    {{- head("user") + "Answer with JSON for a function call in the form " }}
    {{- '{"name": function name, "parameters": dictionary of arguments}.\n\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ "\n\n" }}{% endfor %}
    {{- messages[0].content | trim }}<|eot_id|>
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if "tool_calls" in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("only one call in a message") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head("assistant") + '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}}<|eot_id|>
    {%- elif message.role == "tool" %}
        {{- head("ipython") }}{{ message.content | tojson }}<|eot_id|>
    {%- else %}
        {{- head(message.role) }}{{ message.content | trim }}<|eot_id|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head("assistant") }}{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

LONG = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1900, "stream": True}
LONG["logit_bias"] = {str(LETTER_ID): 100}  # no answer ends by itself
SHORT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def number(live, pattern):
    """A number of the metrics, whose name and labels have a pattern; 0 if it is not there."""
    found = re.search(rf"^{pattern} (\S+)$", httpx.get(f"{live.url}/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def failures(live, reason):
    """How many requests without a whole answer the metrics tell of."""
    return number(live, f'vllm:request_failed_total{{.*reason="{reason}"}}')


def n_generated(live):
    """Tokens of all answers that have ended."""
    return number(live, "vllm:generation_tokens_total{.*}")


def deaf(port, **body):
    """A connection that has asked for an endless stream and reads only its beginning."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", port))
    raw = json.dumps({**LONG, "logprobs": True, "top_logprobs": 20, **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    found.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    assert found.recv(100).startswith(b"HTTP/1.1 200")
    return found


@contextlib.contextmanager
def busy(live, n=None, **body):
    """Long streams that have begun, in all slots or `n` of them: their replies and lines."""
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(n or live.llm.answers.size):
            request = httpx.stream("POST", live.url + CHAT, json={**LONG, **body}, timeout=60)
            reply = stack.enter_context(request)
            lines = reply.iter_lines()
            next(lines)
            streams.append((reply, lines))
        yield streams


def ask(page, text="hello"):
    page.get_by_label("Question").fill(text)
    page.keyboard.press("Enter")


def done(page):
    page.locator("#send").wait_for(state="visible")
    page.locator("#log .turn.assistant").last.locator(".retry").wait_for()


class Live:
    """A server that runs, and where it is."""

    def __init__(self, server: Server, port: int, running: running.GracefulServer) -> None:
        self.server, self.port, self.running = server, port, running
        self.url = f"http://127.0.0.1:{port}"
        self.llm = server.llm


@contextlib.contextmanager
def serving(llm, options=None, defaults=None, api_key=None):
    options = options or ServeOptions(port=0)
    server = Server(llm, options, defaults or Defaults(answer=AnswerOptions(16)), api_key)
    found = running.listen(options)
    made = []
    original = running.GracefulServer.__init__

    def kept(self, *args):
        original(self, *args)
        made.append(self)

    running.GracefulServer.__init__ = kept
    thread = threading.Thread(target=running.run, args=(server, found, print), daemon=True)
    try:
        thread.start()
        while not made or not made[0].started:
            time.sleep(0.01)
    finally:
        running.GracefulServer.__init__ = original
    try:
        yield Live(server, found.getsockname()[1], made[0])
    finally:
        made[0].should_exit = made[0].force_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def serve_dir(tmp_path_factory):
    """A tiny model whose tokenizer goes through every character."""
    return save_tiny(tmp_path_factory.mktemp("serve") / "tiny-model", max_position_embeddings=2048)


def load(folder, parallel):
    llm = fasteagle.load(str(folder), precision="fp32", drafter="ngram", max_seq_len=2048)
    return LLM(llm.name, llm.engine, llm.tokenizer, prefix_cache_gb=0.25, parallel=parallel)


@pytest.fixture(scope="session")
def loaded(serve_dir):
    return load(serve_dir, parallel=4)


@pytest.fixture(scope="session")
def live(loaded):
    with serving(loaded) as found:
        yield found


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
                    allowed = request.mask.rows([0], [0], [True], vocab_size)[0]
                    token = token if allowed[token] else int(allowed.nonzero()[0])
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
def slow(live, monkeypatch):
    slow_down(live, monkeypatch)


def slow_down(live, monkeypatch):
    """Let every pass take a while: an answer of 1,900 tokens lasts as long as a test needs."""
    original = live.llm.answers.step

    def step(*args):
        time.sleep(0.01)
        return original(*args)

    monkeypatch.setattr(live.llm.answers, "step", step)


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
    with serving(load(serve_dir, parallel=1), defaults=defaults) as found:
        yield found


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
