"""Sends a request's answer: whole, or as server-sent events.

Headers go out with the first event, so that what fails before the first token has its
real status; after 15 s without one a stream begins all the same, and comments keep it
alive. A stream that fails later ends with an event that says so. The client's leaving is
watched for in both modes and stops the work at once; a client that reads slowly slows the
worker down. It does not know fields.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Send

from mesh.errors import InternalError, MeshError
from router.core.core import Answer
from router.core.outbox import Outbox
from router.core.request import Delta, Usage
from router.openai import errors

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")
Headers = Sequence[tuple[str, str]]


class Events(Protocol):
    """A stream's events, in an endpoint's dialect. `failed` ends one that has begun."""

    def begin(self, usage: Usage) -> bytes: ...
    def of(self, delta: Delta) -> bytes: ...
    async def end(self, usage: Usage) -> bytes: ...
    def failed(self, error: MeshError) -> bytes: ...


class Dialect(Protocol):
    """What an endpoint's answers look like (`ChatRequest`, `CompletionRequest`, ...).

    `head` has the answer's id, when it was created, and the model as the client named it.
    """

    async def answer(
        self, head: Mapping[str, Any], choices: Sequence[Delta], usage: Usage
    ) -> dict[str, Any]: ...
    def events(self, head: Mapping[str, Any]) -> Events: ...


class ClientLeft(Exception):
    """The client's connection is gone."""


class Connection:
    """One request's connection: what goes out, and whether the client is still there."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._gone: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._quiet_since_s = 0.0
        self.started = False

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled if the client leaves first: ClientLeft."""
        task = asyncio.ensure_future(work)
        try:
            await self.wait(task, None)
            return task.result()
        finally:
            if not task.done():
                task.cancel()

    async def wait(self, task: asyncio.Future[T], timeout_s: float | None) -> bool:
        """Whether `task` is done; False after `timeout_s`. Raises ClientLeft when the client leaves."""
        gone = self._watch()
        both: set[asyncio.Future[Any]] = {task, gone}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and gone.done():
            raise ClientLeft
        return task.done()

    async def deltas(self, outbox: Outbox, silence_s: float | None = None) -> list[Delta] | None:
        """What is new; an empty list at the end, None after `silence_s`. Raises ClientLeft, or the error.

        Called for every token of every stream: it costs one wake-up, no task and no timer of its own.
        """
        gone = self._watch()
        loop = asyncio.get_running_loop()
        self._quiet_since_s = loop.time()
        while (deltas := outbox.taken()) is None:
            if gone.done():
                raise ClientLeft
            if silence_s is not None:
                if loop.time() - self._quiet_since_s >= silence_s:
                    return None
                if self._alarm is None:
                    self._alarm = loop.call_later(silence_s, self._ring, outbox, silence_s)
            gone.add_done_callback(nudge := lambda _: outbox.nudge())
            try:
                await outbox.news()
            finally:
                gone.remove_done_callback(nudge)
        return deltas

    def _ring(self, outbox: Outbox, silence_s: float) -> None:
        """The silence may be over since: then the rest of the present one is waited for."""
        left_s = self._quiet_since_s + silence_s - asyncio.get_running_loop().time()
        self._alarm = None
        if left_s > 0:
            self._alarm = asyncio.get_running_loop().call_later(left_s, self._ring, outbox, silence_s)
        else:
            outbox.nudge()

    def _watch(self) -> asyncio.Task[None]:
        if self._gone is None:
            self._gone = asyncio.ensure_future(self._disconnected())
        return self._gone

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def body(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._gone is not None:
            self._gone.cancel()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


ErrorSender = Callable[[Connection, MeshError, Headers], Awaitable[None]]


async def send_whole(
    connection: Connection,
    dialect: Dialect,
    head: Mapping[str, Any],
    answer: Answer,
    headers: Callable[[], Headers],
) -> None:
    """Collects every choice and answers once."""
    whole = {index: Delta(index) for index in range(answer.choices)}
    while deltas := await connection.deltas(answer.outbox):
        for delta in deltas:
            whole[delta.index].add(delta)
    data = _encode(await dialect.answer(head, list(whole.values()), answer.usage))
    await send_json(connection, 200, data, headers())


async def send_json(connection: Connection, status: int, data: bytes, headers: Headers) -> None:
    length = ("content-length", str(len(data)))
    await connection.start(status, [("content-type", "application/json"), length, *headers])
    await connection.body(data)


async def send_stream(
    connection: Connection, events: Events, answer: Answer, headers: Callable[[], Headers]
) -> None:
    """Server-sent events. Raises what fails; if nothing was sent by then, the client gets its status."""
    deltas = await connection.deltas(answer.outbox, KEEP_ALIVE_S)
    await connection.start(200, [("content-type", EVENT_STREAM), ("cache-control", "no-cache"), *headers()])
    opening = events.begin(answer.usage) + (KEEP_ALIVE if deltas is None else b"")
    if opening:
        await connection.body(opening, more=True)
    if deltas is None:
        deltas = await connection.deltas(answer.outbox, KEEP_ALIVE_S)
    while deltas is None or deltas:
        data = KEEP_ALIVE if deltas is None else b"".join([events.of(delta) for delta in deltas])
        if data:
            await connection.body(data, more=True)
        deltas = await connection.deltas(answer.outbox, KEEP_ALIVE_S)
    await connection.body(await connection.unless_gone(events.end(answer.usage)))


async def send_error(connection: Connection, error: MeshError, headers: Headers) -> None:
    """An error answer, in place of any other."""
    await send_json(connection, error.http_status, errors.body(error), [*headers, *errors.headers(error)])


def mesh_error(error: BaseException) -> MeshError:
    """What a client is told of a failure; anything that is no MeshError is logged and not told."""
    if isinstance(error, MeshError):
        return error
    log.error("request failed", exc_info=error)
    return InternalError("The server had an error while processing your request.")


def created() -> int:
    return int(time.time())
