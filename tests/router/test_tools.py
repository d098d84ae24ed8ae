"""Tool calls as an OpenAI client sees them: both modes agree, in every cut of the token stream."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from tests.router.fakes import text_script
from tests.router.world import World, events, world

PLAN = '{"steps":[{"n":1,"t":"a}b"},{"n":2,"t":"\\"q\\""}],"opt":{}}'
TOOLS = [
    {"type": "function", "function": {"name": "plan", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "ping", "description": "Pings."}},
]
USER = {"role": "user", "content": "go"}
CALL = {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world() as made:
        yield made


def random_steps(seed: int) -> Callable[[int], int]:
    draw = random.Random(seed)
    return lambda step: draw.choice([1, 1, 2, 3, 5, 40])


def merged(chunks: Sequence[Any], index: int = 0) -> dict[str, Any]:
    """What the chunks of one choice add up to; their order is checked on the way."""
    message: dict[str, Any] = {"content": None, "tool_calls": [], "finish": None, "logprobs": []}
    opened = False
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            if choice["index"] != index:
                continue
            assert message["finish"] is None, "something after the end"
            delta = choice["delta"]
            assert ("role" in delta) is not opened
            opened = True
            if delta.get("content") is not None:
                message["content"] = (message["content"] or "") + delta["content"]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    assert call["type"] == "function"
                    message["tool_calls"].append({**call["function"], "id": call["id"]})
                else:
                    assert set(call) == {"index", "function"}
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            if "function_call" in delta:
                message.setdefault("function_call", {"arguments": ""})
                message["function_call"]["arguments"] += delta["function_call"]["arguments"]
                message["function_call"].setdefault("name", delta["function_call"].get("name"))
            message["logprobs"] += (choice.get("logprobs") or {}).get("content", [])
            message["finish"] = choice["finish_reason"]
    return message


ANSWERS: list[tuple[str, list[tuple[str, str]], str | None]] = [
    ("Just text.", [], "Just text."),
    (f'{{"name": "plan", "arguments": {PLAN}}}', [("plan", PLAN)], None),
    ('[{"name": "ping"}, {"name": "ping", "arguments": {}}]', [("ping", "{}"), ("ping", "{}")], None),
    ('{"name": "ping", "arguments": {}} žß', [("ping", "{}")], " žß"),
    ('{"name": "other", "arguments": {}}', [], '{"name": "other", "arguments": {}}'),
]


@pytest.mark.parametrize(("answer", "calls", "text"), ANSWERS)
async def test_streamed_and_whole_calls_agree_for_every_cut(
    mesh: World, answer: str, calls: list[tuple[str, str]], text: str | None
) -> None:  # B37 B38 B39 B40
    mesh.worker.behaviour.script = text_script(answer)
    extra: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "messages": [USER]}
    whole = (await mesh.chat(**extra)).json()["choices"][0]
    message = whole["message"]
    assert message["content"] == text
    told = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]
    assert told == calls
    assert ("tool_calls" in message) is bool(calls)
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
    for seed in range(8):
        mesh.worker.behaviour.tokens_per_step = random_steps(seed)
        streamed = await mesh.chat(stream=True, **extra)
        chunks = events(streamed.content.decode("utf-8", "strict"))
        assert chunks[-1] == "[DONE]"
        add = merged(chunks)
        assert [(call["name"], call["arguments"]) for call in add["tool_calls"]] == calls
        assert (add["content"] or None) == text
        assert add["finish"] == whole["finish_reason"]
        assert len({call["id"] for call in add["tool_calls"]}) == len(calls)
        assert add["logprobs"] == whole["logprobs"]["content"]


async def test_a_call_that_is_cut_off_ends_with_length(mesh: World) -> None:  # B40
    mesh.worker.behaviour.script = text_script(f'{{"name": "plan", "arguments": {PLAN}}}')
    whole = (await mesh.chat(tools=TOOLS, max_tokens=40)).json()["choices"][0]
    chunks = events((await mesh.chat(tools=TOOLS, max_tokens=40, stream=True)).text)
    assert whole["finish_reason"] == merged(chunks)["finish"] == "length"
    [call] = whole["message"]["tool_calls"]
    assert call["function"]["arguments"] == merged(chunks)["tool_calls"][0]["arguments"]
    assert PLAN.startswith(call["function"]["arguments"])


async def test_no_call_is_looked_for_where_none_may_be_made(mesh: World) -> None:
    answer = '{"name": "ping", "arguments": {}}'
    mesh.worker.behaviour.script = text_script(answer)
    before = (await mesh.chat("go")).json()
    none = (await mesh.chat("go", tools=TOOLS, tool_choice="none")).json()
    assert none["choices"][0]["message"]["content"] == answer
    assert none["usage"]["prompt_tokens"] == before["usage"]["prompt_tokens"]
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "plan"}}]},
    }
    other = (await mesh.chat("go", tools=TOOLS, tool_choice=allowed)).json()["choices"][0]
    assert other["message"]["content"] == answer
    assert other["finish_reason"] == "stop"


async def test_without_parallel_calls_there_is_one_at_most(mesh: World) -> None:  # B39
    mesh.worker.behaviour.script = text_script('[{"name": "ping"}, {"name": "plan", "arguments": {"a": 1}}]')
    whole = (await mesh.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]["message"]
    assert [call["function"] for call in whole["tool_calls"]] == [{"name": "ping", "arguments": "{}"}]


async def test_the_older_names_are_answered_in_the_older_shape(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script(f'{{"name": "plan", "arguments": {PLAN}}}')
    functions = [tool["function"] for tool in TOOLS]
    whole = (await mesh.chat(functions=functions)).json()["choices"][0]
    assert whole["message"]["function_call"] == {"name": "plan", "arguments": PLAN}
    assert "tool_calls" not in whole["message"]
    assert whole["finish_reason"] == "function_call"
    add = merged(events((await mesh.chat(functions=functions, stream=True)).text))
    assert add["function_call"] == {"name": "plan", "arguments": PLAN}
    assert add["finish"] == "function_call"


async def test_equal_histories_give_equal_prompts(mesh: World) -> None:  # B32 B33
    async def prompt_tokens(*messages: dict[str, Any]) -> int:
        answer = await mesh.chat(messages=[USER, *messages, USER], max_tokens=1)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    result = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    calling: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}]
    assert (
        len({await prompt_tokens({"role": "assistant", "tool_calls": [CALL], **c}, result) for c in calling})
        == 1
    )
    plain: list[dict[str, Any]] = [
        {},
        {"tool_calls": []},
        {"tool_calls": None, "function_call": None, "refusal": None, "audio": None, "annotations": []},
    ]
    assert len({await prompt_tokens({"role": "assistant", "content": "ok", **p}) for p in plain}) == 1
    parts = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]}
    called = {"role": "assistant", "tool_calls": [CALL]}
    assert await prompt_tokens(called, parts) == await prompt_tokens(called, result)


async def test_an_answer_is_taken_back_as_history(mesh: World) -> None:  # B33
    mesh.worker.behaviour.script = text_script('{"name": "ping", "arguments": {}}')
    message = (await mesh.chat(tools=TOOLS)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "pong"}
    mesh.worker.behaviour.script = text_script("Done.")
    answer = await mesh.chat(tools=TOOLS, messages=[USER, message, result])
    assert answer.json()["choices"][0]["message"]["content"] == "Done."


BAD: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": {}}),
    ("tools[0]", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "x" * 65}}]}),
    ("tools[0].function", {"tools": [{"type": "function", "function": {"name": "x", "parameters": 3}}]}),
    ("tools[0].function", {"tools": [{"type": "function", "function": {"name": "x", "extra": 3}}]}),
    ("tools[1]", {"tools": [TOOLS[0], TOOLS[0]]}),
    ("tools", {"tools": [TOOLS[0]] * 129}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}),
    (
        "tool_choice",
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        },
    ),
    ("functions", {"tools": TOOLS, "functions": [{"name": "f"}]}),
    ("function_call", {"functions": [{"name": "f"}], "function_call": {"name": "g"}}),
    ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": "no"}),
    ("messages[1]", {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "nobody's"}]}),
    ("messages[1]", {"messages": [USER, {"role": "tool", "content": "x"}]}),
    ("messages[1]", {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "id": None}]}]}),
]


@pytest.mark.parametrize(("param", "extra"), BAD)
async def test_bad_tools_are_refused_by_name(mesh: World, param: str, extra: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = await mesh.chat(stream=stream, **extra)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"].startswith(param)
        assert isinstance(error["code"], str)
    assert not mesh.worker.opened


async def test_arguments_in_the_history_must_be_json(mesh: World) -> None:
    broken = {**CALL, "function": {"name": "ping", "arguments": "{oops"}}
    answer = await mesh.chat(messages=[USER, {"role": "assistant", "tool_calls": [broken]}, USER])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert json.loads(answer.text)["error"]["message"]
