"""What the real Envoy does with the document that `deploy.envoy` makes."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from kvmesh.v1 import inference_pb2, inference_pb2_grpc

from deploy.envoy import (
    CertificateFiles,
    EdgeConfig,
    RouterEndpoint,
    UpstreamTls,
    arguments,
    envoy_binary,
    write_bootstrap,
)
from mesh.ca import CertificateAuthority
from tests.deploy.edge_lab import GOOD_KEY, Edge, free_port, running_envoy, start_authorization

AUTHORISED = {"authorization": GOOD_KEY}
MIB = 1024 * 1024


@pytest.fixture
async def client(edge: tuple[Edge, grpc.aio.Server]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=edge[0].url, timeout=20) as http:
        yield http


def is_error_envelope(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    return (
        answer.headers["content-type"] == "application/json"
        and set(error) == {"message", "type", "param", "code"}
        and (error["code"] is None or isinstance(error["code"], str))
    )


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_health_needs_no_credential(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 200


CLOSED = (
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/openapi.json",
    "/",
    "/internal/otlp/v1/traces",
    "/metrics",
    "//v1/models",
    "/V1/models",
    "/%761/models",
    "/v1/../readyz/x",
    "/healthz/",
    "/healthz/../v1/models",
    "/kvmesh.v1.Inference/Generate",
    "/grpc.health.v1.Health/Check",
)
NOWHERE = (
    "/v1/..%2finternal/otlp/v1/traces",
    "/v1/%2e%2e/internal/otlp/v1/traces",
    "/v1/..%5cinternal/otlp/v1/traces",
    "/internal/otlp/v1/traces",
    "/nowhere",
    "/V1/models",
    "/tokenize/x",
    "/Detokenize",
)


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT"])
async def test_everything_else_does(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient, method: str
) -> None:
    for path in CLOSED:
        answer = await client.request(method, path)
        assert answer.status_code == 401, path
        assert method == "HEAD" or is_error_envelope(answer)
    assert not edge[0].upstream.requests()


async def test_a_path_that_does_not_exist_is_a_404_for_who_may_come_in(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient
) -> None:
    for path in NOWHERE:
        answer = await client.post(path, headers=AUTHORISED)
        assert answer.status_code == 404, path
        assert is_error_envelope(answer)
    assert not edge[0].upstream.requests()


async def test_an_encoded_slash_belongs_to_the_model_id(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models/owner%2Fname", headers=AUTHORISED)
    assert answer.json()["line"] == "GET /v1/models/owner/name HTTP/1.1"


async def test_the_router_sees_the_mesh_and_nothing_a_client_made_up(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient
) -> None:
    forged = {
        "x-mesh-identity": "forged",
        "x-mesh-service": "forged",
        "x-mesh-anything": "forged",
        "x-request-id": "forged",
        "x-envoy-max-retries": "9",
    }
    answer = await client.get("/v1/models", headers={**AUTHORISED, **forged})
    seen = answer.json()["headers"]
    assert seen["x-mesh-identity"] == "minted"
    assert seen["x-mesh-service"] == "router-token"
    assert "x-mesh-anything" not in seen
    assert "authorization" not in seen
    assert "x-envoy-max-retries" not in seen
    assert seen["x-request-id"] == answer.headers["x-request-id"] != "forged"
    assert float(seen["x-mesh-start"]) > 1e9
    assert seen["traceparent"].startswith("00-")
    check, metadata = edge[0].authorization.calls[-1]
    assert metadata["x-mesh-service"] == "iam-token"
    assert check.attributes.request.http.headers["x-request-id"] == answer.headers["x-request-id"]


async def test_a_browser_may_ask_first_and_read_refusals(client: httpx.AsyncClient) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    preflight = await client.options("/v1/chat/completions", headers=asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = await client.get("/v1/models", headers={"origin": "https://page.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_has_a_limit_with_and_without_a_stated_length(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient, announced: bool
) -> None:
    async def chunks(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 65536):
            yield b"x" * 65536

    def body(size: int) -> Any:
        return b"x" * size if announced else chunks(size)

    within = await client.post("/v1/completions", headers=AUTHORISED, content=body(7 * MIB))
    assert within.json()["bytes"] == 7 * MIB
    over = await client.post("/v1/completions", headers=AUTHORISED, content=body(9 * MIB))
    assert over.status_code == 413
    assert over.json()["error"]["code"] == "request_too_large"
    assert is_error_envelope(over)
    over = await client.post("/v1/messages", headers=AUTHORISED, content=body(9 * MIB))
    assert over.status_code == 413
    said = over.json()
    assert said.pop("request_id") == over.headers["x-request-id"]
    message = said["error"].pop("message")
    assert said == {"type": "error", "error": {"type": "request_too_large"}}
    assert "too large" in message
    assert len(edge[0].upstream.requests()) == 1


@pytest.mark.parametrize("raw", [b"GARBAGE\r\n\r\n", b"GET /v1/models HTTP/1.1\r\n\r\n"])
async def test_what_is_no_request_gets_an_envelope_and_an_id_too(
    edge: tuple[Edge, grpc.aio.Server], raw: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", edge[0].config.port)
    writer.write(raw)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert len(re.findall(rb"(?m)^x-request-id: [0-9a-f-]{36}\r?$", head)) == 1
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_silence_is_cut_and_slowness_is_not(edge: tuple[Edge, grpc.aio.Server]) -> None:  # B114
    at, _ = edge
    config = replace(
        at.config, port=free_port(), admin_socket=at.directory / "admin2.sock", stream_idle_timeout_s=1.0
    )
    hung_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
        if line == b"/v1/slow":
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(6):
                await asyncio.sleep(0.4)
                writer.write(b"2\r\nab\r\n")
            writer.write(b"0\r\n\r\n")
        else:
            # Never an answer; the edge hangs up.
            await reader.read()
            hung_up.set()
        writer.close()

    at.config.routers[0].openai.unlink()
    server = await asyncio.start_unix_server(serve, at.config.routers[0].openai)
    (at.directory / "two").mkdir()
    async with (
        server,
        running_envoy(config, at.directory / "two"),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.port}", timeout=20) as client,
    ):
        whole = await client.get("/v1/slow", headers=AUTHORISED)
        assert whole.content == b"ab" * 6
        assert whole.elapsed.total_seconds() > 2
        cut = await client.get("/v1/silent", headers=AUTHORISED)
        assert cut.status_code == 504
        assert is_error_envelope(cut)
        await asyncio.wait_for(hung_up.wait(), 5)


async def test_a_restart_of_iam_is_bridged(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient
) -> None:
    at, iam = edge
    await iam.stop(0)
    asked = asyncio.create_task(client.get("/v1/models", headers=AUTHORISED))
    await asyncio.sleep(0.7)
    again = await start_authorization(at.authorization, at.config.iam[0])
    assert (await asked).status_code == 200
    await again.stop(0)


async def test_without_iam_the_answer_is_a_clear_503(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient
) -> None:
    await edge[1].stop(0)
    answer = await client.get("/v1/models", headers=AUTHORISED)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert is_error_envelope(answer)
    assert 2.5 < answer.elapsed.total_seconds() < 5
    assert not edge[0].upstream.requests()


async def test_without_a_router_the_answer_is_a_clear_503(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient
) -> None:
    edge[0].config.routers[0].openai.unlink()
    answer = await client.get("/v1/models", headers=AUTHORISED)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert is_error_envelope(answer)


async def test_what_a_dying_router_has_not_begun_to_answer_is_repeated(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient
) -> None:
    upstream = edge[0].upstream
    upstream.hang_up = ["before the answer"]
    answer = await client.post("/v1/completions", headers=AUTHORISED, content=b"x" * 2 * MIB)
    assert answer.status_code == 200
    assert answer.json()["bytes"] == 2 * MIB
    asked = [headers for line, headers, _ in upstream.requests() if "/v1/" in line]
    first, second = (headers["x-request-id"] for headers in asked)
    assert first == second == answer.headers["x-request-id"]


async def test_an_answer_that_has_begun_is_never_begun_again(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient
) -> None:
    upstream = edge[0].upstream
    upstream.hang_up = ["within the answer"]
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post("/v1/completions", headers=AUTHORISED, content=b"x")
    assert [line for line, _, _ in upstream.requests() if "/v1/" in line] == ["POST /v1/completions HTTP/1.1"]


async def test_grpc_has_its_own_route_with_the_same_check(edge: tuple[Edge, grpc.aio.Server]) -> None:
    at, _ = edge
    identities: list[str] = []

    class Inference(inference_pb2_grpc.InferenceServicer):
        def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
            raise NotImplementedError

        async def Tokenize(self, request: Any, context: Any) -> Any:
            raise NotImplementedError

        async def ListModels(
            self,
            request: inference_pb2.ListModelsRequest,
            context: grpc.aio.ServicerContext[Any, Any],
        ) -> inference_pb2.ListModelsResponse:
            identities.append(str(dict(context.invocation_metadata() or ()).get("x-mesh-identity")))
            return inference_pb2.ListModelsResponse()

    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server)  # type: ignore[abstract]
    server.add_insecure_port(at.config.routers[0].grpc)
    await server.start()
    async with grpc.aio.insecure_channel(at.url.removeprefix("http://")) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListModels(inference_pb2.ListModelsRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("authorization", GOOD_KEY),))
    await server.stop(0)
    assert identities == ["minted"]


async def test_spans_go_to_the_router_and_health_checks_leave_none(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient
) -> None:
    upstream = edge[0].upstream
    await client.get("/healthz")
    await client.get("/v1/models", headers=AUTHORISED)

    while not (found := [h for line, h, _ in upstream.seen if line.startswith("POST /internal/otlp")]):
        await asyncio.wait_for(upstream.heard(), 20)
    headers = found[0]
    assert headers["x-mesh-service"] == "router-token"
    assert headers["content-type"] == "application/x-protobuf"


async def test_the_access_log_has_no_query_and_no_credential(
    edge: tuple[Edge, grpc.aio.Server], client: httpx.AsyncClient
) -> None:
    await client.get("/v1/models?api_key=hidden", headers=AUTHORISED)
    async with asyncio.timeout(20):
        # Envoy says nowhere that it wrote.
        while "/v1/models" not in (text := edge[0].log_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert "hidden" not in text
    assert "good" not in text
    assert "minted" not in text


@pytest.mark.parametrize("routers", [1, 3])
def test_every_form_of_the_document_is_valid(tmp_path: Path, routers: int) -> None:
    binary = envoy_binary()
    if binary is None:
        pytest.skip("no Envoy on this platform")
    authority = CertificateAuthority.open_or_create(tmp_path / "ca")
    files = authority.issue(tmp_path, role="edge", name="edge")
    plain = EdgeConfig(
        host="127.0.0.1",
        port=free_port(),
        admin_socket=tmp_path / "admin.sock",
        routers=tuple(
            RouterEndpoint(f"router-{n}", tmp_path / f"{n}.openai.sock", f"127.0.0.1:{20000 + n}")
            for n in range(routers)
        ),
        iam=("127.0.0.1:21000", "127.0.0.1:21001"),
        router_token="r",
        iam_token="i",
    )
    tls = replace(
        plain,
        tls=CertificateFiles(files.cert, files.key),
        upstream_tls=UpstreamTls(files.cert, files.key, files.ca),
    )
    for config in (plain, tls):
        document = tmp_path / "envoy.json"
        write_bootstrap(document, config)
        assert document.stat().st_mode & 0o777 == 0o600
        command = [*arguments(binary, document), "--disable-hot-restart", "--mode", "validate"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
