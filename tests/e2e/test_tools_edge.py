"""Tools and structured output through the real edge: a random model held to grammars, a scripted one read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.harness import Mesh, events
from tests.e2e.test_openai_edge import chat

SIZES = {
    "type": "object",
    "properties": {"unit": {"enum": ["cm", "ž"]}, "wide": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["unit", "wide"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "sizes", "parameters": SIZES, "strict": True}}
]


def check(value: str) -> None:
    read = json.loads(value)
    assert set(read) == {"unit", "wide"}
    assert read["unit"] in ("cm", "ž")
    assert 0 <= read["wide"] <= 99


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sizes"}}])
async def test_even_a_random_model_makes_a_valid_call(mesh: Mesh, choice: Any) -> None:  # B38 B39 B40
    body = {**chat("go", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False), "model": "tiny"}
    async with mesh.client() as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        streamed = events((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
    [call] = whole["message"]["tool_calls"]
    check(call["function"]["arguments"])
    assert whole["message"]["content"] is None
    finish = "tool_calls" if choice == "required" else "stop"
    assert whole["finish_reason"] == finish
    fragments = [
        part for chunk in streamed[:-1] for part in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert "".join(part["function"]["arguments"] for part in fragments) == call["function"]["arguments"]
    assert [part["function"]["name"] for part in fragments if "id" in part] == ["sizes"]
    assert streamed[-2]["choices"][0]["finish_reason"] == finish


async def test_answers_of_a_random_model_satisfy_their_schema(mesh: Mesh) -> None:  # B43 B44 B46
    wish = {"type": "json_schema", "json_schema": {"name": "sizes", "strict": True, "schema": SIZES}}
    async with mesh.client() as client:
        for temperature in (0, 1.5):
            body = {**chat("go", response_format=wish), "model": "tiny", "temperature": temperature, "n": 3}
            answer = await client.post("/v1/chat/completions", json=body)
            for choice in answer.json()["choices"]:
                check(choice["message"]["content"])
                assert choice["finish_reason"] == "stop"
        refused = await client.post(
            "/v1/chat/completions",
            json={
                **chat(
                    "go",
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "s", "schema": {"$ref": "http://127.0.0.1:9/x"}},
                    },
                )
            },
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format.json_schema.schema"


async def test_a_scripted_call_is_read_back(mesh: Mesh) -> None:
    arguments = '{"unit": "ž", "wide": 7}'
    said = f'{{"name": "sizes", "arguments": {arguments}}}'
    async with mesh.client() as client:
        for split in ("1", "2,3,50"):
            body = chat(said, tools=[{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": False}}])
            body["metadata"] = {"script_split": split}
            choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
            assert choice["message"]["tool_calls"][0]["function"] == {"name": "sizes", "arguments": arguments}
            assert choice["finish_reason"] == "tool_calls"
