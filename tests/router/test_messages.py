"""`/v1/messages`: blocks, typed events, and errors in the shape that its clients know."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.router.fakes import text_script
from tests.router.world import World, world

TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world(prefill=0) as made:
        yield made


async def ask(mesh: World, *messages: tuple[str, Any], **extra: Any) -> httpx.Response:
    listed = [{"role": role, "content": content} for role, content in messages or [("user", "hello")]]
    return await mesh.post("/v1/messages", {"model": "tiny", "max_tokens": 100, "messages": listed, **extra})


def typed(text: str) -> list[dict[str, Any]]:
    """The events; the name of each is its type."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together."""
    message: dict[str, Any] = dict(events[0]["message"])
    blocks: list[dict[str, Any]] = []
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            else:
                block["json"] = block.get("json", "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in blocks:
        if "json" in block:
            block["input"] = json.loads(block.pop("json"))
    return {**message, "content": blocks}


async def tokens_of(mesh: World, messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = (await mesh.post("/tokenize", {"model": "tiny", "messages": messages})).json()["tokens"]
    return ids


async def test_a_text_is_answered_by_a_text_block_in_both_modes(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script("héllo")
    whole = (await ask(mesh, system="be kind")).json()
    assert whole["content"] == [{"type": "text", "text": "héllo"}]
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert whole["usage"]["output_tokens"] == 7
    ids = list(mesh.worker.opened[0].prompt.segments[0].tokens.ids)
    said = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert ids == await tokens_of(mesh, said)
    used = whole["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == len(ids)
    answer = await ask(mesh, system=[{"type": "text", "text": "be kind"}], stream=True)
    events = typed(answer.text)
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert built(events) | {"id": ""} == whole | {"id": ""}


async def test_why_an_answer_ended_is_said(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script("one STOP two")
    for stream in (False, True):
        for extra, reason in (
            ({"stop_sequences": ["nope", "STOP"]}, ("stop_sequence", "STOP")),
            ({"max_tokens": 3}, ("max_tokens", None)),
            ({}, ("end_turn", None)),
        ):
            answer = await ask(mesh, stream=stream, **extra)
            said = built(typed(answer.text)) if stream else answer.json()
            assert (said["stop_reason"], said["stop_sequence"]) == reason
            assert "STOP" not in said["content"][0]["text"] or not extra


async def test_tools_are_called_and_their_results_come_back(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script('{"name": "look", "arguments": {"at": "the sky"}}')
    whole = (await ask(mesh, tools=[TOOL])).json()
    [block] = whole["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "look", {"at": "the sky"})
    assert whole["stop_reason"] == "tool_use"
    streamed = built(typed((await ask(mesh, tools=[TOOL], stream=True)).text))
    assert streamed["content"][0]["input"] == {"at": "the sky"}
    assert streamed["stop_reason"] == "tool_use"
    mesh.worker.behaviour.script = text_script("blue")
    result = {
        "type": "tool_result",
        "tool_use_id": block["id"],
        "content": [{"type": "text", "text": "blue"}],
    }
    answer = await ask(
        mesh,
        ("user", "look"),
        ("assistant", [{"type": "text", "text": "I look."}, block]),
        ("user", [result, {"type": "text", "text": "so?"}]),
        tools=[TOOL],
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == [{"type": "text", "text": "blue"}]


async def test_an_input_is_counted(mesh: World) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "system": "x"}
    counted = (await mesh.post("/v1/messages/count_tokens", body)).json()
    used = (await ask(mesh, system="x")).json()["usage"]
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 10**7}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "system", "content": "x"}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}),
    ("system", {"system": 5}),
    ("temperature", {"temperature": 1.5}),
    ("top_k", {"top_k": "x"}),
    ("stop_sequences", {"stop_sequences": ["a"] * 5}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tools[0].name", {"tools": [{**TOOL, "name": "a b"}]}),
    ("tool_choice", {"tool_choice": {"type": "must"}}),
    ("thinking.type", {"thinking": {"type": "deep"}}),
    ("mcp_servers", {"mcp_servers": []}),
    ("nonsense", {"nonsense": 1}),
]


@pytest.mark.parametrize(("param", "extra"), REFUSED)
async def test_what_is_wrong_is_a_400_in_its_own_shape(
    mesh: World, param: str, extra: dict[str, Any]
) -> None:
    answer = await ask(mesh, **extra)
    assert answer.status_code == 400, answer.text
    said = answer.json()
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
    assert said["request_id"] == answer.headers["x-request-id"]
    if "context length" not in said["error"]["message"]:
        assert param.split("[")[0].split(".")[0] in said["error"]["message"]
    assert not mesh.worker.opened


async def test_other_errors_have_its_shape_too(mesh: World) -> None:
    unknown = await ask(mesh, model="secret")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    large = await ask(mesh, ("user", "x" * (9 << 20)))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    mesh.worker.behaviour.incident, mesh.worker.behaviour.incident_after = "fail", 2
    last = typed((await ask(mesh, ("user", "abcdef"), stream=True)).text)[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
