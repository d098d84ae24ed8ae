"""Writes small GGUF files for tests, also ones that no honest program would write."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", 11: "q", 12: "d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    """The bytes of one value, without its type; for arrays `content` is (item type, items)."""
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        item, items = content
        return struct.pack("<IQ", item, len(items)) + b"".join(value(item, entry) for entry in items)
    return struct.pack("<" + _CODES[kind], content)


def pair(key: str, kind: int, content: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, content)


def tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """One tensor description; `dims` in ggml's order."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(tensors: int, pairs: int, *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def file(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    head = header(len(tensors), len(pairs), version=version) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def inferred(key: str, content: Any) -> bytes:
    """A pair whose type follows from the Python value."""
    return pair(key, *_typed(content))


def metadata_file(metadata: Mapping[str, Any]) -> bytes:
    return file([inferred(key, content) for key, content in metadata.items()])


def _typed(content: Any) -> tuple[int, Any]:
    if isinstance(content, bool):
        return BOOL, content
    if isinstance(content, int):
        return (U32 if 0 <= content < 1 << 32 else 11), content
    if isinstance(content, float):
        return F32, content
    if isinstance(content, str):
        return STRING, content
    items = list(content)
    kind = _typed(items[0])[0] if items else U32
    return ARRAY, (I32 if kind == U32 else kind, items)
