"""Cost of a server: questions to `fasteagle serve` over loopback, and to the model right here.

python scripts/served_speed.py --data questions.jsonl --limit 16

Questions in turn, greedy; both compile and tune first. tok/s counts the tokens after each answer's
first, from the arrival of the first chunk to that of the last. TTFT runs from sending the question.

With --clients 1,4,8, so many questions are under way at once, and nothing is asked here. Then tok/s
is the total, of the same tokens in the time from the first question to the last answer's end.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import httpx

from fasteagle.cli.command import Script
from fasteagle.cli.options import Numbers
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import LLM, open_llm
from fasteagle.loading.tokenizer import Message
from fasteagle.options import DEFAULT_MODEL, DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.prompts import Question, read_questions
from fasteagle.tables import print_table

HELLO: list[Message] = [{"role": "user", "content": "Hello"}]


class Timing(NamedTuple):
    """Number of tokens and times of one answer."""

    n_tokens: int
    first: float  # seconds until the first chunk
    rest: float  # from then on


def timed(arrivals: Iterator[tuple[float, int]], begin: float) -> Timing:
    """Return the times of chunks (moment, tokens); the first one's tokens are not in the rate."""
    chunks = [(moment, n) for moment, n in arrivals if n]
    moments = [moment for moment, _ in chunks]
    return Timing(sum(n for _, n in chunks[1:]), moments[0] - begin, moments[-1] - moments[0])


def here(llm: LLM, messages: list[Message], limit: int) -> Timing:
    begin = time.perf_counter()
    chunks = llm.chat(messages, stream=True, max_new_tokens=limit)
    return timed(((time.perf_counter(), len(chunk.tokens)) for chunk in chunks), begin)


def served(client: httpx.Client, messages: list[Message], limit: int) -> Timing:
    body = {"messages": messages, "max_tokens": limit, "stream": True, "show_accepted": True}

    def arrivals() -> Iterator[tuple[float, int]]:
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                raise FasteagleError(f"the server says {reply.status_code}: {reply.read()!r}")
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter(), tokens_of(json.loads(line[len("data: ") :]))

    begin = time.perf_counter()
    return timed(arrivals(), begin)


def tokens_of(event: dict[str, Any]) -> int:
    return int((event.get("accepted") or {}).get("tokens", 0))


def wait_until_up(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise FasteagleError("the server ended while it started: see its message above")
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise FasteagleError("the server did not come up within two minutes")


def at_once(
    client: httpx.Client, questions: list[Question], n_clients: int, limit: int
) -> tuple[str, ...]:
    """Return a row of the table: `n_clients` ask at once until all questions are answered."""

    def ask(question: Question) -> Timing:
        return served(client, [{"role": "user", "content": question.turns[0]}], limit)

    begin = time.perf_counter()
    with ThreadPoolExecutor(n_clients) as pool:
        answers = list(pool.map(ask, questions))
    rate = sum(t.n_tokens for t in answers) / (time.perf_counter() - begin)
    firsts = [1e3 * t.first for t in answers]
    mean, worst = statistics.mean(firsts), max(firsts)
    return str(n_clients), f"{rate:.1f}", f"{mean:.1f}", f"{worst:.1f}"


@contextlib.contextmanager
def server(model: str, port: int, parallel: int, warm_up: float) -> Iterator[httpx.Client]:
    """Run a server, and yield a client of it once it has tuned."""
    command = [sys.executable, "-m", "fasteagle", "serve", "--model", model, "--port", str(port)]
    process = subprocess.Popen([*command, "--parallel", str(parallel)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            wait_until_up(client, process)
            served(client, HELLO, 8)
            time.sleep(warm_up)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def in_turn(
    client: httpx.Client, model: str, questions: list[Question], limit: int
) -> dict[str, list[Timing]]:
    """Return times of all questions, each asked here and then of the server."""
    llm = open_llm(model, RuntimeOptions(), DraftOptions(), note)
    llm.prepare(SamplingParams(), quiet=True)
    here(llm, HELLO, 8)
    while llm.is_preparing:
        time.sleep(0.2)
    timings: dict[str, list[Timing]] = {"here": [], "served": []}
    for question in questions:
        messages: list[Message] = [{"role": "user", "content": question.turns[0]}]
        timings["here"].append(here(llm, messages, limit))
        timings["served"].append(served(client, messages, limit))
    return timings


@click.command(cls=Script, help=__doc__)
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--data", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--limit", type=click.IntRange(1), help="Only the first N questions.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--port", default=8765, show_default=True)
@click.option("--parallel", default=4, show_default=True, help="Slots of the server.")
@click.option("--warm-up", default=90.0, show_default=True, help="Seconds for the server to tune.")
@click.option("--clients", type=Numbers(), help="How many ask at once, as 1,4,8.")
def main(
    model: str,
    data: Path | None,
    limit: int | None,
    max_new_tokens: int,
    port: int,
    parallel: int,
    warm_up: float,
    clients: tuple[int, ...] | None,
) -> None:
    if clients and min(clients) < 1:
        raise FasteagleError(f"clients {min(clients)} is out of range: use 1 or more")
    questions = read_questions(data, limit)
    with server(model, port, parallel, warm_up) as client:
        if clients:
            rows = [at_once(client, questions, n, max_new_tokens) for n in clients]
            print_table(("clients", "tok/s", "TTFT ms (mean)", "TTFT ms (worst)"), rows)
            return
        timings = in_turn(client, model, questions, max_new_tokens)
    lines = []
    for name, answers in timings.items():
        rate = sum(t.n_tokens for t in answers) / sum(t.rest for t in answers)
        first = statistics.median(t.first for t in answers)
        lines.append((name, f"{rate:.1f}", f"{1e3 * first:.1f}"))
    print_table(("", "tok/s", "TTFT ms (median)"), lines)


if __name__ == "__main__":
    main()
