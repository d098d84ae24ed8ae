"""Where the edge sends things: the routers' two faces, IAM, and IAM through the
edge's own retrying listener.

`iam_internal` is the cluster that `ext_authz` calls: an in-process listener of this
same Envoy whose only route retries the call to `iam`. `ext_authz`'s own retry policy
does nothing when its service cannot be connected to, a route's does. Being inside
the process, that listener is no port that anybody else could reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploy.envoy_types import address, extension, typed

if TYPE_CHECKING:
    from deploy.envoy import EdgeConfig

ROUTERS_OPENAI = "routers_openai"
ROUTERS_GRPC = "routers_grpc"
IAM = "iam"
IAM_INTERNAL = "iam_internal"
AUTHZ_LISTENER = "authz"

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
# Shorter than the keep-alive of the routers' HTTP server, so that a request never
# meets a connection that is being closed.
_HTTP1_IDLE = "3s"


def clusters(edge: EdgeConfig) -> list[dict[str, Any]]:
    """All clusters of the document."""
    return [_routers_openai(edge), _routers_grpc(edge), _iam(edge), _iam_internal()]


def _routers_openai(edge: EdgeConfig) -> dict[str, Any]:
    return {
        **_static(ROUTERS_OPENAI, [f"unix:{router.openai}" for router in edge.routers]),
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: typed(
                _HTTP_OPTIONS,
                common_http_protocol_options={"idle_timeout": _HTTP1_IDLE},
                explicit_http_config={"http_protocol_options": {}},
            )
        },
        **_routers_common(len(edge.routers)),
        **_checked(len(edge.routers), {"http_health_check": {"path": "/readyz", "host": "router"}}),
    }


def _routers_grpc(edge: EdgeConfig) -> dict[str, Any]:
    return {
        **_static(ROUTERS_GRPC, [router.grpc for router in edge.routers]),
        **_http2(),
        **_mutual_tls(edge, "router"),
        **_routers_common(len(edge.routers)),
        **_checked(len(edge.routers), {"grpc_health_check": {}}),
    }


def _iam(edge: EdgeConfig) -> dict[str, Any]:
    return {**_static(IAM, list(edge.iam)), **_http2(), **_mutual_tls(edge, "iam"), **_unbounded()}


def _iam_internal() -> dict[str, Any]:
    endpoint = {"address": {"envoy_internal_address": {"server_listener_name": AUTHZ_LISTENER}}}
    return {
        "name": IAM_INTERNAL,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": IAM_INTERNAL,
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
        },
        **_http2(),
        **_unbounded(),
    }


def _static(name: str, targets: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": address(target)}} for target in targets]}
            ],
        },
    }


def _http2() -> dict[str, Any]:
    return {
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: typed(_HTTP_OPTIONS, explicit_http_config={"http2_protocol_options": {}})
        }
    }


def _routers_common(routers: int) -> dict[str, Any]:
    return {
        "lb_policy": "LEAST_REQUEST" if routers > 1 else "ROUND_ROBIN",
        **_unbounded(),
    }


def _unbounded() -> dict[str, Any]:
    """Admission is the routers' business: the edge must not refuse first. Nor may it refuse to
    repeat: by default three requests may do that at a time, and the others fail."""
    bound = 65536
    return {
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": bound,
                    "max_pending_requests": bound,
                    "max_requests": bound,
                    "max_retries": bound,
                }
            ]
        }
    }


def _checked(routers: int, check: dict[str, Any]) -> dict[str, Any]:
    """Health checks, where there is a choice. One router is asked whatever it says of itself."""
    if routers < 2:
        return {}
    return {
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "5s",
                "no_traffic_interval": "10s",
                "unhealthy_interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                **check,
            }
        ]
    }


def _mutual_tls(edge: EdgeConfig, role: str) -> dict[str, Any]:
    """TLS with the edge's own certificate, to a peer whose certificate names `role`."""
    if edge.upstream_tls is None:
        return {}
    files = edge.upstream_tls
    return {
        "transport_socket": extension(
            "envoy.transport_sockets.tls",
            "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            common_tls_context={
                "alpn_protocols": ["h2"],
                "tls_params": {
                    "tls_minimum_protocol_version": "TLSv1_2",
                    "tls_maximum_protocol_version": "TLSv1_3",
                },
                "tls_certificates": [
                    {
                        "certificate_chain": {"filename": str(files.cert)},
                        "private_key": {"filename": str(files.key)},
                    }
                ],
                "validation_context": {
                    "trusted_ca": {"filename": str(files.ca)},
                    "match_typed_subject_alt_names": [
                        {"san_type": "URI", "matcher": {"prefix": f"spiffe://kvmesh/{role}/"}}
                    ],
                },
            },
        )
    }
