"""The headers file: what the store says of every page, for workers to read and a next store to adopt.

One file head, then 64 bytes per page. Only the store writes it; workers map it
read-only. A record carries a CRC of everything but its state, so that one that was
half written when the store was killed is recognised.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass

HEAD_BYTES = 4096
MAGIC = b"KVMHDR01"
# magic, pages, page bytes, length of the description that follows
HEAD = struct.Struct("<8sIQI")

# state, crc | generation, owner epoch, checksum (xxh3-64), block id, parent id
RECORD = struct.Struct("<IIQQQ16s16s")
STATE = struct.Struct("<I")
_BODY = struct.Struct("<QQQ16s16s")
_SEAL = struct.Struct("<II")
_NOTHING = bytes(16)


@dataclass(frozen=True, slots=True)
class Header:
    """One page as the file has it. `torn`: the record does not match its CRC."""

    state: int
    generation: int
    owner: int
    checksum: int
    block_id: bytes
    parent_id: bytes
    torn: bool = False


def headers_bytes(pages: int) -> int:
    """The size of the file."""
    return HEAD_BYTES + pages * RECORD.size


def record_offset(index: int) -> int:
    """Where the record of a page begins."""
    return HEAD_BYTES + index * RECORD.size


def pack_header(
    state: int, generation: int, owner: int, checksum: int, block_id: bytes, parent_id: bytes
) -> bytes:
    """The 64 bytes of a record. Empty ids become zeros."""
    body = _BODY.pack(generation, owner, checksum, block_id or _NOTHING, parent_id or _NOTHING)
    return _SEAL.pack(state, zlib.crc32(body)) + body


def read_header(buffer: bytes | bytearray | memoryview | mmap.mmap, index: int) -> Header:
    """The record of a page in a mapped file."""
    start = record_offset(index)
    state, crc, generation, owner, checksum, block_id, parent_id = RECORD.unpack_from(buffer, start)
    torn = zlib.crc32(bytes(buffer[start + _SEAL.size : start + RECORD.size])) != crc
    if block_id == _NOTHING:
        block_id = parent_id = b""
    return Header(state, generation, owner, checksum, block_id, parent_id, torn)
