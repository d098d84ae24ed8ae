"""What a request did here, as spans of its trace: hand-over, first step, generation."""

from __future__ import annotations

import time
from itertools import pairwise

from opentelemetry.trace import Tracer

from decode.frames import Ending
from decode.request import Request
from mesh.telemetry.propagation import parent_of
from mesh.telemetry.tracing import record_span


class RequestSpans:
    """Writes the spans of a request when it ends; nothing for one outside of a trace."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def record(self, request: Request, ending: Ending) -> None:
        opening = request.opening
        parent = parent_of(opening.traceparent or None)
        if parent is None:
            return
        borders = [
            ("decode.handover", request.opened_ns),
            ("decode.first_step", request.ready_ns),
            ("decode.generate", request.first_token_ns),
            ("", time.time_ns()),
        ]
        reached = [border for border in borders if border[1]]
        attributes: dict[str, str | int] = {
            "ending": ending.name.lower(),
            "prompt_tokens": len(opening.tokens),
            "computed_prompt_tokens": request.computed_prompt_tokens,
            "choices": opening.n,
            "last_step_unix_ns": request.last_step_ns,
        }
        for (name, start_ns), (_, end_ns) in pairwise(reached):
            record_span(self._tracer, name, start_ns, end_ns, parent=parent, attributes=attributes)
