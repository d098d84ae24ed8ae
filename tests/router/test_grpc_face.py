"""`kvmesh.v1.Inference` over the same core: same answers, same bounds, same refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from kvmesh.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from mesh.errors import InvalidRequest, ModelNotFound, Unauthenticated, from_rpc_error
from tests.router.fakes import endless, text_script
from tests.router.world import World, grpc_channel, until, world


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world(prefill=0) as made:
        yield made


@pytest.fixture
async def stub(mesh: World) -> AsyncIterator[Any]:
    async with grpc_channel(mesh) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


# The generated types know the blocking stub only.
Stub = Any


def metadata(mesh: World, **claims: str) -> list[tuple[str, str]]:
    return list(mesh.headers(**claims).items())


async def generate(
    mesh: World, stub: Stub, request: inference_pb2.GenerateRequest
) -> list[inference_pb2.GenerateResponse]:
    return [message async for message in stub.Generate(request, metadata=metadata(mesh))]


async def test_text_chat_and_tokens_stream_and_end_in_usage(mesh: World, stub: Stub) -> None:
    mesh.worker.behaviour.script = text_script("ž fin")
    ids = common_pb2.Prompt(segments=[common_pb2.Segment(tokens=common_pb2.TokenRun(ids=[104, 105]))])
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    for request in (
        inference_pb2.GenerateRequest(model="tiny", text="hi"),
        inference_pb2.GenerateRequest(model="tiny", prompt=ids),
        inference_pb2.GenerateRequest(model="tiny", chat=chat),
        inference_pb2.GenerateRequest(model="tiny", text="hi", n=2),
    ):
        messages = await generate(mesh, stub, request)
        count = request.n or 1
        for index in range(count):
            mine = [message for message in messages if message.index == index]
            assert "".join(message.text for message in mine) == "ž fin"
            assert [bool(message.finish_reason) for message in mine].index(True) == len(mine) - 1
            assert mine[-1].finish_reason == common_pb2.FINISH_REASON_STOP
        assert [message.HasField("usage") for message in messages].index(True) == len(messages) - 1
        assert messages[-1].usage.completion_tokens == 7 * count
    assert mesh.worker.opened[0].prompt == mesh.worker.opened[1].prompt


async def test_logprobs_and_stop_strings(mesh: World, stub: Stub) -> None:
    request = inference_pb2.GenerateRequest(model="tiny", text="abcdef")
    request.sampling.logprobs = 2
    request.stop.stop.append("de")
    messages = await generate(mesh, stub, request)
    assert "".join(message.text for message in messages) == "abc"
    positions = [position for message in messages for position in message.logprobs]
    assert len(positions) == messages[-1].usage.completion_tokens == 5
    assert all(len(position.top) == 2 for position in positions)


async def test_tokenize_and_models(mesh: World, stub: Stub) -> None:
    tokens = await stub.Tokenize(
        inference_pb2.TokenizeRequest(model="tiny", text="héy"), metadata=metadata(mesh)
    )
    assert list(tokens.token_ids) == list("héy".encode())
    assert tokens.context_length
    listed = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata(mesh))
    assert [card.id for card in listed.models] == ["org/other", "tiny"]


async def test_refusals_are_typed(mesh: World, stub: Stub) -> None:
    cases = [
        (inference_pb2.GenerateRequest(model="secret", text="x"), ModelNotFound, None),
        (inference_pb2.GenerateRequest(model="tiny"), InvalidRequest, "input"),
        (inference_pb2.GenerateRequest(model="tiny", text="x", n=129), InvalidRequest, "n"),
        (
            inference_pb2.GenerateRequest(model="tiny", text="x", metadata={"a": "b" * 600}),
            InvalidRequest,
            "metadata",
        ),
    ]
    nan = inference_pb2.GenerateRequest(model="tiny", text="x")
    nan.sampling.temperature = float("nan")
    cases.append((nan, InvalidRequest, "temperature"))
    media = inference_pb2.GenerateRequest(model="tiny")
    media.prompt.segments.add().media.mime_type = "image/png"
    cases.append((media, InvalidRequest, "prompt"))
    for request, error, param in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(mesh, stub, request)
        told = from_rpc_error(caught.value)
        assert type(told) is error
        assert told.param == param
    assert not mesh.worker.opened


async def test_nobody_is_served_without_both_tokens(mesh: World, stub: Stub) -> None:
    good = mesh.headers()
    for name in ("x-mesh-identity", "x-mesh-service"):
        given = [(key, value) for key, value in good.items() if key != name]
        for call in (
            stub.Tokenize(inference_pb2.TokenizeRequest(model="tiny", text="x"), metadata=given),
            stub.ListModels(inference_pb2.ListModelsRequest(), metadata=given),
            stub.Generate(inference_pb2.GenerateRequest(model="tiny", text="x"), metadata=given).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert isinstance(from_rpc_error(caught.value), Unauthenticated)


async def test_cancelling_the_call_stops_the_work(mesh: World, stub: Stub) -> None:
    mesh.worker.behaviour.script = endless
    mesh.worker.behaviour.step_s = 0.002
    request = inference_pb2.GenerateRequest(model="tiny", text="x")
    request.stop.ignore_eos = True
    call = stub.Generate(request, metadata=metadata(mesh))
    await call.read()
    call.cancel()
    await mesh.worker.until(lambda: mesh.worker.running == 0, 2)
    assert mesh.worker.cancelled
    await until(lambda: not any(w.ours for w in mesh.router.fleet.placement.workers("decode")))
    deadline = stub.Generate(request, metadata=metadata(mesh), timeout=0.2)

    async def read_all() -> None:
        async for _ in deadline:
            pass

    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await read_all()
    await mesh.worker.until(lambda: mesh.worker.running == 0, 2)
