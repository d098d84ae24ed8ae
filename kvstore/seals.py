"""What binds the bytes of a page to the block that they are of, between two stores."""

from __future__ import annotations

import xxhash


def seal(block_id: bytes, parent_id: bytes, checksum: int) -> int:
    """64 bits over both ids and the xxh3-64 of the page's bytes.

    So that intact bytes of another block are noticed as well as damaged ones.
    """
    return xxhash.xxh3_64_intdigest(block_id + parent_id + checksum.to_bytes(8, "little"))
