"""Answers of a model behind an OpenAI-compatible server (vLLM, SGLang), several at a time.

The server is sent messages and sends back text; the model's own tokenizer, here, makes the tokens.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from fasteagle.errors import FasteagleError
from fasteagle.loading.tokenizer import ChatTokenizer, Message
from fasteagle.training.dialogues import Reply, Request

TRIES = 4
FIRST_DELAY = 1.0  # seconds; doubled with every try
TIMEOUT = 600.0  # seconds without a byte of the answer
LOST = (ConnectionError, TimeoutError, http.client.HTTPException)
HINTS = {
    401: ": give the server's key with --api-key",
    403: ": give the server's key with --api-key",
    404: ": check --base-url, and name the server's model with --served-model",
}

Outcome = dict[str, Any] | Exception | None  # None: no room for an answer


class ServedModel:
    """Model behind a server, which is sent all requests under way at once.

    Raises `FasteagleError` where the server cannot be reached, refuses, or goes on failing.
    """

    def __init__(
        self, base_url: str, name: str, tokenizer: ChatTokenizer, api_key: str | None
    ) -> None:
        base = base_url.rstrip("/")
        self._url = (base if base.endswith("/v1") else f"{base}/v1") + "/chat/completions"
        self._name, self._tokenizer = name, tokenizer
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise FasteagleError(
                    "the API key is no header: give one of ASCII characters, in one line"
                )
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._answered: queue.SimpleQueue[tuple[int, Request, Outcome]] = queue.SimpleQueue()

    def begin(self, number: int, request: Request) -> None:
        body = {
            "model": self._name,
            "messages": list(request.messages),
            "temperature": request.params.temperature,
            "top_p": request.params.top_p,
            "seed": request.params.seed,
            "max_tokens": request.max_new_tokens,
        }

        def ask() -> None:
            answer: Outcome
            try:
                answer = self._post(body)
            except Exception as error:  # raised by `replies`
                answer = error
            self._answered.put((number, request, answer))

        # The end of the process, by Ctrl-C or an error, waits for other threads but not for these.
        threading.Thread(target=ask, daemon=True).start()

    def replies(self) -> list[tuple[int, Reply | None]]:
        number, request, answer = self._answered.get()
        if isinstance(answer, Exception):
            raise answer
        return [(number, None if answer is None else self._reply(request, answer))]

    def _reply(self, request: Request, answer: dict[str, Any]) -> Reply:
        try:
            choice = answer["choices"][0]
            text, is_cut = choice["message"]["content"] or "", choice["finish_reason"] == "length"
            if not isinstance(text, str):
                raise TypeError("content must be a text")
            text = text.encode("utf-8", "replace").decode()  # JSON may hold halves of characters
        except (KeyError, IndexError, TypeError) as error:
            raise FasteagleError(
                f"{self._url}: the answer is not a chat completion ({error!r}): "
                "is --base-url an OpenAI-compatible server?"
            ) from error
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
            if attempt:
                time.sleep(FIRST_DELAY * 2 ** (attempt - 1))
            try:
                request = urllib.request.Request(self._url, data, self._headers)
                with OPENER.open(request, timeout=TIMEOUT) as response:
                    answer = json.loads(response.read())
                return answer if isinstance(answer, dict) else {}  # which `_reply` refuses
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}: {_message(error)}"
                if error.code == 400 and "context" in problem:  # as vLLM, SGLang, llama.cpp say it
                    return None
                if error.code != 429 and error.code < 500:
                    raise FasteagleError(
                        f"{self._url}: {problem}{HINTS.get(error.code, '')}"
                    ) from error
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                is_lost = isinstance(reason, LOST) and not isinstance(
                    reason, ConnectionRefusedError
                )
                if not is_lost:
                    raise FasteagleError(
                        f"cannot reach {self._url} ({reason}): is the server running, and "
                        "--base-url right?"
                    ) from error
                problem = str(reason) or type(reason).__name__
            except ValueError as error:
                raise FasteagleError(
                    f"{self._url}: the answer is not JSON: is --base-url right?"
                ) from error
        raise FasteagleError(f"{self._url}: {problem} ({TRIES} tries): run again to go on")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects, with which the API key would be sent elsewhere."""

    def redirect_request(self, request: Any, file: Any, code: int, *rest: Any) -> None:
        return None


OPENER = urllib.request.build_opener(_NoRedirects)


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
