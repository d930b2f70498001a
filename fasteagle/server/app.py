"""Endpoints: OpenAI's chat, completions and models, vLLM's tokenize, health and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fasteagle import __version__
from fasteagle.answering.answer import Chunk
from fasteagle.errors import EngineError, FasteagleError, shown
from fasteagle.llm import LLM
from fasteagle.options import Defaults, ServeOptions
from fasteagle.server.bodies import FEWEST_VALUES, SHORT_BYTES, body_route
from fasteagle.server.failures import MISTAKE, add_errors
from fasteagle.server.guard import Guard, error_body, page_headers, plain_origins
from fasteagle.server.job import CancelledError, Group, Job, TimedOutError, groups
from fasteagle.server.log import AccessLog, complain
from fasteagle.server.metrics import Metrics
from fasteagle.server.prepare import Plan, Planner
from fasteagle.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
)
from fasteagle.server.queue import AnswerQueue
from fasteagle.server.replies import (
    ChatReply,
    Json,
    Reply,
    TextReply,
    sse,
    usage_event,
    whole_reply,
)

LONG_THREADS = 8  # for what takes longer, grammars and long texts: one of each of a client's
PAGE = Path(__file__).with_name("page.html")
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A parameter that cannot be honoured, by name."},
    404: {"description": "Another model than the one that is served."},
    429: {"description": "Too many requests wait; see Retry-After."},
    503: {"description": "The server is shutting down."},
    504: {"description": "The time for a request is over."},
}

Outcome = TypeVar("Outcome")


class UnknownModelError(HTTPException):
    """Error of a request for a model that is not served."""

    code = "model_not_found"


class Server:
    """One model, its queue, its metrics, and the app in front of them."""

    def __init__(
        self, llm: LLM, options: ServeOptions, defaults: Defaults, api_key: str | None = None
    ) -> None:
        self.llm, self.options = llm, options
        # Clients learn no folder of this machine.
        self.name = Path(llm.name).name if Path(llm.name).exists() else llm.name
        self.metrics = Metrics(self.name)
        self.queue = AnswerQueue(llm, options.queue, self.metrics)
        self.metrics.running.set_function(lambda: self.queue.n_running)
        self.metrics.waiting.set_function(lambda: self.queue.n_waiting)
        self.planner = Planner(llm, defaults)
        self._planning = ThreadPoolExecutor(1, "planner")
        self._long = ThreadPoolExecutor(LONG_THREADS, "long")
        self._places: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self.created = int(time.time())
        self.app = make_app(self, api_key)

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            text = f"model {shown(name)} is not served here, {self.name!r} is"
            raise UnknownModelError(404, text)

    async def answer(self, request: Request, body: Sampled, reply_kind: type[Reply]) -> Response:
        """Queue a request, reply whole or by events, and end the answer if the client leaves."""
        self.check_model(body.model)
        make = self.planner.chat if isinstance(body, ChatRequest) else self.planner.completion
        job = Job()
        request.scope["record"].jobs = jobs = [job]
        plan: Plan = await self.planned(request, job, partial(make, body))  # type: ignore[arg-type]
        if plan.form is not None:
            plan = await self._aside(request, job, "grammar", partial(self.planner.compiled, plan))
        self.metrics.planning.observe(time.perf_counter() - job.submitted)
        jobs += [Job(job, i % plan.n == 0) for i in range(1, len(plan.answers))]
        for each, wanted in zip(jobs, plan.answers, strict=True):
            each.request, each.text = wanted, plan.text or None
        self.queue.submit(jobs)
        for each in jobs:
            each.limit(self.options.timeout)
        replies = reply_kind.each(self.name, self.llm.tokenizer, jobs, plan)
        arriving = groups(jobs)
        try:
            # Before the first chunk, what goes wrong still has a status of its own.
            first = await unless_gone(request, anext(arriving))
            if body.stream:
                usage = body.stream_options is not None and body.stream_options.include_usage
                events = self._events(request, replies, first, arriving, usage, body.show_accepted)
                return EventStream(events, jobs)
            for each in jobs:
                each.group_seconds = self.options.timeout
            answers = await unless_gone(request, whole(jobs, first, arriving))
        except BaseException:
            leave(jobs)
            raise
        # In a thread: log-probabilities of a long answer are megabytes.
        return await asyncio.to_thread(lambda: JSONResponse(whole_reply(replies, answers)))

    async def planned(
        self, request: Request, job: Job, make: Callable[[], Outcome], answers: bool = True
    ) -> Outcome:
        """Return the result of `make`, run by another thread; `job` has a place in the queue.

        A place whose client leaves, or whose time ends, is free once `make` is over.
        """
        n_bytes = len(await request.body())
        self.queue.admit(job, answers)
        if n_bytes > SHORT_BYTES:
            return await self._aside(request, job, "text", make)
        return await self._outcome(request, job, self._planning.submit(make))

    async def _aside(
        self, request: Request, job: Job, kind: str, make: Callable[[], Outcome]
    ) -> Outcome:
        """Return the result of `make`, which may take seconds; a client has one of a kind."""
        host = request.client.host if request.client else ""
        place = self._places.setdefault((host, kind), asyncio.Lock())
        try:
            await self._in_time(request, job, place.acquire())
        except BaseException:
            self.queue.release(job)
            raise
        work = self._long.submit(make)
        free = partial(asyncio.get_running_loop().call_soon_threadsafe, place.release)
        work.add_done_callback(lambda done: free())  # also where nobody waits for it any more
        return await self._outcome(request, job, work)

    async def _outcome(self, request: Request, job: Job, work: Future[Outcome]) -> Outcome:
        """Return the result of a thread; `job` keeps its place until the thread is done."""

        async def outcome() -> Outcome:
            return await asyncio.wrap_future(work)

        try:
            return await self._in_time(request, job, outcome())
        except BaseException:
            work.cancel()  # if it has not begun
            work.add_done_callback(lambda done: self.queue.release(job))
            raise

    async def _in_time(
        self, request: Request, job: Job, wanted: Coroutine[Any, Any, Outcome]
    ) -> Outcome:
        """Wait for `wanted` while the client is there and the time for `job` is not over."""
        seconds = self.options.timeout
        try:
            left = job.submitted + seconds - time.perf_counter()
            return await asyncio.wait_for(unless_gone(request, wanted), left)
        except (TimeoutError, CancelledError) as error:
            late = isinstance(error, asyncio.TimeoutError)
            job.end("timeout" if late else "cancelled")
            self.metrics.finished(job)
            if late:
                raise TimedOutError(seconds) from None
            raise
        finally:
            wanted.close()  # it has not begun if the time was over before

    async def at_once(self, request: Request, make: Callable[[], Outcome]) -> Outcome:
        """Return the result of `make`, run by another thread, where no answer is needed."""
        job = Job()
        result = await self.planned(request, job, make, answers=False)
        self.queue.release(job)
        return result

    async def _events(
        self,
        request: Request,
        replies: Sequence[Reply],
        first: Group,
        arriving: AsyncIterator[Group],
        usage: bool,
        accepted: bool,
    ) -> AsyncIterator[str]:
        of_job = {reply.job: reply for reply in replies}

        def text_of(group: Group) -> str:
            reply, chunks = of_job[group[0]], group[1]
            if chunks is None:
                return "".join(sse(event) for event in reply.last_parts())
            return "".join(sse(e) for chunk in chunks for e in reply.parts(chunk, accepted))

        try:
            yield text_of(first)
            async for group in arriving:
                yield text_of(group)
            if usage:
                yield sse(usage_event(replies))
            yield "data: [DONE]\n\n"
        except (TimedOutError, CancelledError, FasteagleError) as error:
            if isinstance(error, EngineError):
                complain(request.scope, f"in a stream: {error}")
            yield sse(error_body(str(error) or "the answer was broken off", "server_error"))
        except Exception as error:  # the status is sent already: this is how a client learns of it
            complain(request.scope, f"in a stream: {type(error).__name__}: {error}")
            yield sse(error_body(MISTAKE, "server_error"))


class EventStream(StreamingResponse):
    """Stream that ends its answers with the connection, even before the first event is read."""

    def __init__(self, events: AsyncIterator[str], jobs: Sequence[Job]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._jobs = jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            leave(self._jobs)


def leave(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.leave()


async def whole(
    jobs: Sequence[Job], first: Group, arriving: AsyncIterator[Group]
) -> list[list[Chunk]]:
    """Return the chunks of each answer, once all are there."""
    answers: dict[Job, list[Chunk]] = {job: [] for job in jobs}
    for job, chunks in [first, *[group async for group in arriving]]:
        answers[job] += chunks or []
    return list(answers.values())


async def unless_gone(request: Request, wanted: Awaitable[Outcome]) -> Outcome:
    """Wait for `wanted`; raise `CancelledError` once the client has left."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, left = asyncio.ensure_future(wanted), asyncio.create_task(gone())
    tasks: list[asyncio.Future[Any]] = [answer, left]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise CancelledError
        return answer.result()
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_app(server: Server, api_key: str | None) -> FastAPI:
    """Return the app with its endpoints, its errors in OpenAI's form, and the guard before it."""
    app = FastAPI(title="fasteagle", version=__version__, docs_url=None, redoc_url=None)
    most = max(FEWEST_VALUES, 2 * server.llm.engine.max_seq_len)  # a prompt of ids, and the rest
    app.router.route_class = body_route(int(server.options.max_body * 2**20), most)
    add_errors(app)
    _add_answers(app, server)
    _add_rest(app, server)
    app.add_middleware(Guard, options=server.options, api_key=api_key)
    if server.options.allow_origin:  # outermost: pages may read the guard's refusals, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=plain_origins(server.options),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # openai-js sends a dozen x-stainless-* ones
            expose_headers=["retry-after", "x-request-id"],
        )
    app.add_middleware(AccessLog, metrics=server.metrics, writes=server.options.access_log)
    plain = app.openapi

    def openapi() -> Json:
        """Return the schema without status 422: wrong parameters are a 400 here."""
        document = plain()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _add_answers(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await server.answer(request, body, ChatReply)

    @app.post("/v1/completions", responses=ERRORS)
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue a text, or token ids."""
        return await server.answer(request, body, TextReply)

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """Return token ids of a text, or of a conversation as the template writes it."""
        server.check_model(body.model)
        ids = await server.at_once(request, partial(server.planner.tokenize, body))
        most = server.llm.engine.max_seq_len
        # As it is: to look at each of 100,000 ids would hold up the event loop.
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": most})

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(request: Request, body: DetokenizeRequest) -> Json:
        """Return the text of token ids, special tokens written out."""
        server.check_model(body.model)
        make = partial(server.planner.detokenize, body.tokens)
        return {"prompt": await server.at_once(request, make)}


def _add_rest(app: FastAPI, server: Server) -> None:
    """Add the endpoints answered at once: on the event loop, so that no thread has to be free."""

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> Json:
        """List the one model that is served."""
        return {"object": "list", "data": [_model(server)]}

    @app.head("/v1/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}", responses={404: ERRORS[404]})
    async def model(name: str) -> Json:
        """Return the model, if it is the one that is served."""
        server.check_model(name)
        return _model(server)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Json:
        """Report that the server is up, and the model that it serves."""
        return {"status": "ok", "model": server.name}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return numbers for Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    content = PAGE.read_bytes()
    headers = page_headers(content)

    @app.api_route("/", methods=["GET", "HEAD"], response_class=Response, include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type="text/html", headers=headers)


def _model(server: Server) -> Json:
    return {
        "id": server.name,
        "object": "model",
        "created": server.created,
        "owned_by": "fasteagle",
        "max_model_len": server.llm.engine.max_seq_len,
        "backend": server.llm.engine.backend.describe(),
    }
