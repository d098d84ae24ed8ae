"""Sends a request's answer: whole, or as server-sent events.

Headers go out with the first event, so that everything that fails before the first
token has its real status. A stream that fails later ends with an `error` event and
without `[DONE]`. The client's leaving is watched for in both modes and stops the work
at once; a client that reads slowly slows the worker down. It does not know fields.
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
from router.core.request import Delta, Usage
from router.openai import errors

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
EVENT_STREAM = "text/event-stream; charset=utf-8"

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")
Headers = Sequence[tuple[str, str]]


class Dialect(Protocol):
    """What an endpoint's answers look like (`ChatRequest`, `CompletionRequest`)."""

    include_usage: bool

    def answer(self, head: Mapping[str, Any], choices: Sequence[Delta], usage: Usage) -> dict[str, Any]: ...
    def usage(self, usage: Usage) -> dict[str, Any]: ...
    def chunk_head(self, head: Mapping[str, Any]) -> dict[str, Any]: ...
    def first(self, index: int) -> dict[str, Any] | None: ...
    def content(self, delta: Delta) -> Sequence[dict[str, Any]]: ...
    def finish(self, delta: Delta) -> dict[str, Any] | None: ...


class ClientLeft(Exception):
    """The client's connection is gone."""


class Connection:
    """One request's connection: what goes out, and whether the client is still there."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._gone: asyncio.Task[None] | None = None
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
        if self._gone is None:
            self._gone = asyncio.ensure_future(self._disconnected())
        both: set[asyncio.Future[Any]] = {task, self._gone}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and self._gone.done():
            raise ClientLeft
        return task.done()

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def body(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def close(self) -> None:
        if self._gone is not None:
            self._gone.cancel()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def send_whole(
    connection: Connection,
    dialect: Dialect,
    head: Mapping[str, Any],
    answer: Answer,
    headers: Callable[[], Headers],
) -> None:
    """Collects every choice and answers once."""
    whole = {index: Delta(index) for index in range(answer.choices)}
    while deltas := await connection.unless_gone(answer.take()):
        for delta in deltas:
            whole[delta.index].add(delta)
    data = _encode(dialect.answer(head, list(whole.values()), answer.usage))
    await send_json(connection, 200, data, headers())


async def send_json(connection: Connection, status: int, data: bytes, headers: Headers) -> None:
    length = ("content-length", str(len(data)))
    await connection.start(status, [("content-type", "application/json"), length, *headers])
    await connection.body(data)


async def send_stream(
    connection: Connection,
    dialect: Dialect,
    head: Mapping[str, Any],
    answer: Answer,
    headers: Callable[[], Headers],
) -> None:
    """Server-sent events. Raises what failed before the first one; later failures become an event."""
    events = _Events(dialect, head)
    deltas = await connection.unless_gone(answer.take())
    await connection.start(200, [("content-type", EVENT_STREAM), ("cache-control", "no-cache"), *headers()])
    while deltas:
        data = b"".join(events.of(delta) for delta in deltas)
        if data:
            await connection.body(data, more=True)
        deltas = await _next(connection, answer)
    await connection.body(events.end(answer.usage))


async def _next(connection: Connection, answer: Answer) -> list[Delta]:
    """The next deltas; a comment goes out after every 15 s of silence."""
    waiting = asyncio.ensure_future(answer.take())
    try:
        while not await connection.wait(waiting, KEEP_ALIVE_S):
            await connection.body(b": keep-alive\n\n", more=True)
        return waiting.result()
    finally:
        waiting.cancel()


async def send_error(connection: Connection, error: MeshError, headers: Headers) -> None:
    """An error answer; on a stream that has begun, an event that ends it."""
    if not connection.started:
        await send_json(connection, error.http_status, errors.body(error), [*headers, *errors.headers(error)])
        return
    await connection.body(b"data: " + errors.body(error) + b"\n\n")


class _Events:
    """The order of a stream: per choice its opening, content and finish; then usage, then the end mark."""

    def __init__(self, dialect: Dialect, head: Mapping[str, Any]) -> None:
        self._dialect = dialect
        self._opened: set[int] = set()
        self._head = dialect.chunk_head(head)
        # The head is the same in every chunk: it is written once.
        self._prefix = b"data: " + _encode(self._head)[:-1] + b',"choices":'
        self._suffix = b',"usage":null}\n\n' if dialect.include_usage else b"}\n\n"

    def of(self, delta: Delta) -> bytes:
        parts: list[dict[str, Any] | None] = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            parts.append(self._dialect.first(delta.index))
        parts.extend(self._dialect.content(delta))
        if delta.finish is not None:
            parts.append(self._dialect.finish(delta))
        return b"".join(self._prefix + _encode([part]) + self._suffix for part in parts if part is not None)

    def end(self, usage: Usage) -> bytes:
        last = b""
        if self._dialect.include_usage:
            last = self._prefix + b'[],"usage":' + _encode(self._dialect.usage(usage)) + b"}\n\n"
        return last + b"data: [DONE]\n\n"


def mesh_error(error: BaseException) -> MeshError:
    """What a client is told of a failure; anything that is no MeshError is logged and not told."""
    if isinstance(error, MeshError):
        return error
    log.error("request failed", exc_info=error)
    return InternalError("The server had an error while processing your request.")


def created() -> int:
    return int(time.time())
