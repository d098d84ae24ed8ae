"""The error envelope of the OpenAI API. `code` and `param` are a string or null, never a number."""

from __future__ import annotations

from typing import Any

import msgspec

from mesh.errors import MeshError

_encode = msgspec.json.Encoder().encode


def envelope(error: MeshError) -> dict[str, Any]:
    """The body of an error answer, and of an `error` event."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.param,
            "code": error.code,
        }
    }


def body(error: MeshError) -> bytes:
    return _encode(envelope(error))


def headers(error: MeshError) -> list[tuple[str, str]]:
    """Headers that belong to the error itself."""
    extra: list[tuple[str, str]] = []
    if error.http_status == 401:
        extra.append(("www-authenticate", "Bearer"))
    if error.retry_after_s is not None:
        # Clients that honour it refuse to wait for more than two minutes.
        extra.append(("retry-after", str(max(1, min(120, round(error.retry_after_s))))))
    return extra
