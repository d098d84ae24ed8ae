"""Every answer, chunk, event and error is what OpenAI's specification says it is, and has no field that its SDK does not know."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel

from response_store.options import ShelfOptions
from tests.encode.tiny_bert import tiny_bert
from tests.router.fakes import text_script
from tests.router.world import World, events, world
from tests.specification.extract import EXTRACT, ROOTS, extract, written
from tests.specification.validate import check, check_event

pytestmark = pytest.mark.asyncio(loop_scope="module")
DOCUMENT = Path(__file__).parents[3] / "shared" / "cases" / "openai-openapi.json"
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = '{"name": "look", "arguments": {"a": 1}}'
THOUGHT = "<think>\nhm\n</think>\n\nFour."
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "s", "strict": True, "schema": {"type": "object", "properties": {}}},
}
# What this server says beyond the fields that the SDK knows: its own, and one of the specification's examples.
EXTENSIONS = {"reasoning_content", "store"}


# One router for all of them: each says first how its worker behaves.
@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[World]:
    async with world(prefill=0, kept=ShelfOptions(), reasoning_parser="think") as made:
        yield made


def as_specified(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what the real service itself does against its specification, as its recordings show (and, for
    what an echoed prompt's first token has instead of a log-probability, as evaluation harnesses expect).

    Null `system_fingerprint`; choices without `logprobs` where none were asked for; null `usage` in the
    chunks of a completion, and null `finish_reason` until its last.
    """
    answer = json.loads(json.dumps(answer))
    completion = answer["object"] == "text_completion"
    for name in ("system_fingerprint", *(["usage"] if completion else [])):
        if answer.get(name, ...) is None:
            del answer[name]
    for choice in answer["choices"]:
        if not completion:
            choice.setdefault("logprobs", None)
        elif choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        logprobs = choice["logprobs"]
        if completion and logprobs and logprobs["token_logprobs"][0] is None:
            assert logprobs["top_logprobs"][0] is None
            logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    return dict(answer)


def says(mesh: World, text: str, *, logprobs: bool = False) -> None:
    mesh.worker.behaviour.script, mesh.worker.behaviour.logprobs = text_script(text), logprobs


def check_known(model: type[BaseModel], value: Any) -> None:
    """The SDK knows each field: a name that is spelt wrong would be one that it does not know."""
    unknown = set(_unknown(model.model_validate(value))) - EXTENSIONS
    assert not unknown, unknown


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _unknown(item)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="OpenAI's whole document is not here")
async def test_the_extract_is_of_the_document() -> None:
    whole = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    assert EXTRACT.read_text(encoding="utf-8") == written(extract(whole))


async def test_what_is_wrong_is_found() -> None:
    """The checks themselves can fail."""
    good = {"id": "m", "object": "model", "created": 1, "owned_by": "us"}
    check("Model", good)
    for bad in (good | {"created": "1"}, good | {"object": "list"}, {"id": "m"}):
        with pytest.raises(AssertionError):
            check("Model", bad)
    with pytest.raises(AssertionError):
        check_known(Model, good | {"ownedby": "us"})
    assert set(json.loads(EXTRACT.read_text(encoding="utf-8"))["components"]["schemas"]) > set(ROOTS)


CHAT: list[tuple[str, dict[str, Any]]] = [
    ("hello", {}),
    ("hello", {"n": 3, "stream_options": {"include_usage": True}}),
    ("hello", {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
    ("hello", {"logprobs": True}),
    (CALL, {"tools": [{"type": "function", "function": TOOL}]}),
    (CALL, {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "logprobs": True}),
    (CALL, {"functions": [TOOL]}),
    ("{}", {"response_format": {"type": "json_object"}}),
    ("{}", {"response_format": SCHEMA}),
    (THOUGHT, {"metadata": {"a": "b"}, "user": "u", "service_tier": "auto"}),
]


@pytest.mark.parametrize(("text", "extra"), CHAT)
async def test_chat(mesh: World, text: str, extra: dict[str, Any]) -> None:
    says(mesh, text, logprobs="logprobs" in extra)
    plain = {name: value for name, value in extra.items() if name != "stream_options"}
    answer = await mesh.chat(**plain)
    assert answer.status_code == 200, answer.text
    check("CreateChatCompletionResponse", as_specified(answer.json()))
    check_known(ChatCompletion, answer.json())
    *chunks, done = events((await mesh.chat(stream=True, **extra)).text)
    assert done == "[DONE]"
    assert chunks
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", as_specified(chunk))
        check_known(ChatCompletionChunk, chunk)


COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "max_tokens": 2},
    {"logprobs": 0},
    {"n": 2, "stream_options": {"include_usage": True}},
    {"echo": True, "logprobs": 1},
    {"prompt": ["ab", "cd"]},
]


