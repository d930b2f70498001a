"""Conversations with a model behind an OpenAI-compatible server (vLLM, SGLang), several at a time.

The server is sent messages and sends back text; the model's own tokenizer, here, makes the tokens.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from fasteagle.errors import FasteagleError
from fasteagle.loading.tokenizer import ChatTokenizer, Message
from fasteagle.training.dialogues import Conversing, Dialogue, Reply, Request

TRIES = 4
FIRST_DELAY = 1.0  # seconds; doubled with every try
TIMEOUT = 600.0  # seconds without a byte of the answer


class ServedModel:
    """Model behind a server: up to `batch` conversations at once, one request of each at a time.

    Raises `FasteagleError` where the server cannot be reached, refuses, or goes on failing.
    """

    def __init__(
        self, base_url: str, name: str, tokenizer: ChatTokenizer, batch: int, api_key: str | None
    ) -> None:
        base = base_url.rstrip("/")
        self._url = (base if base.endswith("/v1") else f"{base}/v1") + "/chat/completions"
        self._name, self._tokenizer, self._batch = name, tokenizer, batch
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._encoding = threading.Lock()  # fast tokenizers fail in two threads: "Already borrowed"
        self._ended = threading.Event()  # nobody waits for answers any more

    def hold(self, started: Iterator[tuple[int, Conversing]]) -> Iterator[tuple[int, Dialogue]]:
        """Hold the conversations; yield them by number as they end."""
        pool = ThreadPoolExecutor(self._batch)
        running: dict[Future[Dialogue], int] = {}
        try:
            while True:
                while len(running) < self._batch and (new := next(started, None)):
                    running[pool.submit(self._hold_one, new[1])] = new[0]
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            self._ended.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _hold_one(self, conversing: Conversing) -> Dialogue:
        reply: Reply | None = None
        while not self._ended.is_set():
            try:
                request = conversing.send(reply)
            except StopIteration as end:
                return end.value
            reply = self._reply(request)
        return Dialogue([])  # which nobody reads

    def _reply(self, request: Request) -> Reply | None:
        body = {
            "model": self._name,
            "messages": list(request.messages),
            "temperature": request.params.temperature,
            "top_p": request.params.top_p,
            "seed": request.params.seed,
            "max_tokens": request.max_new_tokens,
        }
        answer = self._post(body)
        if answer is None:
            return None
        try:
            choice = answer["choices"][0]
            text, is_cut = choice["message"]["content"] or "", choice["finish_reason"] == "length"
        except (KeyError, IndexError, TypeError) as error:
            raise FasteagleError(
                f"{self._url}: the answer is not a chat completion ({error!r}): "
                "is --base-url an OpenAI-compatible server?"
            ) from error
        with self._encoding:
            before = self._tokenizer.render(request.messages)
            ids = self._answer_ids(request.messages, before, text, is_cut)
            return Reply(self._tokenizer.encode(before), ids, text, is_cut)

    def _answer_ids(
        self, messages: tuple[Message, ...], before: str, text: str, is_cut: bool
    ) -> list[int]:
        """Return the tokens of an answer, with the template's end mark after a whole one."""
        tokenizer = self._tokenizer
        if not is_cut:
            whole = tokenizer.render([*messages, {"role": "assistant", "content": text}], False)
            ids = tokenizer.encode(whole.removeprefix(before))
            ends = [i for i, token in enumerate(ids) if token in tokenizer.eos_ids]
            if whole.startswith(before) and ends:
                return ids[: ends[0] + 1]
        return tokenizer.encode(text)

    def _post(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the server's answer, None where its context has no room for one.

        Asks again where it may only be busy, or lost the connection.
        """
        data = json.dumps(body).encode()
        for attempt in range(TRIES):
            if attempt and self._ended.wait(FIRST_DELAY * 2 ** (attempt - 1)):
                break
            try:
                request = urllib.request.Request(self._url, data, self._headers)
                with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}: {_message(error)}"
                if error.code == 400 and "context" in problem:  # as vLLM, SGLang, llama.cpp say it
                    return None
                if error.code != 429 and error.code < 500:
                    raise FasteagleError(f"{self._url}: {problem}{_hint(error.code)}") from error
            except http.client.HTTPException as error:
                problem = str(error) or type(error).__name__
            except OSError as error:
                reason = getattr(error, "reason", error)
                is_lost = isinstance(reason, (ConnectionError, TimeoutError))
                if not is_lost or isinstance(reason, ConnectionRefusedError):
                    raise FasteagleError(
                        f"cannot reach {self._url} ({reason}): is the server running, and "
                        "--base-url right?"
                    ) from error
                problem = str(reason)
            except ValueError as error:
                raise FasteagleError(
                    f"{self._url}: the answer is not JSON: is --base-url right?"
                ) from error
        raise FasteagleError(f"{self._url}: {problem} ({TRIES} tries): run again to go on")


def _message(error: urllib.error.HTTPError) -> str:
    """Return the server's message about an error, in one line."""
    text = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        text = error.read().decode("utf-8", "replace")
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        answer = json.loads(text)
        problem = answer.get("error", answer)
        text = problem if isinstance(problem, str) else str(problem["message"])
    return " ".join(text.split())[:300] or str(error.reason)


def _hint(code: int) -> str:
    hints = {
        401: ": give the server's key with --api-key",
        403: ": give the server's key with --api-key",
        404: ": check --base-url, and name the server's model with --served-model",
    }
    return hints.get(code, "")
