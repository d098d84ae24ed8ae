"""One request from its arrival to its account: phases, span, metrics, usage, log line.

Both faces open an exchange before they look at a request and settle it exactly once,
however it ends. Nothing here holds a prompt or an answer. It does not know how a
request is worked on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvmesh.v1 import iam_pb2
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, use_span

from mesh.errors import MeshError
from mesh.telemetry import parent_of, record_span, traceparent_of
from mesh.telemetry.reading import REQUEST_ID
from router.core import phases as phase
from router.core.metrics import RouterMetrics
from router.core.phases import Phases
from router.core.request import Caller, Usage

log = logging.getLogger("router.request")

CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Books:
    """Where exchanges are accounted for. `keep_usage(request_id, record)` stores a metering record."""

    tracer: Tracer
    metrics: RouterMetrics
    keep_usage: Callable[[str, bytes], None]


class Exchange:
    """`start_ns` is when the edge took the request, in unix nanoseconds; 0 is now."""

    def __init__(
        self, books: Books, route: str, request_id: str, *, start_ns: int = 0, traceparent: str | None = None
    ) -> None:
        arrived_ns = time.time_ns()
        self.route = route
        self.request_id = request_id
        self.arrival_ns = arrived_ns
        self.phases = Phases(start_ns if 0 < start_ns <= arrived_ns else arrived_ns)
        self.usage = Usage()
        self.caller: Caller | None = None
        self.model_asked = ""
        self.first_token_s: float | None = None
        self.finish_reasons: list[str] = []
        self._books = books
        self._model = ""
        self._settled = False
        self._running = False
        parent: Context | None = parent_of(traceparent)
        self.span: Span = books.tracer.start_span(
            route, context=parent or Context(), kind=SpanKind.SERVER, start_time=arrived_ns
        )
        self.span.set_attribute(REQUEST_ID, request_id)
        self.traceparent = traceparent_of(self.span.get_span_context())

    @property
    def elapsed_ms(self) -> int:
        """Since the request arrived here."""
        return (time.time_ns() - self.arrival_ns) // 1_000_000

    def admitted(self, model: str) -> None:
        """The caller may use this model of the catalogue."""
        self._model = model
        self._running = True
        metrics = self._books.metrics
        metrics.running.labels(model).inc()
        # Looked up once: they are counted up for every token.
        self._count_tokens = metrics.generation_tokens.labels(model).inc
        self._observe_interval = metrics.inter_token.labels(model).observe
        self.span.set_attribute("kvmesh.model", model)

    def accepted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A worker has reserved for one prompt of the request."""
        self.usage.cached_tokens += cached_tokens
        metrics = self._books.metrics
        metrics.prompt_tokens.labels(self._model).inc(prompt_tokens)
        metrics.prefix_queries.labels(self._model).inc(prompt_tokens)
        metrics.prefix_hits.labels(self._model).inc(cached_tokens)

    def placed_anew(self, why: str, recomputed_tokens: int) -> None:
        """A choice goes on at a worker after it was `lost`, `moved` or `preempted` elsewhere."""
        self._books.metrics.recomputed.labels(self._model, why).observe(recomputed_tokens)

    def generated(self, tokens: int, since_last_s: float | None) -> None:
        """Tokens of one choice have arrived, `since_last_s` after its last ones (None: its first)."""
        metrics = self._books.metrics
        self.usage.completion_tokens += tokens
        self._count_tokens(tokens)
        if since_last_s is not None and tokens:
            self._observe_interval(since_last_s / tokens)
        if self.first_token_s is None and tokens:
            self.phases.enter(phase.DECODE)
            self.first_token_s = self.phases.total_s(*phase.BEFORE_FIRST_TOKEN)
            metrics.first_token.labels(self._model).observe(self.first_token_s)

    def settle(self, outcome: str = "ok", error: MeshError | None = None) -> None:
        """The end. Only the first call counts."""
        if self._settled:
            return
        self._settled = True
        self.phases.finish()
        if error is not None:
            outcome = error.code or "error"
            self.span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self._tell_metrics(outcome)
        self._tell_trace(outcome)
        self._tell_usage(outcome)
        self._tell_log(outcome, error)

    def _tell_metrics(self, outcome: str) -> None:
        metrics, model, phases = self._books.metrics, self._model, self.phases
        metrics.requests.labels(model, outcome).inc()
        if not self._running:
            return
        metrics.running.labels(model).dec()
        metrics.whole.labels(model).observe(phases.elapsed_s())
        metrics.queued.labels(model).observe(phases.total_s(phase.QUEUE))
        if self.first_token_s is not None:
            metrics.prefill.labels(model).observe(phases.total_s(phase.PREFILL, phase.HANDOVER))
            metrics.decode.labels(model).observe(phases.total_s(phase.DECODE))
            metrics.prompt_length.labels(model).observe(self.usage.prompt_tokens)
            metrics.answer_length.labels(model).observe(self.usage.completion_tokens)

    def _tell_trace(self, outcome: str) -> None:
        for visit in self.phases.visits:
            record_span(self._books.tracer, visit.phase, visit.start_ns, visit.end_ns, parent=self.span)
        self.span.set_attributes(
            {
                "kvmesh.outcome": outcome,
                "kvmesh.prompt_tokens": self.usage.prompt_tokens,
                "kvmesh.cached_tokens": self.usage.cached_tokens,
                "kvmesh.completion_tokens": self.usage.completion_tokens,
            }
        )
        if self.first_token_s is not None:
            self.span.set_attribute("kvmesh.time_to_first_token_s", self.first_token_s)
        self.span.end()

    def _tell_usage(self, outcome: str) -> None:
        if not self._running or self.caller is None or not self.usage.prompt_tokens:
            return
        record = iam_pb2.UsageRecord(
            request_id=self.request_id,
            organisation=self.caller.organisation,
            credential=self.caller.credential,
            model_asked=self.model_asked,
            model_served=self._model,
            prompt_tokens=self.usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens,
            cached_tokens=self.usage.cached_tokens,
            outcome=outcome,
            finished_unix_ms=time.time_ns() // 1_000_000,
        )
        self._books.keep_usage(self.request_id, record.SerializeToString())

    def _tell_log(self, outcome: str, error: MeshError | None) -> None:
        # The line takes the trace's id from the span that is current.
        with use_span(self.span):
            log.info("request", extra=self._line(outcome, error))

    def _line(self, outcome: str, error: MeshError | None) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "route": self.route,
            "organisation": self.caller.organisation if self.caller else None,
            "credential": self.caller.credential if self.caller else None,
            "model": self._model or None,
            "outcome": outcome,
            "status": error.http_status if error is not None else None,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "time_to_first_token_s": self.first_token_s,
            "duration_s": round(self.phases.elapsed_s(), 4),
        }
