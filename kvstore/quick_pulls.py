"""A pull that is smaller than a socket's buffers: asked for, heard and taken on the event loop.

For one small page, waking a thread and being woken by it costs more than the page. Nothing
here blocks: what is not there yet is waited for by the loop. It does not know the rules of pages.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence

import xxhash

from kvstore.framing import HEADER, SIZE, HungUp, Kind, part, part_length, read_error, read_header
from kvstore.imports import Arrival
from mesh.errors import InternalError

# A sender's socket has twice as much room.
QUICK_BYTES = 128 * 1024


def is_quick(sizes: Sequence[int]) -> bool:
    """Whether pages of these sizes go this way."""
    return sum(sizes) <= QUICK_BYTES


async def pulled(
    connection: socket.socket, request: bytes, places: Sequence[tuple[bytes, memoryview]]
) -> AsyncIterator[Arrival]:
    """The pages of one request, on a blocking socket without TLS that nobody else uses.

    Raises the other store's refusal, InternalError for what it should not send, and OSError where
    the connection breaks. Only after the last page may the connection be used again.
    """
    message = part(request)
    if connection.send(message, socket.MSG_DONTWAIT) != len(message):
        raise ConnectionError("the other store does not take a request")
    head = bytearray(HEADER.size)
    await readable(connection)
    while True:
        await fill(connection, memoryview(head))
        header = read_header(head)
        if header.kind is Kind.END:
            return
        if header.kind is Kind.ERROR:
            body = bytearray(min(header.length, 65536))
            await fill(connection, memoryview(body))
            raise read_error(bytes(body))
        if header.index >= len(places):
            raise InternalError("the other store sent a page that nobody asked for")
        block_id, place = places[header.index]
        if header.kind is not Kind.PAGE or header.length != len(place):
            raise InternalError("the other store sent a page of another size", code="corrupt_page")
        await fill(connection, place)
        yield Arrival(block_id, header.seal, xxhash.xxh3_64_intdigest(place))


async def request_heard(connection: socket.socket) -> bytes:
    """The next request at the other end; HungUp when there is none, ConnectionError for nonsense."""
    length = bytearray(SIZE.size)
    await readable(connection)
    await fill(connection, memoryview(length))
    data = bytearray(part_length(length))
    await fill(connection, memoryview(data))
    return bytes(data)


async def fill(connection: socket.socket, place: memoryview) -> None:
    """Fills `place` as its bytes come; HungUp if the connection ends before."""
    at = 0
    while at < len(place):
        try:
            n = connection.recv_into(place[at:], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            await readable(connection)
            continue
        if n == 0:
            raise HungUp("the connection was closed")
        at += n


async def readable(connection: socket.socket) -> None:
    """Returns when there is something to read, or the end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    handle = connection.fileno()

    def wake() -> None:
        loop.remove_reader(handle)
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(handle, wake)
    try:
        await ready
    finally:
        loop.remove_reader(handle)
