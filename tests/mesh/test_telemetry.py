"""Spans, logs and metrics: they arrive, they are bounded, and they keep secrets to themselves."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from mesh.telemetry import (
    MetricsServer,
    Tracing,
    bind_request_id,
    configure_logging,
    current_traceparent,
    parent_of,
    read_trace,
    record_span,
    traceparent_of,
)
from mesh.telemetry.propagation import parse_traceparent
from mesh.telemetry.reading import StoredSpan
from mesh.telemetry.tracing import DROPPED

PROMPT = "My password is hunter2, what is the capital of France?"


@pytest.fixture
def tracing(tmp_path: Path) -> Iterator[Tracing]:
    tracing = Tracing("router-0", "router", tmp_path / "traces")
    yield tracing
    tracing.close()


# Traces


def test_a_trace_is_found_by_its_id_and_by_its_request(tracing: Tracing, tmp_path: Path) -> None:
    worker = Tracing("decode-0", "decode", tmp_path / "traces")
    root = record_span(tracing.tracer, "request", 100, 900, attributes={"kvmesh.request_id": "req-1"})
    queued = record_span(tracing.tracer, "queue", 100, 200, parent=root)
    record_span(worker.tracer, "decode", 300, 800, parent=parent_of(traceparent_of(root)))
    record_span(tracing.tracer, "other", 1, 2, attributes={"kvmesh.request_id": "req-2"})
    tracing.flush()
    worker.close()
    by_id = read_trace(tmp_path, f"{root.trace_id:032x}")
    assert [(span.name, span.service) for span in by_id] == [
        ("request", "router-0"),
        ("queue", "router-0"),
        ("decode", "decode-0"),
    ]
    assert {span.parent_id for span in by_id} == {None, f"{root.span_id:016x}"}
    assert (by_id[1].start_ns, by_id[1].end_ns) == (100, 200)
    assert queued.trace_id == root.trace_id
    assert read_trace(tmp_path, "req-1") == by_id
    assert read_trace(tmp_path, "req-9") == []


def test_the_context_of_a_span_is_what_a_call_carries(tracing: Tracing) -> None:
    assert current_traceparent() is None
    with tracing.tracer.start_as_current_span("request") as span:
        line = current_traceparent()
        assert line is not None
        parsed = parse_traceparent(line)
        assert parsed is not None
        assert parsed.span_id == span.get_span_context().span_id
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "00",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01-more",
        "00-" + "A" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01\n",
    ],
)
def test_a_malformed_parent_is_no_parent(line: str) -> None:
    assert parse_traceparent(line) is None


def test_a_later_version_of_the_header_is_understood() -> None:
    context = parse_traceparent("01-" + "1" * 32 + "-" + "2" * 16 + "-01-more")
    assert context is not None
    assert context.is_remote


def test_prose_never_reaches_the_file(tracing: Tracing, tmp_path: Path) -> None:
    def failing() -> None:
        with tracing.tracer.start_as_current_span("request") as span:
            span.set_attribute("note", PROMPT)
            span.set_attribute("parts", PROMPT.split())
            span.set_attribute("model", "smollm2")
            span.add_event(PROMPT)
            raise ValueError(PROMPT)

    with pytest.raises(ValueError, match="hunter2"):
        failing()
    tracing.flush()
    text = (tmp_path / "traces" / "router-0.jsonl").read_text()
    assert "hunter2" not in text
    assert json.loads(text)["attributes"] == {"note": DROPPED, "parts": DROPPED, "model": "smollm2"}
    assert json.loads(text)["error"] == "ValueError"


def test_the_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.telemetry.tracing.FILE_LIMIT_BYTES", 2000)
    tracing = Tracing("router-0", "router", tmp_path / "traces")
    for number in range(100):
        last = record_span(tracing.tracer, "request", number, number + 1)
    tracing.close()
    sizes = [path.stat().st_size for path in (tmp_path / "traces").iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 2000 + 500
    assert read_trace(tmp_path, f"{last.trace_id:032x}")
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "traces").iterdir())


def test_half_a_line_of_a_killed_process_is_skipped(tracing: Tracing, tmp_path: Path) -> None:
    root = record_span(tracing.tracer, "request", 1, 2)
    tracing.flush()
    with (tmp_path / "traces" / "decode-0.jsonl").open("w") as file:
        file.write('{"trace_id":"')
    assert len(read_trace(tmp_path, f"{root.trace_id:032x}")) == 1


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def collecting() -> tuple[Collector, grpc.Server, int]:
    server, collector = grpc.server(ThreadPoolExecutor(1)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return collector, server, port


def test_a_configured_collector_gets_the_same_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector, server, port = collecting()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    tracing = Tracing("router-0", "router", tmp_path / "traces")
    span = record_span(tracing.tracer, "request", 1, 2, attributes={"note": PROMPT})
    tracing.close()
    server.stop(None)
    assert [sent.span_id for sent in collector.spans] == [span.span_id.to_bytes(8, "big")]
    assert "hunter2" not in str(collector.spans)
    assert len(read_trace(tmp_path, f"{span.trace_id:032x}")) == 1


def test_spans_of_others_are_forwarded_to_the_collector_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = StoredSpan(
        "ab" * 16, "cd" * 8, "ef" * 8, "envoy.request", "envoy", "server", 1, 2, "error", {"n": "x"}
    )
    without = Tracing("router-0", "router", tmp_path / "traces")
    without.forward([span])
    without.close()
    collector, server, port = collecting()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    tracing = Tracing("router-0", "router", tmp_path / "traces")
    tracing.forward([span])
    tracing.close()
    server.stop(None)
    (sent,) = collector.spans
    assert (sent.trace_id.hex(), sent.span_id.hex()) == (span.trace_id, span.span_id)
    assert (sent.parent_span_id.hex(), sent.name) == (span.parent_id, span.name)
    assert read_trace(tmp_path, span.trace_id) == []


def test_a_collector_that_is_away_does_not_hold_the_end_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("mesh.telemetry.tracing.CLOSE_TIMEOUT_S", 0.2)
    tracing = Tracing("router-0", "router", tmp_path / "traces")
    span = record_span(tracing.tracer, "request", 1, 2)
    started = time.monotonic()
    tracing.close()
    assert time.monotonic() - started < 1
    assert len(read_trace(tmp_path, f"{span.trace_id:032x}")) == 1


# Logs


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs with the service's logging; the result's call gives the lines so far."""
    output = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stdout", output)
    listener = configure_logging("router-0", level="info")

    def read() -> list[dict[str, Any]]:
        listener.stop()
        return [json.loads(line) for line in output.getvalue().splitlines()]

    yield read
    root.handlers[:], root.level = before, level


