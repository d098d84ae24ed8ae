"""The sending end of the byte path: a thread per connection, the store's loop decides.

What may be sent, and when, is asked on the store's event loop; the thread only moves
bytes, from shared memory straight into the socket. Without TLS the loop itself hears
requests, and answers those that are small. A caller that hangs up while
nothing is there to send is noticed at once. It does not know the rules of pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from kvmesh.v1 import pages_pb2

from kvstore.exports import Sending
from kvstore.framing import HEADER, MAGIC, SCHEME, Kind, end, error_frame, receive, receive_part
from kvstore.quick_pulls import QUICK_BYTES, is_quick, request_heard
from mesh.ca import service_uri
from mesh.errors import InternalError, InvalidRequest, MeshError, Unauthenticated
from mesh.identity import TokenVerifier, service_audience

log = logging.getLogger(__name__)

T = TypeVar("T")

ROLE = "kvstore"
HELLO_S = 10.0
# A receiver that takes nothing for so long is gone, whatever its host says.
STALLED_S = 60.0
BACKLOG = 64

# An asynchronous generator: nothing runs until the loop asks for the first batch.
Pull = Callable[[pages_pb2.PullRequest], AsyncGenerator[list[Sending], None]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request on its way: what was asked, where the pages come from, the first of them."""

    request: pages_pb2.PullRequest
    pages: AsyncGenerator[list[Sending], None]
    batch: list[Sending]


