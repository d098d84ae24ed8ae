"""Other nodes' stores over gRPC: `Pages.Pull` from the caller's end, and its messages.

The plain twin of the byte path (`links.py`), for stores that offer no other.

Pages travel in messages of at most 1 MiB, in one or several of them; gRPC's flow
control holds the sender back.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio
import xxhash
from kvmesh.v1 import pages_pb2, pages_pb2_grpc

from kvstore.exports import Sending
from kvstore.imports import Arrival
from mesh.errors import InternalError, from_rpc_error

MESSAGE_BYTES = 1024 * 1024 - 4096

Dial = Callable[[str], grpc.aio.Channel]


class GrpcSource:
    """One other store, over gRPC. `request` is filled but for its blocks."""

    def __init__(self, channel: grpc.aio.Channel, request: pages_pb2.PullRequest) -> None:
        self._stub: Any = pages_pb2_grpc.PagesStub(channel)
        self._request = request

    async def pull(self, handoff_id: str, places: dict[bytes, memoryview]) -> AsyncIterator[list[Arrival]]:
        """See `kvstore.imports.Source`."""
        block_ids = list(places)
        request = pages_pb2.PullRequest()
        request.CopyFrom(self._request)
        request.handoff_id = handoff_id
        request.block_ids.extend(block_ids)
        call = self._stub.Pull(request)
        parts = _Parts()
        try:
            async for part in call:
                if part.index >= len(block_ids):
                    raise InternalError("the other store sent a page that nobody asked for")
                block_id = block_ids[part.index]
                if parts.take(part, places[block_id]):
                    found = xxhash.xxh3_64_intdigest(places[block_id])
                    yield [Arrival(block_id, part.checksum, found)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()


class _Parts:
    """Puts the parts of one page after another together."""

    def __init__(self) -> None:
        self._deflated = bytearray()

    def take(self, part: pages_pb2.PullResponse, place: memoryview) -> bool:
        """True with the last part of a page."""
        end = part.offset + len(part.data)
        if not part.deflated_bytes:
            if end > len(place):
                raise InternalError("the other store sent more than a page")
            place[part.offset : end] = part.data
            return end == len(place)
        if part.offset != len(self._deflated) or end > part.deflated_bytes:
            raise InternalError("the parts of a page do not follow each other")
        self._deflated += part.data
        if end < part.deflated_bytes:
            return False
        inflate = zlib.decompressobj()
        try:
            page = inflate.decompress(self._deflated, len(place) + 1)
        except zlib.error as error:
            raise InternalError(f"a page cannot be inflated: {error}", code="corrupt_page") from error
        self._deflated.clear()
        if len(page) != len(place):
            raise InternalError("an inflated page has another size", code="corrupt_page")
        place[:] = page
        return True


def messages(sending: Sending, *, compress: bool) -> Iterator[pages_pb2.PullResponse]:
    """A page in messages of bounded size."""
    data: bytes | memoryview = sending.data
    deflated = 0
    if compress:
        smaller = zlib.compress(sending.data, 1)
        if len(smaller) < len(data):
            data, deflated = smaller, len(smaller)
    for offset in range(0, len(data), MESSAGE_BYTES):
        yield pages_pb2.PullResponse(
            index=sending.index,
            offset=offset,
            data=bytes(data[offset : offset + MESSAGE_BYTES]),
            checksum=sending.seal,
            parent_id=sending.parent_id,
            deflated_bytes=deflated,
        )
