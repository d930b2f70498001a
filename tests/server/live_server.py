"""A server of a tiny model in a thread of this process: what its tests share."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import threading
import time
from pathlib import Path

import httpx
from tokenizers.pre_tokenizers import ByteLevel

import fasteagle
from fasteagle.llm import LLM
from fasteagle.options import AnswerOptions, Defaults, ServeOptions
from fasteagle.server import run as running
from fasteagle.server.app import Server

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


def closed(**properties):
    """JSON schema of an object with these properties and no others."""
    more = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **more}


WEATHER = {"description": "The weather of a city."}
WEATHER |= {"name": "weather", "parameters": closed(city={"enum": ["Rome", "Oslo"]})}
WEATHER = {"type": "function", "function": WEATHER}

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'

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
    match = re.search(rf"^{pattern} (\S+)$", httpx.get(f"{live.url}/metrics").text, re.M)
    return float(match[1]) if match else 0.0


def failures(live, reason):
    """Return the number of requests without a whole answer in the metrics."""
    return number(live, f'vllm:request_failed_total{{.*reason="{reason}"}}')


def n_generated(live):
    """Tokens of all answers that have ended."""
    return number(live, "vllm:generation_tokens_total{.*}")


def deaf(port, **body):
    """A connection that has asked for an endless stream and reads only its beginning."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    raw = json.dumps({**LONG, "logprobs": True, "top_logprobs": 20, **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    return client


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
    listener = running.listen(options)
    made, ready = [], threading.Event()
    original = running.GracefulServer.__init__

    def with_reference(self, *args):
        original(self, *args)
        made.append(self)

    running.GracefulServer.__init__ = with_reference
    work = functools.partial(running.run, server, listener, print, ready.set)
    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
        assert ready.wait(20)
    finally:
        running.GracefulServer.__init__ = original
    try:
        yield Live(server, listener.getsockname()[1], made[0])
    finally:
        made[0].should_exit = made[0].force_exit = True
        thread.join(20)
        assert not thread.is_alive()


def load(folder, parallel):
    llm = fasteagle.load(str(folder), precision="fp32", drafter="ngram", max_seq_len=2048)
    options = ServeOptions(prefix_cache=0.25, parallel=parallel)
    return LLM(llm.name, llm.engine, llm.tokenizer, options)


def slow_down(live, monkeypatch):
    """Let every pass take a while: an answer of 1,900 tokens lasts as long as a test needs."""
    original = live.llm.answers.step

    def step(*args):
        time.sleep(0.01)
        return original(*args)

    monkeypatch.setattr(live.llm.answers, "step", step)
