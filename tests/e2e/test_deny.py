"""Nobody gets anywhere without an identity: every port, every route."""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from kvmesh.v1 import decode_pb2, iam_pb2, inference_pb2, pages_pb2, prefill_pb2, responses_pb2

from tests.e2e.harness import Mesh, running

SERVICES = {
    "router": [(inference_pb2, "Inference")],
    "prefill": [(prefill_pb2, "Prefill")],
    "decode": [(decode_pb2, "Decode")],
    "kvstore": [(pages_pb2, "Pages")],
    "responses": [(responses_pb2, "Responses")],
    "iam": [(iam_pb2, name) for name in ("Identity", "Policy", "Quota", "Admin")],
}


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    state = tmp_path_factory.mktemp("tcp") / "state"
    with running(state, ["--listen", "tcp", "--tls", "--model", "tiny=tiny:seed=1"], scheme="https") as m:
        yield m


async def test_keys(mesh: Mesh) -> None:
    request = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic eDp5"},
            {"authorization": f"Bearer {mesh.key}x"},
            {"x-mesh-identity": "forged"},
        ):
            answer = await client.post("/v1/completions", json=request, headers=headers)
            assert answer.status_code == 401, headers
            error = answer.json()["error"]
            assert error["code"] is None or isinstance(error["code"], str)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.headers["x-request-id"]
        secret = mesh.new_key("dev")
        key_id = secret.split("_")[1]
        headers = {"authorization": f"Bearer {secret}"}
        assert (await client.post("/v1/completions", json=request, headers=headers)).status_code == 200
        mesh.cli("keys", "revoke", key_id)
        end = time.monotonic() + 5
        while (await client.post("/v1/completions", json=request, headers=headers)).status_code != 401:
            assert time.monotonic() < end


async def test_unknown_and_forbidden_models_look_the_same(mesh: Mesh) -> None:
    mesh.cli("orgs", "create", "narrow")
    mesh.cli("grants", "allow", "narrow", "script")
    secret = mesh.new_key("narrow")
    async with mesh.client(key=secret) as client:
        answers = []
        for model in ("tiny", "nonexistent"):
            answer = await client.post("/v1/completions", json={"model": model, "prompt": "x"})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert error["code"] == "model_not_found"
            answers.append(error["message"].replace(model, "M"))
        assert answers[0] == answers[1]
        listed = (await client.get("/v1/models")).json()["data"]
        assert [m["id"] for m in listed] == ["script"]
        assert (await client.get("/v1/models/tiny")).status_code == 404
        ok = await client.post("/v1/completions", json={"model": "script", "prompt": "x"})
        assert ok.status_code == 200


def methods(role: str) -> list[str]:
    names = ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/nowhere.Service/Method"]
    for module, service in SERVICES[role]:
        descriptor = module.DESCRIPTOR.services_by_name[service]
        names += [f"/{descriptor.full_name}/{method.name}" for method in descriptor.methods]
    if role == "iam":
        names.append("/envoy.service.auth.v3.Authorization/Check")
    return names


async def denied(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    """The status of a call without an identity; on the wire every kind of call begins like a unary one."""
    call: Any = channel.unary_unary(method, lambda data: data, lambda data: data)
    try:
        await call(b"", timeout=10)
    except grpc.aio.AioRpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", sorted(SERVICES))
async def test_every_rpc_over_unix_sockets_is_denied(mesh: Mesh, role: str) -> None:
    for process in mesh.processes(role):
        async with grpc.aio.insecure_channel(process["address"]) as channel:
            for method in methods(role):
                code = await denied(channel, method)
                assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED), method


@pytest.mark.parametrize("role", sorted(SERVICES))
async def test_every_rpc_over_tcp_needs_a_certificate_of_the_right_service(
    tcp: Mesh, role: str, tmp_path: Path
) -> None:
    from mesh.ca import CertificateAuthority
    from mesh.identity import ServiceIdentity
    from mesh.rpc import open_channel

    address = tcp.processes(role)[0]["address"]
    async with grpc.aio.insecure_channel(address) as channel:
        assert await denied(channel, methods(role)[-1]) == grpc.StatusCode.UNAVAILABLE
    authority = CertificateAuthority.open_or_create(tcp.state / "ca")
    identity = ServiceIdentity.load(authority.issue(tmp_path, role="nobody", name="nobody-0"))
    channel = open_channel(address, identity, callee_role=role, tls=True)
    async with channel:
        for method in methods(role):
            code = await denied(channel, method)
            assert code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED), method