def test_a_line_names_service_request_and_trace(lines: Any, tracing: Tracing) -> None:
    log = logging.getLogger("router.core")
    with bind_request_id("req-1"), tracing.tracer.start_as_current_span("request") as span:
        log.info("placed on %s", "decode-0", extra={"attempt": 2})
        expected = f"{span.get_span_context().trace_id:032x}"
    log.debug("not shown")
    log.warning("later")
    first, second = lines()
    assert first["message"] == "placed on decode-0"
    assert (first["service"], first["level"], first["logger"]) == ("router-0", "info", "router.core")
    assert (first["request_id"], first["trace_id"], first["attempt"]) == ("req-1", expected, 2)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "request_id" not in second
    assert "trace_id" not in second


def test_an_exception_is_told_without_quoting_it(lines: Any) -> None:
    log = logging.getLogger("router.core")
    try:
        raise KeyError(PROMPT)
    except KeyError:
        log.exception("a request failed")
    try:
        raise FileNotFoundError(2, "No such file", "/state/arena")
    except OSError:
        log.exception("the arena is gone")
    first, second = lines()
    assert first["exception"]["type"] == "KeyError"
    assert "test_an_exception_is_told" in first["exception"]["at"][-1]
    assert "hunter2" not in json.dumps(first)
    assert "/state/arena" in second["exception"]["message"]


async def test_context_follows_tasks(lines: Any) -> None:
    async def child() -> None:
        logging.getLogger("x").info("child")

    with bind_request_id("req-7"):
        task = asyncio.create_task(child())
    await task
    logging.getLogger("x").info("outside")
    assert [line.get("request_id") for line in lines()] == ["req-7", None]


# Metrics

TOKEN = "s3cret-tökén"


@pytest.fixture
async def metrics() -> AsyncIterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("kvmesh_prompt_tokens", "x", registry=registry).inc(5)
    server = MetricsServer(registry, host="127.0.0.1", port=0, token=TOKEN)
    await server.start()
    yield server
    await server.close()


async def ask(server: MetricsServer, request: bytes) -> bytes:
    port = int(server.url.rpartition(":")[2].removesuffix("/metrics"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def get(path: str = "/metrics", token: str | None = TOKEN, method: str = "GET") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n"
    if token is not None:
        head += f"Authorization: Bearer {token}\r\n"
    return head.encode() + b"\r\n"


async def test_metrics_are_there_for_who_has_the_token(metrics: MetricsServer) -> None:
    answer = await ask(metrics, get())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"kvmesh_prompt_tokens_total 5.0" in answer


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get(token=None), 401),
        (get(token="wrong"), 401),
        (get(token=""), 401),
        (get(token=TOKEN + "x"), 401),
        (get(token=TOKEN[:-1]), 401),
        (get().replace(b"Bearer", b"Basic"), 401),
        (get().replace(b"Bearer", b"bearer"), 401),
        (get()[:-2] + b"Authorization: Bearer x\r\n\r\n", 401),
        (get("/", token=None), 401),
        (get("/healthz", token=None), 401),
        (get("/"), 404),
        (get("/metrics/"), 404),
        (get("//metrics"), 404),
        (get(method="POST"), 405),
        (get(method="HEAD"), 405),
        (b"\r\n\r\n", 401),
    ],
)
async def test_anything_else_is_refused(metrics: MetricsServer, request_bytes: bytes, status: int) -> None:
    answer = await ask(metrics, request_bytes)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"kvmesh_" not in answer


async def test_an_endless_or_silent_request_is_dropped(
    metrics: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.telemetry.metrics._HEAD_TIMEOUT_S", 0.05)
    assert await ask(metrics, b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 100_000) == b""
    assert await ask(metrics, b"GET /met") == b""
    assert (await ask(metrics, get())).startswith(b"HTTP/1.1 200")
