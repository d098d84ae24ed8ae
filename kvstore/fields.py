"""Fields of requests that must make sense before anything is done with them."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from mesh.errors import InvalidRequest
from mesh.kv.page import BLOCK_ID_BYTES


def block_id(value: bytes) -> bytes:
    """The id itself; InvalidRequest if it is none."""
    if len(value) != BLOCK_ID_BYTES:
        raise InvalidRequest(f"a block id has {BLOCK_ID_BYTES} bytes, not {len(value)}", param="block_ids")
    return value


def block_ids(values: Iterable[bytes]) -> list[bytes]:
    """All of them, checked."""
    return [block_id(value) for value in values]


def unpacked(chain: bytes) -> tuple[bytes, ...]:
    """Ids that lie one after another; InvalidRequest where the last one is cut."""
    n, rest = divmod(len(chain), BLOCK_ID_BYTES)
    if rest:
        raise InvalidRequest(f"{rest} bytes are left of an id of {BLOCK_ID_BYTES}", param="packed_chains")
    return struct.unpack(f"{BLOCK_ID_BYTES}s" * n, chain)


def named(value: str, param: str) -> str:
    """A name that is not empty."""
    if not value:
        raise InvalidRequest(f"{param} is empty", param=param)
    return value
