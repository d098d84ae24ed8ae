"""uvicorn without its clock: idle is idle.

The stock server wakes ten times a second to look at a flag and the date. This one
waits for an event; Envoy writes the date. It listens on a Unix socket of the owner
alone, or on loopback, never elsewhere, and leaves signals to the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from mesh.sockets import SocketPlace

BACKLOG = 2048
# Longer than the edge keeps a connection that nobody uses.
KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        self.server_state.default_headers = self.config.encoded_headers
        await self.stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one application. `socket_path`, or `port` on loopback (0 takes a free one).

    Answers that run when it stops have `grace_s`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        socket_path: Path | None = None,
        port: int | None = None,
        grace_s: float = 5.0,
    ) -> None:
        self._place = None if socket_path is None else SocketPlace(socket_path)
        self._socket = _loopback(port or 0) if self._place is None else _unix(self._place.own)
        self._server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                loop="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(grace_s),
                h11_max_incomplete_event_size=64 * 1024,
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """`unix:/path`, or `127.0.0.1:port`."""
        if self._place is not None:
            return f"unix:{self._place.path}"
        host, port = self._socket.getsockname()[:2]
        return f"{host}:{port}"

    async def start(self) -> None:
        self._socket.listen(BACKLOG)
        if self._place is not None:
            self._place.take()
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._socket]), name="http server"
        )

    async def stop(self) -> None:
        """No new connections; running answers have their grace."""
        self._server.should_exit = True
        self._server.stopping.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._place is not None:
            self._place.leave()


def _unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _loopback(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
