"""The HTTP server around the app: uvicorn with bounds on connections and heads, time limits on arriving requests, JSON
in every error, and an end that lets running answers finish.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.errors import SettingError
from tandem.serve.errors_api import ApiError, problem

_AFTER_GRACE_S = 5.0  # for last events to be sent
_KEEP_ALIVE_S = 75.0  # longer than the pools of usual clients keep a connection


@dataclass(frozen=True)
class HttpLimits:
    """max_header_bytes: of a request's head. head_s: within which a head must have arrived; body_s: a body, after it.
    max_connections: at the same time. grace_s: for running answers at the end."""

    max_header_bytes: int = 64 << 10
    head_s: float = 30.0
    body_s: float = 60.0
    max_connections: int = 512
    grace_s: float = 20.0


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to that address; port 0: any free one. Raises SettingError if it cannot be had."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=kind, backlog=2048)
    except socket.gaierror:
        raise SettingError(f"host {host!r} is no address of this machine: 127.0.0.1 is the usual one") from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        advice = "stop what listens there, or set another port"
        raise SettingError(f"cannot listen on {host}:{port}: {reason}; {advice}") from None


class Server(uvicorn.Server):
    """An HTTP server that ends on SIGTERM and SIGINT without dying of them.

    on_listening: called as soon as clients can connect. on_stopping: awaited beside the running answers when the end
    begins. A second SIGINT cuts the connections.
    """

    def __init__(
        self,
        app: Callable,
        limits: HttpLimits,
        on_listening: Callable[[], None] = lambda: None,
        on_stopping: Callable[[], Awaitable[None]] | None = None,
    ):
        super().__init__(
            uvicorn.Config(
                app,
                http=type("BoundProtocol", (GuardedProtocol,), {"limits": limits}),
                ws="none",
                interface="asgi3",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                h11_max_incomplete_event_size=limits.max_header_bytes,
                timeout_graceful_shutdown=limits.grace_s + _AFTER_GRACE_S,
                backlog=min(2048, limits.max_connections * 2),
            )
        )
        self._on_listening, self._on_stopping = on_listening, on_stopping

    async def startup(self, sockets: list | None = None) -> None:
        """Starts the app, then takes connections from the sockets."""
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    async def shutdown(self, sockets: list | None = None) -> None:
        """Ends listening and idle connections, waits for the running answers and for on_stopping."""
        stopping = asyncio.ensure_future(self._on_stopping()) if self._on_stopping else None
        await super().shutdown(sockets)
        if stopping:
            await stopping

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM begin the end; SIGHUP (a terminal closed) means nothing. Only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def end(received: int, _frame: FrameType | None) -> None:
            self.force_exit = self.should_exit and received == signal.SIGINT
            self.should_exit = True

        def ignore(_received: int, _frame: FrameType | None) -> None:
            pass

        handlers = {signal.SIGINT: end, signal.SIGTERM: end, signal.SIGHUP: ignore}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class GuardedProtocol(H11Protocol):
    """One connection: refused beyond the allowed number, closed if a request does not arrive in time."""

    limits: HttpLimits
    _timer: asyncio.TimerHandle | None = None
    _waits_for = "head"
    _bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for a head."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(problem("connections", found=self.limits.max_connections, retry_after_s=5.0))
        else:
            self._wait("head")

    def data_received(self, data: bytes) -> None:
        """Hands the bytes on, then sees what is still missing of the request."""
        if self.transport.is_closing():
            return
        self._bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            self._stop_waiting()
        elif self.cycle is None or self.cycle.response_complete:
            self._wait("head")
        elif self.cycle.more_body:
            self._wait("body")
        else:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """The connection is idle again; uvicorn's own timer closes it if it stays so."""
        self._stop_waiting()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in JSON, and with 431 for a head that is too large."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self._refuse(problem("headers") if status == 431 else problem("bad_http"))

    def _wait(self, part: str) -> None:
        """Starts the timer of that part; one that runs for it goes on, so that single bytes win no time."""
        if self._timer is not None and self._waits_for == part:
            return
        self._stop_waiting()
        self._waits_for = part
        seconds = self.limits.head_s if part == "head" else self.limits.body_s
        self._timer = self.loop.call_later(seconds, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.transport is None or self.transport.is_closing():
            return
        if self._bytes == 0:  # opened in advance and never used
            self.transport.close()
            return
        seconds = self.limits.head_s if self._waits_for == "head" else self.limits.body_s
        self._refuse(ApiError("slow", f"the {self._waits_for} of the request did not arrive within {seconds:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """An error without the app, and the end of the connection."""
        body = error.encoded("openai")
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in (headers | error.headers()).items())
        reason = HTTPStatus(error.status).phrase
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(f"HTTP/1.1 {error.status} {reason}\r\n{head}\r\n".encode() + body)
        self._stop_waiting()
        self.transport.close()
