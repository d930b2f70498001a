"""Running the server: its own socket, and an end that lets the running answers finish."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fasteagle.errors import LONGEST_SHOWN, FasteagleError, cut, note
from fasteagle.options import ServeOptions
from fasteagle.server.app import Server
from fasteagle.server.guard import is_loopback

HEAD_SECONDS = 10.0  # for the first line and the headers of a request to arrive
BACKLOG = 256
# Of the kernel, and as many here: how far a client is behind unnoticed. Less than a segment of
# loopback (64 KiB) waits 40 ms for each acknowledgement: 2 MB/s.
SEND_BYTES = 2**16
WRITE_SECONDS = 30.0  # for a client to take what was sent, once the buffers are full
LACKS_HANDLES = (errno.EMFILE, errno.ENFILE)
SILENCE = 60.0  # seconds between two lines about a lack of file handles
PATIENCE = 1.0  # seconds for connections to close after the second signal


def check_exposed(options: ServeOptions, api_key: str | None) -> None:
    """Refuse to serve other machines without a key, unless asked to."""
    if api_key == "":
        raise FasteagleError("the API key is empty: give one, or leave --api-key out")
    if api_key is not None and (not api_key.isprintable() or api_key != api_key.strip()):
        raise FasteagleError(
            "the API key begins or ends with a blank, or holds a line break or wrong UTF-8: no "
            "client can send it"
        )
    if api_key is not None and options.allow_anyone:
        raise FasteagleError(
            "--allow-anyone and --api-key (FASTEAGLE_API_KEY) contradict each other: give one"
        )
    if api_key is None and not options.allow_anyone and not is_loopback(options.host):
        raise FasteagleError(
            f"--host {options.host} is open to other machines: add --api-key KEY, or "
            "--allow-anyone if they may all use it"
        )


def listen(options: ServeOptions) -> socket.socket:
    """Return the socket, taken before a model is loaded; raise `FasteagleError` on failure."""
    host, port = options.host, options.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # of connections
        listener.bind(address)
        listener.listen(BACKLOG)  # another server on this port is refused from here on
    except socket.gaierror as error:
        raise FasteagleError(f"--host {host}: {error.strerror}") from error
    except UnicodeError as error:  # a part between dots that is empty or longer than names are
        raise FasteagleError(
            f"--host {cut(host, LONGEST_SHOWN)}: no host has such a name"
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FasteagleError(
                f"port {port} of {host} is in use: stop that server, or give another --port"
            ) from error
        raise FasteagleError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


class Protocol(H11Protocol):
    """HTTP protocol that closes connections if a request is late or a client does not read."""

    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=SEND_BYTES)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def _wait_for_reader(self, n_bytes: float = math.inf) -> None:
        """Go on waiting for a client that has taken some of `n_bytes`; end the connection else."""
        left = self.transport.get_write_buffer_size()
        if left >= n_bytes:
            self.transport.abort()  # closing would wait for what is in the buffer
        else:
            self._stalled = self.loop.call_later(WRITE_SECONDS, self._wait_for_reader, left)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def _go_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._go_on()
        super().connection_lost(exc)

    @property
    def _waits_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._waits_for_head:
            self._stop_watching()
        elif self._timer is None:  # bytes that trickle in gain no time
            self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._waits_for_head and not self.transport.is_closing():
            self.transport.close()


class GracefulServer(uvicorn.Server):
    """Server whose first signal lets the running answers finish, and whose second does not."""

    def __init__(
        self,
        config: uvicorn.Config,
        server: Server,
        say: Callable[[str], None],
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._server, self._say, self._ready = server, say, ready
        self._silent_until = 0.0  # on the event loop's clock

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._tell)
        await super().startup(sockets)
        self._ready()

    def _tell(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Tell in one line that no connection can be accepted, which asyncio tries again."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in LACKS_HANDLES:
            loop.default_exception_handler(context)
        elif loop.time() >= self._silent_until:
            self._silent_until = loop.time() + SILENCE
            note("error: connections wait for want of open files: raise the limit (ulimit -n)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._server.queue.break_off()
            # A client that does not read can hold its connection open.
            self._loop.call_soon_threadsafe(self._loop.call_later, PATIENCE, self._abort)
            return
        self.should_exit = True
        if self._server.queue.n_running:
            self._say("finishing the running answers; once more to end at once")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._server.queue.drain()
        self._loop.call_later(self._server.options.timeout, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        """End the connections that are still open."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def run(
    server: Server, listener: socket.socket, say: Callable[[str], None], ready: Callable[[], None]
) -> None:
    """Serve until a signal comes; call `ready` when signals are handled."""
    config = uvicorn.Config(
        server.app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level="error",  # its warnings, of strangers' connections, tell neither time nor client
        access_log=False,
        backlog=BACKLOG,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(server.options.timeout + PATIENCE),
    )
    running = GracefulServer(config, server, say, ready)
    try:
        running.run(sockets=[listener])
    finally:
        server.queue.stop()
        listener.close()
