"""The error envelope of the messages dialect.

| HTTP | type |
|---|---|
| 400, 405 | invalid_request_error |
| 401 | authentication_error |
| 403 | permission_error |
| 404 | not_found_error |
| 413 | request_too_large |
| 429 | rate_limit_error |
| 503 | overloaded_error |
| any other | api_error |
"""

from __future__ import annotations

from typing import Any

import msgspec

from mesh.errors import MeshError
from router.openai import errors
from router.openai.answers import Connection, Headers, send_json

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def envelope(error: MeshError) -> dict[str, Any]:
    """The body of an error answer, and of an `error` event."""
    kind = _TYPES.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


async def send_error(connection: Connection, error: MeshError, headers: Headers) -> None:
    """An error answer."""
    request_id = next((value for name, value in headers if name == "x-request-id"), None)
    body = msgspec.json.encode({**envelope(error), "request_id": request_id})
    await send_json(connection, error.http_status, body, [*headers, *errors.headers(error)])
