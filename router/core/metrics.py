"""The router's metrics, under the field's names.

Labels are model names of the catalogue and outcomes, nothing else of a request.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mesh.telemetry import LATENCY_BUCKETS_S, TOKEN_INTERVAL_BUCKETS_S

_TOKEN_BUCKETS = tuple(float(2**power) for power in range(0, 18))


class RouterMetrics:
    """One per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
            return Histogram(f"kvmesh_{name}", text, ["model"], buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvmesh_{name}", text, ["model", *labels], registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"kvmesh_{name}", text, ["model"], registry=registry)

        self.first_token = histogram("time_to_first_token_seconds", "From the edge to the first token.")
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between two tokens of a choice.", TOKEN_INTERVAL_BUCKETS_S
        )
        self.whole = histogram("e2e_request_latency_seconds", "From the edge to the end of the answer.")
        self.queued = histogram("request_queue_time_seconds", "Waiting for a decode worker.")
        self.prefill = histogram("request_prefill_time_seconds", "From the reservation to the last block.")
        self.decode = histogram("request_decode_time_seconds", "From the first token to the last.")
        self.prompt_length = histogram(
            "request_prompt_tokens", "Tokens of the prompts of a request.", _TOKEN_BUCKETS
        )
        self.answer_length = histogram("request_generation_tokens", "Tokens of its answers.", _TOKEN_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self.recomputed = Histogram(
            "kvmesh_recomputed_tokens",
            "Tokens computed a second time by a choice that goes on elsewhere (why: lost, moved, preempted).",
            ["model", "why"],
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.requests = counter("requests", "Requests by outcome (ok, cancelled, an error code).", "outcome")
        self.running = gauge("num_requests_running", "Requests being answered, those that wait included.")
        self.waiting = gauge("num_requests_waiting", "Requests waiting for a decode worker.")
