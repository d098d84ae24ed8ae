"""What an OpenAI client sees of the router, over its real socket, with a worker that says what it is told."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.router.fakes import END, endless, text_script
from tests.router.world import World, chat_body, events, until, world

CASES = Path(os.environ.get("KVMESH_CASES", Path(__file__).parents[3] / "shared" / "cases"))
RECORDINGS = CASES / "openai-recordings"


@pytest.fixture
async def mesh() -> AsyncIterator[World]:
    async with world() as made:
        yield made


def by(tokens: int) -> Callable[[int], int]:
    """So many tokens in every step."""
    return lambda step: tokens


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in chunk["choices"]
        if choice["index"] == index
    )


async def test_streamed_and_whole_answers_agree_to_the_byte(mesh: World) -> None:  # B01
    text = "ž🫠龘𝛀 fin"
    mesh.worker.behaviour.script = text_script(text)
    for split in (1, 2, 3, 7):
        mesh.worker.behaviour.tokens_per_step = by(split)
        for limit in (None, *range(1, 18, 3)):
            extra = {} if limit is None else {"max_tokens": limit}
            whole = (await mesh.chat(**extra)).json()["choices"][0]
            streamed = await mesh.chat(stream=True, **extra)
            chunks = events(streamed.content.decode("utf-8", "strict"))
            assert joined(chunks) == whole["message"]["content"]
            assert "\ufffd" not in whole["message"]["content"]
            assert whole["message"]["content"] == text.encode()[:limit].decode("utf-8", "ignore")
            assert whole["finish_reason"] == ("stop" if limit is None else "length")


async def test_stop_strings_cut_at_the_right_character_in_both_modes(mesh: World) -> None:  # B02
    forced = "one two STOP-HERE-NOW three"
    mesh.worker.behaviour.script = text_script(forced)
    draw = random.Random(2)
    stops = [["STOP-HERE-NOW"], ["ERE-N"], ["STOP", "STOP-HERE"], ["absent"]]
    for _ in range(12):
        start = draw.randrange(len(forced) - 1)
        stops.append([forced[start : start + draw.randrange(1, 30)]])
    for stop in stops:
        count = draw.choice([1, 2, 5])
        mesh.worker.behaviour.tokens_per_step = by(count)
        cut = min((at for s in stop if (at := forced.find(s)) >= 0), default=len(forced))
        whole = (await mesh.chat(stop=stop)).json()
        chunks = events((await mesh.chat(stop=stop, stream=True)).text)
        assert whole["choices"][0]["message"]["content"] == joined(chunks) == forced[:cut], stop
        assert whole["choices"][0]["finish_reason"] == "stop"
        end = min((at + len(s) for s in stop if (at := forced.find(s)) >= 0), default=len(forced) + 1)
        assert whole["usage"]["completion_tokens"] <= end
    await mesh.worker.until(lambda: mesh.worker.running == 0)


async def test_usage_comes_once_and_only_when_asked(mesh: World) -> None:  # B05
    unasked: list[dict[str, Any]] = [{}, {"stream_options": {}}, {"stream_options": None}]
    for options in unasked:
        chunks = events((await mesh.chat(stream=True, **options)).text)
        assert all("usage" not in chunk for chunk in chunks[:-1])
    whole = (await mesh.chat()).json()["usage"]
    chunks = events((await mesh.chat(stream=True, stream_options={"include_usage": True})).text)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-2])
    assert chunks[-2]["usage"] | {"prompt_tokens_details": None} == whole | {"prompt_tokens_details": None}
    refused = await mesh.chat(stream_options={"include_usage": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize(("n", "limit"), [(1, None), (3, 5), (4, None)])
async def test_each_choice_opens_runs_and_finishes_once(
    mesh: World, n: int, limit: int | None
) -> None:  # B07
    extra = {} if limit is None else {"max_tokens": limit}
    chunks = events((await mesh.chat("some words", n=n, stream=True, **extra)).text)
    state = dict.fromkeys(range(n), "begin")
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice["delta"]
            assert state[index] != "finished"
            if state[index] == "begin":
                assert delta == {"role": "assistant", "content": "", "refusal": None}
                state[index] = "running"
            elif choice["finish_reason"] is None:
                assert set(delta) == {"content"}
            else:
                assert delta == {}
                assert choice["finish_reason"] == ("length" if limit else "stop")
                state[index] = "finished"
    assert set(state.values()) == {"finished"}
    assert chunks.count("[DONE]") == 1
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks[:-1]}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_whole_streams_end_in_done_and_broken_ones_in_an_error(
    mesh: World, path: str
) -> None:  # B08 B10
    body = {**chat_body("hello"), "stream": True}
    if path == "/v1/completions":
        body = {"model": "tiny", "prompt": "hello", "stream": True}
    answer = await mesh.post(path, body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("data: [DONE]\n\n")
    mesh.worker.behaviour.incident = "fail"
    mesh.worker.behaviour.step_s = 0.01
    broken = await mesh.post(path, body)
    assert broken.status_code == 200
    assert "[DONE]" not in broken.text
    assert events(broken.text)[-1] == {
        "error": {
            "message": "the step failed",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    mesh.worker.behaviour.incident = "fail"
    whole = await mesh.post(path, {**body, "stream": False})
    assert whole.status_code == 500


async def test_what_fails_before_the_first_token_has_its_real_status(mesh: World) -> None:
    mesh.worker.behaviour.refuse = [4]
    answer = await mesh.chat(stream=True)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "never"


async def test_a_long_wait_for_the_first_token_is_kept_alive(
    mesh: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.openai.answers.KEEP_ALIVE_S", 0.05)
    mesh.worker.behaviour.script, mesh.worker.behaviour.step_s = text_script("ab"), 0.2
    answer = await mesh.chat(stream=True)
    assert answer.text.startswith(": keep-alive\n\n")
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in events(answer.text)[:-1]) == "ab"
    mesh.worker.behaviour.incident, mesh.worker.behaviour.incident_after = "fail", 1
    broken = await mesh.chat(stream=True)
    assert (broken.status_code, broken.text[:2]) == (200, ": ")
    assert "error" in events(broken.text)[-1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_work(mesh: World, stream: bool) -> None:  # B12
    mesh.worker.behaviour.script = endless
    mesh.worker.behaviour.step_s = 0.002
    asking = asyncio.ensure_future(mesh.chat(stream=stream, max_tokens=20_000, ignore_eos=True))
    await mesh.worker.until(lambda: bool(mesh.worker.opened))
    handoff_id = mesh.worker.opened[0].handoff_id
    await until(lambda: mesh.worker.sent.get(handoff_id, 0))
    asking.cancel()
    await mesh.worker.until(lambda: (handoff_id, None) in mesh.worker.cancelled, 2)
    await mesh.worker.until(lambda: mesh.worker.running == 0, 2)
    worker = mesh.router.fleet.placement.get("decode-tiny-0")
    assert worker is not None
    await until(lambda: not worker.ours, 2)


async def test_a_client_that_reads_slowly_slows_the_worker(mesh: World) -> None:
    mesh.worker.behaviour.script = endless
    mesh.worker.behaviour.tokens_per_step = lambda step: 64
    # Log-probabilities make the stream larger than what sockets hold.
    extra = {"max_tokens": 4000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    body = json.dumps(chat_body("x", stream=True, **extra)).encode()
    async with mesh.client.stream(
        "POST", "/v1/chat/completions", content=body, headers=mesh.headers()
    ) as answer:
        lines = answer.aiter_lines()
        await lines.__anext__()
        handoff_id = mesh.worker.opened[0].handoff_id
        sent = -1
        for _ in range(100):
            before, sent = sent, mesh.worker.sent.get(handoff_id, 0)
            if sent == before:
                break
            await asyncio.sleep(0.05)
        assert sent < 4000
        async for _ in lines:
            pass
    assert mesh.worker.sent[handoff_id] >= 4000
    assert mesh.worker.credits


async def test_a_client_that_reads_slowly_slows_nobody_else(mesh: World) -> None:
    mesh.worker.behaviour.script = endless
    mesh.worker.behaviour.tokens_per_step = lambda step: 64
    extra = {"max_tokens": 4000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    body = json.dumps(chat_body("x", stream=True, **extra)).encode()
    async with mesh.client.stream(
        "POST", "/v1/chat/completions", content=body, headers=mesh.headers()
    ) as stuck:
        await stuck.aiter_lines().__anext__()
        handoff_id = mesh.worker.opened[0].handoff_id
        # Beside the one that reads nothing more, others come to their end at the same worker.
        others = await asyncio.gather(
            *(mesh.chat(stream=True, max_tokens=1000, ignore_eos=True) for _ in range(3))
        )
        for other in others:
            chunks = events(other.text)
            assert chunks[-1] == "[DONE]"
            assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert mesh.worker.sent[handoff_id] < 4000


async def test_a_pause_within_a_stream_is_kept_alive(mesh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.openai.answers.KEEP_ALIVE_S", 0.05)
    mesh.worker.behaviour.script, mesh.worker.behaviour.step_s = text_script("abc"), 0.2
    text = (await mesh.chat(stream=True)).text
    begun = text.index("data: ")
    # Between the tokens as before the first, and never within an event.
    assert text.count(": keep-alive\n\n", begun) >= 2
    assert all(event.startswith(("data: ", ": keep-alive")) for event in text.strip().split("\n\n"))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in events(text)[:-1]) == "abc"


async def test_chat_logprobs_have_the_chat_shape(mesh: World) -> None:  # B14
    for extra, top in (
        ({}, 0),
        ({"top_logprobs": 0}, 0),
        ({"top_logprobs": 3}, 3),
        ({"top_logprobs": 20}, 20),
    ):
        whole = (await mesh.chat("hé", logprobs=True, **extra)).json()
        content = whole["choices"][0]["logprobs"]["content"]
        assert len(content) == whole["usage"]["completion_tokens"] == 4
        assert whole["choices"][0]["logprobs"]["refusal"] is None
        chunks = events((await mesh.chat("hé", logprobs=True, stream=True, **extra)).text)
        parts = [
            entry
            for chunk in chunks[:-1]
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {}).get("content", [])
        ]
        assert parts == content
        for entry in content:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert entry["logprob"] <= 0
            assert len(entry["top_logprobs"]) == (top or 0)
            values = [other["logprob"] for other in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
        assert [entry["bytes"] for entry in content] == [[104], [0xC3], [0xA9], None]
    assert (await mesh.chat(top_logprobs=3)).status_code == 400
    assert "logprobs" not in (await mesh.chat()).json()["choices"][0]


async def test_completion_logprobs_have_the_old_shape(mesh: World) -> None:  # B14
    for count in (0, 2):
        answer = (await mesh.complete("abc", logprobs=count, max_tokens=3)).json()
        shape = answer["choices"][0]["logprobs"]
        assert set(shape) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert shape["tokens"] == ["a", "b", "c"]
        assert shape["text_offset"] == [0, 1, 2]
        assert all(value <= 0 for value in shape["token_logprobs"])
        # Beside the alternatives the token itself, which is not among the likeliest here.
        for token, top in zip(shape["tokens"], shape["top_logprobs"], strict=True):
            assert token in top
            assert len(top) == count + 1
    assert (await mesh.complete("abc", logprobs=6)).status_code == 400
    assert (await mesh.complete("abc")).json()["choices"][0]["logprobs"] is None


async def test_several_prompts_become_several_choices(mesh: World) -> None:
    answer = (await mesh.complete(["ab", "cde"], n=2)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "ab"),
        (1, "ab"),
        (2, "cde"),
        (3, "cde"),
    ]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 2 * 3 + 2 * 4
    ids = (await mesh.complete([[97, 98], [99]])).json()
    assert [c["text"] for c in ids["choices"]] == ["ab", "c"]
    one = (await mesh.complete([97, 98])).json()
    assert [c["text"] for c in one["choices"]] == ["ab"]
    chunks = events((await mesh.complete(["ab", "cde"], stream=True)).text)
    assert {c["index"] for chunk in chunks[:-1] for c in chunk["choices"]} == {0, 1}


async def test_cached_tokens_are_whole_blocks_of_the_first_placement(mesh: World) -> None:  # B76
    for length in (1, 15, 16, 17, 32, 33, 100):
        answer = (await mesh.complete([97] * length, max_tokens=2)).json()
        cached = answer["usage"].get("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"]
        assert cached == 16 * ((length - 1) // 16) < length


async def test_the_seed_reaches_the_worker_and_one_is_drawn_without(mesh: World) -> None:
    for seed, expected in ((7, 7), (0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**64 - 1)):
        assert (await mesh.chat(seed=seed)).status_code == 200
        assert mesh.worker.opened[-1].sampling.seed == expected
    await mesh.chat()
    await mesh.chat()
    assert mesh.worker.opened[-1].sampling.seed != mesh.worker.opened[-2].sampling.seed
    await mesh.chat(temperature=1e-9)
    assert mesh.worker.opened[-1].sampling.temperature == 0.0  # B19
    await mesh.chat(top_p=0)
    assert mesh.worker.opened[-1].sampling.temperature == 0.0
    await mesh.chat(metadata={"script_split": "1,2", "mine": "secret"})
    assert dict(mesh.worker.opened[-1].metadata) == {"script_split": "1,2"}
    assert list(mesh.worker.opened[-1].stop.stop_token_ids) == [END]
    await mesh.chat(ignore_eos=True, stop_token_ids=[65], max_tokens=9)
    assert list(mesh.worker.opened[-1].stop.stop_token_ids) == [65]


async def test_models_are_listed_by_the_decision_that_calls_go_through(mesh: World) -> None:
    listed = await mesh.client.get("/v1/models", headers=mesh.headers())
    assert [m["id"] for m in listed.json()["data"]] == ["org/other", "tiny"]
    assert listed.json()["data"][1] == {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "kvmesh",
    }
    for path in ("/v1/models/org/other", "/v1/models/org%2Fother"):
        assert (await mesh.client.get(path, headers=mesh.headers())).json()["id"] == "org/other"
    answers = []
    for name in ("secret", "absent"):
        one = await mesh.client.get(f"/v1/models/{name}", headers=mesh.headers())
        call = await mesh.post("/v1/completions", {"model": name, "prompt": "x", "temperature": 99})
        assert one.status_code == call.status_code == 404
        assert one.json() == call.json()
        answers.append(json.dumps(one.json()).replace(name, "M"))
    assert answers[0] == answers[1]
    narrow = await mesh.client.get("/v1/models", headers=mesh.headers(models=["tiny"]))
    assert [m["id"] for m in narrow.json()["data"]] == ["tiny"]
    nothing = await mesh.client.get("/v1/models", headers=mesh.headers(org="beta"))
    assert nothing.json()["data"] == []
