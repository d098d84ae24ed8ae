"""What an OpenAI client sees, to the byte, through the real edge (the scripted model says what it is told)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Mesh, events

TEXT = "ž🫠龘𝛀 fin"


def chat(text: str, **extra: Any) -> dict[str, Any]:
    return {"model": "script", "messages": [{"role": "user", "content": text}], "temperature": 0, **extra}


async def plain(client: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(
    client: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> tuple[list[Any], str]:
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    body_text = answer.content.decode("utf-8", errors="strict")
    return events(body_text), body_text


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in chunk["choices"]
        if choice["index"] == index
    )


@pytest.mark.parametrize("split", ["1", "1,3,2", "7", "2"])
async def test_characters_split_between_tokens_never_break(mesh: Mesh, split: str) -> None:  # B01
    async with mesh.client() as client:
        for limit in (None, *range(1, 18)):
            body = chat(TEXT, metadata={"script_split": split})
            if limit is not None:
                body["max_tokens"] = limit
            whole = (await plain(client, body))["choices"][0]
            chunks, _ = await streamed(client, body)
            text = joined(chunks)
            assert text == (whole["message"]["content"] or "")
            assert "\ufffd" not in text[:-1]
            if limit is None:
                assert text == TEXT
                assert whole["finish_reason"] == "stop"


async def test_stop_strings_neither_leak_nor_lose_text(mesh: Mesh) -> None:  # B02
    forced = "one two STOP-HERE-NOW three"
    draw = random.Random(2)
    stops = [["STOP-HERE-NOW"], ["ERE-N"], ["STOP", "STOP-HERE"], ["absent"]]
    for _ in range(20):
        start = draw.randrange(len(forced) - 1)
        stops.append([forced[start : start + draw.randrange(1, 30)]])
    async with mesh.client() as client:
        for stop in stops:
            body = chat(forced, stop=stop, metadata={"script_split": draw.choice(["1", "3,1", "5"])})
            cut = min((at for s in stop if (at := forced.find(s)) >= 0), default=len(forced))
            whole = (await plain(client, body))["choices"][0]
            chunks, _ = await streamed(client, body)
            assert whole["message"]["content"] == forced[:cut], stop
            assert joined(chunks) == forced[:cut], stop
            assert whole["finish_reason"] == "stop"


async def test_usage_comes_once_and_only_when_asked(mesh: Mesh) -> None:  # B05
    async with mesh.client() as client:
        counts = (await plain(client, chat("hello there")))["usage"]
        for asked in (False, True):
            body = chat("hello there")
            if asked:
                body["stream_options"] = {}
            chunks, _ = await streamed(client, body)
            assert all(not chunk.get("usage") for chunk in chunks[:-1])
        chunks, _ = await streamed(client, chat("hello there", stream_options={"include_usage": True}))
        assert chunks[-1] == "[DONE]"
        assert chunks[-2]["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks[:-2])
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert chunks[-2]["usage"][name] == counts[name]
        refused = await client.post(
            "/v1/chat/completions", json=chat("x", stream_options={"include_usage": True})
        )
        assert refused.status_code in (200, 400)


async def test_each_choice_finishes_exactly_once(mesh: Mesh) -> None:  # B07
    async with mesh.client() as client:
        for n, limit in ((3, 5), (1, None)):
            body = chat("a natural end", n=n, **({"max_tokens": limit} if limit else {}))
            chunks, _ = await streamed(client, body)
            state = dict.fromkeys(range(n), "begin")
            for chunk in chunks[:-1]:
                for choice in chunk["choices"]:
                    index = choice["index"]
                    assert state[index] != "finished"
                    if state[index] == "begin":
                        assert choice["delta"]["role"] == "assistant"
                        state[index] = "running"
                    if choice["finish_reason"] is not None:
                        assert choice["finish_reason"] == ("length" if limit else "stop")
                        state[index] = "finished"
            assert set(state.values()) == {"finished"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_whole_stream_ends_in_done(mesh: Mesh, path: str) -> None:  # B08
    async with mesh.client() as client:
        for extra in ({}, {"max_tokens": 2}):
            body = {**chat("hello"), **extra}
            if path == "/v1/completions":
                body = {"model": "script", "prompt": "hello", "temperature": 0, **extra}
            chunks, raw = await streamed(client, body, path)
            assert chunks.count("[DONE]") == 1
            assert raw.endswith("data: [DONE]\n\n")


async def test_a_late_failure_is_an_error_event_without_done(mesh: Mesh) -> None:
    body = chat("this will fail", metadata={"script_fail_at": "5"})
    async with mesh.client() as client:
        chunks, raw = await streamed(client, body)
        assert chunks[-1]["error"]["type"] == "server_error"
        assert "[DONE]" not in raw
        early = await client.post(
            "/v1/chat/completions", json={**chat("x", metadata={"script_fail_at": "0"})}
        )
        assert early.status_code == 500
        assert early.json()["error"]["type"] == "server_error"
        plain_answer = await client.post("/v1/chat/completions", json=body)
        assert plain_answer.status_code == 500


async def test_chat_logprobs_have_the_chat_shape(mesh: Mesh) -> None:  # B14
    async with mesh.client() as client:
        for extra, top in (
            ({}, 0),
            ({"top_logprobs": 0}, 0),
            ({"top_logprobs": 3}, 3),
            ({"top_logprobs": 20}, 20),
        ):
            body = {
                **chat("hi"),
                "model": "tiny",
                "max_tokens": 6,
                "logprobs": True,
                "ignore_eos": True,
                **extra,
            }
            answer = await plain(client, body)
            content = answer["choices"][0]["logprobs"]["content"]
            assert len(content) == answer["usage"]["completion_tokens"]
            chunks, _ = await streamed(client, body)
            parts = [
                entry
                for chunk in chunks[:-1]
                for choice in chunk["choices"]
                for entry in (choice.get("logprobs") or {}).get("content") or []
            ]
            assert parts == content
            for entry in content:
                assert entry["logprob"] <= 0
                assert len(entry["top_logprobs"]) == top
                values = [alternative["logprob"] for alternative in entry["top_logprobs"]]
                assert values == sorted(values, reverse=True)
        refused = await client.post("/v1/chat/completions", json={**chat("hi"), "top_logprobs": 3})
        assert refused.status_code == 400
        for count in (0, 2):
            answer = await plain(
                client,
                {"model": "tiny", "prompt": "abc", "max_tokens": 4, "logprobs": count, "ignore_eos": True},
                "/v1/completions",
            )
            shape = answer["choices"][0]["logprobs"]
            assert set(shape) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
            assert len(shape["tokens"]) == 4


BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    # B16: token ids of logit_bias
    *[("logit_bias", {"logit_bias": bias}) for bias in ({"272": 5}, {"-1": 5}, {"abc": 5}, {"12": 1e9})],
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(400)}}),
    # B18: bounds
    *[("top_logprobs", {"logprobs": True, "top_logprobs": k}) for k in (2_000_000_000, -1, 21)],
    *[("n", {"n": n}) for n in (0, -1, 100_000)],
    # B19: sampling ranges
    *[("temperature", {"temperature": t}) for t in (2.1, -0.1, "NaN")],
    ("min_p", {"min_p": 1.1}),
    ("top_p", {"top_p": 1.5}),
    ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
    # B23: empty input
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "wizard", "content": "x"}]}),
    # what is not served is refused by name
    ("tools", {"tools": [{"type": "function", "function": {"name": "f g"}}]}),
    ("response_format", {"response_format": {"type": "json"}}),
]


@pytest.mark.parametrize(("param", "extra"), BAD_REQUESTS, ids=lambda v: str(v)[:40])
async def test_bad_requests_are_refused_with_a_reason(mesh: Mesh, param: str, extra: dict[str, Any]) -> None:
    before = mesh.pids("router", "decode", "prefill")
    async with mesh.client() as client:
        answer = await client.post("/v1/chat/completions", json={**chat("hi"), "model": "tiny", **extra})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] is None or error["param"].startswith(param)
        assert error["message"]
        assert answer.headers["x-request-id"]
        assert joined((await streamed(client, chat("still here")))[0]) == "still here"
    assert mesh.pids("router", "decode", "prefill") == before


async def test_token_ids_outside_the_vocabulary_are_refused(mesh: Mesh) -> None:  # B23, B24
    async with mesh.client() as client:
        prompts: list[Any] = [[-1], [272], [261], [1.5], [True], [2**40], ["7", 3], "", [], [[]], None, [""]]
        for prompt in prompts:
            answer = await client.post(
                "/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 2}
            )
            assert answer.status_code == 400, (prompt, answer.text)
        good = await client.post("/v1/completions", json={"model": "tiny", "prompt": [255], "max_tokens": 2})
        assert good.status_code == 200, good.text


async def test_tiny_temperature_is_greedy(mesh: Mesh) -> None:  # B19
    async with mesh.client() as client:
        base = {"model": "tiny", "prompt": "some text", "max_tokens": 16, "ignore_eos": True}
        greedy = (await plain(client, {**base, "temperature": 0}, "/v1/completions"))["choices"][0]["text"]
        for extra in (
            {"temperature": 1e-12},
            {"temperature": 1e-6},
            {"temperature": 1, "top_k": 1},
            {"temperature": 1, "top_p": 1e-9},
            {"temperature": 0, "top_k": -1},
            {"temperature": 1, "min_p": 1},
        ):
            text = (await plain(client, {**base, **extra}, "/v1/completions"))["choices"][0]["text"]
            assert text == greedy, extra


async def test_a_seed_decides_whatever_shares_the_batch(mesh: Mesh) -> None:  # B13
    async with mesh.client() as client:

        async def ask(seed: int | None, n: int = 1) -> list[str]:
            body = {"model": "tiny", "prompt": "seeded", "max_tokens": 24, "temperature": 0.9, "n": n}
            body |= {"ignore_eos": True}
            if seed is not None:
                body["seed"] = seed
            answer = await plain(client, body, "/v1/completions")
            return [choice["text"] for choice in answer["choices"]]

        alone = await ask(1234)
        for neighbours in ([1, 2, 3], [None, None, None]):
            results = await asyncio.gather(ask(1234), *[ask(seed) for seed in neighbours])
            assert results[0] == alone
        pair = await ask(7, n=2)
        assert pair[0] != pair[1]
        assert await ask(7, n=2) == pair
        for seed in (0, -1, 2**63 - 1):
            await ask(seed)


async def test_every_end_token_ends_and_ignore_eos_ignores(mesh: Mesh) -> None:  # B21
    async with mesh.client() as client:
        base = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "temperature": 0}
        ended = await plain(client, {**base, "logit_bias": {"257": 100}}, "/v1/completions")
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert ended["choices"][0]["text"] == ""
        ignored = await plain(
            client, {**base, "logit_bias": {"257": 100}, "ignore_eos": True}, "/v1/completions"
        )
        assert ignored["choices"][0]["finish_reason"] == "length"
        user = await plain(
            client,
            {**base, "logit_bias": {"65": 100}, "ignore_eos": True, "stop_token_ids": [65]},
            "/v1/completions",
        )
        assert user["choices"][0]["finish_reason"] == "stop"
        kept = await plain(client, {**base, "logit_bias": {"257": 100}, "min_tokens": 4}, "/v1/completions")
        assert kept["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"tools":'
        + b"[" * 3000
        + b"]" * 3000
        + b"}",
        b'{"metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"model":"tiny","model":"script","messages":[{"role":"user","content":"x"}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"model":"tiny","messages":[{"role":"user","content":"cut \\ud83d here"}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"\\udc00"}]}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"stop":"\\ud83d"}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}',
        b"[]",
        b"",
        b'{"model":"tiny"} x',
    ],
    ids=[
        "nested-tools",
        "nested-metadata",
        "twice",
        "nan",
        "surrogate",
        "surrogate-part",
        "surrogate-stop",
        "utf8",
        "array",
        "empty",
        "trailing",
    ],
)
async def test_hostile_json_is_refused_and_harms_nobody(mesh: Mesh, raw: bytes) -> None:  # B27, B29
    before = mesh.pids("router", "decode")
    async with mesh.client() as client:
        answer = await client.post(
            "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        assert "Traceback" not in answer.text
        assert "Error" not in answer.json()["error"]["message"]
    assert mesh.pids("router", "decode") == before


async def test_a_surrogate_pair_is_a_character(mesh: Mesh) -> None:  # B29
    raw = b'{"model":"script","messages":[{"role":"user","content":"pair \\ud83d\\ude42"}]}'
    async with mesh.client() as client:
        answer = await client.post("/v1/chat/completions", content=raw)
        assert answer.json()["choices"][0]["message"]["content"] == "pair 🙂"


async def test_one_size_limit_with_a_clear_answer(mesh: Mesh) -> None:  # B102
    async with mesh.client() as client:
        body = {"model": "tiny", "prompt": "a" * 1_500_000, "max_tokens": 1}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        body["prompt"] = "a" * 9_000_000
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


async def test_models_are_listed_and_found(mesh: Mesh) -> None:
    async with mesh.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert {m["id"] for m in listed["data"]} == {"tiny", "script"}
        for model in listed["data"]:
            assert set(model) >= {"id", "object", "created", "owned_by"}
            one = (await client.get(f"/v1/models/{model['id']}")).json()
            assert one == model
        assert (await client.get("/v1/models/none")).status_code == 404
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        missing = await client.get("/v2/nowhere")
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "invalid_request_error"


async def test_browsers_may_ask_from_elsewhere(mesh: Mesh) -> None:
    async with httpx.AsyncClient(base_url=mesh.url) as client:
        answer = await client.options(
            "/v1/chat/completions",
            headers={
                "origin": "https://example.org",
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            },
        )
        assert answer.status_code in (200, 204)
        assert answer.headers["access-control-allow-origin"] in ("*", "https://example.org")
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
