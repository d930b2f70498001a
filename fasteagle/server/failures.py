"""Errors in the form of OpenAI's API: a status, one message, and the parameter."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response

from fasteagle.errors import LONGEST_SHOWN, EngineError, FasteagleError, cut, shown
from fasteagle.server.guard import error_reply
from fasteagle.server.job import CancelledError, TimedOutError
from fasteagle.server.log import GONE, complain
from fasteagle.server.protocol import ChatRequest
from fasteagle.server.queue import QueueFullError, ShuttingDownError

MISTAKE = "the server has made a mistake; its log says more"


def add_errors(app: FastAPI) -> None:
    """Answer every exception that requests can raise."""

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        placed = [(_place(problem, error.body), problem) for problem in error.errors()]
        # Of a value of several kinds, the kind that it comes nearest to tells what is wrong.
        place, problem = max(placed, key=lambda pair: len(pair[0]))
        param = cut(".".join(place), LONGEST_SHOWN) if place else None
        if problem["type"] == "extra_forbidden":
            return error_reply(400, f"unknown parameter {param!r}", param=param)
        text = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "literal_error":
            expected = problem["ctx"]["expected"]
            text = f"{shown(problem['input'])} is not supported: use {expected}"
        elif problem["type"] == "model_type":  # pydantic's text names a class of this server
            text = "Input should be an object"
        return error_reply(400, f"{param}: {text}" if param else text, param=param)

    @app.exception_handler(FasteagleError)
    async def refused(request: Request, error: FasteagleError) -> Response:
        text, param = _in_our_words(str(error))
        param = getattr(error, "param", param)
        return error_reply(400, text, param=param, code=getattr(error, "code", None))

    @app.exception_handler(EngineError)
    async def failed(request: Request, error: EngineError) -> Response:
        complain(request.scope, str(error))
        return error_reply(500, str(error), kind="server_error")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        text, path = str(error.detail), cut(request.url.path, LONGEST_SHOWN)
        if text == "Not Found":  # starlette's, of a path: what is missing has words of its own
            text = f"{path} is not served here, /v1/chat/completions is: see /openapi.json"
        elif error.status_code == 405:
            method, usable = cut(request.method, LONGEST_SHOWN), (error.headers or {}).get("Allow")
            text = f"{path} is served here, {method} is not: use {usable}"
        code = getattr(error, "code", None)
        return error_reply(error.status_code, text, headers=error.headers, code=code)

    @app.exception_handler(QueueFullError)
    async def full(request: Request, error: QueueFullError) -> Response:
        headers = {"retry-after": str(error.retry_after)}
        return error_reply(429, str(error), kind="rate_limit_error", headers=headers)

    @app.exception_handler(ShuttingDownError)
    @app.exception_handler(TimedOutError)
    async def late(request: Request, error: Exception) -> Response:
        status = 504 if isinstance(error, TimedOutError) else 503
        return error_reply(status, str(error), kind="server_error")

    @app.exception_handler(CancelledError)
    async def left(request: Request, error: CancelledError) -> Response:
        return Response(status_code=GONE)

    async def broken(request: Request, error: Exception) -> Response:
        complain(request.scope, f"{type(error).__name__}: {error}")
        return error_reply(500, MISTAKE, kind="server_error")

    # As a handler it would be outside of the layers that name requests and let pages read replies.
    app.add_middleware(ServerErrorMiddleware, handler=broken)


def _place(problem: dict[str, Any], body: Any) -> list[str]:
    """Return the fields and indices that lead to a mistake, without the kinds of values between."""
    _, *parts = problem["loc"]
    place = []
    for part in parts:
        try:
            body = body[part]
        except (LookupError, TypeError):
            continue
        place.append(str(part))
    return place + [str(part) for part in parts[-1:] if problem["type"] == "missing"]


def _in_our_words(message: str) -> tuple[str, str | None]:
    """Return `message` with the parameter that it begins with under its name here, and that name.

    Without a parameter it stays as it is.
    """
    word = message.split(" ", 1)[0].rstrip(":")
    param = word.replace("-", "_")
    param = "max_tokens" if param == "max_new_tokens" else param
    known = param in ChatRequest.model_fields
    return (param + message.removeprefix(word), param) if known else (message, None)