@pytest.mark.parametrize("extra", COMPLETIONS)
async def test_completions(mesh: World, extra: dict[str, Any]) -> None:
    mesh.worker.behaviour.logprobs = "logprobs" in extra
    body = {"prompt": "abc", **extra}
    plain = {name: value for name, value in body.items() if name != "stream_options"}
    answer = await mesh.complete(**plain)
    assert answer.status_code == 200, answer.text
    check("CreateCompletionResponse", as_specified(answer.json()))
    check_known(Completion, as_specified(answer.json()))
    *chunks, done = events((await mesh.complete(stream=True, **body)).text)
    assert done == "[DONE]"
    assert chunks
    for chunk in chunks:
        check("CreateCompletionResponse", as_specified(chunk))
        check_known(Completion, as_specified(chunk))


RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("hello", {}),
    ("hello", {"instructions": "x", "metadata": {"a": "b"}, "max_output_tokens": 100, "user": "u"}),
    ("hello", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("x" * 40, {"max_output_tokens": 16}),
    (CALL, {"tools": [{"type": "function", "strict": False, **TOOL}], "tool_choice": "auto"}),
    (CALL, {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}),
    (CALL, {"tools": [{"type": "function", **TOOL}], "tool_choice": {"type": "function", "name": "look"}}),
    (THOUGHT, {"store": False, "max_tool_calls": 2, "prompt_cache_key": "k", "safety_identifier": "s"}),
    ("{}", {"text": {"format": {"type": "json_object"}}}),
    ("{}", {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}}),
]


@pytest.mark.parametrize(("text", "extra"), RESPONSES)
async def test_responses(mesh: World, text: str, extra: dict[str, Any]) -> None:
    says(mesh, text, logprobs="include" in extra)
    body = {"model": "tiny", "input": [{"role": "user", "content": "q"}], **extra}
    answer = await mesh.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    check("Response", answer.json())
    check_known(Response, answer.json())
    if extra.get("store", True):
        kept = f"/v1/responses/{answer.json()['id']}"
        check("Response", (await mesh.client.get(kept, headers=mesh.headers())).json())
        page = await mesh.client.get(f"{kept}/input_items", headers=mesh.headers())
        check("ResponseItemList", page.json())
    told = events_of((await mesh.post("/v1/responses", {**body, "stream": True})).text)
    assert told[-1]["type"] in ("response.completed", "response.incomplete")
    for event in told:
        check_event(event)


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of typed events."""
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]


async def test_a_response_that_goes_on_and_one_that_fails(mesh: World) -> None:
    says(mesh, CALL)
    tools = [{"type": "function", **TOOL}]
    first = (await mesh.post("/v1/responses", {"model": "tiny", "input": "q", "tools": tools})).json()
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
    body = {"model": "tiny", "input": [result], "previous_response_id": first["id"], "tools": tools}
    second = (await mesh.post("/v1/responses", body)).json()
    check("Response", second)
    page = await mesh.client.get(f"/v1/responses/{second['id']}/input_items", headers=mesh.headers())
    check("ResponseItemList", page.json())
    counted = await mesh.post("/v1/responses/input_tokens", {"model": "tiny", "input": "q"})
    check("TokenCountsResource", counted.json())
    mesh.worker.behaviour.incident, mesh.worker.behaviour.incident_after = "fail", 2
    told = events_of((await mesh.post("/v1/responses", {**body, "stream": True})).text)
    assert told[-1]["type"] == "response.failed"
    for event in told:
        check_event(event)


async def test_models_and_errors(mesh: World) -> None:
    models = (await mesh.client.get("/v1/models", headers=mesh.headers())).json()
    check("ListModelsResponse", models)
    for model in models["data"]:
        check("Model", (await mesh.client.get(f"/v1/models/{model['id']}", headers=mesh.headers())).json())
        check_known(Model, model)
    wrong = [
        await mesh.chat(temperature=3),
        await mesh.chat(nonsense=1),
        await mesh.post("/v1/chat/completions", b"{"),
        await mesh.post("/v1/chat/completions", {"model": "nowhere", "messages": []}),
        await mesh.post("/v1/responses", {"model": "tiny"}),
        await mesh.post("/v1/embeddings", {"model": "tiny", "input": "x"}),
        await mesh.client.get("/v1/responses/resp_1", headers=mesh.headers()),
        await mesh.client.get("/v1/nowhere", headers=mesh.headers()),
        await mesh.client.put("/v1/models", headers=mesh.headers()),
        await mesh.client.get("/v1/models"),
    ]
    for answer in wrong:
        assert answer.status_code >= 400
        check("ErrorResponse", answer.json())
        assert set(answer.json()) == {"error"}
    mesh.worker.behaviour.incident, mesh.worker.behaviour.incident_after = "fail", 2
    check("ErrorResponse", events((await mesh.chat("abcdef", stream=True)).text)[-1])


async def test_embeddings(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "tiny")
    async with world(prefill=0, decode=0, source=str(directory), encode=directory) as mesh:
        for extra in ({}, {"dimensions": 4}, {"encoding_format": "base64"}):
            answer = await mesh.post("/v1/embeddings", {"model": "tiny", "input": ["a", "b"], **extra})
            if "encoding_format" in extra:
                # The schema knows numbers only; the SDK asks for base64 by default, and reads it.
                for item in answer.json()["data"]:
                    assert isinstance(item["embedding"], str)
                continue
            check("CreateEmbeddingResponse", answer.json())
            check_known(CreateEmbeddingResponse, answer.json())
