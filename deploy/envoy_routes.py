"""Which request goes where. Everything that is not named here is refused: first for
want of a credential, then with a 404.

`OPEN` lists the only paths that need no credential.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from deploy.envoy_clusters import ROUTERS_GRPC, ROUTERS_OPENAI
from deploy.envoy_replies import error_body
from deploy.envoy_types import other_hosts, seconds, set_header, typed

if TYPE_CHECKING:
    from deploy.envoy import EdgeConfig

OPEN = ("/healthz", "/readyz")
OPENAI_PREFIX = "/v1/"
# Paths of the OpenAI face beside the prefix.
OPENAI_PATHS = ("/tokenize", "/detokenize", "/openapi.json")
GRPC_PREFIX = "/kvmesh.v1.Inference/"

_BROWSER_HEADERS = (
    "authorization",
    "content-type",
    "accept",
    "idempotency-key",
    "openai-beta",
    "openai-organization",
    "openai-project",
    "traceparent",
    "tracestate",
    "x-client-request-id",
    "x-api-key",
    "anthropic-version",
    "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
    *(
        f"x-stainless-{name}"
        for name in (
            "arch",
            "async",
            "custom-poll-interval",
            "helper-method",
            "lang",
            "os",
            "package-version",
            "poll-helper",
            "raw-response",
            "read-timeout",
            "retry-count",
            "runtime",
            "runtime-version",
            "timeout",
        )
    ),
)
_EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "openai-model",
    "openai-organization",
    "openai-project",
    "openai-processing-ms",
    "openai-version",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)


def routes(edge: EdgeConfig) -> dict[str, Any]:
    """The route table of the public port.

    It sets no `request_body_buffer_limit`: with one, a body over the limit that arrives
    while IAM is asked is never refused; both sides wait until the client gives up.
    """
    return {
        "name": "edge",
        "virtual_hosts": [
            {
                "name": "api",
                "domains": ["*"],
                "request_headers_to_add": [
                    set_header("x-mesh-service", edge.router_token),
                    set_header("x-mesh-start", "%START_TIME(%s.%6f)%"),
                ],
                "response_headers_to_add": [set_header("x-content-type-options", "nosniff")],
                "response_headers_to_remove": ["x-mesh-not-started"],
                "typed_per_filter_config": {"envoy.filters.http.cors": _cors()},
                "routes": [
                    _healthz(),
                    _readyz(),
                    _grpc(edge),
                    _openai(edge, {"prefix": OPENAI_PREFIX}),
                    *(_openai(edge, {"path": path}) for path in OPENAI_PATHS),
                    _unknown(),
                ],
            }
        ],
    }


def _healthz() -> dict[str, Any]:
    return {
        "match": {"path": "/healthz"},
        "direct_response": {"status": 200, "body": {"inline_string": '{"status":"ok"}'}},
        "response_headers_to_add": [set_header("content-type", "application/json")],
        **_without_credential(),
        **_untraced(),
    }


def _readyz() -> dict[str, Any]:
    return {
        "match": {"path": "/readyz"},
        "route": {"cluster": ROUTERS_OPENAI, "timeout": "5s"},
        **_without_credential(),
        **_untraced(),
    }


def _openai(edge: EdgeConfig, match: dict[str, Any]) -> dict[str, Any]:
    return {
        "match": match,
        "route": {"cluster": ROUTERS_OPENAI, **_patient(edge)},
    }


def _grpc(edge: EdgeConfig) -> dict[str, Any]:
    return {
        "match": {"prefix": GRPC_PREFIX, "grpc": {}},
        "route": {
            "cluster": ROUTERS_GRPC,
            **_patient(edge),
            # The client's own deadline counts.
            "max_stream_duration": {"grpc_timeout_header_max": "0s"},
        },
    }


def _unknown() -> dict[str, Any]:
    body = error_body("Unknown request URL. See the documentation for the paths that exist.", *_NOT_FOUND)
    return {
        "match": {"prefix": "/"},
        "direct_response": {"status": 404, "body": {"inline_string": json.dumps(body)}},
        "response_headers_to_add": [set_header("content-type", "application/json")],
    }


_NOT_FOUND = ("invalid_request_error", None)


def _patient(edge: EdgeConfig) -> dict[str, Any]:
    """No limit on the whole answer, a generous one on silence, and a router that dies is
    replaced by another, or by its successor, as long as no answer has begun.

    A repeat has the same request id, under which usage is counted once; the first run
    ended with its router. What has no router for some seconds is refused.
    """
    return {
        "timeout": "0s",
        "idle_timeout": seconds(edge.stream_idle_timeout_s),
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset",
            "num_retries": edge.router_retries,
            # Random pauses below a growing limit: about 6 s in all, a restart of a router.
            "retry_back_off": {"base_interval": "0.25s", "max_interval": "2s"},
            **other_hosts(),
        },
    }


def _without_credential() -> dict[str, Any]:
    return {
        "typed_per_filter_config": {
            "envoy.filters.http.ext_authz": typed(
                "envoy.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute", disabled=True
            )
        }
    }


def _untraced() -> dict[str, Any]:
    never = {"numerator": 0}
    return {"tracing": {"client_sampling": never, "random_sampling": never, "overall_sampling": never}}


def _cors() -> dict[str, Any]:
    """Any page may call, as the credential is a header that a page must know, not a cookie."""
    return typed(
        "envoy.extensions.filters.http.cors.v3.CorsPolicy",
        allow_origin_string_match=[{"safe_regex": {"regex": ".*"}}],
        allow_methods="GET, POST, DELETE, OPTIONS",
        allow_headers=", ".join(_BROWSER_HEADERS),
        expose_headers=", ".join(_EXPOSED_HEADERS),
        max_age="7200",
    )
