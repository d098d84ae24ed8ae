"""Requests that once took servers down: each is refused in words, and nobody beside it notices."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Mesh
from tests.e2e.test_openai_edge import chat, joined, plain, streamed

MIB = 1024 * 1024
HALF, LOW = "cut \\ud83d here", "\\udc00"


def resident_bytes(mesh: Mesh, *roles: str) -> dict[str, int]:
    return {name: psutil.Process(pid).memory_info().rss for name, pid in mesh.pids(*roles).items()}


async def test_huge_counts_allocate_nothing(mesh: Mesh) -> None:  # B18
    async with mesh.client() as client:
        await plain(client, {**chat("warm"), "model": "tiny", "max_tokens": 4})
        before = resident_bytes(mesh, "router", "decode")
        for extra in (
            {"logprobs": True, "top_logprobs": 2_000_000_000},
            {"logprobs": True, "top_logprobs": -1},
            {"n": 100_000},
            {"n": 2**62},
            {"max_tokens": 2**62},
        ):
            for _ in range(5):
                answer = await client.post(
                    "/v1/chat/completions", json={**chat("hi"), "model": "tiny", **extra}
                )
                assert answer.status_code == 400, (extra, answer.text)
        for extra in ({"logprobs": 50}, {"n": 2, "best_of": 1}, {"best_of": 100_000}):
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", **extra})
            assert answer.status_code == 400, (extra, answer.text)
        for name, grown in resident_bytes(mesh, "router", "decode").items():
            assert grown - before[name] < 50 * MIB, name


SURROGATES: list[tuple[str, str]] = [
    ("/v1/chat/completions", '{"model":"tiny","messages":[{"role":"user","content":"%s"}]}'),
    (
        "/v1/chat/completions",
        '{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"%s"}]}]}',
    ),
    ("/v1/chat/completions", '{"model":"tiny","messages":[{"role":"user","content":"x","name":"%s"}]}'),
    (
        "/v1/chat/completions",
        '{"model":"tiny","messages":[{"role":"user","content":"x"}],'
        '"tools":[{"type":"function","function":{"name":"%s"}}]}',
    ),
    (
        "/v1/chat/completions",
        '{"model":"tiny","messages":[{"role":"assistant","content":"x","tool_calls":[{"id":"1","type":"function",'
        '"function":{"name":"f","arguments":"%s"}}]}]}',
    ),
    (
        "/v1/chat/completions",
        '{"model":"tiny","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
        '"json_schema":{"name":"s","schema":{"enum":["%s"]}}}}',
    ),
    ("/v1/chat/completions", '{"model":"%s","messages":[{"role":"user","content":"x"}]}'),
    ("/v1/chat/completions", '{"model":"tiny","messages":[{"role":"user","content":"x"}],"user":"%s"}'),
    (
        "/v1/chat/completions",
        '{"model":"tiny","messages":[{"role":"user","content":"x"}],"metadata":{"k":"%s"}}',
    ),
    ("/v1/completions", '{"model":"tiny","prompt":"%s"}'),
    ("/v1/completions", '{"model":"tiny","prompt":["ok","%s"]}'),
    ("/v1/completions", '{"model":"tiny","prompt":"x","stop":["%s"]}'),
]


async def test_half_a_surrogate_pair_anywhere_is_a_400(mesh: Mesh) -> None:  # B29
    async with mesh.client() as client:
        for path, template in SURROGATES:
            for half in (HALF, LOW):
                for stream in ("false", "true"):
                    raw = (template % half)[:-1] + f',"stream":{stream}}}'
                    answer = await client.post(path, content=raw.encode())
                    assert answer.status_code == 400, (raw, answer.text)
                    assert "Error" not in answer.json()["error"]["message"]
    text = mesh.cli("logs", "router")
    assert "Traceback" not in text


async def test_deep_nesting_does_not_disturb_a_stream_beside_it(mesh: Mesh) -> None:  # B27
    before = mesh.pids("router", "decode", "prefill", "iam")
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    bodies = [
        '{"model":"tiny","messages":[{"role":"user","content":"x"}],"metadata":' + deep + "}",
        '{"model":"tiny","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function",'
        '"function":{"name":"f","parameters":' + deep + "}}]}",
    ]
    async with mesh.client() as client:
        beside = asyncio.create_task(streamed(client, chat("y" * 40, metadata={"script_delay_ms": "50"})))
        for body in bodies * 3:
            answer = await client.post("/v1/chat/completions", content=body)
            assert answer.status_code == 400
            assert "levels deep" in answer.json()["error"]["message"]
        assert joined((await beside)[0]) == "y" * 40

    # The same in a credential, as far as a header can hold it.
    def part(text: str) -> str:
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    nested = "[" * 2500 + "]" * 2500
    for head, claims in (
        ('{"alg":"EdDSA"}', '{"iss":' + nested + "}"),
        ('{"alg":"EdDSA","x":' + nested + "}", "{}"),
    ):
        async with mesh.client(key=f"{part(head)}.{part(claims)}.{part('x' * 64)}") as client:
            answer = await client.get("/v1/models")
            assert answer.status_code == 401, answer.text
    assert mesh.pids("router", "decode", "prefill", "iam") == before


ROLES: list[tuple[list[str], int]] = [
    (["system", "user"], 200),
    (["developer", "user"], 200),
    (["user", "user"], 200),
    (["user", "assistant"], 200),
    (["assistant"], 200),
    (["system", "system", "user"], 200),
    (["wizard"], 400),
    (["user", "tool"], 400),
]


@pytest.mark.parametrize(("roles", "status"), ROLES, ids=lambda value: str(value)[:30])
async def test_every_order_of_roles_has_an_answer(mesh: Mesh, roles: list[str], status: int) -> None:  # B31
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": role, "content": "x"} for role in roles],
        "max_tokens": 2,
    }
    async with mesh.client() as client:
        for stream in (False, True):
            answer = await client.post("/v1/chat/completions", json={**body, "stream": stream})
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_without_any_text_ends_in_done_too(mesh: Mesh, path: str) -> None:  # B08
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with mesh.client() as client:
        chunks, raw = await streamed(client, {"model": "tiny", **asked, "logit_bias": {"257": 100}}, path)
    assert raw.endswith("data: [DONE]\n\n")
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_refusal_is_fast(mesh: Mesh) -> None:  # B18, B27
    """The best of some tries: the machine may be busy, the answer may not need to be."""
    async with mesh.client() as client:
        times = []
        for _ in range(10):
            begun = time.perf_counter()
            await client.post("/v1/chat/completions", content=json.dumps(chat("x", n=100_000)))
            times.append(time.perf_counter() - begun)
    assert min(times) < 0.1
