"""The receiving end of the byte path: connections to other stores, each with a thread.

Bytes go from the socket straight into the page that they are for, and their checksum
is taken there. It does not know what becomes of a page.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
import threading
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import xxhash
from kvmesh.v1 import pages_pb2

from kvstore.framing import (
    MAGIC,
    SCHEME,
    Header,
    Kind,
    part,
    read_error,
    receive,
    receive_header,
    receive_into,
)
from kvstore.imports import Arrival
from kvstore.quick_pulls import is_quick, pulled
from mesh.ca import role_dns_name
from mesh.config import IdentityFiles
from mesh.errors import InternalError, MeshError, Unavailable

CONNECT_S = 5.0
IDLE_LINKS = 8
ROLE = "kvstore"


@dataclass(frozen=True, slots=True)
class _Job:
    request: pages_pb2.PullRequest
    places: list[tuple[bytes, memoryview]]
    # Called in the link's thread.
    arrived: Callable[[Arrival], None]
    done: Callable[[MeshError | None], None]


class Link:
    """One connection. Connects with its first job; after a failure it is of no more use."""

    def __init__(self, address: str, token: Callable[[], str], tls: ssl.SSLContext | None) -> None:
        self.broken = False
        self._address = address.removeprefix(SCHEME)
        self._token = token
        self._tls = tls
        self._socket: socket.socket | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="pages in", daemon=True).start()

    @property
    def plain(self) -> socket.socket | None:
        """The connection, where it is there and without TLS; for whoever has no job running here."""
        connection = self._socket
        return None if self.broken or isinstance(connection, ssl.SSLSocket) else connection

    def submit(self, job: _Job) -> None:
        """One job at a time."""
        self._jobs.put(job)

    def close(self) -> None:
        """Breaks off what runs; the thread ends."""
        self.broken = True
        self._jobs.put(None)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Not SSLSocket's own, which would take the session from under the thread.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # -- in the link's thread ---------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            error: MeshError | None = None
            try:
                self._pull(job)
            except MeshError as refused:
                error = refused
            except (OSError, ValueError) as broken:
                self.broken = True
                error = Unavailable(f"the connection to the other store broke: {broken}")
            except Exception as bug:
                self.broken = True
                error = InternalError(f"pages could not be received: {bug!r}")
            job.done(error)
        if self._socket is not None:
            self._socket.close()

    def _connect(self) -> socket.socket:
        if self._socket is None:
            if self._address.startswith("unix:"):
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(CONNECT_S)
                connection.connect(self._address.removeprefix("unix:"))
            else:
                if self._tls is None:
                    raise InternalError("pages of another host travel under TLS only")
                host, _, port = self._address.rpartition(":")
                plain = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = self._tls.wrap_socket(plain, server_hostname=role_dns_name(ROLE))
            connection.sendall(MAGIC + part(self._token().encode()))
            connection.settimeout(None)
            self._socket = connection
            if self.broken:
                raise ConnectionError("given up")
        return self._socket

    def _pull(self, job: _Job) -> None:
        connection = self._connect()
        connection.sendall(part(job.request.SerializeToString()))
        while (header := receive_header(connection)).kind is not Kind.END:
            if header.kind is Kind.ERROR:
                raise read_error(receive(connection, min(header.length, 65536)))
            if header.index >= len(job.places):
                self.broken = True
                raise InternalError("the other store sent a page that nobody asked for")
            block_id, place = job.places[header.index]
            self._receive(connection, header, place)
            job.arrived(Arrival(block_id, header.seal, xxhash.xxh3_64_intdigest(place)))

    def _receive(self, connection: socket.socket, header: Header, place: memoryview) -> None:
        if header.kind is Kind.PAGE and header.length == len(place):
            receive_into(connection, place)
            return
        if header.kind is Kind.PAGE or header.length > len(place):
            self.broken = True
            raise InternalError("the other store sent a page of another size", code="corrupt_page")
        inflate = zlib.decompressobj()
        with contextlib.suppress(zlib.error):
            # One that cannot be inflated differs from its checksum.
            page = inflate.decompress(receive(connection, header.length), len(place))
            place[: len(page)] = page


class Links:
    """The connections of one store to others. `files` are its own identity's, for TLS."""

    def __init__(self, token: Callable[[], str], files: IdentityFiles | None) -> None:
        self._token = token
        self._files = files
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[str, list[Link]] = {}

    def take(self, address: str) -> Link:
        """An idle link, or a new one."""
        idle = self._idle.get(address)
        if idle:
            return idle.pop()
        if self._tls is None and self._files is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(self._files.ca))
            self._tls.load_cert_chain(self._files.cert, self._files.key)
        return Link(address, self._token, self._tls)

    def give(self, address: str, link: Link) -> None:
        """A link whose job is done."""
        idle = self._idle.setdefault(address, [])
        if link.broken or len(idle) >= IDLE_LINKS:
            link.close()
        else:
            idle.append(link)

    def close(self) -> None:
        for links in self._idle.values():
            for link in links:
                link.close()
        self._idle.clear()


