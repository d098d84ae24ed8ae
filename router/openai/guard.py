"""Default deny: nothing behind this middleware is reached without the right tokens.

`OPEN` needs none. `EDGE_ONLY` is what Envoy sends by itself: its own service token.
Everything else, paths that do not exist included, needs the edge's service token and
an identity that IAM made for this request. Gives every request its id on the way.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from mesh.errors import MeshError
from router.core.exchange import Books, Exchange
from router.core.identity import Verifier, verify_caller, verify_edge
from router.core.request import Caller
from router.openai.answers import Connection, send_error

OPEN = frozenset({"/healthz", "/readyz"})
EDGE_ONLY = frozenset({"/internal/otlp/v1/traces"})

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_START = re.compile(r"([0-9]{1,12})\.([0-9]{6})")

Denied = Callable[[MeshError, str], None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the edge says of a request. `edge_start_ns` is 0 if it does not say."""

    request_id: str
    service_token: str | None
    identity_token: str | None
    traceparent: str | None
    edge_start_ns: int
    at_ns: int

    def exchange(self, books: Books, route: str) -> Exchange:
        """Opens the books on this request."""
        return Exchange(
            books, route, self.request_id, start_ns=self.edge_start_ns, traceparent=self.traceparent
        )

    def headers(self, caller: Caller | None = None) -> list[tuple[str, str]]:
        """Headers that every answer carries. `caller`: once it is known whose request it is."""
        headers = [
            ("x-request-id", self.request_id),
            ("openai-version", "2020-10-01"),
            ("openai-processing-ms", str((time.time_ns() - self.at_ns) // 1_000_000)),
        ]
        if caller is not None:
            headers += [("openai-organization", caller.organisation), ("openai-project", caller.project)]
        return headers


class Guard:
    """ASGI middleware; sets `scope["arrival"]`."""

    def __init__(self, app: ASGIApp, verifier: Verifier) -> None:
        self._app = app
        self._verifier = verifier

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # No WebSockets: closed before they are accepted.
            await send({"type": "websocket.close", "code": 1008})
            return
        arrival = _arrival(scope)
        scope["arrival"] = arrival
        try:
            self._check(scope["path"], arrival)
        except MeshError as error:
            await send_error(Connection(receive, send), error, arrival.headers())
            return
        await self._app(scope, receive, send)

    def _check(self, path: str, arrival: Arrival) -> None:
        if path in OPEN:
            return
        verify_edge(self._verifier, arrival.service_token)
        if path not in EDGE_ONLY:
            verify_caller(self._verifier, arrival.identity_token, arrival.request_id)


def arrival_of(scope: Scope) -> Arrival:
    """What the guard has found out about the request."""
    arrival = scope["arrival"]
    assert isinstance(arrival, Arrival)
    return arrival


Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


def _arrival(scope: Scope) -> Arrival:
    wanted = {b"x-request-id", b"x-mesh-service", b"x-mesh-identity", b"x-mesh-start", b"traceparent"}
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in wanted:
            # A header that comes twice counts for nothing.
            found[name] = "" if name in found else value.decode("latin-1")
    request_id = found.get(b"x-request-id", "")
    start = _START.fullmatch(found.get(b"x-mesh-start", ""))
    return Arrival(
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else str(uuid.uuid4()),
        service_token=found.get(b"x-mesh-service"),
        identity_token=found.get(b"x-mesh-identity"),
        traceparent=found.get(b"traceparent"),
        edge_start_ns=int(start[1]) * 10**9 + int(start[2]) * 1000 if start else 0,
        at_ns=time.time_ns(),
    )
