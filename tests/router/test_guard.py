"""Every route denies by default; who asks is checked before anything is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.routing import Route

from mesh.identity import service_audience
from router.openai.app import _routes
from router.openai.guard import EDGE_ONLY, OPEN
from tests.router.world import World, policy, until, world


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world(prefill=0) as made:
        yield made


def routes(mesh: World) -> Iterator[tuple[str, str]]:
    for route in _routes(mesh.router.core, mesh.router.spans, mesh.router.readiness):
        assert isinstance(route, Route)
        for method in route.methods or ():
            yield method, route.path.replace("{model:path}", "tiny")


async def test_every_route_denies_without_both_tokens(mesh: World) -> None:  # B98
    listed = list(routes(mesh))
    denied = {kind: list(denied_headers(mesh, edge_only=kind)) for kind in (True, False)}
    assert len(listed) >= 7
    strange = [(m, p) for m in ("GET", "POST", "PUT", "OPTIONS", "HEAD") for p in (
        "/", "/nowhere", "//v1/models", "/v1/chat/completions/", "/V1/models", "/healthz/x", "/metrics",
        "/docs",        "/openapi.json", "/v1/../healthz/../v1/models",
    )]  # fmt: skip
    for method, path in [*listed, *strange]:
        for headers in denied[path in EDGE_ONLY]:
            answer = await mesh.client.request(method, path, headers=headers, content=b"{}")
            if path in OPEN:
                assert answer.status_code in (200, 405), (method, path)
            else:
                assert answer.status_code == 401, (method, path, headers)
                assert answer.headers["www-authenticate"]
                assert answer.headers["x-request-id"]
    assert not mesh.worker.opened


def denied_headers(mesh: World, *, edge_only: bool) -> Iterator[dict[str, str]]:
    good = mesh.headers()
    yield {}
    yield {"authorization": "Bearer sk-something"}
    yield {**good, "x-mesh-service": "forged"}
    iam, edge = mesh.iam_identity, mesh.edge_identity
    # A token of the right mesh, for another audience or of another role.
    yield {**good, "x-mesh-service": edge.mint({}, audience="router", ttl_s=60)}
    yield {**good, "x-mesh-service": iam.mint({}, audience=service_audience("router"), ttl_s=60)}
    yield {**good, "x-mesh-service": edge.mint({}, audience=service_audience("router"), ttl_s=-1)}
    if edge_only:
        return
    yield {k: v for k, v in good.items() if k != "x-mesh-identity"}
    yield {k: v for k, v in good.items() if k != "x-mesh-service"}
    yield {
        **good,
        "x-mesh-identity": edge.mint({"org": "acme", "credential": "k"}, audience="router", ttl_s=60),
    }
    yield {**good, "x-mesh-identity": good["x-mesh-service"]}
    # Made for another request.
    yield {**good, "x-request-id": "another"}
    yield {**mesh.headers(org="")}
    yield {**mesh.headers(models="tiny")}


async def test_an_unknown_path_and_a_wrong_method_have_the_envelope(mesh: World) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions/", 404),
    ):
        answer = await mesh.client.request(method, path, headers=mesh.headers())
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"]


async def test_revoked_suspended_and_unknown_callers(mesh: World) -> None:
    assert (await mesh.chat()).status_code == 200
    for org in ("gone", "never"):
        answer = await mesh.post("/v1/completions", {"model": "tiny", "prompt": "x"}, org=org)
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"
    mesh.iam.put(policy(2, revoked=["k1"]))
    await until(lambda: mesh.router.policy.current().version == 2)
    answer = await mesh.chat()
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_a_snapshot_outlives_iam_for_a_while(mesh: World) -> None:
    await mesh.servers["iam-0"].stop(0)
    await until(lambda: not mesh.router.policy._connected)
    assert (await mesh.chat()).status_code == 200
    mesh.router.policy._usable_s = 0.0
    answer = await mesh.chat()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert (await mesh.client.get("/readyz")).status_code == 503
    assert (await mesh.client.get("/healthz")).status_code == 200


async def test_readiness_says_why(mesh: World) -> None:
    ready = await mesh.client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["models"] == 1
    await mesh.decode[0].server.stop(0)
    await until(lambda: not mesh.router.fleet.serving()["tiny"])
    gone = await mesh.client.get("/readyz")
    assert gone.status_code == 503
    assert gone.json()["models_without_workers"] == 1


async def test_envoys_spans_join_the_others(mesh: World) -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    from mesh.telemetry import read_trace

    request = trace_service_pb2.ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = b"\x01" * 16, b"\x02" * 8, "ingress"
    span.start_time_unix_nano, span.end_time_unix_nano = 5, 9
    attribute = span.attributes.add(key="guid:x-request-id")
    attribute.value.string_value = "r-1"
    span.attributes.add(key="http.url").value.string_value = "https://secret"
    headers = {"x-mesh-service": mesh.headers()["x-mesh-service"]}
    answer = await mesh.client.post(
        "/internal/otlp/v1/traces", content=request.SerializeToString(), headers=headers
    )
    assert answer.status_code == 200
    (stored,) = read_trace(mesh.path, "r-1")
    assert (stored.service, stored.name, stored.end_ns) == ("envoy", "envoy.ingress", 9)
    assert "secret" not in str(stored)
    bad = await mesh.client.post("/internal/otlp/v1/traces", content=b"\xff\xff", headers=headers)
    assert bad.status_code == 400


def test_the_socket_is_the_owners_alone(tmp_path: Any) -> None:
    from router.openai.http_server import _unix

    listener = _unix(tmp_path / "s.sock")
    assert (tmp_path / "s.sock").stat().st_mode & 0o777 == 0o600
    listener.close()
