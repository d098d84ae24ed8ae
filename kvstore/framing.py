"""Frames of the byte path between stores: `Pages.Pull` without gRPC around the bytes.

A connection begins with MAGIC and the caller's service token. Then pulls follow one
after another: a PullRequest, answered by pages as they become committed and by END,
or by ERROR. Numbers are little-endian; every part says its length before it comes.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from kvmesh.v1 import common_pb2

from mesh.errors import InternalError, MeshError, detail, from_detail

MAGIC = b"KVMPAGE1"
# How the addresses of the byte path differ from those of gRPC.
SCHEME = "pages+"
SIZE = struct.Struct("<I")
# kind, index of the block in the request, bytes that follow, seal and parent of the page
HEADER = struct.Struct("<B3xIQQ16s")
# Far above a token and a request for the longest prompt.
PART_LIMIT_BYTES = 4 * 1024 * 1024


class Kind(IntEnum):
    """What a header announces."""

    PAGE = 1
    DEFLATED = 2
    END = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class Header:
    """One header of an answer."""

    kind: Kind
    index: int
    length: int
    seal: int
    parent_id: bytes


class HungUp(ConnectionError):
    """The other end closed the connection."""


def receive_into(connection: socket.socket, place: memoryview) -> None:
    """Fills `place`; HungUp if the connection ends before."""
    at = 0
    while at < len(place):
        n = connection.recv_into(place[at:])
        if n == 0:
            raise HungUp("the connection was closed")
        at += n


def receive(connection: socket.socket, n: int) -> bytes:
    """Exactly `n` bytes."""
    data = bytearray(n)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_part(connection: socket.socket) -> bytes:
    """What follows a length; a connection that says nonsense is broken off."""
    return receive(connection, part_length(receive(connection, SIZE.size)))


def part_length(data: bytes | bytearray) -> int:
    """How much follows; ConnectionError for nonsense."""
    (length,) = SIZE.unpack(data)
    if length > PART_LIMIT_BYTES:
        raise ConnectionError(f"a part of {length} bytes")
    return int(length)


def receive_header(connection: socket.socket) -> Header:
    """The next header of an answer; ConnectionError for nonsense."""
    return read_header(receive(connection, HEADER.size))


def read_header(data: bytes | bytearray) -> Header:
    """A header of an answer; ConnectionError for nonsense."""
    kind, index, length, seal, parent_id = HEADER.unpack(data)
    if kind not in Kind._value2member_map_:
        raise ConnectionError(f"a frame of kind {kind}")
    return Header(Kind(kind), index, length, seal, parent_id)


def part(data: bytes) -> bytes:
    """Data with its length before it."""
    return SIZE.pack(len(data)) + data


def end() -> bytes:
    """Every page was sent."""
    return HEADER.pack(Kind.END, 0, 0, 0, b"")


def error_frame(error: MeshError) -> bytes:
    """Why no more pages come."""
    body = part(detail(error).SerializeToString()) + error.message.encode()
    return HEADER.pack(Kind.ERROR, 0, len(body), 0, b"") + body


def read_error(body: bytes) -> MeshError:
    """The error of an ERROR frame."""
    try:
        (length,) = SIZE.unpack_from(body)
        wire = common_pb2.ErrorDetail.FromString(body[SIZE.size : SIZE.size + length])
        return from_detail(wire, body[SIZE.size + length :].decode(errors="replace"))
    except Exception:
        return InternalError("the other store failed and cannot say why")
