"""`/tokenize` and `/detokenize`: the ids that would be computed, and their text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from kvmesh.v1 import inference_pb2, inference_pb2_grpc

from tests.router.world import World, grpc_channel, world


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world(prefill=0) as made:
        yield made


async def test_ids_are_those_that_are_computed(mesh: World) -> None:
    said = (
        await mesh.post("/tokenize", {"model": "tiny", "prompt": "héllo", "return_token_strs": True})
    ).json()
    assert said == {
        "count": 6,
        "max_model_len": 32768,
        "tokens": list("héllo".encode()),
        "token_strs": ["h", "\ufffd", "\ufffd", "l", "l", "o"],
    }
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "héllo"}]
    said = (await mesh.post("/tokenize", {"model": "tiny", "messages": messages})).json()
    assert said["token_strs"] is None
    assert (await mesh.chat(messages=messages)).status_code == 200
    assert said["tokens"] == list(mesh.worker.opened[0].prompt.segments[0].tokens.ids)


async def test_tools_are_part_of_a_conversation(mesh: World) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "go"}]}
    plain = (await mesh.post("/tokenize", body)).json()["tokens"]
    for extra in (
        {"tools": [{"type": "function", "function": function}]},
        {"functions": [function]},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "none"},
    ):
        ids = (await mesh.post("/tokenize", {**body, **extra})).json()["tokens"]
        assert (await mesh.chat(messages=body["messages"], **extra)).status_code == 200
        assert ids == list(mesh.worker.opened[-1].prompt.segments[0].tokens.ids)
        assert (ids == plain) is ("tool_choice" in extra)
    wrong = await mesh.post("/tokenize", {**body, "tools": [{"type": "poem"}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tools[0].type")


async def test_detokenize_is_the_way_back(mesh: World) -> None:
    for prompt in ("", "héllo", "<|user|>x<|end|>"):
        ids = (await mesh.post("/tokenize", {"model": "tiny", "prompt": prompt})).json()["tokens"]
        answer = await mesh.post("/detokenize", {"model": "tiny", "tokens": ids})
        assert answer.json() == {"prompt": prompt}


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("/tokenize", "prompt", {}),
    ("/tokenize", "prompt", {"prompt": 5}),
    ("/tokenize", "messages", {"messages": []}),
    ("/tokenize", "prompt", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
    ("/tokenize", "add_generation_prompt", {"prompt": "x", "add_generation_prompt": False}),
    ("/tokenize", "add_generation_prompt", {"messages": [{"role": "user", "content": "x"}],
                                            "add_generation_prompt": False}),
    ("/detokenize", "tokens", {}),
    ("/detokenize", "tokens", {"tokens": [-1]}),
    ("/detokenize", "tokens", {"tokens": [261]}),
    ("/detokenize", "tokens[0]", {"tokens": ["a"]}),
    ("/detokenize", "extra", {"tokens": [], "extra": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "param", "body"), REFUSED)
async def test_what_is_wrong_is_named(mesh: World, path: str, param: str, body: dict[str, Any]) -> None:
    answer = await mesh.post(path, {"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_forbidden_model_looks_like_an_unknown_one(mesh: World) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        for model in ("secret", "nonexistent"):
            answer = await mesh.post(path, {"model": model, **body})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"


async def test_the_same_over_grpc(mesh: World) -> None:
    metadata = tuple(mesh.headers().items())
    async with grpc_channel(mesh) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.DetokenizeRequest(model="tiny", token_ids=[*"é".encode(), 257])
        assert (await stub.Detokenize(request, metadata=metadata)).text == "é<|end|>"
        request = inference_pb2.DetokenizeRequest(model="secret", token_ids=[1])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Detokenize(request, metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
