"""What a prefill worker counts. No label ever carries a request or a tenant."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CHUNK_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class LoopTelemetry:
    """The metrics of the loop. `changed` is called when the load is another one."""

    def __init__(self, registry: CollectorRegistry, changed: Callable[[], None] = lambda: None) -> None:
        self.running = self.waiting = 0
        self.chunk_s = 0.0
        self.changed = changed
        self._running = Gauge("kvmesh_num_requests_running", "Prompts in computation.", registry=registry)
        self._waiting = Gauge("kvmesh_num_requests_waiting", "Prompts in the queue.", registry=registry)
        self._runs = Counter("kvmesh_prefill_runs_total", "Runs taken into the queue.", registry=registry)
        self._tokens = Counter("kvmesh_prefill_tokens_total", "Prompt tokens computed.", registry=registry)
        self._chunk_s = Histogram(
            "kvmesh_prefill_chunk_seconds", "Time of one chunk.", buckets=CHUNK_BUCKETS_S, registry=registry
        )

        self._cancelled = Histogram(
            "kvmesh_cancel_seconds",
            "From the caller's leaving to the end of the chunk that was running.",
            buckets=CHUNK_BUCKETS_S,
            registry=registry,
        )

    def cancelled(self, seconds: float) -> None:
        self._cancelled.observe(seconds)

    def entered(self) -> None:
        self._runs.inc()

    def queue(self, *, running: int, waiting: int) -> None:
        self.running, self.waiting = running, waiting
        self._running.set(running)
        self._waiting.set(waiting)
        self.changed()

    def computed(self, tokens: int, seconds: float) -> None:
        self.chunk_s = seconds
        self._tokens.inc(tokens)
        self._chunk_s.observe(seconds)
