"""The two listeners of the edge: the public port, and the in-process one through
which `ext_authz` reaches IAM with retries.

What the public port does, in order: forgets every header with which a client could
pretend to be the mesh, gives the request its id, answers browsers' preflights, asks
IAM who this is, bounds the body, routes. Local answers have the shape of the OpenAI
API. Does not know what the routes mean: that is `envoy_routes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploy.envoy_clusters import AUTHZ_LISTENER, IAM, IAM_INTERNAL, ROUTERS_OPENAI
from deploy.envoy_replies import local_replies
from deploy.envoy_routes import OPEN, routes
from deploy.envoy_types import extension, other_hosts, seconds, set_header, typed

if TYPE_CHECKING:
    from deploy.envoy import EdgeConfig

_FILTERS = "envoy.extensions.filters.http"
_CONNECTION_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
# Between two tries of a Check; Envoy draws a random pause below the growing interval.
_RETRY_BASE_S, _RETRY_MAX_S = 0.1, 0.2
_RETRIES = 60
# Headers that only the mesh may set, or that would steer Envoy itself.
_FORGOTTEN_PREFIXES = ("x-mesh-", "x-envoy-", "x-request-id")


def edge_listener(edge: EdgeConfig) -> dict[str, Any]:
    """The public port."""
    chain: dict[str, Any] = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": _manager(edge)}]
    }
    if edge.tls is not None:
        chain["transport_socket"] = _server_tls(edge)
    return {
        "name": "edge",
        "address": {"socket_address": {"address": edge.host, "port_value": edge.port}},
        "per_connection_buffer_limit_bytes": 1024 * 1024,
        # Without it, a second process could listen on the same port beside this one.
        "enable_reuse_port": False,
        "filter_chains": [chain],
    }


def authz_listener(edge: EdgeConfig) -> dict[str, Any]:
    """Inside the process: repeats a Check that did not reach IAM, for `authz_timeout_s` in all."""
    route = {
        "cluster": IAM,
        "timeout": seconds(edge.authz_timeout_s),
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset,unavailable",
            "num_retries": _RETRIES,
            # One that hangs is given up in time to ask another.
            "per_try_timeout": seconds(edge.authz_timeout_s / 4),
            "retry_back_off": {
                "base_interval": seconds(_RETRY_BASE_S),
                "max_interval": seconds(_RETRY_MAX_S),
            },
            **other_hosts(),
        },
    }
    manager = typed(
        _CONNECTION_MANAGER,
        stat_prefix="authz",
        codec_type="HTTP2",
        route_config={
            "name": "authz",
            "virtual_hosts": [
                {
                    "name": "iam",
                    "domains": ["*"],
                    "request_headers_to_add": [set_header("x-mesh-service", edge.iam_token)],
                    "routes": [
                        {"match": {"path": "/envoy.service.auth.v3.Authorization/Check"}, "route": route}
                    ],
                }
            ],
        },
        http_filters=[extension("envoy.filters.http.router", f"{_FILTERS}.router.v3.Router")],
    )
    return {
        "name": AUTHZ_LISTENER,
        "internal_listener": {},
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _manager(edge: EdgeConfig) -> dict[str, Any]:
    return typed(
        _CONNECTION_MANAGER,
        stat_prefix="edge",
        server_name="kvmesh",
        use_remote_address=True,
        xff_num_trusted_hops=0,
        # `%2F` is part of a model's id. Unescaping comes before normalising, so what
        # is matched is what is forwarded.
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action="UNESCAPE_AND_FORWARD",
        generate_request_id=True,
        preserve_external_request_id=False,
        always_set_request_id_in_response=True,
        stream_idle_timeout=seconds(edge.stream_idle_timeout_s),
        request_headers_timeout="10s",
        # To receive the whole request; the answer has no such limit.
        request_timeout="300s",
        delayed_close_timeout="1s",
        drain_timeout="5s",
        max_request_headers_kb=60,
        common_http_protocol_options={
            "idle_timeout": "3600s",
            "max_headers_count": 100,
            "headers_with_underscores_action": "REJECT_REQUEST",
        },
        http2_protocol_options={
            "max_concurrent_streams": 1024,
            "initial_stream_window_size": 1024 * 1024,
            "initial_connection_window_size": 4 * 1024 * 1024,
        },
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                mutations=[
                    {"remove_on_match": {"key_matcher": {"prefix": prefix}}} for prefix in _FORGOTTEN_PREFIXES
                ],
            )
        ],
        access_log=[_access_log()],
        local_reply_config=local_replies(),
        route_config=routes(edge),
        http_filters=_http_filters(edge),
        **({"tracing": _tracing(edge)} if edge.tracing else {}),
    )


def _http_filters(edge: EdgeConfig) -> list[dict[str, Any]]:
    return [
        extension("envoy.filters.http.cors", f"{_FILTERS}.cors.v3.Cors"),
        extension(
            "envoy.filters.http.ext_authz",
            f"{_FILTERS}.ext_authz.v3.ExtAuthz",
            transport_api_version="V3",
            # A little more than the route behind it, so that the route's answer arrives.
            grpc_service={
                "envoy_grpc": {"cluster_name": IAM_INTERNAL},
                "timeout": seconds(edge.authz_timeout_s + 0.2),
            },
            failure_mode_allow=False,
            status_on_error={"code": "ServiceUnavailable"},
            validate_mutations=True,
            decoder_header_mutation_rules={
                "allow_expression": {"regex": "(x-mesh-identity|authorization|x-api-key)"},
                "disallow_all": True,
            },
        ),
        # After the check: nobody unknown makes the edge hold a body. It counts what
        # arrives, so a request without a content-length is bounded as well.
        extension(
            "envoy.filters.http.buffer",
            f"{_FILTERS}.buffer.v3.Buffer",
            max_request_bytes=edge.body_limit_bytes,
        ),
        extension("envoy.filters.http.router", f"{_FILTERS}.router.v3.Router", suppress_envoy_headers=True),
    ]


def _tracing(edge: EdgeConfig) -> dict[str, Any]:
    return {
        "random_sampling": {"value": 100},
        "spawn_upstream_span": False,
        "provider": extension(
            "envoy.tracers.opentelemetry",
            "envoy.config.trace.v3.OpenTelemetryConfig",
            service_name="envoy",
            http_service={
                "http_uri": {
                    "uri": "http://router/internal/otlp/v1/traces",
                    "cluster": ROUTERS_OPENAI,
                    "timeout": "2s",
                },
                "request_headers_to_add": [set_header("x-mesh-service", edge.router_token)],
            },
        ),
    }


def _access_log() -> dict[str, Any]:
    """One JSON line per request, health checks aside: no query, no credential, no body."""
    return {"filter": _not_open(), **_stdout_log()}


def _not_open() -> dict[str, Any]:
    return {
        "header_filter": {
            "header": {
                "name": ":path",
                "string_match": {"safe_regex": {"regex": f"({'|'.join(OPEN)})(\\?.*)?"}},
                "invert_match": True,
            }
        }
    }


def _stdout_log() -> dict[str, Any]:
    return extension(
        "envoy.access_loggers.stdout",
        "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
        log_format={
            "json_format": {
                "time": "%START_TIME(%Y-%m-%dT%H:%M:%S.%3fZ)%",
                "level": "info",
                "service": "envoy",
                "message": "request",
                "request_id": "%REQ(X-REQUEST-ID)%",
                "trace_id": "%TRACE_ID%",
                "method": "%REQ(:METHOD)%",
                "path": "%REQ_WITHOUT_QUERY(X-ENVOY-ORIGINAL-PATH?:PATH)%",
                "status": "%RESPONSE_CODE%",
                "details": "%RESPONSE_CODE_DETAILS%",
                "flags": "%RESPONSE_FLAGS%",
                "duration_ms": "%DURATION%",
                "first_byte_ms": "%RESPONSE_DURATION%",
                "received_bytes": "%BYTES_RECEIVED%",
                "sent_bytes": "%BYTES_SENT%",
                "upstream": "%UPSTREAM_HOST%",
            },
            "formatters": [
                extension(
                    "envoy.formatter.req_without_query",
                    "envoy.extensions.formatter.req_without_query.v3.ReqWithoutQuery",
                )
            ],
        },
    )


def _server_tls(edge: EdgeConfig) -> dict[str, Any]:
    assert edge.tls is not None
    return extension(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        common_tls_context={
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "tls_certificates": [
                {
                    "certificate_chain": {"filename": str(edge.tls.cert)},
                    "private_key": {"filename": str(edge.tls.key)},
                }
            ],
        },
    )
