"""W3C trace context between processes: one `traceparent` line per call."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def parse_traceparent(text: str) -> SpanContext | None:
    """The remote parent that the line names; None if it is malformed."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    context = SpanContext(
        trace_id=int(match[2], 16),
        span_id=int(match[3], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[4], 16) & TraceFlags.SAMPLED),
    )
    return context if context.is_valid else None


def traceparent_of(context: SpanContext) -> str:
    """The line that names `context` as the parent of what follows."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def current_traceparent() -> str | None:
    """The line for the span that is current here; None outside of a trace."""
    context = trace.get_current_span().get_span_context()
    return traceparent_of(context) if context.is_valid else None


def parent_of(traceparent: str | None) -> Context | None:
    """The OpenTelemetry context to start children of a remote span in."""
    parsed = None if traceparent is None else parse_traceparent(traceparent)
    return None if parsed is None else trace.set_span_in_context(NonRecordingSpan(parsed), Context())


@contextmanager
def server_span(name: str, traceparent: str | None) -> Iterator[Span | None]:
    """A span around the handling of a call that belongs to a trace; nothing around others.

    Calls outside of any trace (heartbeats, refills) are many and tell nothing.
    """
    parent = parent_of(traceparent)
    if parent is None:
        yield None
        return
    tracer = trace.get_tracer("kvmesh")
    with tracer.start_as_current_span(
        name.strip("/"),
        context=parent,
        kind=SpanKind.SERVER,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield span
        except asyncio.CancelledError:
            # The caller has what it wanted, or has gone: the normal end of a prefill run.
            span.set_attribute("rpc.cancelled", True)
            raise
        except BaseException as error:
            # Only the type: a message may quote what a user wrote.
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
