"""Logs, traces and metrics of one process. None of them ever carries a prompt or a secret."""

from mesh.telemetry.logs import bind_request_id, configure_logging
from mesh.telemetry.metrics import LATENCY_BUCKETS_S, TOKEN_INTERVAL_BUCKETS_S, MetricsServer
from mesh.telemetry.propagation import current_traceparent, parent_of, server_span, traceparent_of
from mesh.telemetry.reading import StoredSpan, read_trace
from mesh.telemetry.tracing import Tracing, record_span

__all__ = [
    "LATENCY_BUCKETS_S",
    "TOKEN_INTERVAL_BUCKETS_S",
    "MetricsServer",
    "StoredSpan",
    "Tracing",
    "bind_request_id",
    "configure_logging",
    "current_traceparent",
    "parent_of",
    "read_trace",
    "record_span",
    "server_span",
    "traceparent_of",
]
