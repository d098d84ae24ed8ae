"""Reads a request's body, up to the one documented limit, into one JSON object."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope

from mesh.errors import InvalidRequest, RequestTooLarge
from router.openai.answers import ClientLeft
from router.openai.strict_json import INLINE_BYTES, parse_object

LIMIT_BYTES = 8 * 1024 * 1024


async def read_bytes(scope: Scope, receive: Receive, limit_bytes: int = LIMIT_BYTES) -> bytes:
    """Raises RequestTooLarge as soon as the limit is passed, ClientLeft if the rest never comes."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit_bytes:
            raise _too_large(limit_bytes)
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise InvalidRequest("Compressed request bodies are not supported.", code="unsupported_encoding")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def read_object(scope: Scope, receive: Receive) -> dict[str, Any]:
    """The JSON object in the body; a large one is read in a thread."""
    body = await read_bytes(scope, receive)
    if len(body) <= INLINE_BYTES:
        return parse_object(body)
    return await asyncio.to_thread(parse_object, body)


def _too_large(limit_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The request body is too large: at most {limit_bytes} bytes are accepted.")
