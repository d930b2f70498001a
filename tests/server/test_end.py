"""What breaks in an answer, and how a server ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import errno
import gc
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from live_server import CHAT, LONG, SHORT, busy, deaf, failures, serving, until

from fasteagle.decoding.runner import Runner
from fasteagle.generate import Engine
from fasteagle.options import AnswerOptions, Defaults, ServeOptions
from fasteagle.server.app import Server
from fasteagle.server.run import listen, run
from helpers import raising, rest_slow


def test_memory_that_runs_out_is_the_servers_fault(live, monkeypatch, capfd):
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    before = failures(live, "error")
    for stream, status in ((False, 500), (True, 200)):
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "run", raising(error))
            reply = httpx.post(live.url + CHAT, json={**SHORT, "stream": stream})
        assert reply.status_code == status and '"server_error"' in reply.text
        assert "out of memory at token" in reply.text and "[DONE]" not in reply.text
        log = [line for line in capfd.readouterr().err.splitlines() if "memory" in line]
        assert len(log) == 1 and log[0].startswith("error: "), log
    assert failures(live, "error") == before + 2
    assert httpx.post(live.url + CHAT, json=SHORT).status_code == 200


def test_an_answer_that_breaks_spoils_nothing(live, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "prefill_parts", raising(RuntimeError("planted")))
        reply = httpx.post(live.url + CHAT, json=SHORT)
    assert reply.status_code == 500 and "planted" not in reply.text
    with monkeypatch.context() as patch:  # after the first token the status is sent already
        patch.setattr(Runner, "run", raising(RuntimeError("planted")))
        reply = httpx.post(live.url + CHAT, json={**SHORT, "stream": True})
    assert reply.status_code == 200 and "planted" not in reply.text
    assert "has made a mistake" in reply.text and "[DONE]" not in reply.text
    assert httpx.post(live.url + CHAT, json=SHORT).status_code == 200


def test_a_lack_of_file_handles_is_one_line_and_ends(loaded, monkeypatch, capfd):
    """Of asyncio it is a traceback for each try, hundreds a second."""
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.01)
    plain, left = socket.socket.accept, [errno.EMFILE] * 3

    def accept(listener):
        if left:
            raise OSError(left.pop(), "Too many open files")
        return plain(listener)

    with serving(loaded) as served:
        monkeypatch.setattr(socket.socket, "accept", accept)
        assert httpx.get(f"{served.url}/health").status_code == 200 and not left
    (line,) = capfd.readouterr().err.splitlines()
    assert "open files: raise the limit (ulimit -n)" in line


def test_the_end_of_a_server_finishes_the_running_answers(live, loaded, slow):
    with (
        serving(loaded, defaults=Defaults(answer=AnswerOptions(4))) as served,
        busy(served, max_tokens=200) as running,
    ):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx.post, served.url + CHAT, json=SHORT, timeout=30)
            until(lambda: served.server.queue.n_waiting == 1)
            served.server.queue.drain()
            assert waiting.result().status_code == 503
            assert failures(served, "shutdown") == 1
        assert httpx.post(served.url + CHAT, json=SHORT).status_code == 503
        for _, lines in running:
            rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]


def test_a_stream_that_is_broken_off_says_so(live, slow):
    with busy(live, 1) as ((_, lines),):
        live.server.queue.break_off()
        rest = [line for line in lines if line]
    assert "the answer was broken off" in rest[-1] and "data: [DONE]" not in rest


def test_the_first_signal_tells_what_the_second_does(live, loaded, slow, capfd):
    with serving(loaded) as served, busy(served, 1, max_tokens=30) as ((_, lines),):
        served.running.handle_exit(signal.SIGTERM, None)
        assert "once more to end at once" in capfd.readouterr().out
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_signals_are_handled_as_soon_as_it_says_that_it_serves(loaded):
    """The command ended with -15 where the signal came a moment later than that line."""
    options = ServeOptions(port=0)
    server = Server(loaded, options, Defaults())
    run(server, listen(options), print, lambda: signal.raise_signal(signal.SIGINT))
    assert not server.queue._thread.is_alive()


SERVE = [sys.executable, "-m", "fasteagle", "serve", "--drafter", "ngram"]


def start(model, port, *more):
    """The command, once it serves."""
    command = [*SERVE, "--model", str(model), "--precision", "fp32", "--port", str(port), *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("serving"):
            break
    else:
        raise AssertionError("".join(seen))
    return process


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def assert_ends(process, seconds=20):
    try:
        assert process.wait(seconds) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()


@pytest.mark.parametrize(("number", "times"), rest_slow([(signal.SIGINT, 2), (signal.SIGTERM, 1)]))
def test_signals_end_the_command(serve_dir, number, times):
    """Open connections do not hold up the end: one that was used, and one that says nothing.

    Nor does a client that does not read: the first signal's no longer than a request may take.
    """
    port = free_port()
    process = start(serve_dir, port, "--no-compile", "--timeout", "4")
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(timeout=60) as idle, socket.create_connection(("127.0.0.1", port)):
        idle.get(f"{url}/health")
        with (
            contextlib.closing(deaf(port)),
            httpx.stream("POST", url + CHAT, json={**LONG, "max_tokens": 400}, timeout=60) as one,
        ):
            lines = one.iter_lines()
            next(lines)
            for _ in range(times):
                process.send_signal(number)
                time.sleep(0.05)
            try:
                rest = [line for line in lines if line]
            except httpx.RemoteProtocolError:
                rest = ["broken off"]
            # The first signal lets the answer finish; the second may come when it has.
            assert times == 2 or rest[-1] == "data: [DONE]"
            assert_ends(process, 30)


@pytest.mark.slow
def test_it_answers_and_ends_while_something_is_still_compiled(serve_dir):
    port = free_port()
    process = start(serve_dir, port)
    for _ in range(2):
        reply = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=SHORT, timeout=60)
        assert reply.status_code == 200
    process.send_signal(signal.SIGTERM)
    assert_ends(process, 30)


def test_memory_does_not_grow(live):
    """Whatever came before, many short requests leave nothing behind: no object, no thread."""

    def ask(n):
        with httpx.Client() as client:
            for _ in range(n):
                assert client.post(live.url + CHAT, json=SHORT).status_code == 200
        gc.collect()
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # The event loop keeps up to a hundred ended timers, for as long as they might have lasted.
        timers = asyncio.TimerHandle, contextvars.Context
        lasting = [1 for one in gc.get_objects() if type(one) not in timers]
        return len(lasting), threading.active_count(), rss

    def least():
        """The least of some looks: an answer that just ended may still be there."""
        return map(min, zip(*[ask(10) for _ in range(4)], strict=True))

    ask(40)
    objects, threads, rss = least()
    ask(160)
    objects_then, threads_then, rss_then = least()
    assert objects_then < objects + 100
    assert threads_then <= threads + 1
    assert rss_then < 1.02 * rss


def test_a_large_reply_does_not_wait_for_acknowledgements():
    """With a send buffer below a segment of loopback it came at 2 MB/s."""
    listener, data = listen(ServeOptions(port=0)), bytes(2**22)

    async def send(reader, writer):
        writer.write(data)
        writer.close()

    async def seconds():
        async with await asyncio.start_server(send, sock=listener) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            begin = time.perf_counter()
            assert await reader.read() == data
            writer.close()
            return time.perf_counter() - begin

    assert asyncio.run(seconds()) < 1
