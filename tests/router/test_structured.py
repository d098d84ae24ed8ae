"""What becomes of wishes for the form of an answer: the grammar that a worker gets, or a refusal before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from kvmesh.v1 import inference_pb2, inference_pb2_grpc

from tests.router.test_tools import TOOLS, USER
from tests.router.world import World, grpc_channel, world
from text import load_text_model
from text.grammar import Grammars

TINY = load_text_model("script:")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
STRICT = {"type": "function", "function": {"name": "count", "parameters": SCHEMA, "strict": True}}
LOOSE: dict[str, Any] = {"type": "function", "function": {"name": "loose", "parameters": {"not": {}}}}


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world() as made:
        yield made


def allows(grammar: str, text: str) -> bool:
    """Whether an answer may be exactly this."""
    if not grammar:
        return True
    matcher = Grammars(TINY.tokenizer, TINY.end_ids, TINY.vocab_size).compile(grammar)
    return matcher.take(list(text.encode())) and (
        matcher.complete or bool(matcher.allowed()[0][sorted(TINY.end_ids)].any())
    )


CALL = '{"name": "count", "arguments": {"a":1}}'
PING = '{"name": "ping", "arguments": {}}'
NAMED = {"type": "function", "function": {"name": "ping"}}
WISHES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, ["anything"], []),
    ({"response_format": {"type": "text"}}, ["anything"], []),
    ({"response_format": {"type": "json_object"}}, ['{"b": [1]}'], ["[]", "x"]),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
            }
        },
        ['{"a": 1}'],
        ['{"a": "1"}', "{}"],
    ),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a":1}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
    ({"structured_outputs": {"regex": "[ab]+"}}, ["abba"], ["c"]),
    ({"guided_choice": ["yes", "no"]}, ["yes"], ["y", "maybe"]),
    ({"guided_json": '{"type": "null"}'}, ["null"], ["1"]),
    ({"guided_regex": "x"}, ["x"], ["y"]),
    ({"guided_grammar": 'root ::= "a" "b"'}, ["ab"], ["a"]),
    ({"tools": TOOLS}, ["anything"], []),
    ({"tools": TOOLS, "tool_choice": "required"}, [PING, f"[{PING}, {PING}]"], ["text", CALL]),
    (
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        [PING],
        [f"[{PING}]", "text"],
    ),
    ({"tools": TOOLS, "tool_choice": NAMED}, [PING], ['{"name": "plan", "arguments": {}}', f"[{PING}]"]),
    ({"tools": [STRICT]}, [CALL, "text"], ['{"name": "count", "arguments": {"a":"x"}}']),
    ({"tools": [STRICT, LOOSE]}, [CALL, '{"name": "loose", "arguments": {"b":2}}'], []),
    ({"tools": [LOOSE], "tool_choice": "required"}, ['{"name": "loose", "arguments": {}}'], ["text"]),
    (
        {"tools": [STRICT], "response_format": {"type": "json_object"}},
        [CALL, '{"b": 1}'],
        ["text"],
    ),
    ({"tools": TOOLS, "guided_choice": ["yes"]}, ["yes", PING], ["text"]),
    (
        {"functions": [STRICT["function"]], "function_call": {"name": "count"}},
        [CALL],
        ["text"],
    ),
]


@pytest.mark.parametrize(("extra", "may", "may_not"), WISHES)
async def test_the_worker_gets_a_grammar_of_what_was_wished(
    mesh: World, extra: dict[str, Any], may: list[str], may_not: list[str]
) -> None:
    answer = await mesh.chat(**extra)
    assert answer.status_code == 200, answer.text
    grammar = mesh.worker.opened[-1].grammar
    assert bool(grammar) is bool(may_not or "strict" in str(extra))
    for text in may:
        assert allows(grammar, text), text
    for text in may_not:
        assert not allows(grammar, text), text


FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("response_format.json_schema.schema", {"response_format": FORMAT}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.name", {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}),
    ("response_format.extra", {"response_format": {"type": "text", "extra": 1}}),
    ("guided_json", {"guided_json": SCHEMA, "response_format": {"type": "json_object"}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    ("structured_outputs.whitespace_pattern", {"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}),
    ("guided_grammar", {"guided_grammar": "start: ("}),
    ("tools", {"tools": [{"type": "function", "function": {**LOOSE["function"], "strict": True}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "extra"), REFUSED)
async def test_what_cannot_be_enforced_is_a_400_that_names_the_field(
    mesh: World, param: str, extra: dict[str, Any]
) -> None:
    for stream in (False, True):
        answer = await mesh.chat(stream=stream, **extra)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    assert not mesh.worker.opened


async def test_completions_and_grpc_have_the_same_wishes(mesh: World) -> None:
    assert (await mesh.complete("x", guided_regex="ab")).status_code == 200
    assert allows(mesh.worker.opened[-1].grammar, "ab")
    refused = await mesh.complete("x", guided_regex="(")
    assert refused.json()["error"]["param"] == "guided_regex"
    wishes = [
        (inference_pb2.Grammar(choices=inference_pb2.Choices(texts=["a", "b"])), "b", "c"),
        (inference_pb2.Grammar(json_schema='{"type": "null"}'), "null", "1"),
        (inference_pb2.Grammar(regex="x+"), "xx", "y"),
        (inference_pb2.Grammar(grammar='start: "q"'), "q", "r"),
    ]
    async with grpc_channel(mesh) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for wish, may, may_not in wishes:
            request = inference_pb2.GenerateRequest(model="tiny", text="x", grammar=wish)
            async for _ in stub.Generate(request, metadata=list(mesh.headers().items())):
                pass
            assert allows(mesh.worker.opened[-1].grammar, may)
            assert not allows(mesh.worker.opened[-1].grammar, may_not)
        broken = inference_pb2.GenerateRequest(
            model="tiny", text="x", grammar=inference_pb2.Grammar(regex="(")
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(broken, metadata=list(mesh.headers().items())):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_named_and_required_calls_end_as_documented(mesh: World) -> None:  # B40
    from tests.router.fakes import text_script
    from tests.router.test_tools import merged
    from tests.router.world import events

    mesh.worker.behaviour.script = text_script(PING)
    for choice, finish in ((NAMED, "stop"), ("required", "tool_calls"), ("auto", "tool_calls")):
        extra: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "messages": [USER]}
        whole = (await mesh.chat(**extra)).json()["choices"][0]
        chunks = events((await mesh.chat(stream=True, **extra)).text)
        assert whole["finish_reason"] == merged(chunks)["finish"] == finish
        assert whole["message"]["tool_calls"][0]["function"] == {"name": "ping", "arguments": "{}"}
        opened = chunks[0]["choices"][0]["delta"]
        assert opened["content"] == ("" if choice == "auto" else None)
