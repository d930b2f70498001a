"""Bodies of requests: read and checked, long ones by another thread than the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from fasteagle.errors import FasteagleError, reason_of, shown
from fasteagle.server.guard import CLOSE
from fasteagle.server.job import CancelledError
from fasteagle.server.protocol import Body

SHORT_BYTES = 2**15  # of requests that one thread reads for all: a few milliseconds each
BODY_SECONDS = 30.0  # for a whole body to arrive
FEWEST_VALUES = 2**18  # of a body, are allowed in any case: Python reads them in about 0.1 s


class CheckedRequest(Request):
    """Request whose body was read and checked."""

    def __init__(self, request: Request, raw: bytes, checked: Body) -> None:
        super().__init__(request.scope, request.receive)
        self._raw, self._checked = raw, checked

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._checked


def body_route(most_bytes: int, most_values: int) -> type[APIRoute]:
    """Return the class of routes that read bodies of at most so many bytes and JSON values.

    While one call of Python's JSON reader runs, no other thread does: `most_values` bounds it.
    """
    # One thread: of several, each would take the interpreter from those that decode.
    reader = ThreadPoolExecutor(1, "bodies")

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            kind = get_type_hints(self.endpoint).get("body")
            if kind is None:
                return handle

            async def handler(request: Request) -> Response:
                raw = await whole_body(request, most_bytes)
                if not raw:
                    raise FasteagleError("the body is empty: send the request as JSON")
                if "json" not in request.headers.get("content-type", "").lower():
                    raise FasteagleError("send the body with Content-Type: application/json")
                if len(raw) <= SHORT_BYTES:
                    checked = read_body(raw, kind, most_values)
                else:
                    loop = asyncio.get_running_loop()
                    checked = await loop.run_in_executor(reader, read_body, raw, kind, most_values)
                return await handle(CheckedRequest(request, raw, checked))

            return handler

    return BodyRoute


async def whole_body(request: Request, most: int) -> bytes:
    """Return the body; raise `HTTPException` for one that is long, slow or compressed.

    `most` bytes may come; what is left is not read. Raises `CancelledError` if the client leaves.
    """
    coding = request.headers.get("content-encoding", "")
    if coding.lower() not in ("", "identity"):
        text = f"Content-Encoding {shown(coding)} is not read here: send the body as it is"
        raise HTTPException(415, text, CLOSE)
    too_large = HTTPException(413, f"the body is larger than {most:,} bytes: see --max-body", CLOSE)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise too_large
    except TimeoutError:
        text = f"the body did not arrive within {BODY_SECONDS:g} seconds"
        raise HTTPException(408, text, CLOSE) from None
    except ClientDisconnect:
        raise CancelledError from None
    return bytes(raw)


def read_body(raw: bytes, kind: type[Body], most_values: int) -> Body:
    """Return the checked body of a request.

    Raises `FasteagleError` for what is no JSON or too much, `RequestValidationError` for the rest.
    """
    if more_values_than(most_values, raw):
        raise FasteagleError(f"the body has more than {most_values:,} values: shorten its lists")
    try:
        data = json.loads(raw)
    except RecursionError:
        raise FasteagleError("the body is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FasteagleError(f"the body is no JSON: {reason_of(error)}") from None
    except ValueError:  # what Python refuses to convert
        raise FasteagleError("a number in the body has thousands of digits") from None
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        placed = [{**problem, "loc": ("body", *problem["loc"])} for problem in problems]
        raise RequestValidationError(placed, body=data) from None


def more_values_than(most: int, raw: bytes) -> bool:
    """Return whether JSON has more values than `most`, without reading it."""
    if _n_marks(raw) <= most:
        return False
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    # A value has at most two strings, its key and itself.
    return plain.count(b'"') > 4 * most or _n_marks(b"".join(plain.split(b'"')[::2])) > most


def _n_marks(text: bytes) -> int:
    """Return the number of commas and opening brackets: before a value is one of these."""
    return sum(map(text.count, (b",", b"[", b"{")))
