"""What a decode worker counts. No label ever carries a request or a tenant."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decode.frames import Ending

STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class LoopTelemetry:
    """The metrics of the loop; `step_s` is a moving average. `changed`: the load may be another one."""

    def __init__(self, registry: CollectorRegistry, changed: Callable[[], None] = lambda: None) -> None:
        self.step_s = 0.0
        self.running = self.waiting = 0
        self.changed = changed
        self._running = Gauge("kvmesh_num_requests_running", "Requests in the batch.", registry=registry)
        self._waiting = Gauge(
            "kvmesh_num_requests_waiting", "Requests in their hand-over.", registry=registry
        )
        self._steps = Counter("kvmesh_decode_steps_total", "Engine steps.", registry=registry)
        self._rows = Counter("kvmesh_decode_rows_total", "Token positions computed.", registry=registry)
        self._step_s = Histogram(
            "kvmesh_decode_step_seconds", "Time of one step.", buckets=STEP_BUCKETS_S, registry=registry
        )
        self._prompt = Counter(
            "kvmesh_decode_prompt_tokens_total",
            "Prompt tokens this worker computed itself.",
            registry=registry,
        )
        self._generated = Counter("kvmesh_generation_tokens_total", "Tokens generated.", registry=registry)
        self._endings = Counter(
            "kvmesh_decode_requests_total", "Requests by how they ended.", ["ending"], registry=registry
        )

        self._cancelled = Histogram(
            "kvmesh_cancel_seconds",
            "From a cancellation to the end of the last step that the request was in.",
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )

    def cancelled(self, seconds: float) -> None:
        self._cancelled.observe(seconds)

    def stepped(self, seconds: float, rows: int) -> None:
        self.step_s = seconds if self.step_s == 0.0 else 0.9 * self.step_s + 0.1 * seconds
        self._steps.inc()
        self._rows.inc(rows)
        self._step_s.observe(seconds)

    def requests(self, *, running: int, waiting: int) -> None:
        self.running, self.waiting = running, waiting
        self._running.set(running)
        self._waiting.set(waiting)
        self.changed()

    def generated(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def ended(self, ending: Ending, computed_prompt_tokens: int) -> None:
        self._prompt.inc(computed_prompt_tokens)
        self._endings.labels(ending.name.lower()).inc()
