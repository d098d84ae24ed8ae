"""`POST /internal/otlp/v1/traces`: Envoy's spans, beside those of the other services.

Envoy speaks OTLP over HTTP and cannot write our files. Only names, times and a few
attributes that are identifiers are kept. The file is bounded: two of 4 MiB. What is
written is forwarded as well, for a collector that wants the whole trace.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from starlette.types import Receive, Scope, Send

from mesh.errors import InvalidRequest
from mesh.telemetry.reading import REQUEST_ID, StoredSpan
from mesh.telemetry.tracing import FILE_LIMIT_BYTES
from router.openai.answers import ClientLeft, Connection, mesh_error, send_error
from router.openai.body import read_bytes
from router.openai.guard import arrival_of

SERVICE = "envoy"
_KEPT = {"guid:x-request-id": REQUEST_ID, "http.status_code": "http.status_code"}
_IDENTIFIER = re.compile(r"[\w.:/@+<>=,-]{0,160}")


class EnvoySpans:
    """Appends to `path`, in a thread, and gives them to `forward`."""

    def __init__(self, path: Path, forward: Callable[[Sequence[StoredSpan]], None]) -> None:
        self._path = path
        self._forward = forward
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="envoy-spans")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = arrival_of(scope)
        connection = Connection(receive, send)
        try:
            spans = read_spans(await read_bytes(scope, receive))
            if spans:
                await asyncio.get_running_loop().run_in_executor(self._disk, _append, self._path, spans)
                self._forward(spans)
            kind = ("content-type", "application/x-protobuf")
            await connection.start(200, [kind, ("content-length", "0"), *arrival.headers()])
            await connection.body(b"")
        except ClientLeft:
            return
        except Exception as error:
            await send_error(connection, mesh_error(error), arrival.headers())

    def close(self) -> None:
        self._disk.shutdown(wait=False)


def read_spans(body: bytes) -> list[StoredSpan]:
    """The spans of an OTLP request; raises InvalidRequest."""
    try:
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        raise InvalidRequest("not an OTLP trace request", code="invalid_protobuf") from None
    return [
        _record(span)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if len(span.trace_id) == 16 and len(span.span_id) == 8
    ]


def _record(span: Any) -> StoredSpan:
    attributes = {}
    for item in span.attributes:
        kept = _KEPT.get(item.key)
        if kept is not None and _IDENTIFIER.fullmatch(item.value.string_value):
            attributes[kept] = item.value.string_value
    name = span.name if _IDENTIFIER.fullmatch(span.name) else "request"
    return StoredSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        name=f"{SERVICE}.{name}" if not name.startswith(SERVICE) else name,
        service=SERVICE,
        kind="server",
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        error="error" if span.status.code == 2 else None,
        attributes=attributes,
    )


def _append(path: Path, spans: Sequence[StoredSpan]) -> None:
    lines = b"".join(json.dumps(asdict(span), separators=(",", ":")).encode() + b"\n" for span in spans)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, lines)
            full = os.fstat(handle).st_size >= FILE_LIMIT_BYTES
        finally:
            os.close(handle)
        if full:
            path.replace(path.with_suffix(".old.jsonl"))
    except OSError:
        # A full disk costs traces, never requests.
        return
