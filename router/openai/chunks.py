"""Streams of chunks, as chat and completions send them: `data:` lines, usage if asked for, `[DONE]`.

It knows the order of a stream and not what is in its chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from mesh.errors import MeshError
from router.core.request import Delta, Usage
from router.openai import errors

_encode = msgspec.json.Encoder().encode


class Chunks(Protocol):
    """What the chunks of an endpoint look like (`ChatRequest`, `CompletionRequest`)."""

    include_usage: bool

    def usage(self, usage: Usage) -> dict[str, Any]: ...
    def chunk_head(self, head: Mapping[str, Any]) -> dict[str, Any]: ...
    def chunk_tail(self, head: Mapping[str, Any]) -> dict[str, Any]: ...
    def first(self, index: int) -> dict[str, Any] | None: ...
    def content(self, delta: Delta) -> Sequence[dict[str, Any]]: ...
    def finish(self, delta: Delta) -> dict[str, Any] | None: ...


class ChunkEvents:
    """The order of a stream: per choice its opening, content and finish; then usage, then the end mark."""

    def __init__(self, chunks: Chunks, head: Mapping[str, Any]) -> None:
        self._chunks = chunks
        self._opened: set[int] = set()
        # What comes before and after the choices is the same in every chunk: it is written once.
        self._prefix = b"data: " + _encode(chunks.chunk_head(head))[:-1] + b',"choices":'
        tail = _encode(chunks.chunk_tail(head))[1:-1]
        self._tail = b"," + tail if tail else b""
        self._suffix = self._tail + (b',"usage":null}\n\n' if chunks.include_usage else b"}\n\n")

    def begin(self, usage: Usage) -> bytes:
        """Nothing comes before the first token."""
        return b""

    def of(self, delta: Delta) -> bytes:
        """The events that a delta makes."""
        parts: list[dict[str, Any] | None] = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            parts.append(self._chunks.first(delta.index))
        parts.extend(self._chunks.content(delta))
        if delta.finish is not None:
            parts.append(self._chunks.finish(delta))
        return b"".join(self._prefix + _encode([part]) + self._suffix for part in parts if part is not None)

    async def end(self, usage: Usage) -> bytes:
        """What follows the last choice."""
        last = b""
        if self._chunks.include_usage:
            last = (
                self._prefix
                + b"[]"
                + self._tail
                + b',"usage":'
                + _encode(self._chunks.usage(usage))
                + b"}\n\n"
            )
        return last + b"data: [DONE]\n\n"

    def failed(self, error: MeshError) -> bytes:
        """What ends a stream that breaks: no end mark."""
        return b"data: " + errors.body(error) + b"\n\n"
