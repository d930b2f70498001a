"""A server that answers in the model's place, as a stub in a thread."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.training import served_model
from helpers import invoke, write_questions


class Stub(http.server.ThreadingHTTPServer):
    """Answers with `plan[i]` at request i: (status, body), "reset", "cut STATUS", or None."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.plan: list = []
        self.bodies: list[dict] = []
        self.finish_reason, self.delay = "stop", 0.0
        self.at_once: list[int] = [0]  # requests in work as each arrives and leaves

    def handle_error(self, request, client_address) -> None:
        """A connection that broke off is part of the plan."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Stub
    lock = threading.Lock()

    def do_POST(self) -> None:
        stub = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            planned = dict(enumerate(stub.plan)).get(len(stub.bodies))
            key = self.headers.get("Authorization")
            stub.bodies.append({"path": self.path, "key": key, **body})
            stub.at_once.append(stub.at_once[-1] + 1)
        time.sleep(stub.delay)
        with self.lock:
            stub.at_once.append(stub.at_once[-1] - 1)
        if planned == "reset":
            self.connection.close()
            return
        if isinstance(planned, str):  # it ends in the middle of its answer
            self.send_response(int(planned.removeprefix("cut ")))
            self.send_header("Content-Length", "99")
            self.end_headers()
            return
        message = {"role": "assistant", "content": f"answer to {body['messages'][-1]['content']}"}
        good = {"choices": [{"message": message, "finish_reason": stub.finish_reason}]}
        status, answer = planned or (200, json.dumps(good))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode("utf-8", "surrogateescape"))

    def log_message(self, *args) -> None:
        """Nothing."""


@pytest.fixture
def stub():
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(served_model, "FIRST_DELAY", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def ask(tiny_dir, tmp_path):
    prompts = write_questions(tmp_path / "p.jsonl", ["one", "and then?"], ["two"], ["three"])

    def run(url, *more, out="text.jsonl"):
        arguments = ("--model", tiny_dir, "--prompts", prompts, "--out", tmp_path / out)
        return invoke("generate-data", *arguments, "--base-url", url, *more)

    run.prompts = prompts
    return run


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "text.jsonl").read_text().splitlines()]


def test_a_server_answers(stub, ask, tiny_dir, tmp_path):
    more = ("--served-model", "org/name", "--temperature", "0,0.7", "--top-p", 0.9)
    done = ask(f"{stub.url}/v1/", *more, "--max-new-tokens", 40, "--api-key", "secret")
    assert done.exit_code == 0, done.output
    assert "loaded in" not in done.stderr and "3 conversations" in done.stderr
    tokenizer = load_tokenizer(tiny_dir)
    texts = [tokenizer.raw(line["ids"]) for line in lines(tmp_path)]
    first = "<|user|>one<|end|><|assistant|>answer to one<|end|>"
    assert texts == [
        first,
        f"{first}<|user|>and then?<|end|><|assistant|>answer to and then?<|end|>",
        "<|user|>two<|end|><|assistant|>answer to two<|end|>",
        "<|user|>three<|end|><|assistant|>answer to three<|end|>",
    ]
    answers = [tokenizer.raw(line["ids"][line["prompt_len"] :]) for line in lines(tmp_path)]
    assert answers[0] == "answer to one<|end|>"
    assert [line["T"] for line in lines(tmp_path)] == [0.0, 0.0, 0.7, 0.0]
    body = next(b for b in stub.bodies if b["messages"][-1]["content"] == "and then?")
    assert body["path"] == "/v1/chat/completions" and body["model"] == "org/name"
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.0, 0.9, 40)
    assert len({b["seed"] for b in stub.bodies}) == 4 and 0 <= body["seed"] < 2**31
    assert body["key"] == "Bearer secret"
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "secret" not in written


def test_a_key_goes_to_the_server_that_was_named(stub, ask, monkeypatch):
    elsewhere, get = [], lambda handler: elsewhere.append(handler.path)
    monkeypatch.setattr(stub.RequestHandlerClass, "do_GET", get, raising=False)

    def redirects(handler):
        handler.send_response(302)
        handler.send_header("Location", f"{stub.url}/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr(stub.RequestHandlerClass, "do_POST", redirects)
    done = ask(f"{stub.url}/v1", "--api-key", "secret")
    assert done.exit_code != 0 and "HTTP 302" in done.stderr and not elsewhere


def test_several_requests_at_once(stub, ask, tmp_path):
    stub.delay = 0.2
    assert ask(stub.url, "--batch", 3).exit_code == 0
    together = (tmp_path / "text.jsonl").read_bytes()
    assert max(stub.at_once) == 3
    assert ask(stub.url, "--batch", 1, out="alone.jsonl").exit_code == 0
    assert (tmp_path / "alone.jsonl").read_bytes() == together


@pytest.mark.parametrize(
    "problem", [(429, "busy"), (500, "oops"), (503, ""), "reset", "cut 200", "cut 503"]
)
def test_a_busy_server_is_asked_again(stub, ask, problem):
    stub.plan = [problem, problem]
    done = ask(stub.url, "--batch", 1)
    assert done.exit_code == 0, done.output
    assert "3 conversations" in done.stderr and len(stub.bodies) == 6


def test_it_is_asked_later_and_later(stub, ask, monkeypatch):
    delays = []
    monkeypatch.setattr(served_model, "time", SimpleNamespace(sleep=delays.append))
    stub.plan = ["reset"] * 9
    assert ask(stub.url, "--batch", 1).exit_code == 2
    assert delays == [served_model.FIRST_DELAY * n for n in (1, 2, 4)]


def test_a_server_that_does_not_answer_is_asked_again(stub, ask, monkeypatch):
    monkeypatch.setattr(served_model, "TIMEOUT", 0.02)
    stub.delay = 0.3
    done = ask(stub.url, "--batch", 1)
    assert done.exit_code == 2 and "timed out (4 tries)" in done.stderr, done.output


def error(message):
    return json.dumps({"error": {"message": message}})


def said(content, finish_reason="stop"):
    """Plan of a whole answer."""
    choice = {"message": {"content": content}, "finish_reason": finish_reason}
    return 200, json.dumps({"choices": [choice]})


@pytest.mark.parametrize(
    ("plan", "tries", "parts"),
    [
        ([(500, error("CUDA out\nof memory"))] * 9, 4, ["HTTP 500: CUDA out of memory (4 tries)"]),
        ([(500, error("lost the context"))] * 9, 4, ["HTTP 500: lost the context"]),
        ([(429, '{"message": "slow down"}')] * 9, 4, ["HTTP 429: slow down"]),
        (["reset"] * 9, 4, ["4 tries", "run again"]),
        ([(401, '{"error": "bad key"}')], 1, ["HTTP 401: bad key", "--api-key"]),
        ([(403, error("not for you"))], 1, ["HTTP 403: not for you", "--api-key"]),
        ([(404, error("no such model"))], 1, ["HTTP 404: no such model", "--served-model"]),
        ([(400, "")], 1, ["HTTP 400: Bad Request"]),
        ([(400, '{"error": {}}')], 1, ['HTTP 400: {"error": {}}']),
        ([(400, '{"error": 5}')], 1, ['HTTP 400: {"error": 5}']),
        ([(400, "[1]")], 1, ["HTTP 400: [1]"]),
        ([(400, "caf\udce9")], 1, ["HTTP 400: caf\ufffd"]),  # in Latin-1
        ([(200, "<html>")], 1, ["is not JSON"]),
        ([(200, "null")], 1, ["not a chat completion"]),
        ([(200, "[]")], 1, ["not a chat completion"]),
        ([(200, '{"choices": []}')], 1, ["not a chat completion"]),
        *(([said(c)], 1, ["not a chat completion"]) for c in (["a"], {"a": 1}, True, 5)),
    ],
)
def test_what_the_server_says_is_told_in_a_line(stub, ask, plan, tries, parts):
    stub.plan = plan
    done = ask(stub.url, "--batch", 1)
    assert done.exit_code == 2 and len(stub.bodies) == tries, done.output
    assert len(done.stderr.strip().splitlines()) == 1
    for part in [*parts, stub.url]:
        assert part in done.stderr


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 64 tokens. However, you requested 70.",
        "The input (70 tokens) is longer than the model's context length (64 tokens).",
    ],
)
def test_a_turn_that_does_not_fit_ends_its_conversation(stub, ask, tiny_dir, tmp_path, message):
    stub.plan = [None, (400, error(message))]
    done = ask(stub.url, "--batch", 1)
    assert done.exit_code == 0 and "1 longer than the context" in done.stderr, done.output
    assert [line["id"] for line in lines(tmp_path)] == [0, 1, 2]
    stub.finish_reason = "length"  # a cut answer has no end mark
    assert ask(stub.url, out="cut.jsonl").exit_code == 0
    cut = json.loads((tmp_path / "cut.jsonl").read_text().splitlines()[0])
    assert load_tokenizer(tiny_dir).raw(cut["ids"]).endswith("answer to one")


def test_nothing_more_is_asked_once_there_is_enough(stub, ask):
    """Longer conversations beside the one that is enough end where they are."""
    stub.delay = 0.2
    write_questions(ask.prompts, ["one"], *[["one", "and then?", "and?", "and?"]] * 3)
    done = ask(stub.url, "--batch", 4, "--tokens", 1)
    assert done.exit_code == 0, done.output
    assert len(stub.bodies) < 13


def test_nobody_listens(stub, ask):
    stub.server_close()
    done = ask(stub.url)
    assert done.exit_code == 2 and "cannot reach" in done.stderr and "running" in done.stderr
    done = ask("http://no-such-host.invalid/v1", out="b.jsonl")
    assert done.exit_code == 2 and "cannot reach" in done.stderr


@pytest.mark.parametrize("key", ["key\n", "k\u20acy"])
def test_a_key_that_is_no_header(stub, ask, key):
    done = ask(stub.url, "--api-key", key)
    assert done.exit_code == 2 and "the API key is no header" in done.stderr, done.output
    assert not stub.bodies


def test_what_was_answered_before_an_error_is_kept(stub, ask, tmp_path):
    stub.plan = [None, None, (400, error("too long"))]
    assert ask(stub.url, "--batch", 1).exit_code == 2
    assert [line["id"] for line in lines(tmp_path)] == [0, 0]
    done = ask(stub.url, "--batch", 1)
    assert done.exit_code == 0 and "going on" in done.stderr and len(stub.bodies) == 5
    assert [line["id"] for line in lines(tmp_path)] == [0, 0, 1, 2]


def test_an_answer_without_text_is_dropped(stub, ask, tmp_path):
    stub.plan = [said(None)]
    done = ask(stub.url, "--batch", 1)
    assert done.exit_code == 0 and "1 empty answer" in done.stderr
    assert [line["id"] for line in lines(tmp_path)] == [1, 2]


def test_ctrl_c_waits_for_no_answer(stub, ask, tiny_dir, tmp_path):
    stub.delay = 60.0
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a background job
        "from fasteagle.cli.main import main\n"
        "main()"
    )
    files = ("--model", tiny_dir, "--prompts", ask.prompts, "--out", tmp_path / "text.jsonl")
    words = [sys.executable, "-c", code, "generate-data", *files, "--base-url", stub.url]
    with subprocess.Popen([str(word) for word in words], stderr=subprocess.PIPE) as process:
        try:
            while len(stub.bodies) < 3 and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 1
        finally:
            process.kill()


def test_half_of_a_character_in_an_answer_is_replaced(stub, ask, tiny_dir, tmp_path):
    stub.plan = [said("so \ud800", "eos_token")]
    done = ask(stub.url, "--batch", 1, "--api-key", "")
    assert done.exit_code == 0 and stub.bodies[0]["key"] is None
    ids = lines(tmp_path)[0]["ids"]
    assert load_tokenizer(tiny_dir).raw(ids).endswith("so ?<|end|>"), "a whole answer"


@pytest.mark.parametrize(("before", "answer"), [("Q: ", "yes."), ("other: ", "yes")])
def test_an_answer_before_which_the_template_writes_something_else_has_no_end_mark(before, answer):
    """The tokens of a whole conversation are those of an answer only after what was asked.

    What follows its end mark is not of it.
    """

    def encode(text):
        return [*map(ord, text)]

    tokenizer = SimpleNamespace(encode=encode, eos_ids={ord(".")}, render=lambda *_: "Q: yes.\n")
    model = served_model.ServedModel("http://localhost", "m", tokenizer, None)
    assert model._answer_ids((), before, "yes", False) == encode(answer)


def test_a_long_message_of_the_server_is_cut(stub, ask):
    stub.plan = [(400, error("x" * 999))]
    assert ask(stub.url, "--batch", 1).stderr.count("x") < 330
