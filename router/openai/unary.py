"""An endpoint that answers once, without generating: opened, identified, answered and settled alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from mesh.errors import MeshError
from mesh.telemetry import bind_request_id
from router.core.core import Admitted, Core
from router.core.exchange import CANCELLED, Exchange
from router.core.request import Caller
from router.openai.answers import ClientLeft, Connection, ErrorSender, mesh_error, send_error, send_json
from router.openai.body import read_object
from router.openai.guard import arrival_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One request as an endpoint sees it."""

    core: Core
    exchange: Exchange
    caller: Caller
    connection: Connection
    path: Mapping[str, str]
    query: Sequence[tuple[str, str]]
    _scope: Scope
    _receive: Receive

    async def body(self) -> dict[str, Any]:
        """The JSON object of the request; raises InvalidRequest or RequestTooLarge."""
        return await read_object(self._scope, self._receive)

    async def admit(self, model: str) -> Admitted:
        """Decides; raises ModelNotFound for an unknown and for a forbidden model alike."""
        return await self.core.admit(self.exchange, model)

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled if the client leaves first."""
        return await self.connection.unless_gone(work)


Work = Callable[[Call], Awaitable[Any]]


class Unary:
    """One endpoint. `work` gives what is to be the JSON answer, or raises."""

    def __init__(self, core: Core, route: str, work: Work, *, send_error: ErrorSender = send_error) -> None:
        self._core = core
        self._route = route
        self._work = work
        self._send_error = send_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = arrival_of(scope)
        exchange = arrival.exchange(self._core.books, self._route)
        connection = Connection(receive, send)
        failure: MeshError | None = None
        outcome = CANCELLED
        with bind_request_id(arrival.request_id):
            try:
                caller = self._core.identify(exchange, arrival.identity_token)
                call = Call(
                    self._core,
                    exchange,
                    caller,
                    connection,
                    scope.get("path_params", {}),
                    _query(scope),
                    scope,
                    receive,
                )
                data = msgspec.json.encode(await self._work(call))
                await send_json(connection, 200, data, arrival.headers(caller))
                outcome = "ok"
            except ClientLeft:
                pass
            except asyncio.CancelledError:
                raise
            except Exception as error:
                failure = mesh_error(error)
                await self._send_error(connection, failure, arrival.headers(exchange.caller))
            finally:
                exchange.settle(outcome, failure)
                connection.close()


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
