"""Spans into a file of the state directory, and to a collector if one is configured.

A span that ends is handed to a thread that sleeps until there is one: the
service's loop neither formats nor writes, and an idle service does not wake. The
file of a service is bounded: two of 4 MiB, the older is dropped. Text attributes
must look like an identifier; prose is dropped, so that no prompt gets in by accident.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.util.types import AttributeValue

from mesh.telemetry.reading import StoredSpan

FILE_LIMIT_BYTES = 4 * 1024 * 1024
CLOSE_TIMEOUT_S = 2.0
OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"

_IDENTIFIER = re.compile(r"[\w.:/@+<>=,-]{0,160}")
DROPPED = "<dropped>"


class Tracing:
    """The tracer of one process. `close` writes what is pending."""

    def __init__(self, service: str, role: str, directory: Path) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource({"service.name": f"kvmesh-{role}", "service.instance.id": service}),
            shutdown_on_exit=False,
        )
        self._file = _FileProcessor(service, directory)
        self._provider.add_span_processor(_Cleaning(self._file))
        self._collector = _Cleaning(_otlp()) if os.environ.get(OTLP_ENDPOINT) else None
        if self._collector is not None:
            self._provider.add_span_processor(self._collector)
        self.tracer: Tracer = self._provider.get_tracer("kvmesh")

    def install(self) -> None:
        """Makes this the process's tracer, which `server_span` uses."""
        trace.set_tracer_provider(self._provider)

    def forward(self, spans: Iterable[StoredSpan]) -> None:
        """Gives the collector, if there is one, spans of a process that cannot reach it itself."""
        if self._collector is not None:
            for span in spans:
                self._collector.on_end(_foreign(span))

    def flush(self) -> None:
        """Blocks until every ended span is in the file."""
        self._provider.force_flush()

    def close(self) -> None:
        """Writes what is pending and ends the thread; blocks up to CLOSE_TIMEOUT_S. Idempotent."""
        # A collector that is away would hold the end of the process up with its retries.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def record_span(
    tracer: Tracer,
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    parent: Context | SpanContext | Span | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> SpanContext:
    """A span of the past, from `start_ns` to `end_ns` (unix nanoseconds). Gives its context."""
    if isinstance(parent, Context):
        parent = trace.get_current_span(parent)
    if isinstance(parent, Span):
        parent = parent.get_span_context()
    if not isinstance(tracer, SdkTracer) or parent is None or not parent.is_valid:
        return _started(tracer, name, start_ns, end_ns, parent, attributes or {}, kind)
    # A span that is over needs none of the machinery of one that runs, and there are eight to a request.
    context = SpanContext(
        parent.trace_id,
        tracer.id_generator.generate_span_id(),
        is_remote=False,
        trace_flags=parent.trace_flags,
    )
    if parent.trace_flags.sampled:
        tracer.span_processor.on_end(
            ReadableSpan(
                name=name,
                context=context,
                parent=parent,
                resource=tracer.resource,
                attributes=attributes,
                kind=kind,
                start_time=start_ns,
                end_time=end_ns,
            )
        )
    return context


def _started(
    tracer: Tracer,
    name: str,
    start_ns: int,
    end_ns: int,
    parent: SpanContext | None,
    attributes: Mapping[str, AttributeValue],
    kind: SpanKind,
) -> SpanContext:
    within = (
        Context() if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
    )
    span = tracer.start_span(name, context=within, kind=kind, start_time=start_ns)
    span.set_attributes(attributes)
    span.end(end_time=end_ns)
    return span.get_span_context()


def _foreign(span: StoredSpan) -> ReadableSpan:
    def context(span_id: str) -> SpanContext:
        return SpanContext(
            int(span.trace_id, 16),
            int(span_id, 16),
            is_remote=True,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )

    return ReadableSpan(
        name=span.name,
        context=context(span.span_id),
        parent=None if span.parent_id is None else context(span.parent_id),
        resource=Resource({"service.name": f"kvmesh-{span.service}", "service.instance.id": span.service}),
        attributes=span.attributes,
        kind=SpanKind[span.kind.upper()],
        status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR, span.error),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )


def _otlp() -> SpanProcessor:
    # Imported only when asked for: it opens a gRPC channel of its own.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())


class _Cleaning(SpanProcessor):
    """Passes spans on without events (they may quote errors) and without prose."""

    def __init__(self, inner: SpanProcessor) -> None:
        self._inner = inner

    def on_end(self, span: ReadableSpan) -> None:
        if not span.attributes and not span.events and span.status.is_unset:
            self._inner.on_end(span)
            return
        self._inner.on_end(
            ReadableSpan(
                name=span.name,
                context=span.get_span_context(),
                parent=span.parent,
                resource=span.resource,
                attributes={key: _clean(value) for key, value in (span.attributes or {}).items()},
                kind=span.kind,
                status=_clean_status(span.status),
                start_time=span.start_time,
                end_time=span.end_time,
                instrumentation_scope=span.instrumentation_scope,
            )
        )

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _clean_status(status: Status) -> Status:
    """OpenTelemetry writes an exception's message there; its type is all that may pass."""
    if status.is_ok or status.description is None:
        return status
    kind = status.description.split(":")[0]
    return Status(status.status_code, kind if _IDENTIFIER.fullmatch(kind) else DROPPED)


def _clean(value: AttributeValue) -> AttributeValue:
    if isinstance(value, str):
        return value if _IDENTIFIER.fullmatch(value) else DROPPED
    if isinstance(value, bool | int | float):
        return value
    # Sequences of one type are all that OpenTelemetry allows besides.
    return DROPPED


class _FileProcessor(SpanProcessor):
    def __init__(self, service: str, directory: Path) -> None:
        self._service = service
        self._path = directory / f"{service}.jsonl"
        self._queue: SimpleQueue[ReadableSpan | threading.Event | None] = SimpleQueue()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._write_all, name="kvmesh-spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        self._queue.put(span)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout_millis / 1000)

    def shutdown(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout=5)

    def _write_all(self) -> None:
        file = self._open()
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    file.flush()
                    item.set()
                    continue
                file.write(self._line(item))
                if self._queue.empty():
                    file.flush()
                if file.tell() >= FILE_LIMIT_BYTES:
                    file.close()
                    self._path.replace(self._path.with_suffix(".old.jsonl"))
                    file = self._open()
            except OSError:
                # A full disk costs traces, never requests.
                continue
        file.close()

    def _open(self) -> IO[bytes]:
        return open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")

    def _line(self, span: ReadableSpan) -> bytes:
        context = span.get_span_context()
        record: dict[str, Any] = {
            "trace_id": f"{context.trace_id:032x}" if context else "",
            "span_id": f"{context.span_id:016x}" if context else "",
            "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
            "name": span.name,
            "service": self._service,
            "kind": span.kind.name.lower(),
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            "error": (span.status.description or "error") if not span.status.is_ok else None,
            "attributes": dict(span.attributes or {}),
        }
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"