class LinkSource:
    """One other store, over the byte path. `request` is filled but for its blocks."""

    def __init__(self, links: Links, address: str, request: pages_pb2.PullRequest) -> None:
        self._links = links
        self._address = address
        self._request = request

    async def pull(self, handoff_id: str, places: dict[bytes, memoryview]) -> AsyncIterator[list[Arrival]]:
        """See `kvstore.imports.Source`."""
        request = pages_pb2.PullRequest()
        request.CopyFrom(self._request)
        request.handoff_id = handoff_id
        request.block_ids.extend(places)
        link = self._links.take(self._address)
        connection = link.plain
        if connection is not None and not request.compress and is_quick([len(p) for p in places.values()]):
            async for arrival in self._quickly(link, connection, request, places):
                yield [arrival]
            return
        inbox = _Inbox()
        link.submit(_Job(request, list(places.items()), inbox.arrived, inbox.done))
        try:
            while batch := await inbox.take():
                yield batch
        finally:
            if not inbox.over.is_set():
                # Whoever gives up must know that nothing is written any more.
                link.close()
                await inbox.over.wait()
            self._links.give(self._address, link)

    async def _quickly(
        self,
        link: Link,
        connection: socket.socket,
        request: pages_pb2.PullRequest,
        places: dict[bytes, memoryview],
    ) -> AsyncIterator[Arrival]:
        """On the loop: nothing is written to a place once this has ended, however it did."""
        whole = False
        try:
            async for arrival in pulled(connection, request.SerializeToString(), list(places.items())):
                yield arrival
            whole = True
        except OSError as error:
            raise Unavailable(f"the connection to the other store broke: {error}") from error
        finally:
            link.broken = link.broken or not whole
            self._links.give(self._address, link)


class _Inbox:
    """What a link's thread tells the loop, gathered until the loop has time for it."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._arrivals: deque[Arrival] = deque()
        self._woken = False
        self._error: MeshError | None = None

    def arrived(self, arrival: Arrival) -> None:
        """Called in the thread. Appending needs no lock, and the loop is woken once."""
        self._arrivals.append(arrival)
        if not self._woken:
            self._woken = True
            self._soon(self._news.set)

    def done(self, error: MeshError | None) -> None:
        """Called in the thread, last."""
        self._error = error
        self._soon(self._end)

    async def take(self) -> list[Arrival]:
        """All that has come since the last call, empty after the end; raises what ended it."""
        while True:
            # In this order: what comes after the look wakes the loop again.
            self._news.clear()
            self._woken = False
            arrivals: list[Arrival] = []
            while self._arrivals:
                arrivals.append(self._arrivals.popleft())
            if arrivals:
                return arrivals
            if self.over.is_set():
                if self._error is not None:
                    raise self._error
                return []
            await self._news.wait()

    def _end(self) -> None:
        self.over.set()
        self._news.set()

    def _soon(self, work: Callable[[], None]) -> None:
        # The loop of a store that has ended wants to know nothing.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)
