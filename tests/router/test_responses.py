"""`/v1/responses`: items in and out, typed events, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from response_store.options import ShelfOptions
from tests.router.fakes import text_script
from tests.router.world import World, world


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world(prefill=0, kept=ShelfOptions()) as made:
        yield made


async def ask(mesh: World, body: Any = "hello", claims: Any = (), **extra: Any) -> httpx.Response:
    return await mesh.post("/v1/responses", {"model": "tiny", "input": body, **extra}, **dict(claims))


async def call(mesh: World, method: str, path: str, **claims: Any) -> httpx.Response:
    return await mesh.client.request(method, f"/v1/responses{path}", headers=mesh.headers(**claims))


def typed(text: str) -> list[dict[str, Any]]:
    """The events; the name of each is its type, and they are numbered."""
    found = []
    for number, block in enumerate(text.strip().split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def prompt(mesh: World, place: int = -1) -> list[int]:
    return list(mesh.worker.opened[place].prompt.segments[0].tokens.ids)


async def tokens_of(mesh: World, messages: list[dict[str, Any]]) -> list[int]:
    answer = await mesh.post("/tokenize", {"model": "tiny", "messages": messages})
    ids: list[int] = answer.json()["tokens"]
    return ids


def timeless(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two answers to one question."""
    text = json.dumps(response | {"created_at": 0, "completed_at": 0, "id": "", "store": None})
    for item in response["output"]:
        text = text.replace(item["id"], item["id"].partition("_")[0])
    out: dict[str, Any] = json.loads(text)
    return out


