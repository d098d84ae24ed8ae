"""What the edge itself answers, in the shape of the OpenAI API.

Envoy rewrites every answer that it makes itself, also those whose body IAM wrote;
those are told apart by their code details and passed on as they are. What was asked in
Anthropic's dialect is answered in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deploy.envoy_types import extension, set_header

_OWN_BODY = "response.code_details in ['ext_authz_denied', 'direct_response']"
_MESSAGES = "request.url_path.startsWith('/v1/messages')"
_AUTHZ_AWAY = "response.code_details == 'ext_authz_error'"
# What is refused before its headers are read has no id yet; the id of any other request wins.
_OWN_ID = set_header("x-request-id", "%UNIQUE_ID%")


def error_body(message: str, kind: str, code: str | None) -> dict[str, Any]:
    """The error envelope of the OpenAI API."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _when(expression: str) -> dict[str, Any]:
    return {
        "extension_filter": extension(
            "envoy.access_loggers.extension_filters.cel",
            "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter",
            expression=expression,
        )
    }


def _status(op: str, status: int) -> dict[str, Any]:
    return {
        "status_code_filter": {
            "comparison": {
                "op": op,
                "value": {"default_value": status, "runtime_key": f"edge.status.{op}.{status}"},
            }
        }
    }


@dataclass(frozen=True, slots=True)
class Reply:
    """What `which` answers say: `kind` and `code` are OpenAI's words, `anthropic` is the other's type."""

    which: dict[str, Any]
    message: str
    kind: str
    code: str
    anthropic: str
    headers: tuple[dict[str, Any], ...] = ()


_BUSY = (set_header("retry-after", "1"),)
_INVALID, _SERVER = "invalid_request_error", "server_error"

# The first that matches wins.
REPLIES = (
    Reply(
        _when(_AUTHZ_AWAY),
        "The authorization service is unavailable. Try again.",
        _SERVER,
        "service_unavailable",
        "overloaded_error",
        _BUSY,
    ),
    Reply(
        _status("EQ", 413),
        "The request body is too large.",
        _INVALID,
        "request_too_large",
        "request_too_large",
    ),
    Reply(
        _status("EQ", 408),
        "The request did not arrive in time.",
        _INVALID,
        "request_timeout",
        _INVALID,
        (_OWN_ID,),
    ),
    Reply(_status("EQ", 504), "No answer in time.", _SERVER, "deadline_exceeded", "timeout_error"),
    Reply(
        _status("EQ", 503),
        "No router can be reached. Try again.",
        _SERVER,
        "service_unavailable",
        "overloaded_error",
        _BUSY,
    ),
    Reply(_status("GE", 500), "The request could not be served.", _SERVER, "internal_error", "api_error"),
    Reply(
        _status("GE", 400),
        "The request is not valid HTTP for this server.",
        _INVALID,
        "invalid_request",
        _INVALID,
        (_OWN_ID,),
    ),
)


def local_replies() -> dict[str, Any]:
    """The mappers; the first that matches wins."""
    own_body = {
        "filter": _when(_OWN_BODY),
        "body_format_override": {
            "text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"},
            "content_type": "application/json",
        },
    }
    return {"mappers": [own_body, *(mapper for reply in REPLIES for mapper in _mappers(reply))]}


def _mappers(reply: Reply) -> list[dict[str, Any]]:
    """What is asked in Anthropic's dialect, and everything else."""
    own: dict[str, Any] = {"headers_to_add": list(reply.headers)} if reply.headers else {}
    said = {"type": reply.anthropic, "message": reply.message}
    anthropic = {"type": "error", "error": said, "request_id": "%REQ(X-REQUEST-ID)%"}
    both = {"and_filter": {"filters": [reply.which, _when(_MESSAGES)]}}
    return [
        {"filter": both, **own, **_body(anthropic)},
        {"filter": reply.which, **own, **_body(error_body(reply.message, reply.kind, reply.code))},
    ]


def _body(said: dict[str, Any]) -> dict[str, Any]:
    return {"body_format_override": {"content_type": "application/json", "json_format": said}}
