"""`/v1/embeddings` with a real encode worker on a tiny model."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from kvmesh.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from encode.bert import Bert
from tests.encode.tiny_bert import HIDDEN, LONGEST, tiny_bert
from tests.router.world import World, grpc_channel, world


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[World]:
    directory = tiny_bert(tmp_path / "tiny")
    async with world(prefill=0, decode=0, source=str(directory), encode=directory) as made:
        yield made


async def ask(mesh: World, given: Any, **extra: Any) -> httpx.Response:
    return await mesh.post("/v1/embeddings", {"model": "tiny", "input": given, **extra})


async def ids_of(mesh: World, text: str) -> list[int]:
    ids: list[int] = (await mesh.post("/tokenize", {"model": "tiny", "prompt": text})).json()["tokens"]
    return ids


async def test_a_text_has_the_vector_of_its_ids_in_every_form(mesh: World, tmp_path: Path) -> None:
    right = Bert(tmp_path / "tiny").embed([await ids_of(mesh, "hello you")])[0]
    answer = (await ask(mesh, "hello you")).json()
    assert list(answer) == ["object", "data", "model", "usage"]
    [item] = answer["data"]
    assert (item["object"], item["index"]) == ("embedding", 0)
    assert item["embedding"] == pytest.approx(right.tolist(), abs=1e-6)
    ids = await ids_of(mesh, "hello you")
    assert answer["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    encoded = (await ask(mesh, "hello you", encoding_format="base64")).json()["data"][0]["embedding"]
    assert array("f", base64.b64decode(encoded)).tolist() == pytest.approx(item["embedding"], rel=1e-7)
    # With and without the tokens that a text is framed by.
    for given in (ids, [ids], [ids[1:-1]]):
        assert (await ask(mesh, given)).json()["data"][0]["embedding"] == pytest.approx(
            item["embedding"], abs=1e-6
        )


async def test_a_batch_keeps_its_order(mesh: World) -> None:
    texts = [f"{'ab' * (1 + n % 7)} {chr(97 + n % 26)}" for n in range(100)]
    answer = (await ask(mesh, texts)).json()
    assert [item["index"] for item in answer["data"]] == list(range(100))
    for place in (0, 41, 99):
        alone = (await ask(mesh, texts[place])).json()["data"][0]["embedding"]
        assert answer["data"][place]["embedding"] == pytest.approx(alone, abs=1e-6)


async def test_fewer_dimensions_have_length_one_again(mesh: World) -> None:
    whole = (await ask(mesh, "abc")).json()["data"][0]["embedding"]
    short = (await ask(mesh, "abc", dimensions=5)).json()["data"][0]["embedding"]
    length = math.sqrt(sum(number**2 for number in whole[:5]))
    assert short == pytest.approx([number / length for number in whole[:5]], abs=1e-6)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": ""}),
    ("input", {"input": []}),
    ("input[1]", {"input": ["a", ""]}),
    ("input[1]", {"input": ["a", [1]]}),
    ("input", {"input": ["a"] * 2049}),
    ("input", {"input": "a " * LONGEST}),
    ("input", {"input": [10**6]}),
    ("input", {"input": [-1]}),
    ("input", {"input": {"text": "a"}}),
    ("encoding_format", {"encoding_format": "float16"}),
    ("dimensions", {"dimensions": 0}),
    ("dimensions", {"dimensions": HIDDEN + 1}),
    ("nonsense", {"nonsense": 1}),
]


@pytest.mark.parametrize(("param", "extra"), REFUSED)
async def test_what_is_wrong_is_named(mesh: World, param: str, extra: dict[str, Any]) -> None:
    answer = await mesh.post("/v1/embeddings", {"model": "tiny", "input": "abc", **extra})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


async def test_only_who_may_use_the_model_and_only_for_what_it_does(mesh: World) -> None:
    for model in ("secret", "nonexistent"):
        refused = await ask(mesh, "abc", model=model)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    generates = await mesh.complete("abc")
    assert (generates.status_code, generates.json()["error"]["param"]) == (400, "model")
    assert (await mesh.chat("abc")).status_code == 400
    async with world(prefill=0) as other:
        refused = await ask(other, "abc")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def test_without_a_worker_it_says_so(mesh: World) -> None:
    await mesh.servers["encode-tiny-0"].stop(0)
    assert (await ask(mesh, "abc")).status_code == 503
    mesh.members.pop("encode-tiny-0")
    mesh.tell_members()
    refused = await ask(mesh, "abc")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")


async def test_the_same_over_grpc(mesh: World) -> None:
    whole = (await ask(mesh, "abc")).json()["data"][0]["embedding"]
    metadata = tuple(mesh.headers().items())
    async with grpc_channel(mesh) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answer = await stub.Embed(
            inference_pb2.EmbedRequest(model="tiny", texts=["abc", "d"]), metadata=metadata
        )
        assert list(answer.embeddings[0].values) == pytest.approx(whole, abs=1e-6)
        assert answer.usage.prompt_tokens == 5 + 3
        runs = [common_pb2.TokenRun(ids=await ids_of(mesh, "abc"))]
        answer = await stub.Embed(
            inference_pb2.EmbedRequest(model="tiny", token_runs=runs, dimensions=3), metadata=metadata
        )
        assert len(answer.embeddings[0].values) == 3
        for wrong in (
            {},
            {"texts": ["a"], "token_runs": runs},
            {"texts": [""]},
            {"texts": ["a"], "dimensions": 99},
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Embed(inference_pb2.EmbedRequest(model="tiny", **wrong), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
