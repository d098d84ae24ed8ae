"""An endpoint that generates: from the body to the last byte, with one account at the end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from mesh.telemetry import bind_request_id
from router.core.core import Admitted, Answer, Core
from router.core.exchange import CANCELLED, Exchange
from router.core.request import Ask
from router.openai.answers import (
    ClientLeft,
    Connection,
    Dialect,
    ErrorSender,
    Events,
    created,
    mesh_error,
    send_error,
    send_stream,
    send_whole,
)
from router.openai.body import read_object
from router.openai.guard import Arrival, arrival_of


class Reading(Dialect, Protocol):
    """A request in one endpoint's dialect; `read` comes after the caller may use the model."""

    model: str
    stream: bool
    names: Mapping[str, str]

    def read(self) -> None: ...
    async def ask(self, core: Core, admitted: Admitted) -> Ask: ...


class ReadingOf(Protocol):
    """Makes a `Reading` of a body; raises InvalidRequest."""

    def __call__(self, body: Mapping[str, Any]) -> Reading: ...


class Generate:
    """One endpoint. `id_prefix` begins the answers' ids."""

    def __init__(
        self,
        core: Core,
        route: str,
        reading: ReadingOf,
        id_prefix: str,
        *,
        send_error: ErrorSender = send_error,
    ) -> None:
        self._core = core
        self._route = route
        self._reading = reading
        self._id_prefix = id_prefix
        self._send_error = send_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = arrival_of(scope)
        exchange = arrival.exchange(self._core.books, self._route)
        with bind_request_id(arrival.request_id):
            connection = Connection(receive, send)
            try:
                await self._serve(scope, receive, arrival, exchange, connection)
            finally:
                connection.close()

    async def _serve(
        self, scope: Scope, receive: Receive, arrival: Arrival, exchange: Exchange, connection: Connection
    ) -> None:
        answer: Answer | None = None
        events: Events | None = None
        failure: BaseException | None = None
        try:
            reading, answer = await self._begin(scope, receive, arrival, exchange, connection)
            head = {
                "id": self._id_prefix + secrets.token_hex(12),
                "created": created(),
                "model": reading.model,
            }
            headers = partial(self._headers, arrival, exchange)
            if reading.stream:
                events = reading.events(head)
                await send_stream(connection, events, answer, headers)
            else:
                await send_whole(connection, reading, head, answer, headers)
        except ClientLeft:
            failure = asyncio.CancelledError()
        except asyncio.CancelledError as error:
            failure = error
            raise
        except Exception as error:
            failure = mesh_error(error)
            self._settle(exchange, answer, failure)
            if connection.started and events is not None:
                await connection.body(events.failed(failure))
            elif not connection.started:
                await self._send_error(connection, failure, self._headers(arrival, exchange))
        finally:
            self._settle(exchange, answer, failure)

    async def _begin(
        self, scope: Scope, receive: Receive, arrival: Arrival, exchange: Exchange, connection: Connection
    ) -> tuple[Reading, Answer]:
        core = self._core
        core.identify(exchange, arrival.identity_token)
        reading = self._reading(await read_object(scope, receive))
        admitted = await core.admit(exchange, reading.model)
        reading.read()
        ask = await connection.unless_gone(reading.ask(core, admitted))
        return reading, await core.start(admitted, ask, names=reading.names)

    @staticmethod
    def _headers(arrival: Arrival, exchange: Exchange) -> list[tuple[str, str]]:
        return arrival.headers(exchange.caller)

    @staticmethod
    def _settle(exchange: Exchange, answer: Answer | None, failure: BaseException | None) -> None:
        """Stops what still runs, and closes the account. Only the first call counts."""
        if answer is not None:
            answer.close(failure)
        elif failure is None or isinstance(failure, asyncio.CancelledError):
            exchange.settle(CANCELLED)
        else:
            exchange.settle(error=mesh_error(failure))
