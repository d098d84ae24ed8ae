"""Calls between services: who gets through, what arrives, and how a failure reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvmesh.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from mesh.errors import InternalError, OutOfPages, RequestTooLarge, from_rpc_error
from mesh.rpc import MESSAGE_LIMIT_BYTES, SERVICE_TOKEN_KEY, RpcServer, caller, open_channel

Metadata = list[tuple[str, str]]


@dataclass
class Call:
    """One way to reach the server, with or without an identity."""

    site: Any
    rpc: RpcServer
    tls: bool

    def bare(self, certificate_of: str | None = "router") -> grpc.aio.Channel:
        """A channel that sends no token; over TLS with the certificate of that role."""
        if not self.tls:
            return grpc.aio.insecure_channel(self.rpc.address)
        credentials = grpc.ssl_channel_credentials(self.site.ca.cert_file.read_bytes())
        if certificate_of is not None:
            identity = self.site.identity(certificate_of, f"{certificate_of}-9")
            credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
        return grpc.aio.secure_channel(
            self.rpc.address, credentials, (("grpc.ssl_target_name_override", "localhost"),)
        )

    def named(self, role: str, name: str | None = None, callee_role: str = "prefill") -> grpc.aio.Channel:
        identity = self.site.identity(role, name or f"{role}-0")
        return open_channel(self.rpc.address, identity, callee_role=callee_role, tls=self.tls)


async def tokenize(channel: grpc.aio.Channel, text: str = "", metadata: Metadata | None = None) -> Any:
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.TokenizeRequest(text=text)
    return await stub.Tokenize(request, metadata=metadata, timeout=10)


async def run(channel: grpc.aio.Channel, request_id: str = "") -> list[Any]:
    call = prefill_pb2_grpc.PrefillStub(channel).Run(
        prefill_pb2.RunRequest(request_id=request_id), timeout=10
    )
    return [response async for response in call]


async def status_of(work: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    return caught.value.code()


async def raw_call(channel: grpc.aio.Channel, method: str, metadata: Metadata | None = None) -> None:
    call: Any = channel.unary_unary
    await call(method)(b"", metadata=metadata, timeout=10)


@pytest.fixture(params=[False, True], ids=["unix", "tcp"])
async def server(request: Any, site: Any, serving: Any) -> AsyncIterator[tuple[Call, Any, Any]]:
    async with serving(tls=request.param) as (rpc, worker, tokenizer):
        yield Call(site, rpc, request.param), worker, tokenizer


Server = tuple[Call, Any, Any]


async def test_the_named_role_gets_through(server: Server) -> None:
    call, _, tokenizer = server
    callers: list[str] = []

    async def remember(request: Any, context: Any) -> Any:
        callers.append(caller(context).name)
        return inference_pb2.TokenizeResponse(context_length=7)

    tokenizer.tokenize = remember
    async with call.named("router") as channel:
        assert (await tokenize(channel, "seven..")).context_length == 7
        assert [response.computed_tokens for response in await run(channel)] == [1]
    assert callers == ["router-0"]


async def test_nobody_else_does(server: Server, site: Any) -> None:
    call, worker, tokenizer = server
    good = site.identity("router", "router-0")
    for_other = good.service_token("decode")
    identity_token = site.identity("iam", "iam-0").mint({}, audience="router", ttl_s=60)
    unauthenticated: list[Metadata | None] = [
        None,
        [(SERVICE_TOKEN_KEY, "nonsense")],
        [(SERVICE_TOKEN_KEY, for_other)],
        [(SERVICE_TOKEN_KEY, identity_token)],
        [("authorization", f"Bearer {good.service_token('prefill')}")],
        [(SERVICE_TOKEN_KEY, good.service_token("prefill"))] * 2,
    ]
    async with call.bare() as channel:
        for metadata in unauthenticated:
            assert await status_of(tokenize(channel, metadata=metadata)) is grpc.StatusCode.UNAUTHENTICATED
    async with call.named("decode") as channel:
        assert await status_of(tokenize(channel)) is grpc.StatusCode.PERMISSION_DENIED
        assert await status_of(run(channel)) is grpc.StatusCode.PERMISSION_DENIED
    async with call.named("edge") as channel:
        assert (await tokenize(channel, "seven..")).context_length == 7
        assert await status_of(run(channel)) is grpc.StatusCode.PERMISSION_DENIED
    assert (worker.handled, tokenizer.handled) == (0, 1)


async def test_every_method_of_the_server_is_refused_without_an_identity(server: Server) -> None:
    call, worker, tokenizer = server
    methods = [
        "/kvmesh.v1.Prefill/Run",
        "/kvmesh.v1.Inference/Tokenize",
        "/kvmesh.v1.Inference/Generate",
        "/kvmesh.v1.Inference/NoSuchMethod",
        "/no.such.Service/Method",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetTopChannels",
        "/kvmesh.v1.Prefill/run",
        "/KVMESH.v1.Prefill/Run",
        "/kvmesh.v1.Prefill//Run",
        "//kvmesh.v1.Prefill/Run",
        "/kvmesh.v1.Prefill/Run/",
        "/grpc.health.v1.Health/../../kvmesh.v1.Prefill/Run",
    ]
    async with call.bare() as channel:
        for method in methods:
            assert await status_of(raw_call(channel, method)) is grpc.StatusCode.UNAUTHENTICATED, method
    assert (worker.handled, tokenizer.handled) == (0, 0)


async def test_an_unknown_method_is_unknown_to_who_may_ask(server: Server) -> None:
    call, _, _ = server
    async with call.named("router") as channel:
        assert await status_of(raw_call(channel, "/kvmesh.v1.Prefill/Walk")) is grpc.StatusCode.UNIMPLEMENTED
        code = await status_of(raw_call(channel, "/no.such.Service/Method"))
        assert code is grpc.StatusCode.PERMISSION_DENIED


async def test_health_is_open(server: Server) -> None:
    call, _, _ = server
    async with call.bare() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == 1
        await call.rpc.set_serving(False)
        assert (await watch.read()).status == 2
        watch.cancel()


async def test_reflection_is_for_operators(server: Server) -> None:
    call, _, _ = server

    async def listing(channel: grpc.aio.Channel) -> set[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        stream = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        return {service.name async for answer in stream for service in answer.list_services_response.service}

    async with call.named("operator") as channel:
        assert "kvmesh.v1.Prefill" in await listing(channel)
    async with call.named("router") as channel:
        # Where the refusal of a stream meets its first message, grpc.aio makes INTERNAL of it now
        # and then. Refused it is either way; what it is refused with is said at least once.
        said = {await status_of(listing(channel)) for _ in range(8)}
        assert grpc.StatusCode.PERMISSION_DENIED in said
        assert said <= {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INTERNAL}


async def test_a_typed_error_comes_back(server: Server) -> None:
    call, worker, tokenizer = server

    async def refuse(request: Any, context: Any) -> Any:
        raise OutOfPages("no page is free", retry_after_s=1.5, param="prompt")

    async def refuse_later(request: Any, context: Any) -> AsyncIterator[Any]:
        yield prefill_pb2.RunResponse()
        await refuse(request, context)

    tokenizer.tokenize, worker.run = refuse, refuse_later
    async with call.named("router") as channel:
        for work in (tokenize(channel), run(channel)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await work
            error = from_rpc_error(caught.value)
            assert isinstance(error, OutOfPages)
            assert (error.message, error.retry_after_s, error.param) == ("no page is free", 1.5, "prompt")


async def test_a_fault_says_nothing_of_itself(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    call, _, tokenizer = server

    async def fail(request: Any, context: Any) -> Any:
        raise KeyError("a tenant's prompt")

    tokenizer.tokenize = fail
    async with call.named("router") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokenize(channel)
    assert "prompt" not in str(caught.value)
    assert type(from_rpc_error(caught.value)) is InternalError
    assert "/kvmesh.v1.Inference/Tokenize failed" in caplog.text


async def test_a_cancelled_stream_is_closed_at_once(server: Server) -> None:
    call, worker, _ = server

    async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
        yield prefill_pb2.RunResponse()
        await asyncio.Event().wait()

    worker.run = endless
    async with call.named("router") as channel:
        stream = prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.RunRequest())
        await stream.read()
        stream.cancel()
        await asyncio.wait_for(worker.closed.wait(), 5)


async def list_models(channel: grpc.aio.Channel) -> Any:
    stub = inference_pb2_grpc.InferenceStub(channel)
    return await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10)


@pytest.mark.parametrize("size", [4 * 2**20 - 100, 4 * 2**20 + 100, MESSAGE_LIMIT_BYTES - 2**20])
async def test_a_large_message_passes_both_ways(server: Server, size: int) -> None:
    call, _, tokenizer = server
    tokenizer.answer_bytes = size
    async with call.named("router") as channel:
        assert (await tokenize(channel, "x" * size)).context_length == size
        assert len((await list_models(channel)).models[0].id) == size


async def test_a_message_over_the_limit_is_refused_with_a_clear_status(server: Server) -> None:
    call, _, tokenizer = server
    tokenizer.answer_bytes = too_much = MESSAGE_LIMIT_BYTES + 2**20
    async with call.named("router") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as sending:
            await tokenize(channel, "x" * too_much)
        with pytest.raises(grpc.aio.AioRpcError) as receiving:
            await list_models(channel)
    for caught in (sending, receiving):
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(caught.value)
        assert isinstance(error, RequestTooLarge)
        assert str(MESSAGE_LIMIT_BYTES) in error.message


async def test_the_server_holds_the_limit_by_itself(server: Server, site: Any) -> None:
    """Also against a client that has none (B102)."""
    call, _, tokenizer = server
    options = [("grpc.max_send_message_length", -1), ("grpc.ssl_target_name_override", "localhost")]
    router = site.identity("router", "router-0")
    if call.tls:
        credentials = grpc.ssl_channel_credentials(router.ca_pem, router.key_pem, router.cert_pem)
        channel = grpc.aio.secure_channel(call.rpc.address, credentials, options)
    else:
        channel = grpc.aio.insecure_channel(call.rpc.address, options)
    metadata = [(SERVICE_TOKEN_KEY, router.service_token("prefill"))]
    async with channel:
        code = await status_of(tokenize(channel, "x" * (MESSAGE_LIMIT_BYTES + 2**20), metadata))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert tokenizer.handled == 0


# Only over TLS


async def test_a_client_needs_a_certificate_of_this_mesh(site: Any, serving: Any) -> None:
    async with serving(tls=True) as (rpc, _, tokenizer):
        call = Call(site, rpc, tls=True)
        token = [(SERVICE_TOKEN_KEY, site.identity("router", "router-9").service_token("prefill"))]
        async with call.bare(certificate_of=None) as channel:
            assert await status_of(tokenize(channel, metadata=token)) is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(rpc.address) as channel:
            assert await status_of(tokenize(channel, metadata=token)) is grpc.StatusCode.UNAVAILABLE
        assert tokenizer.handled == 0


async def test_certificate_and_token_must_name_one_service(site: Any, serving: Any) -> None:
    async with serving(tls=True) as (rpc, _, tokenizer):
        call = Call(site, rpc, tls=True)
        mine = [(SERVICE_TOKEN_KEY, site.identity("router", "router-9").service_token("prefill"))]
        other = [(SERVICE_TOKEN_KEY, site.identity("router", "router-0").service_token("prefill"))]
        async with call.bare(certificate_of="router") as channel:
            assert await status_of(tokenize(channel, metadata=other)) is grpc.StatusCode.UNAUTHENTICATED
            assert await status_of(tokenize(channel)) is grpc.StatusCode.UNAUTHENTICATED
            assert (await tokenize(channel, "seven..", mine)).context_length == 7
        async with call.bare(certificate_of="decode") as channel:
            assert await status_of(tokenize(channel, metadata=mine)) is grpc.StatusCode.UNAUTHENTICATED
        assert tokenizer.handled == 1


async def test_a_client_can_insist_on_the_callee(site: Any, serving: Any) -> None:
    async with serving(tls=True) as (rpc, _, _):
        router = site.identity("router", "router-0")

        def channel(name: str) -> grpc.aio.Channel:
            return open_channel(rpc.address, router, callee_role="prefill", tls=True, callee_name=name)

        def of_role(role: str) -> grpc.aio.Channel:
            return open_channel(rpc.address, router, callee_role=role, tls=True)

        async with channel("prefill-0") as right:
            assert (await tokenize(right, "seven..")).context_length == 7
        async with of_role("prefill") as right:
            assert (await tokenize(right, "seven..")).context_length == 7
        for wrong in (channel("decode-0"), of_role("decode"), of_role("localhost"), channel("prefill")):
            async with wrong:
                assert await status_of(tokenize(wrong)) is grpc.StatusCode.UNAVAILABLE


# Bounds


def test_nothing_is_sent_or_served_in_the_clear_over_tcp(site: Any) -> None:
    identity = site.identity("router", "router-0")
    with pytest.raises(ValueError, match="Unix"):
        open_channel("127.0.0.1:1", identity, callee_role="iam", tls=False)
    from dataclasses import replace

    config = replace(site.config("prefill", "prefill-0"), listen="127.0.0.1:0")
    with pytest.raises(ValueError, match="Unix"):
        RpcServer(config, identity, allowed={})


async def test_two_servers_never_share_a_port(site: Any, serving: Any) -> None:
    from dataclasses import replace

    async with serving(tls=True) as (rpc, _, _):
        config = replace(site.config("prefill", "prefill-1", tls=True), listen=rpc.address)
        second = RpcServer(config, site.identity("prefill", "prefill-1"), allowed={})
        with pytest.raises(OSError, match="cannot listen"):
            await second.start()


async def test_a_socket_left_by_a_killed_process_is_no_obstacle(site: Any, serving: Any) -> None:
    import socket

    left = socket.socket(socket.AF_UNIX)
    left.bind(str(site.path / "prefill-0.sock"))
    left.close()
    async with serving() as (rpc, _, _):
        path = site.path / "prefill-0.sock"
        assert path.stat().st_mode & 0o777 == 0o600
        async with Call(site, rpc, tls=False).named("router") as channel:
            assert (await tokenize(channel, "seven..")).context_length == 7
