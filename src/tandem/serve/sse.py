"""Server-sent events: updates of an answer to bytes on a connection, with pings, bounded memory and prompt cancelling.

In: an iterator of updates and a shaper, which writes them in the events of one API. Out: an ASGI response. Nothing is
sent before the first sign of work, so that errors before it have their HTTP status; later ones are events.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from tandem.serve.answer import Ended, Progress, Update, Written
from tandem.serve.errors_api import ApiError, Shape, as_api_error

PING = b": ping\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class StreamTiming:
    """Seconds. patience_s: until headers are sent though nothing has begun; ping_s: of silence until a comment;
    event_s: of silence until an event that says nothing, for clients that do not count comments; 0: never."""

    patience_s: float = 0.5
    ping_s: float = 15.0
    event_s: float = 60.0


class Shaper(Protocol):
    """Writes the events of one API. Each method returns bytes of whole events, b"" for none."""

    shape: Shape

    def begin(self, progress: Progress | None) -> bytes:
        """The first events; progress: of the prompt, None if it has not begun."""

    def written(self, update: Written) -> bytes:
        """More of the answer."""

    def ended(self, update: Ended) -> bytes:
        """The end of one answer."""

    def close(self) -> bytes:
        """What follows the end of all answers."""

    def idle(self) -> bytes:
        """An event that says nothing."""

    def fail(self, error: ApiError) -> bytes:
        """The last event if something went wrong."""


class EventStream:
    """An ASGI response. Closes the updates, and with them the generation, when the client goes or all is sent."""

    def __init__(
        self,
        updates: AsyncIterator[Update],
        shaper: Shaper,
        timing: StreamTiming,
        headers: list[tuple[bytes, bytes]] = (),
    ):
        self._updates, self._shaper, self._timing = updates, shaper, timing
        self._headers = [*HEADERS, *headers]
        self._started = self._sending = False
        self._last_bytes = self._last_event = time.monotonic()

    async def __call__(self, scope, receive, send) -> None:
        """Sends everything; returns early when the client has gone."""
        self._send = send
        work = asyncio.create_task(self._run())
        await until_gone(work, receive)

    async def _run(self) -> None:
        async with aclosing(self._updates) as updates:
            pings = None
            try:
                first = asyncio.ensure_future(_first_sign(updates))
                try:
                    await asyncio.wait({first}, timeout=self._timing.patience_s)
                    if not first.done():
                        await self._begin(None)
                        pings = asyncio.create_task(self._ping())
                    update = await first
                finally:
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)  # updates cannot be closed while it reads them
                if pings is None:
                    await self._begin(update if isinstance(update, Progress) else None)
                    pings = asyncio.create_task(self._ping())
                await self._pass_on(update, updates)
                data = self._shaper.close()
            except Exception as error:
                if not self._started:
                    await self._refuse(as_api_error(error))
                    return
                data = self._shaper.fail(as_api_error(error))
            finally:
                if pings:
                    pings.cancel()
            await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _pass_on(self, update: Update | None, updates: AsyncIterator[Update]) -> None:
        await self._one(update)
        async for update in updates:
            await self._one(update)

    async def _one(self, update: Update | None) -> None:
        kind = type(update)
        if kind is Written:
            await self._event(self._shaper.written(update))
        elif kind is Ended:
            await self._event(self._shaper.ended(update))

    async def _begin(self, progress: Progress | None) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._event(self._shaper.begin(progress))

    async def _event(self, data: bytes) -> None:
        if not data:
            return
        self._sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending = False
        self._last_bytes = self._last_event = time.monotonic()

    async def _ping(self) -> None:
        """Breaks silences. A client that does not read gets none: the bytes before them are still on their way."""
        timing = self._timing
        if not timing.ping_s:
            return
        while True:
            now = time.monotonic()
            due_s = min(self._last_bytes + timing.ping_s, self._last_event + (timing.event_s or 1e9)) - now
            if due_s > 0:
                await asyncio.sleep(due_s)
            elif self._sending:
                await asyncio.sleep(timing.ping_s)
            elif timing.event_s and now >= self._last_event + timing.event_s:
                await self._event(self._shaper.idle() or PING)
            else:
                await self._send({"type": "http.response.body", "body": PING, "more_body": True})
                self._last_bytes = time.monotonic()

    async def _refuse(self, error: ApiError) -> None:
        await send_json(self._send, error.status, error.encoded(self._shaper.shape), error.headers())


async def _first_sign(updates: AsyncIterator[Update]) -> Update | None:
    """The first update that says the request has begun; None if there is none at all."""
    async for update in updates:
        if not isinstance(update, Progress) or update.step is not None:
            return update
    return None


async def until_gone(work: asyncio.Task, receive: Callable) -> None:
    """Waits for the work, and cancels it as soon as the client has gone. Raises what the work raised."""
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
    if not work.cancelled() and (error := work.exception()):
        raise error


async def _gone(receive: Callable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Callable, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """One whole JSON response."""
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    fields += [(key.encode(), value.encode("latin-1", "replace")) for key, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})