async def test_a_text_is_answered_by_a_message(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script("héllo")
    answer = await ask(mesh, "hi", instructions="be short", metadata={"a": "b"})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said["object"] == "response"
    assert said["status"] == "completed"
    assert said["error"] is None
    assert said["metadata"] == {"a": "b"}
    [item] = said["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "héllo", "annotations": [], "logprobs": []}]
    assert said["usage"]["output_tokens"] == len("héllo".encode()) + 1
    assert said["usage"]["total_tokens"] == said["usage"]["input_tokens"] + said["usage"]["output_tokens"]
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    assert prompt(mesh) == await tokens_of(mesh, messages)


async def test_the_events_of_a_stream_add_up_to_the_whole_answer(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script("abc")
    whole = (await ask(mesh)).json()
    answer = await ask(mesh, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = typed(answer.text)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "abc"
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert timeless(events[-1]["response"]) == timeless(whole)
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {events[-1]["response"]["output"][0]["id"]}


async def test_calls_become_items_of_their_own(mesh: World) -> None:
    call_ = '{"name": "look", "arguments": {"at": "the sky"}}'
    mesh.worker.behaviour.script = text_script(call_)
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    whole = (await ask(mesh, tools=[tool])).json()
    [item] = whole["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "look", "completed")
    assert json.loads(item["arguments"]) == {"at": "the sky"}
    events = typed((await ask(mesh, tools=[tool], stream=True)).text)
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done[0]["arguments"] == item["arguments"]
    assert events[-1]["response"]["output"][0]["name"] == "look"
    # The call and its result continue the conversation.
    mesh.worker.behaviour.script = text_script("blue")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "blue"}
    answer = await ask(mesh, [result], tools=[tool], previous_response_id=whole["id"])
    assert answer.json()["output"][0]["content"][0]["text"] == "blue"


async def test_what_is_kept_can_be_read_listed_and_deleted(mesh: World) -> None:
    for stream in (False, True):
        answer = await ask(
            mesh, [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}], stream=stream
        )
        said = typed(answer.text)[-1]["response"] if stream else answer.json()
        path = f"/{said['id']}"
        assert said["store"] is True
        assert (await call(mesh, "GET", path)).json() == said
        page = (await call(mesh, "GET", f"{path}/input_items?limit=1")).json()
        assert page["has_more"] is True
        assert page["data"][0]["content"] == [{"type": "input_text", "text": "two"}]
        rest = (await call(mesh, "GET", f"{path}/input_items?after={page['last_id']}")).json()
        assert [item["content"][0]["text"] for item in rest["data"]] == ["one"]
        assert rest["has_more"] is False
        for other in ({"org": "beta"}, {"models": ["other"]}):
            for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                refused = await call(mesh, method, path + end, **other)
                assert refused.status_code == 404, (method, end, other)
        cancelled = await call(mesh, "POST", f"{path}/cancel")
        assert cancelled.status_code == 400
        assert "synchronous" in cancelled.json()["error"]["message"]
        gone = (await call(mesh, "DELETE", path)).json()
        assert gone == {"id": said["id"], "object": "response", "deleted": True}
        assert (await call(mesh, "GET", path)).status_code == 404


async def test_what_is_not_to_be_kept_is_not(mesh: World) -> None:
    said = (await ask(mesh, store=False)).json()
    assert said["store"] is False
    assert (await call(mesh, "GET", f"/{said['id']}")).status_code == 404


async def test_a_conversation_goes_on_from_its_last_response(mesh: World) -> None:
    mesh.worker.behaviour.script = text_script("one")
    first = (await ask(mesh, "a", instructions="not passed on")).json()
    mesh.worker.behaviour.script = text_script("two")
    second = (await ask(mesh, "b", previous_response_id=first["id"])).json()
    assert second["previous_response_id"] == first["id"]
    await ask(mesh, "c", previous_response_id=second["id"], store=False)
    conversation = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"), ("user", "c")]
    messages = [{"role": role, "content": text} for role, text in conversation]
    assert prompt(mesh) == await tokens_of(mesh, messages)
    for previous, claims in (("resp_nowhere", {}), (first["id"], {"org": "beta"})):
        refused = await ask(mesh, "d", claims, previous_response_id=previous)
        assert refused.status_code in (400, 404)
        assert refused.json()["error"]["code"] in ("previous_response_not_found", "model_not_found")


async def test_an_answer_that_is_cut_off_is_incomplete(mesh: World) -> None:
    body = {"max_output_tokens": 16}
    said = (await ask(mesh, "x" * 40, **body)).json()
    assert said["status"] == "incomplete"
    assert said["incomplete_details"] == {"reason": "max_output_tokens"}
    assert said["output"][0]["status"] == "incomplete"
    assert said["completed_at"] is None
    assert typed((await ask(mesh, "x" * 40, stream=True, **body)).text)[-1]["type"] == "response.incomplete"


async def test_a_stream_that_breaks_says_so(mesh: World) -> None:
    mesh.worker.behaviour.incident, mesh.worker.behaviour.incident_after = "fail", 2
    last = typed((await ask(mesh, "abcdef", stream=True)).text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert (await call(mesh, "GET", f"/{last['response']['id']}")).status_code == 404


async def test_log_probabilities_on_request(mesh: World) -> None:
    mesh.worker.behaviour.script, mesh.worker.behaviour.logprobs = text_script("ab"), True
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = (await ask(mesh, **body)).json()["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in whole][:2] == ["a", "b"]
    assert len(whole[0]["top_logprobs"]) == 1
    events = typed((await ask(mesh, stream=True, **body)).text)
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == whole


async def test_an_input_is_counted(mesh: World) -> None:
    body = {"model": "tiny", "input": "hello", "instructions": "x"}
    counted = (await mesh.post("/v1/responses/input_tokens", body)).json()
    used = (await ask(mesh, "hello", instructions="x")).json()["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": []}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input[0].extra", {"input": [{"role": "user", "content": "x", "extra": 1}]}),
    ("max_output_tokens", {"max_output_tokens": 15}),
    ("max_output_tokens", {"max_output_tokens": 10**6}),
    ("temperature", {"temperature": 3}),
    ("temperature", {"temperature": "hot"}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("include", {"include": ["file_search_call.results"]}),
    ("truncation", {"truncation": "auto"}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "c"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function", "name": "a b"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("text.format", {"text": {"format": {"type": "poem"}}}),
    ("text.color", {"text": {"color": "red"}}),
    ("reasoning.summary", {"reasoning": {"summary": "long"}}),
    ("previous_response_id", {"previous_response_id": "resp_nowhere"}),
    ("stream_options", {"stream_options": {}}),
    ("metadata", {"metadata": {str(i): "x" for i in range(17)}}),
    ("nonsense", {"nonsense": 1}),
]


@pytest.mark.parametrize(("param", "extra"), REFUSED)
async def test_what_is_wrong_is_named_in_the_clients_words(
    mesh: World, param: str, extra: dict[str, Any]
) -> None:
    answer = await mesh.post("/v1/responses", {"model": "tiny", "input": "x", **extra})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] is not None
    assert error["param"].startswith(param), error
    assert not mesh.worker.opened


async def test_without_the_service_nothing_is_kept_and_everything_else_works() -> None:
    async with world(prefill=0) as mesh:
        said = (await ask(mesh)).json()
        assert (said["status"], said["store"]) == ("completed", False)
        refused = await ask(mesh, store=True)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
        assert (await call(mesh, "GET", "/resp_1")).status_code == 404


async def test_a_service_that_is_away_refuses_what_is_to_be_kept(mesh: World) -> None:
    await mesh.servers["responses-0"].stop(0)
    refused = await ask(mesh)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert (await ask(mesh, store=False)).status_code == 200
    assert (await ask(mesh, previous_response_id="resp_1", store=False)).status_code == 503
    # It is told before anything is generated.
    opened = len(mesh.worker.opened)
    assert (await ask(mesh, stream=True)).status_code == 503
    assert len(mesh.worker.opened) == opened