class LinkServer:
    """`pull` answers one request; `tls` is the server's context, None on a Unix socket."""

    def __init__(self, pull: Pull, verifier: TokenVerifier, tls: ssl.SSLContext | None) -> None:
        self.address = ""
        self._pull = pull
        self._verifier = verifier
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self.connections: dict[socket.socket, threading.Thread] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def listen(self, address: str) -> None:
        """At `unix:PATH` or `host:port`; `self.address` is what other stores dial."""
        if address.startswith("unix:"):
            path = Path(address.removeprefix("unix:"))
            path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            path.chmod(0o600)
            self.address = f"{SCHEME}{address}"
        else:
            host, _, port = address.rpartition(":")
            listener = socket.create_server((host.strip("[]"), int(port)))
            self.address = f"{SCHEME}{host}:{listener.getsockname()[1]}"
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self._accepting = self._loop.create_task(self._accept(listener))

    async def close(self) -> None:
        """Breaks every connection off and waits for its thread."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        if self._listener is not None:
            self._listener.close()
        threads = list(self.connections.values())
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
        # They still ask this loop for a last word, so the wait must not block it.
        for thread in threads:
            await asyncio.to_thread(thread.join)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = await self._loop.sock_accept(listener)
            connection.setblocking(True)
            connection.settimeout(HELLO_S)
            if connection.family == socket.AF_UNIX:
                # For the whole of what is sent at once, with what the kernel needs beside it.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * QUICK_BYTES)
            thread = threading.Thread(target=self._serve, args=(connection,), name="pages out", daemon=True)
            self.connections[connection] = thread
            thread.start()

    # -- in the connection's thread -------------------------------------------

    def _serve(self, raw: socket.socket) -> None:
        connection = raw
        try:
            if raw.family != socket.AF_UNIX:
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                assert self._tls is not None
                connection = self._tls.wrap_socket(raw, server_side=True)
            refused = self._hello(connection)
            connection.settimeout(None)
            if refused is not None:
                receive_part(connection)
                connection.settimeout(STALLED_S)
                connection.sendall(error_frame(refused))
                return
            while True:
                try:
                    self._answer(connection, self._asked(connection))
                except MeshError as error:
                    connection.settimeout(STALLED_S)
                    connection.sendall(error_frame(error))
                connection.settimeout(None)
        except (OSError, RuntimeError) as error:
            log.debug("a connection for pages ended: %s", error)
        finally:
            connection.close()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.connections.pop, raw, None)

    def _hello(self, connection: socket.socket) -> MeshError | None:
        """Who calls must be a store of this mesh, and under TLS the one of the certificate."""
        if receive(connection, len(MAGIC)) != MAGIC:
            raise ConnectionError("not a caller of this protocol")
        token = receive_part(connection).decode(errors="replace")
        names: set[str] | None = None
        if isinstance(connection, ssl.SSLSocket):
            certificate: dict[str, Any] = connection.getpeercert() or {}
            names = {value for _, value in certificate.get("subjectAltName", ())}
        return asyncio.run_coroutine_threadsafe(self._verify(token, names), self._loop).result()

    def _asked(self, connection: socket.socket) -> _Asked:
        """The next request that this thread has to answer; MeshError for one that is refused."""
        if not isinstance(connection, ssl.SSLSocket):
            return self._on_loop(self._quickly(connection))
        return self._on_loop(self._begun(connection, receive_part(connection)))

    def _answer(self, connection: socket.socket, asked: _Asked) -> None:
        compress, left, batch = asked.request.compress, len(asked.request.block_ids), asked.batch
        connection.settimeout(STALLED_S)
        try:
            while batch:
                left -= len(batch)
                for page in batch:
                    last = left <= 0 and page is batch[-1]
                    _send(connection, page, end() if last else b"", compress=compress)
                if left <= 0:
                    return
                batch = self._on_loop(self._next(connection.fileno(), asked.pages))
            connection.sendall(end())
        finally:
            # What was leased for this goes back in its own time.
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(asked.pages.aclose()))

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # -- on the loop ------------------------------------------------------------

    async def _verify(self, token: str, names: set[str] | None) -> MeshError | None:
        try:
            caller = self._verifier.verify(token, audience=service_audience(ROLE), roles={ROLE})
            if names is not None and service_uri(caller.role, caller.name) not in names:
                raise Unauthenticated(
                    "the token is not of the certificate's owner", code="invalid_mesh_token"
                )
        except MeshError as error:
            return error
        return None

    async def _quickly(self, connection: socket.socket) -> _Asked:
        """Answers what is small and there; returns with the first request that is not."""
        while True:
            asked = await self._begun(connection, await request_heard(connection))
            if not _sent_at_once(connection, asked):
                return asked
            await asked.pages.aclose()

    async def _begun(self, connection: socket.socket, data: bytes) -> _Asked:
        """A request and its first pages; asked for once at least: whether any may be had is checked there."""
        try:
            request = pages_pb2.PullRequest.FromString(data)
        except DecodeError:
            raise InvalidRequest("not a PullRequest") from None
        pages = self._pull(request)
        try:
            return _Asked(request, pages, await self._next(connection.fileno(), pages))
        except BaseException:
            await pages.aclose()
            raise

    async def _next(self, handle: int, pages: AsyncGenerator[list[Sending], None]) -> list[Sending]:
        """The next pages, empty after the last. A caller that says anything meanwhile is leaving."""
        task = asyncio.current_task()
        assert task is not None
        left = False

        def leave() -> None:
            nonlocal left
            left = True
            self._loop.remove_reader(handle)
            task.cancel()

        self._loop.add_reader(handle, leave)
        try:
            return await anext(pages, [])
        except asyncio.CancelledError:
            if left:
                raise ConnectionError("the caller has left") from None
            raise
        except MeshError:
            raise
        except ConnectionError:
            raise
        except Exception:
            log.exception("pages could not be sent")
            raise InternalError("internal error") from None
        finally:
            if not left:
                self._loop.remove_reader(handle)


def _sent_at_once(connection: socket.socket, asked: _Asked) -> bool:
    """Sends an answer that is complete and fits in the socket's buffer from the loop: to wake a
    thread for it takes longer."""
    batch, request = asked.batch, asked.request
    small = is_quick([len(page.data) for page in batch])
    if not batch or len(batch) < len(request.block_ids) or not small or request.compress:
        return False
    parts: list[bytes | memoryview] = []
    for page in batch:
        parts += (_header(Kind.PAGE, page, len(page.data)), page.data)
    parts.append(end())
    try:
        sent = connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    if sent < sum(map(len, parts)):
        raise ConnectionError("the caller takes nothing")
    return True


def _header(kind: Kind, page: Sending, length: int) -> bytes:
    return HEADER.pack(kind, page.index, length, page.seal, page.parent_id)


def _send(connection: socket.socket, page: Sending, then: bytes, *, compress: bool) -> None:
    """A page, and what follows it."""
    data: bytes | memoryview = page.data
    kind = Kind.PAGE
    if compress and len(smaller := zlib.compress(page.data, 1)) < len(data):
        data, kind = smaller, Kind.DEFLATED
    header = _header(kind, page, len(data))
    if isinstance(connection, ssl.SSLSocket):
        connection.sendall(header)
        connection.sendall(data)
        if then:
            connection.sendall(then)
        return
    parts: list[bytes | memoryview] = [header, data, then]
    sent = connection.sendmsg(parts)
    for part in parts:
        rest = part[min(sent, len(part)) :]
        sent -= len(part) - len(rest)
        if rest:
            connection.sendall(rest)
