"""What the edge itself answers, in the shape of the OpenAI API.

Envoy rewrites every answer that it makes itself, also those whose body IAM wrote;
those are told apart by their code details and passed on as they are.
"""

from __future__ import annotations

from typing import Any

from deploy.envoy_types import extension, set_header

_OWN_BODY = "response.code_details in ['ext_authz_denied', 'direct_response']"
_AUTHZ_AWAY = "response.code_details == 'ext_authz_error'"
# What is refused before its headers are read has no id yet; the id of any other request wins.
_OWN_ID = set_header("x-request-id", "%UNIQUE_ID%")


def error_body(message: str, kind: str, code: str | None) -> dict[str, Any]:
    """The error envelope of the OpenAI API."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def local_replies() -> dict[str, Any]:
    """The mappers; the first that matches wins."""
    return {
        "mappers": [
            {
                "filter": _when(_OWN_BODY),
                "body_format_override": {
                    "text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"},
                    "content_type": "application/json",
                },
            },
            {
                "filter": _when(_AUTHZ_AWAY),
                "headers_to_add": [set_header("retry-after", "1")],
                **_body(
                    "The authorization service is unavailable. Try again.",
                    "server_error",
                    "service_unavailable",
                ),
            },
            {
                "filter": _status("EQ", 413),
                **_body("The request body is too large.", "invalid_request_error", "request_too_large"),
            },
            {
                "filter": _status("EQ", 408),
                "headers_to_add": [_OWN_ID],
                **_body("The request did not arrive in time.", "invalid_request_error", "request_timeout"),
            },
            {
                "filter": _status("EQ", 504),
                **_body("No answer in time.", "server_error", "deadline_exceeded"),
            },
            {
                "filter": _status("EQ", 503),
                "headers_to_add": [set_header("retry-after", "1")],
                **_body("No router can be reached. Try again.", "server_error", "service_unavailable"),
            },
            {
                "filter": _status("GE", 500),
                **_body("The request could not be served.", "server_error", "internal_error"),
            },
            {
                "filter": _status("GE", 400),
                "headers_to_add": [_OWN_ID],
                **_body(
                    "The request is not valid HTTP for this server.",
                    "invalid_request_error",
                    "invalid_request",
                ),
            },
        ]
    }


def _body(message: str, kind: str, code: str) -> dict[str, Any]:
    return {
        "body_format_override": {
            "content_type": "application/json",
            "json_format": error_body(message, kind, code),
        }
    }


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