async def test_the_mesh_serves_over_tcp_with_tls(tcp: Mesh) -> None:
    context = ssl.create_default_context(cafile=str(tcp.state / "ca" / "ca.pem"))
    async with httpx.AsyncClient(
        base_url=tcp.url, verify=context, headers=tcp.headers(), timeout=60
    ) as client:
        answer = await client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 3}
        )
        assert answer.status_code == 200, answer.text


async def test_http_faces_are_denied(mesh: Mesh) -> None:
    for process in mesh.status()["processes"]:
        url = process.get("metrics_url")
        if url and url.startswith("http"):
            assert httpx.get(url).status_code == 401, process["name"]
            wrong = httpx.get(url, headers={"authorization": "Bearer wrong"})
            assert wrong.status_code == 401, process["name"]
    for process in mesh.processes("router"):
        transport = httpx.AsyncHTTPTransport(
            uds=process["address"].removeprefix("unix:").replace(".sock", ".openai.sock")
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            for path in (
                "/v1/chat/completions",
                "/v1/models",
                "/internal/otlp/v1/traces",
                "/nowhere",
                "//v1/models",
            ):
                for method in ("GET", "POST"):
                    answer = await client.request(method, path, json={}, headers=mesh.headers())
                    assert answer.status_code in (401, 403), (method, path, answer.status_code)


async def test_the_edge_denies_by_default(mesh: Mesh) -> None:  # B98
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as client:
        for path in (
            "/v1/chat/completions",
            "/v1/chat/completions/",
            "//v1/chat/completions",
            "/v1/../v1/models",
            "/V1/models",
            "/%76%31/models",
            "/v1/models/a%2Fb",
            "/internal/otlp/v1/traces",
            "/metrics",
            "/stats",
            "/kvmesh.v1.Inference/ListModels",
            "/kvmesh.v1.Admin/CreateKey",
            "/kvmesh.v1.Pages/Stats",
        ):
            for method in ("GET", "POST", "HEAD"):
                answer = await client.request(method, path)
                assert answer.status_code in (400, 401, 403, 404), (method, path, answer.status_code)
                assert answer.status_code != 200


def test_nats_refuses_strangers(mesh: Mesh) -> None:
    address = mesh.processes("nats")[0]["address"].removeprefix("nats://")
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=5) as s:
        s.settimeout(5)
        info = s.recv(4096)
        assert json.loads(info.split(b" ", 1)[1])["auth_required"]
        s.sendall(b'CONNECT {"verbose":true}\r\nPING\r\n')
        assert b"-ERR" in s.recv(4096)


def test_sockets_and_files_belong_to_the_owner_alone(mesh: Mesh) -> None:
    def mode(path: Path) -> int:
        return os.stat(path).st_mode & 0o777

    assert mode(mesh.state) == 0o700
    assert mode(mesh.state / "dev-key") == 0o600
    for process in mesh.status()["processes"]:
        address: Any = process.get("address") or ""
        if address.startswith("unix:"):
            assert mode(Path(address.removeprefix("unix:")).parent) == 0o700


def test_nothing_secret_reaches_logs_or_traces(mesh: Mesh) -> None:
    canary = "xyzzy-canary-prompt"
    httpx.post(
        f"{mesh.url}/v1/completions",
        json={"model": "script", "prompt": canary},
        headers=mesh.headers(),
        timeout=60,
    ).raise_for_status()
    secrets = [canary, mesh.key, mesh.key.rsplit("_", 1)[1]]
    for folder in ("logs", "traces"):
        for path in (mesh.state / folder).rglob("*"):
            if path.is_file():
                text = path.read_text(errors="replace")
                assert not any(secret in text for secret in secrets), path
