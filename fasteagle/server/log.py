"""Lines about requests on stderr, and the number of refused ones."""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from datetime import UTC, datetime
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fasteagle.errors import note
from fasteagle.server.job import Job
from fasteagle.server.metrics import Metrics

HEADER = "x-request-id"
GONE = 499  # nginx's status for a client that has left; nobody reads it


@dataclasses.dataclass
class Record:
    """One request: its sender, and its result."""

    client: str
    id: str
    route: str
    status: int = GONE
    jobs: list[Job] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope) -> Record:
        """Return the record of a request, under the id that its client has given it, if any."""
        own = Headers(scope=scope).get(HEADER, "")
        name = own if re.fullmatch(r"[\w.-]{1,64}", own, re.ASCII) else uuid.uuid4().hex
        client = scope["client"][0] if scope.get("client") else "-"
        return cls(client, name, f"{scope['method']} {quote(scope['path'])}")

    def line(self, text: str) -> str:
        """Return `text` after the words that identify the request."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return f"{now} {self.client} {self.id} {self.route} {text}"

    @property
    def tokens(self) -> str:
        """Tokens of the prompts and of the answers, as text."""
        if not self.jobs:
            return "-"
        n_prompt = sum(job.stats.prompt_tokens for job in self.jobs if job.is_first)
        return f"{n_prompt}+{sum(job.stats.new_tokens for job in self.jobs)}"


class AccessLog:
    """Outermost layer of the app: counts refusals, names requests, writes a line for each."""

    def __init__(self, app: ASGIApp, metrics: Metrics, writes: bool) -> None:
        self._app, self._metrics, self._writes = app, metrics, writes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        record = scope["record"] = Record.of(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = record.id
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:
            record.status = 500
            raise
        finally:
            self._metrics.answered(record.status)
            if self._writes:
                seconds = time.perf_counter() - begin
                note(record.line(f"{record.status} {seconds:.3f} s {record.tokens} tokens"))


def complain(scope: Scope, text: str) -> None:
    """Write a line about an error in a request."""
    note(f"error: {scope['record'].line(text)}")
