"""Prometheus metrics behind a token, on a server that is nothing but an asyncio protocol.

`GET /metrics` with `Authorization: Bearer <token>` answers; a wrong or missing
token is 401 whatever the path, and any other path is 404.
"""

from __future__ import annotations

import asyncio
import hmac

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

# Time to first token: from a cached prompt on a small model to a long one on a slow machine.
LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
# Between two tokens of one stream.
TOKEN_INTERVAL_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5,
)  # fmt: skip

_HEAD_LIMIT_BYTES = 8192
_HEAD_TIMEOUT_S = 5.0
_CONNECTION_LIMIT = 16


class MetricsServer:
    """Serves one registry on `host`:`port`; port 0 takes a free one."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int, token: str) -> None:
        if not token:
            raise ValueError("the metrics token is empty")
        self._registry = registry
        self._host, self._port = host, port
        self._expected = b"Bearer " + token.encode()
        self._server: asyncio.Server | None = None
        self._connections = 0

    @property
    def url(self) -> str:
        """Where the metrics are; valid after `start`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/metrics"

    async def start(self) -> None:
        """Raises OSError if the address cannot be had."""
        self._server = await asyncio.start_server(
            self._serve, self._host, self._port, limit=_HEAD_LIMIT_BYTES, backlog=_CONNECTION_LIMIT
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _CONNECTION_LIMIT:
                async with asyncio.timeout(_HEAD_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            self._connections -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        request, *lines = head.split(b"\r\n")
        words = request.split(b" ")
        given = [
            line.split(b":", 1)[1].strip() for line in lines if line.lower().startswith(b"authorization:")
        ]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
            return _response(
                b"401 Unauthorized", b"a bearer token is needed\n", b"www-authenticate: Bearer\r\n"
            )
        if len(words) != 3 or words[1].split(b"?")[0] != b"/metrics":
            return _response(b"404 Not Found", b"only /metrics is here\n")
        if words[0] != b"GET":
            return _response(b"405 Method Not Allowed", b"only GET\n", b"allow: GET\r\n")
        return _response(b"200 OK", generate_latest(self._registry), kind=CONTENT_TYPE_LATEST.encode())


def _response(
    status: bytes, body: bytes, headers: bytes = b"", *, kind: bytes = b"text/plain; charset=utf-8"
) -> bytes:
    return (
        b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n"
        b"cache-control: no-store\r\n%b\r\n%b" % (status, kind, len(body), headers, body)
    )
